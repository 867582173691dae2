"""SUITES: named workloads with what each has to reach, run in one go into one record.

`targets` is what the portable kernels promise on an H200, for any chip to run; `sweep` gives the share of the
ceiling over length and batch; `choose` has our top-k beside torch's. Every case is verified first, timed as a
captured graph with caches flushed, beside ceilings of the same run.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from anymla.benchmarking.run import Record, bench, ceilings, provenance
from anymla.benchmarking.workloads import PARTS, Workload
from anymla.errors import InvalidInput
from anymla.hardware.probe import this_machine
from anymla.models import model_named
from anymla.problem import canonical_name
from anymla.rules import listed

Say = Callable[[str], object]


@dataclass(frozen=True)
class Target:
    """What a case has to reach.

    Attributes:
        of: A key of MEASURES.
        bound: At least this for shares and `times_faster`, at most this for the others.
        than: The case that a ratio compares with.
    """

    of: str
    bound: float
    than: str = ""


@dataclass(frozen=True)
class Row:
    """A case of a suite.

    Attributes:
        name: Short, unique among all suites.
        work: What is run.
        target: What it has to reach, or None.
        planning: Whether the planning of the step is timed too.
    """

    name: str
    work: Workload
    target: Target | None = None
    planning: bool = False


@dataclass(frozen=True)
class Measure:
    """How a target is measured: the value of a record beside that of the case to compare with."""

    value: Callable[[Record, Record | None], float]
    at_least: bool
    words: str


def _ratio(slow: Record | None, fast: Record | None) -> float:
    if slow is None or fast is None or slow.timing is None or fast.timing is None:
        return math.nan
    return slow.timing.median_us / fast.timing.median_us


def _plan_us(record: Record) -> float:
    """Of the host or the device, whichever needs less; nothing waits for what the device does."""
    planning = record.planning or {}
    return min(planning.get(f"plan_{where}_us", math.nan) for where in ("host", "device"))


MEASURES: Mapping[str, Measure] = {
    "copy_rate": Measure(lambda record, _: record.bandwidth_share or math.nan, True, "of the copy rate"),
    "matrix_rate": Measure(lambda record, _: record.product_share or math.nan, True, "of the matrix rate"),
    "floor": Measure(
        lambda record, _: max(record.bandwidth_share or math.nan, record.product_share or 0.0),
        True,
        "of the larger of both",
    ),
    "times_slower": Measure(lambda record, other: _ratio(record, other), False, "times as long as"),
    "times_faster": Measure(lambda record, other: _ratio(other, record), True, "times as fast as"),
    "plan_us": Measure(lambda record, _: _plan_us(record), False, "µs on the host, or on the device"),
}


def targets(fp8_flavour: str = "e4m3fn") -> Iterator[Row]:
    """The cases of the targets.

    Args:
        fp8_flavour: That of the chip.

    Yields:
        Rows; one that is compared with comes before those that compare with it.
    """

    def dense(name: str, batch: int, heads: int, context: int, target: Target | None, **more: Any) -> Row:
        return Row(name, _work("deepseek-v3", heads, "decode", batch, context, **more), target)

    base, wide, even = "128x16x4096", "128x128x4096", "128x16x8448"
    yield dense(base, 128, 16, 4096, Target("copy_rate", 0.90))
    yield dense("32x16x8192", 32, 16, 8192, Target("copy_rate", 0.85))
    yield dense("8x16x32768", 8, 16, 32768, Target("copy_rate", 0.85))
    yield dense("1x16x65536", 1, 16, 65536, Target("copy_rate", 0.60))
    yield dense(f"{base}-q2", 128, 16, 4096, Target("times_slower", 1.05, base), q_len=2)
    yield dense(f"{base}-q4", 128, 16, 4096, Target("times_slower", 1.15, base), q_len=4)
    yield dense(wide, 128, 128, 4096, Target("matrix_rate", 0.50))
    yield dense(f"{wide}-q2", 128, 128, 4096, Target("matrix_rate", 0.50), q_len=2)
    fp8 = f"fp8_{fp8_flavour}"
    yield dense(f"{base}-fp8", 128, 16, 4096, Target("times_faster", 1.7, base), kv_format=fp8)
    yield dense(even, 128, 16, 8448, None)
    yield dense(f"{even}-uneven", 128, 16, 8448, Target("times_slower", 1.1, even), turns=(512, 16384))

    tiled = "fp8_ds_mla_fnuz" if fp8_flavour == "e4m3fnuz" else "fp8_ds_mla"
    sparse = ("deepseek-v3.2", 128, "sparse_decode")
    work = _work(*sparse, 128, 8192, kv_format=tiled)
    yield Row("sparse-128x128-656", work, Target("matrix_rate", 0.45))
    for context in (8192, 32768):
        work = _work(*sparse, 1, context, q_len=4096)
        yield Row(f"sparse-prefill-4096x128-{context}", work, Target("matrix_rate", 0.50))

    yield from _sparse_steps(fp8)

    for name, heads, batch, context, q_len in (
        ("prefill-4096x128", 128, 1, 0, 4096),
        ("prefill-4096x16", 16, 1, 0, 4096),
        ("prefill-8x1024x16", 16, 8, 0, 1024),
        ("prefill-1024x128-after-16384", 128, 1, 16384, 1024),
        ("prefill-4x512x16-after-8192", 16, 4, 8192, 512),
    ):
        yield Row(name, _work("deepseek-v3", heads, "prefill", batch, context, q_len=q_len))

    work = _work("deepseek-v3", 16, "decode", 256, 1024)
    yield Row("plan-256x16x1024", work, Target("plan_us", 30), planning=True)
    for tokens in (128, 65536):
        for kv_format in ("bf16", fp8, tiled):
            work = _work("deepseek-v3", 16, "write_cache", tokens, 1, kv_format=kv_format)
            yield Row(f"write-{tokens}-{kv_format}", work)


def _sparse_steps(fp8: str) -> Iterator[Row]:
    """The indexer by parts, and all that a sparse step has in the place of a dense one."""
    index = partial(_index, fp8)
    yield Row("index-logits-64x32768", index(64, 32768, "logits"), Target("floor", 0.60))
    yield Row("index-logits-4096x32768", index(1, 32768, "logits", 4096), Target("floor", 0.60))
    for context in (32768, 131072):
        name = f"topk-64x{context}"
        yield Row(f"{name}-torch", index(64, context, "torch.topk"))
        yield Row(name, index(64, context, "choice"), Target("times_faster", 3, f"{name}-torch"))
    dense = "dense-step-64x64x65536"
    yield Row(dense, _work("deepseek-v3.2", 64, "decode", 64, 65536))
    work = _work("deepseek-v3.2", 64, "sparse_decode", 64, 65536, index=index(64, 65536))
    yield Row("sparse-step-64x64x65536", work, Target("times_faster", 3, dense))


def _index(fp8: str, batch: int, context: int, part: str = "", q_len: int = 1) -> Workload:
    keys = "index_k_fnuz" if fp8.endswith("fnuz") else "index_k"
    facts = ("deepseek-v3.2", 64, "index_topk", batch, context)
    return _work(*facts, q_len=q_len, kv_format=keys, q_dtype=fp8, part=part)


CHOSEN_AMONG = (
    *((1, context, 1, 2048) for context in (4096, 32768, 131072, 1 << 20)),
    *((64, context, 1, 2048) for context in (4096, 32768, 131072)),
    *((64, 32768, 1, topk) for topk in (64, 512, 4096)),
    (1, 32768, 4096, 2048),
)
"""Sequences, tokens of each, query tokens of each, how many are chosen."""


def choose(fp8_flavour: str = "e4m3fn") -> Iterator[Row]:
    """Our choice beside torch.topk, sorted and not, of logits that differ and that are all the same."""
    for batch, context, q_len, topk in CHOSEN_AMONG:
        for part in PARTS:
            work = _index(f"fp8_{fp8_flavour}", batch, context, part, q_len)
            work = replace(work, problem=replace(work.problem, topk=topk))
            if part != "logits" and (q_len == 1 or not part.endswith("ties")):
                yield Row(f"choose-{batch * q_len}x{context}-k{topk}-{part}", work)


SWEPT_BATCHES, SWEPT_CONTEXTS, SWEPT_HEADS = (1, 4, 16, 64, 256), (1024, 4096, 16384, 65536), (16, 128)
SWEPT_TOKENS = 1 << 22
"""Of one case: 4.5 GiB of bf16 cache."""


def sweep(fp8_flavour: str = "e4m3fn") -> Iterator[Row]:
    """Dense decode over length and batch."""
    for heads in SWEPT_HEADS:
        for batch in SWEPT_BATCHES:
            for context in SWEPT_CONTEXTS:
                if batch * context <= SWEPT_TOKENS:
                    work = _work("deepseek-v3", heads, "decode", batch, context)
                    yield Row(f"sweep-{batch}x{heads}x{context}", work)


SUITES: Mapping[str, Callable[[str], Iterable[Row]]] = {"targets": targets, "sweep": sweep, "choose": choose}


def rows_of(suite: str, device: torch.device, only: Sequence[str] = ()) -> list[Row]:
    """The rows of a suite on a device.

    Args:
        suite: A key of SUITES.
        device: Says the fp8 flavour.
        only: Names, or parts of names, of rows to keep; what they compare with is kept as well. Empty: all.

    Returns:
        The rows in order.

    Raises:
        InvalidInput: there is no such suite or row.
    """
    if suite not in SUITES:
        raise InvalidInput("bench", [f"suite got {suite}; needs {listed(SUITES)}"])
    every = list(SUITES[suite](this_machine(device).fp8_flavour))
    kept = [row for row in every if not only or any(part in row.name for part in only)]
    if not kept:
        names = listed([row.name for row in every])
        raise InvalidInput("bench", [f"only got {listed(only)}; needs a part of {names}"])
    compared = {row.target.than for row in kept if row.target}
    return [row for row in every if row in kept or row.name in compared]


def row_named(name: str, device: torch.device) -> Row:
    """The row of that name in any suite.

    Raises:
        InvalidInput: there is none.
    """
    every = {row.name: row for suite in SUITES for row in rows_of(suite, device)}
    if name not in every:
        raise InvalidInput("bench", [f"case got {name}; needs {listed(every)}"])
    return every[name]


def run_suite(
    suite: str,
    device: torch.device,
    *,
    backend: str = "auto",
    only: Sequence[str] = (),
    repeats: int = 30,
    processes: int | None = None,
    commit: str = "",
    say: Say = print,
) -> dict[str, Any]:
    """Compile, verify and time every row of a suite.

    Args:
        suite: A key of SUITES.
        device: Where.
        backend: A name in BACKENDS, or "auto".
        only: Parts of names of the rows to run.
        repeats: Timed calls of each.
        processes: That compile at a time, before anything is timed; 0 leaves it to the cases. None: as many
            as there are cores, or none on a CPU.
        commit: Where the package lies outside its repository.
        say: Told each line of progress.

    Returns:
        The record: where and when, the ceilings, and each case; one that is refused or fails says why.

    Raises:
        InvalidInput: there is no such suite or row.
    """
    began, rows = time.monotonic(), rows_of(suite, device, only)
    if processes is None:
        processes = 0 if device.type == "cpu" else os.cpu_count() or 1
    if processes:
        compile_all(distinct(rows), device, backend, processes, say)
    copy, product = ceilings(device)
    say(f"copy {copy / 1e12:.3f} TB/s, product {product / 1e12:.1f} TFLOP/s")
    found: dict[str, Record] = {}
    cases = []
    for number, row in enumerate(rows, 1):
        case = measured(row, found, device, backend, repeats)
        cases.append(case)
        say(f"[{number}/{len(rows)}, {time.monotonic() - began:.0f} s] {_line(case)}")
    made = provenance(device)
    return {
        "suite": suite,
        **made,
        "commit": made["commit"] or commit,
        "timing": f"captured graph, caches flushed and clean, median of {repeats}",
        "copy_bytes_a_second": copy,
        "product_flop_a_second": product,
        "seconds": round(time.monotonic() - began, 1),
        "cases": cases,
    }


def measured(
    row: Row, found: dict[str, Record], device: torch.device, backend: str, repeats: int
) -> dict[str, Any]:
    """One case of a record; adds its Record to `found`, by name."""
    target = row.target
    case: dict[str, Any] = {"case": row.name}
    try:
        record = bench(row.work, backend, device, repeats=repeats, planning=row.planning)
    except Exception as error:  # what a kernel raises is not ours to foresee
        return case | {"passed": False, "reasons": [f"{type(error).__name__}: {error}"]}
    found[row.name] = record
    case |= record.to_dict()
    if target is not None:
        measure = MEASURES[target.of]
        value = measure.value(record, found.get(target.than))
        met = value >= target.bound if measure.at_least else value <= target.bound
        case |= {
            "target": asdict(target),
            "value": None if math.isnan(value) else round(value, 4),
            "met": met,
        }
    return case


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Of the rows that compile the same kernels, one: Triton specialises on 1 and on multiples of 16."""
    kinds: dict[Any, Row] = {}
    for row in rows:
        p, batch = row.work.problem, row.work.batch
        context = row.work.context and (row.work.context == 1, row.work.context % 16 == 0)
        kinds.setdefault((p, batch == 1, batch % 16 == 0, context), row)
    return list(kinds.values())


