"""What single kernels do: whether they are right, what they write, read and leave out, at every tile edge."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from anymla.contract import AttentionOutput
from anymla.verification.aiter_objects import planner
from anymla.verification.aiter_objects.kernels import Kernel
from anymla.verification.aiter_objects.launch import Faulted, Objects, Ran
from anymla.verification.aiter_objects.scenes import LATENT, SM_SCALE, Scene, scene
from anymla.verification.aiter_objects.stages import (
    Operands,
    operands,
    read_splits,
    run_persistent,
    run_rows,
)
from anymla.verification.judge import Judgement, judge_tensor

EDGES = (3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 193, 257)
"""Keys of each sequence: a key short of, at and past the end of every tile that these kernels have."""
FEW = (3, 17, 33, 77, 520)
"""The same in short; the last is long enough to be cut by a plan."""
BEFORE = (1 << 24) + 1
"""Slots before those of far keys: their ids need more than 24 bits, their addresses more than 32."""
UNITS = 6
"""Workgroups of a persistent kernel: few enough that some rows are cut and some are not."""
OUTCOMES = ("right", "undecided", "wrong", "faults")
"""right: nothing depended on time. undecided: right by a clock, which proves nothing. faults: goes astray."""


@dataclass(frozen=True)
class Finding:
    """What is known of a kernel, or of a way that our adapter calls one.

    Attributes:
        name: Which.
        outcome: One of OUTCOMES.
        share: Of the judge's budget, the largest that was used.
        why: What is wrong, "" for nothing.
        facts: What it does, by what is asked.
        timing: Places that depend on the timing of waves.
        seconds: How long it took.
    """

    name: str
    outcome: str
    share: float
    why: str
    facts: dict[str, str]
    timing: int
    seconds: float


@dataclass
class _Notes:
    """Collects what the runs of one kernel show."""

    judged: list[Judgement] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=set)
    fault: str = ""

    def ran(self, ran: Ran) -> None:
        self.undecided |= ran.undecided
        if ran.past:
            self.facts["goes past the end of a buffer"] = ran.past

    def finding(self, name: str, began: float) -> Finding:
        wrong = [reason for one in self.judged for reason in one.reasons]
        outcome = "wrong" if wrong else "undecided" if self.undecided else "right"
        share = max((one.share for one in self.judged), default=0.0)
        why = self.fault or next(iter(wrong), "")
        outcome = "faults" if self.fault and not self.judged else outcome
        seconds = time.monotonic() - began
        return Finding(name, outcome, share, why, self.facts, len(self.undecided), seconds)


def examine(objects: Objects, kernel: Kernel, *, quick: bool = False) -> Finding:
    """Run a kernel in every way that is asked about.

    Args:
        objects: Where it is.
        kernel: Which.
        quick: Fewer lengths.
    """
    began, notes = time.monotonic(), _Notes()
    lens = tuple(n for n in (FEW if quick else EDGES) if n >= kernel.q_len)
    for step in (_persistent,) if kernel.persistent else (_splits, _one_split):
        try:
            step(objects, kernel, lens, notes)
        except Faulted as fault:
            notes.facts[_WAYS[step.__name__]] = f"faults: {fault}"
            notes.fault = notes.fault or str(fault)
    return notes.finding(str(kernel), began)


_WAYS = {"_persistent": "a plan", "_splits": "two splits", "_one_split": "one split"}


def _splits(objects: Objects, kernel: Kernel, lens: tuple[int, ...], notes: _Notes) -> None:
    """Two splits: what is written is right together; which of it is read; whether slot 0 matters."""
    made = scene(objects.chip, kernel.q, kernel.kv, kernel.heads, lens, kernel.q_len)
    given = operands(made, SM_SCALE)
    parts = run_rows(objects, kernel, given, 2)
    notes.ran(parts.ran)
    written, read = parts.written(), read_splits(given, kernel, 2, kernel.q_len)
    notes.judged.append(made.judged(parts.merged(written)))
    lost = _lengths(made, (read & ~written).any(1))
    notes.facts["reads splits that were not written"] = f"at {lost} keys" if lost else "no"
    ignored = _lengths(made, (written & ~read).any(1))
    notes.facts["writes splits that are not read"] = f"at {ignored} keys" if ignored else "no"
    poisoned = scene(objects.chip, kernel.q, kernel.kv, kernel.heads, lens, kernel.q_len, poisoned=True)
    again = run_rows(objects, kernel, operands(poisoned, SM_SCALE), 2)
    _slot_0(made, again.merged(written).out, notes)


def _one_split(objects: Objects, kernel: Kernel, lens: tuple[int, ...], notes: _Notes) -> None:
    """One split: in which format the output is written, and which lse."""
    made = scene(
        objects.chip, kernel.q, kernel.kv, kernel.heads, lens[:: max(len(lens) // 4, 1)], kernel.q_len
    )
    parts = run_rows(objects, kernel, operands(made, SM_SCALE), 1)
    notes.ran(parts.ran)
    tokens, heads = made.q.shape[:2]
    flat = parts.out.reshape(-1)
    is_half = bool(flat[flat.numel() // 2 :].isnan().all())
    out = (
        flat.view(torch.bfloat16)[: flat.numel()].view(tokens, heads, LATENT) if is_half else parts.out[:, 0]
    )
    notes.facts["one split writes"] = "bf16" if is_half else "fp32"
    notes.judged.append(made.judged(AttentionOutput(out, None)))
    assert parts.final_lse is not None
    notes.facts["lse of one split"] = _lse_words(made, parts.lse[:, 0])
    notes.facts["lse of the row, one split"] = _lse_words(made, parts.final_lse)


def _persistent(objects: Objects, kernel: Kernel, lens: tuple[int, ...], notes: _Notes) -> None:
    """A plan that cuts some rows: whether all are right; which lse is there; whether slot 0 matters."""
    made = scene(objects.chip, kernel.q, kernel.kv, kernel.heads, lens, kernel.q_len)
    given = operands(made, SM_SCALE)
    plan = planner.planned(given.kv_indptr, heads=kernel.heads, q_len=kernel.q_len, units=UNITS)
    found = run_persistent(objects, kernel, given, plan)
    notes.ran(found.ran)
    notes.judged.append(made.judged(AttentionOutput(found.result.out, None)))
    lse = found.result.lse
    assert lse is not None
    notes.facts["lse of cut rows"] = _lse_words(made, lse, found.is_cut)
    notes.facts["lse of whole rows"] = _lse_words(made, lse, ~found.is_cut)
    if found.touched:
        notes.facts["writes the output of cut rows"] = "yes"
    poisoned = scene(objects.chip, kernel.q, kernel.kv, kernel.heads, lens, kernel.q_len, poisoned=True)
    again = run_persistent(objects, kernel, operands(poisoned, SM_SCALE), plan)
    _slot_0(made, again.result.out, notes)


def finds_far_keys(objects: Objects, kernel: Kernel) -> bool:
    """Whether the result is the same, bit for bit, where BEFORE slots lie before those of the keys.

    Args:
        objects: Where it is.
        kernel: Which, right or not.

    Raises:
        Faulted: it goes astray with keys nearby.
    """
    made = scene(objects.chip, kernel.q, kernel.kv, kernel.heads, FEW[1:4], kernel.q_len)
    near = operands(made, SM_SCALE)
    expected = _result(objects, kernel, near)
    size = (BEFORE + len(near.kv)) * near.kv[0].nbytes
    # What nobody writes of a file takes no place, so most of the cache is only an address.
    with tempfile.TemporaryFile() as hole:
        memory = torch.from_numpy(np.memmap(hole, np.uint8, "w+", shape=(size,)))
        kv = memory.view(near.kv.dtype).view(-1, near.kv.shape[1])
        kv[BEFORE:] = near.kv
        try:
            got = _result(objects, kernel, replace(near, kv=kv, slots=near.slots + BEFORE))
        except Faulted:
            return False
    return torch.equal(got.nan_to_num(), expected.nan_to_num())


def _result(objects: Objects, kernel: Kernel, given: Operands) -> Tensor:
    if not kernel.persistent:
        return run_rows(objects, kernel, given, 2).out
    plan = planner.planned(given.kv_indptr, heads=kernel.heads, q_len=kernel.q_len, units=UNITS)
    return run_persistent(objects, kernel, given, plan).result.out


def _slot_0(made: Scene, poisoned: Tensor, notes: _Notes) -> None:
    hit = _lengths(made, poisoned.isnan().any(-1).any(-1))
    notes.facts["NaN in slot 0 reaches"] = f"rows of {hit} keys" if hit else "no row"


def _lengths(made: Scene, rows: Tensor) -> list[int]:
    """Lengths of the sequences of some query tokens."""
    return sorted({made.lens[token // made.q_len] for token in rows.nonzero().flatten().tolist()})


def _lse_words(made: Scene, lse: Tensor, rows: Tensor | None = None) -> str:
    chosen = slice(None) if rows is None else rows
    assert made.expected.lse is not None
    got, right = lse[chosen], made.expected.lse[chosen]
    if not got.numel():
        return "none"
    if bool(got.isnan().all()):
        return "not written"
    noise = [run.lse[chosen] for run in made.eager if run.lse is not None]
    judged = judge_tensor("lse", got, right, *noise, by_row=False)
    return "right" if judged.passed else f"wrong: {judged.reasons[0]}"


def tried(objects: Objects, kernels: tuple[Kernel, ...]) -> Iterator[Kernel]:
    """The kernels of a chip whose code objects are there."""
    return (kernel for kernel in kernels if objects.chip in kernel.chips and objects.has(kernel))
