"""Launch rows tried side by side: what one could paste into LAUNCH. Nothing is changed but in this process.

A row is tried by putting it, alone, in the table while a step is planned, run and captured. So the planner
itself says whether it fits, and whatever launches by the table can be tuned.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch

from anymla import select
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.run import ceilings, planned
from anymla.benchmarking.sample import verified
from anymla.benchmarking.suite import Row, Say, in_processes
from anymla.benchmarking.timing import captured, time_in_turns
from anymla.errors import InvalidInput, Reasons
from anymla.hardware.launch import LAUNCH, Launch, launch_rows
from anymla.hardware.probe import this_machine
from anymla.rules import listed
from anymla.verification.inputs import Inputs

Rows = dict[str, Launch]
"""A row for each kernel named, instead of those of the table."""


@dataclass(frozen=True)
class Tuned:
    """How a kernel is tuned if nothing else is asked for: on which case, over which fields."""

    case: str
    vary: tuple[str, ...]


LEAST = {"block_m": 1, "block_n": 1, "num_warps": 1, "num_stages": 1, "programs_a_unit": 1, "chunk": 16}
MOST = {"block_m": 256, "block_n": 256, "num_warps": 16, "num_stages": 6, "programs_a_unit": 4, "chunk": 1024}
BY_ONE = ("num_stages", "programs_a_unit")
"""Fields that change by one; the other numbers double or halve."""
SWITCHES = tuple(f.name for f in fields(Launch) if isinstance(f.default, bool))

KERNELS: Mapping[str, Tuned] = {
    "attend": Tuned("128x16x4096", (*LEAST, *(name for name in SWITCHES if name != "overlap"))),
    "combine": Tuned("1x16x65536", ("block_n", "num_warps", "num_stages", "chunk", "overlap")),
    "prefill": Tuned("prefill-4096x128", ("block_m", "block_n", "num_warps", "num_stages")),
    "gather": Tuned("prefill-1024x128-after-16384", ("block_m", "num_warps")),
    "cache_write": Tuned("write-65536-bf16", ("num_warps",)),
}

GAIN = 1.01
"""A row counts as better if it is faster by more than what two measurements differ by."""


@dataclass(frozen=True)
class Trial:
    """A row that was tried.

    Attributes:
        rows: What was launched.
        microseconds: The median, or None if it was not timed.
        share: Of the ceiling that is nearer: of the copy rate or of the matrix rate.
        reason: Why it was not timed: it does not fit, does not compile, or is wrong.
    """

    rows: Rows
    microseconds: float | None = None
    share: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        what = (
            "; ".join(f"{kernel} {pasted(row)}" for kernel, row in self.rows.items()) or "as the table says"
        )
        if self.microseconds is None:
            return f"{what}: {' '.join(self.reason.split())[:160]}"
        return f"{what}: {self.microseconds:.1f} us, {self.share:.1%} of the ceiling"

    def to_dict(self) -> dict[str, Any]:
        """For a record."""
        rows = {kernel: pasted(row) for kernel, row in self.rows.items()}
        return {"rows": rows, "us": self.microseconds, "share": self.share, "reason": self.reason}


def usual_case(kernel: str) -> str:
    """The case that a kernel is tuned on if no other is named.

    Raises:
        InvalidInput: there is no such kernel, or no usual case.
    """
    if kernel in KERNELS:
        return KERNELS[kernel].case
    others = {name for name, _ in LAUNCH} - set(KERNELS)
    needs = f"{listed(KERNELS)}" + (f", or a case beside {listed(sorted(others))}" if others else "")
    raise InvalidInput("bench", [f"kernel got {kernel}; needs {needs}"])


def usual_kernel(row: Row) -> str:
    """The kernel that most of the time of a case goes to."""
    return {"prefill": "prefill", "write_cache": "cache_write"}.get(row.work.problem.op, "attend")


def check_tunable(row: Row, device: torch.device, backend: str) -> None:
    """Refuse a case that nothing launches by the table.

    Args:
        row: The case.
        device: Where it would run.
        backend: A name in BACKENDS, or "auto".

    Raises:
        InvalidInput: the device is no GPU, or the backend that takes the case is not "triton".
        NoBackend: none takes it.
    """
    reasons = Reasons("bench")
    if reasons.need(device.type != "cpu", "device", device, "a GPU: launch rows are of its kernels"):
        chosen = select.choose(row.work.problem, this_machine(device), backend).backend.name
        reasons.need(chosen == "triton", "backend", chosen, "triton: launch rows are of its kernels")
    reasons.raise_if_any()


@contextmanager
def launched_by(rows: Rows, arch: str) -> Iterator[None]:
    """Within it, the table has these rows alone for their kernels."""
    table = cast(dict[tuple[str, str], tuple[Launch, ...]], LAUNCH)
    before = {(kernel, arch): table.get((kernel, arch)) for kernel in rows}
    table.update({(kernel, arch): (row,) for kernel, row in rows.items()})
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del table[key]
            else:
                table[key] = value


def tune(
    row: Row,
    kernel: str,
    device: torch.device,
    *,
    backend: str = "auto",
    rounds: int = 4,
    repeats: int = 30,
    processes: int = 1,
    say: Say = print,
) -> list[Trial]:
    """Climb from the row in use to the fastest of its neighbours, until none is faster.

    Args:
        row: The case to be fast at.
        kernel: A kernel of LAUNCH.
        device: A GPU.
        backend: A name in BACKENDS, or "auto".
        rounds: Steps of the climb, at most.
        repeats: Timed calls of each row.
        processes: That compile at a time.
        say: Told each line of progress.

    Returns:
        Every trial, the fastest first, those without a time last; the row in use is among them.

    Raises:
        InvalidInput: the case does not run as the table is.
    """
    call, arch = drawn_inputs(row.work, device), this_machine(device).arch
    best: Rows = {kernel: row_in_use(row, call, kernel, backend, arch)}
    trials = compared(row, call, [best], device, backend, repeats, processes, say)
    if trials[0].microseconds is None:
        raise InvalidInput("bench", [f"{row.name} got {trials[0].reason}; needs a table that it runs with"])
    vary = KERNELS[kernel].vary if kernel in KERNELS else (*LEAST, *SWITCHES)
    for _ in range(rounds):
        tried = [trial.rows for trial in trials]
        fresh = [rows for other in neighbours(best[kernel], vary) if (rows := {kernel: other}) not in tried]
        if not fresh:
            break
        found = compared(row, call, [best, *fresh], device, backend, repeats, processes, say)
        before = next(trial for trial in found if trial.rows == best)
        trials = [trial for trial in trials if trial.rows != best] + found
        fastest = found[0]
        if fastest.microseconds is None or before.microseconds is None:
            break
        if fastest.microseconds * GAIN >= before.microseconds:
            break
        best = fastest.rows
    return ranked(trials)


def compared(
    row: Row,
    call: Inputs,
    variants: Sequence[Rows],
    device: torch.device,
    backend: str,
    repeats: int,
    processes: int,
    say: Say,
) -> list[Trial]:
    """Compile, verify and time variants of one case in turns.

    Returns:
        A trial for each, the fastest first.
    """
    began, refused, runs = time.monotonic(), dict[int, str](), dict[str, Callable[[], object]]()
    if processes and device.type != "cpu":
        jobs = [
            [
                "compile",
                "--case",
                row.name,
                "--device",
                str(device),
                "--backend",
                backend,
                "--rows",
                as_json(rows),
            ]
            for rows in variants
        ]
        refused = {i: error for i, error in enumerate(in_processes(jobs, processes)) if error}
        say(f"{row.name}: {len(jobs)} variants compiled in {time.monotonic() - began:.0f} s")
    arch = this_machine(device).arch
    for i, rows in enumerate(variants):
        if i in refused:
            continue
        try:
            with launched_by(rows, arch):
                ready = planned(call, row.work, backend)
                judgement = verified(call, ready.run()).judgement
                if judgement.passed:
                    runs[str(i)] = captured(ready.run, device)
                else:
                    refused[i] = "; ".join(judgement.reasons)
        except Exception as error:  # what a kernel raises is not ours to foresee
            refused[i] = f"{type(error).__name__}: {error}"
    times = time_in_turns(runs, device, repeats=repeats)
    copy, product = ceilings(device)
    floor = max(row.work.num_bytes / copy, row.work.flops / product) * 1e6
    trials = []
    for i, rows in enumerate(variants):
        if i in refused:
            trials.append(Trial(rows, reason=refused[i]))
        else:
            median = times[str(i)].median_us
            trials.append(Trial(rows, round(median, 2), round(floor / median, 4)))
        say(f"{row.name}: {trials[-1]}")
    return ranked(trials)


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The fastest first, those without a time last."""
    return sorted(trials, key=lambda trial: trial.microseconds or float("inf"))


