"""Small workloads on the CPU, and ceilings that take no time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from anymla.benchmarking import run, timing
from anymla.benchmarking.workloads import Workload, workloads


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies and products that take no time."""
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(timing, "PRODUCT_SIZE", {"cpu": 32})
    run.ceilings.cache_clear()
    run._copy_bandwidth.cache_clear()
    yield
    run.ceilings.cache_clear()
    run._copy_bandwidth.cache_clear()


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