def compile_all(rows: Sequence[Row], device: torch.device, backend: str, processes: int, say: Say) -> None:
    """Run each row once in a process of its own, several at a time, to fill the compiler's cache."""
    began = time.monotonic()
    jobs = [["compile", "--case", row.name, "--device", str(device), "--backend", backend] for row in rows]
    for row, error in zip(rows, in_processes(jobs, processes), strict=True):
        if error:
            say(f"{row.name}: {error}")
    say(f"compiled {len(rows)} cases in {time.monotonic() - began:.0f} s")


def in_processes(jobs: Sequence[Sequence[str]], processes: int) -> list[str]:
    """Run `python -m anymla.benchmarking` with each of these arguments.

    Returns:
        The last line of what each wrote to stderr if it failed, else "".
    """
    with ThreadPoolExecutor(max(1, processes)) as pool:
        return list(pool.map(_error_of, jobs))


JOB_SECONDS = 240


def _error_of(job: Sequence[str]) -> str:
    command = [sys.executable, "-m", "anymla.benchmarking", *job]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=JOB_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took more than {JOB_SECONDS} s"
    lines = done.stderr.strip().splitlines() or [f"exited with {done.returncode}"]
    return lines[-1] if done.returncode else ""


def write_record(record: Mapping[str, Any], folder: Path) -> Path:
    """Write a record to `folder/<arch>/<suite>.json`.

    Args:
        record: From `run_suite`.
        folder: Usually "benchmarks/results".

    Returns:
        The file.
    """
    path = folder / str(record["arch"]) / f"{record['suite']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def summary(record: Mapping[str, Any]) -> str:
    """What a record says of its targets, in one line."""
    judged = [case for case in record["cases"] if "met" in case]
    wrong = [case["case"] for case in record["cases"] if not case["passed"]]
    missed = [case["case"] for case in judged if not case["met"]]
    words = [f"{len(record['cases'])} cases in {record['seconds']:.0f} s"]
    words += [f"{len(judged) - len(missed)} of {len(judged)} targets met"] if judged else []
    words += [f"missed: {listed(missed, 'and')}"] if missed else []
    words += [f"WRONG: {listed(wrong, 'and')}"] if wrong else []
    return "; ".join(words)