def row_in_use(row: Row, call: Inputs, kernel: str, backend: str, arch: str) -> Launch:
    """The row that a kernel is launched by: that of the plan if it is the kernel's, else its first."""
    rows = launch_rows(kernel, arch)
    chosen = getattr(getattr(planned(call, row.work, backend).plan, "state", None), "launch", None)
    return chosen if chosen in rows else rows[0]


def neighbours(row: Launch, vary: Sequence[str]) -> list[Launch]:
    """Rows that differ from a row in one field, by one step."""
    found = []
    for name in vary:
        value = getattr(row, name)
        if isinstance(value, bool):
            changed: dict[str, Any] = {name: not value}
            found.append(replace(row, **changed))
            continue
        steps = (value - 1, value + 1) if name in BY_ONE else (value // 2, value * 2)
        found += [replace(row, **{name: n}) for n in steps if LEAST[name] <= n <= MOST[name]]
    return found


def pasted(row: Launch) -> str:
    """A row as it stands in LAUNCH, without fields at their default."""
    given = [(f.name, getattr(row, f.name)) for f in fields(row) if getattr(row, f.name) != f.default]
    return f"Launch({', '.join(f'{name}={value!r}' for name, value in given)})"


def proposal(kernel: str, arch: str, trials: Sequence[Trial]) -> str:
    """What to paste, and what it is measured to be."""
    best = trials[0]
    return f'("{kernel}", "{arch}"): {pasted(best.rows[kernel])},  # {best.microseconds} us, {best.share:.1%}'


def as_json(rows: Rows) -> str:
    """Rows for the command line; `rows_from` is the inverse."""
    return json.dumps({kernel: [getattr(r, f.name) for f in fields(r)] for kernel, r in rows.items()})


def rows_from(given: Mapping[str, Any], in_use: Callable[[str], Launch] | None = None) -> Rows:
    """Rows from JSON: each a list of fields from the first on, or an object of changes to the row in use.

    Args:
        given: By kernel.
        in_use: Gives the row in use of a kernel; needed for changes.

    Returns:
        The rows.

    Raises:
        InvalidInput: a field does not exist.
    """
    names = [f.name for f in fields(Launch)]
    rows = {}
    for kernel, values in given.items():
        changes = dict(zip(names, values, strict=False)) if isinstance(values, list) else dict(values)
        wrong = [name for name in changes if name not in names]
        if wrong or (isinstance(values, list) and len(values) > len(names)):
            raise InvalidInput(
                "bench", [f"{kernel} got {values}; needs fields of Launch: {', '.join(names)}"]
            )
        if isinstance(values, list):
            rows[kernel] = Launch(**changes)
        else:
            assert in_use is not None
            rows[kernel] = replace(in_use(kernel), **changes)
    return rows
