"""Our adapter over AITER's own kernels: every route that it takes, run with its own lists and plans."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from anymla import select
from anymla.backends import BACKENDS
from anymla.contract import AttentionOutput, Batch
from anymla.errors import AnyMLAError
from anymla.hardware.probe import Machine
from anymla.plans import decode_plan
from anymla.problem import Feature, Problem
from anymla.verification.aiter_objects import findings
from anymla.verification.aiter_objects.code_object import CodeObjectError
from anymla.verification.aiter_objects.findings import EDGES, Finding
from anymla.verification.aiter_objects.launch import Objects
from anymla.verification.aiter_objects.scenes import (
    LATENT,
    SM_SCALE,
    WIDTH,
    Scene,
    scene,
)
from anymla.verification.aiter_objects.stand_in import NotModelled, StandIn, kernel_of
from anymla.verification.amdgcn.parse import Unknown
from anymla.verification.judge import wrong

HEADS = (5, *range(8, 129, 8))
"""Every number that AITER's planner can be asked for, and one that is padded."""
Q_LENS = (1, 2, 3, 4)
UNNAMED = "unnamed"
"""A release that nothing says."""
LENS = (5, 33, 70)
"""Keys of each sequence where only a few are asked for; else those of findings.EDGES."""
UNITS = 6
DTYPES = (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"))


@dataclass(frozen=True)
class Call:
    """A decode that is asked of the adapter."""

    q: str
    kv: str
    heads: int
    q_len: int
    lse: bool

    def __str__(self) -> str:
        lse = ", lse" if self.lse else ""
        return f"{self.q} × {self.kv}, {self.heads} heads, {self.q_len} query tokens{lse}"


def calls() -> Iterator[Call]:
    """Every one that is asked."""
    for q, kv in DTYPES:
        for heads in HEADS:
            for q_len in Q_LENS:
                for lse in (False, True):
                    yield Call(q, kv, heads, q_len, lse)


class NotTaken(AnyMLAError, RuntimeError):
    """The adapter takes no call at all with an AITER; the message gives every reason."""


def examine(
    objects: Objects,
    root: Path,
    release: str,
    not_run: dict[str, str],
    *,
    quick: bool = False,
    seen: set[object] | None = None,
) -> Iterator[Finding]:
    """Run every route that the adapter takes, of code objects that nobody ran too.

    Args:
        objects: The code objects.
        root: The folder that holds the package `aiter`, beside its tables.
        release: What its package calls it, "" where nothing says.
        not_run: Filled with calls of which nothing can be said, and why.
        quick: Fewer lengths.
        seen: What was run before and is not again; added to.

    Raises:
        NotTaken: there is no route.
    """
    packages = (("aiter", release or UNNAMED), ("torch", ""), ("triton", ""))
    machine = Machine(objects.chip, packages, multiprocessors=UNITS, takes_unrun=True)
    seen = set() if seen is None else seen
    why: dict[str, None] = {}
    taken = False
    for call in calls():
        stand_in = StandIn(objects, UNITS)
        with _on_path(root), stand_in.installed():
            verdict = next(v for v in select.explain(_problem(machine, call), machine) if _is_ours(v))
            if not verdict.accepted:
                why.update(dict.fromkeys(verdict.reasons))
                continue
            route, taken = _route(machine, call), True
            key = (route.call._replace(lse_from="", in_order=True), *sorted(route.knobs.items()))
            if key in seen:
                continue
            seen.add(key)
            try:
                found = _run(objects.chip, stand_in, machine, call, LENS if quick else EDGES)
                found.facts["digest"] = route.call.digest
                if route.call.digest not in seen:
                    far = findings.finds_far_keys(objects, kernel_of(objects, route.call))
                    found.facts["far keys"] = "found" if far else "missed"
                    seen.add(route.call.digest)
            except (NotModelled, CodeObjectError, Unknown) as reason:
                not_run[f"our adapter, {call}"] = str(reason)
                continue
        yield found
    if not taken:
        raise NotTaken("; ".join(why))


def _run(chip: str, stand_in: StandIn, machine: Machine, call: Call, lens: tuple[int, ...]) -> Finding:
    """Run a call."""
    lens = tuple(n for n in lens if n >= call.q_len)
    began, made = time.monotonic(), scene(chip, call.q, call.kv, call.heads, lens, call.q_len)
    plan = decode_plan(_batch(made), _problem(machine, call), "aiter", machine)
    route = plan.state.layout.route
    stand_in.chosen = route.call
    q = made.exact_q()
    try:
        got = plan.run(q[..., :LATENT], q[..., LATENT:], made.cache, sm_scale=SM_SCALE, return_lse=call.lse)
        judged = made.judged(AttentionOutput(got.out, got.lse))
    except (NotModelled, CodeObjectError, Unknown):
        raise
    except AnyMLAError as error:
        judged = wrong(str(error))
    outcome = "wrong" if judged.reasons else "undecided" if stand_in.undecided else "right"
    name = f"{call}: {', '.join(dict.fromkeys(stand_in.launched))}"
    why, timing = next(iter(judged.reasons), ""), len(stand_in.undecided)
    knobs = {knob: str(value) for knob, value in sorted(route.knobs.items())}
    return Finding(name, outcome, judged.share, why, knobs, timing, time.monotonic() - began)


def _manifest() -> Any:
    """What knows the routes of the backend."""
    return import_module(next(row.manifest for row in BACKENDS if row.name == "aiter"))


def _route(machine: Machine, call: Call) -> Any:
    """The route of a call that is taken: that of its query tokens, or else of one at a time."""
    route_of, aiter = _manifest().route_of, _manifest().aiter_of(machine)
    problem = _problem(machine, call)
    return route_of(problem, aiter, call.q_len)[0] or route_of(problem, aiter, 1)[0]


def _is_ours(verdict: select.Verdict) -> bool:
    return verdict.backend.name == "aiter"


def _problem(machine: Machine, call: Call) -> Problem:
    fp8 = f"fp8_{machine.fp8_flavour}"
    q, kv = (fp8 if kind == "fp8" else kind for kind in (call.q, call.kv))
    several = {Feature.MULTI_TOKEN} if call.q_len > 1 else set()
    asked = frozenset(several | ({Feature.LSE} if call.lse else set()))
    return Problem(
        "decode", q, kv, call.heads, LATENT, WIDTH - LATENT, block_size=1, q_len=call.q_len, features=asked
    )


def _batch(made: Scene) -> Batch:
    pages = torch.zeros(len(made.lens), max(made.lens), dtype=torch.int32)
    for row, (start, end) in zip(pages, pairwise(made.kv_indptr.tolist()), strict=True):
        row[: end - start] = made.slots[start:end]
    lens = torch.tensor(made.lens, dtype=torch.int32)
    return Batch.of(seq_lens=lens, block_table=pages, qo_indptr=made.qo_indptr, block_size=1)


@contextmanager
def _on_path(root: Path) -> Iterator[None]:
    """The AITER of a folder is the one that is found; what was said of another is forgotten."""
    sys.path.insert(0, str(root))
    try:
        select.explain.cache_clear(), select.choose.cache_clear()
        yield
    finally:
        sys.path.remove(str(root))
        select.explain.cache_clear(), select.choose.cache_clear()
