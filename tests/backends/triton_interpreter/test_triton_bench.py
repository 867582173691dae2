"""What `anymla bench` plans, verifies and tunes is what a chip would run."""

from dataclasses import replace

import pytest
import torch

from anymla import plans, select
from anymla.benchmarking import run, timing, tune
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.suite import Row
from anymla.benchmarking.workloads import workloads
from anymla.hardware.launch import launch_rows
from anymla.hardware.probe import machine_named

CPU = torch.device("cpu")
CASES = {
    "decode": {"q_len": 2},
    "prefill": {"q_len": 5},
    "write_cache": {"kv_format": "fp8_e4m3fn"},
}


@pytest.fixture(autouse=True)
def chip(monkeypatch):
    """A chip that is not here, whose kernels the interpreter runs, and ceilings that take no time."""
    for module in (plans, run, tune):
        name = "machine_of" if module is plans else "this_machine"
        monkeypatch.setattr(module, name, lambda device: replace(machine_named("gfx90a"), multiprocessors=3))
    rows = [replace(row, built=True) if row.name == "triton" else row for row in select.BACKENDS]
    monkeypatch.setattr(select, "BACKENDS", tuple(rows))
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(timing, "PRODUCT_SIZE", {"cpu": 32})


def small(op: str, **more) -> Row:
    facts = {"tp": 128, "batches": (2,), "contexts": (20,), "block_size": 16, **more}
    (work,) = workloads("deepseek-v3", op=op, **facts)
    return Row(
        "small", replace(work, problem=replace(work.problem, num_heads=3 if op != "write_cache" else 1))
    )


@pytest.mark.parametrize("op", CASES)
def test_a_case_is_planned_verified_and_timed(op):
    found = run.bench(small(op, **CASES[op]).work, "triton", CPU, repeats=1)
    assert found.passed, found.verified.judgement.reasons
    assert found.backend == "triton" and found.timing is not None
    assert (found.launch is not None) == (op != "write_cache")


@pytest.mark.parametrize("part", ["logits", "choice", "torch.topk"])
def test_a_part_of_the_indexer_is_timed_and_all_of_it_verified(part):
    work = indexer(part=part)
    found = run.bench(work, "triton", CPU, repeats=1)
    assert found.passed, found.verified.judgement.reasons
    assert found.backend == "triton" and found.timing is not None
    assert (found.workload.flops > 0) == (part == "logits")


def test_a_whole_sparse_step_is_one_case():
    facts = {"tp": 64, "batches": (2,), "contexts": (20,), "block_size": 16, "topk": 8}
    (work,) = workloads("deepseek-v3.2", op="sparse_decode", **facts)
    work = replace(work, problem=replace(work.problem, num_heads=3), index=indexer())
    found = run.bench(work, "triton", CPU, repeats=1)
    assert found.passed, found.verified.judgement.reasons
    assert work.num_bytes > work.index.num_bytes and found.timing is not None


def indexer(**more):
    facts = {"tp": 1, "batches": (2,), "contexts": (20,), "block_size": 16, "topk": 8, "q_dtype": "bf16"}
    (work,) = workloads("deepseek-v3.2", op="index_topk", **facts)
    problem = replace(work.problem, q_dtype="fp8_e4m3fn", num_heads=4)
    return replace(work, problem=problem, **more)


def test_a_launch_row_is_tried_by_the_planner_itself():
    row = small("decode")
    call = drawn_inputs(row.work, CPU)
    first = tune.row_in_use(row, call, "attend", "triton", "gfx90a")
    assert first in launch_rows("attend", "gfx90a")
    large, fewer = replace(first, block_m=256, block_n=256), replace(first, block_n=first.block_n // 2)
    seen: list[str] = []
    variants = [{"attend": other} for other in (fewer, large)]
    trials = tune.compared(row, call, variants, CPU, "triton", 1, 0, seen.append)
    times = {trial.rows["attend"]: trial.microseconds for trial in trials}
    assert times[fewer] and times[large] is None
    assert "no launch row of attend" in trials[-1].reason
    with tune.launched_by({"attend": fewer}, "gfx90a"):
        assert run.planned(call, row.work, "triton").launch == fewer.__dict__
