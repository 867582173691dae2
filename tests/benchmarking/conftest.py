"""Small workloads on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anymla.benchmarking.workloads import Workload, workloads


@pytest.fixture(autouse=True)
def every_test_is_on_a(small_machine: None) -> None:
    """No test here measures this machine."""


@pytest.fixture
def small() -> Callable[..., Workload]:
    """A workload of one head, by operation."""

    def made(
        op: str, *, batch: int = 3, context: int = 70, turns: tuple[int, ...] = (), **more: Any
    ) -> Workload:
        model = "deepseek-v3.2" if op in ("sparse_decode", "index_topk") else "deepseek-v3"
        facts = {"tp": 128, "q_dtype": "bf16", "block_size": 16, **more}
        (work,) = workloads(model, op=op, batches=(batch,), contexts=(context,), **facts)
        return replace(work, turns=turns)

    return made