def _line(case: Mapping[str, Any]) -> str:
    """A case for the eye."""
    if not case["passed"]:
        return f"{case['case']}: {'; '.join(case['reasons'])[:300]}"
    words = [
        f"{case['case']}: {case['median_us']:.1f} us",
        f"copy {case['bandwidth_share']:.1%}",
        f"matrix {case['product_share']:.1%}",
    ]
    words += [f"{name} {case[name]:.1f}" for name in case if name.startswith(("plan_", "batch_"))]
    if "target" in case:
        target = case["target"]
        sign = ">=" if MEASURES[target["of"]].at_least else "<="
        what = f"{target['of']} {target['than']}".strip()
        words.append(f"{what} {case['value']} {sign} {target['bound']}: {'met' if case['met'] else 'MISSED'}")
    return f"{', '.join(words)} (budget {case['share_of_budget']})"


@lru_cache(maxsize=1024)
def _work(
    model: str,
    heads: int,
    op: str,
    batch: int,
    context: int,
    *,
    q_len: int = 1,
    kv_format: str = "bf16",
    turns: tuple[int, ...] = (),
    q_dtype: str = "bf16",
    part: str = "",
    index: Workload | None = None,
) -> Workload:
    """A workload of a model split until it has so many heads."""
    row = model_named(model)
    tp = row.num_heads // heads
    problem = row.problem(
        op,
        tp=tp,
        q_dtype=q_dtype,
        kv_format=canonical_name(kv_format),
        block_size=64,
        q_len=q_len,
        cached_context=context > 0,
    )
    return Workload(model, tp, problem, row.sm_scale, batch, context, turns, part, index)
