"""Which of AITER's kernels a call gets: nothing is accepted that its tables do not hold at all stages.

A call outside them would end the process, so planner, attention and reducer are looked up before any launch.
Indexer and cache writers have no table: there a call is accepted if its functions take what it needs.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

from anymla.backends.aiter_mla import bindings, facts
from anymla.backends.aiter_mla.calls import import_apart, import_failure
from anymla.backends.aiter_mla.facts import Dispatch, Kernel, mode
from anymla.backends.aiter_mla.provider import Aiter, aiter_of, commit_of, environment
from anymla.hardware.kernel_quirks import KERNEL_QUIRKS, KernelCall
from anymla.hardware.probe import PACKAGES, Machine
from anymla.hardware.quirks import Quirk, Weighed
from anymla.problem import Feature, Problem

LANES = tuple(range(8, 129, 8))
"""Head counts that AITER's planner can be asked for."""


@dataclass(frozen=True)
class Route:
    """One way to run a decode for which every stage has a kernel and no quirk refuses.

    Attributes:
        call: What the kernel is given.
        quirks: The quirks that it has, each with a knob.
    """

    call: KernelCall
    quirks: tuple[Quirk, ...]

    @property
    def knobs(self) -> dict[str, int]:
        """What the quirks set; of several lower bounds the largest."""
        knobs: dict[str, int] = {}
        for quirk in self.quirks:
            assert isinstance(quirk.value, int)
            knobs[quirk.knob] = max(quirk.value, knobs.get(quirk.knob, quirk.value))
        return knobs


def weigh(problem: Problem, machine: Machine) -> Weighed:
    """Say how a call would be run, or why not."""
    aiter = aiter_of(machine)
    ways = {"prefill": _prefill, "index_topk": _index_topk, "write_cache": _write_cache}
    said = ways.get(problem.op, _decode)(problem, aiter)
    if said.reasons:
        return said
    told = dict(machine.failures)
    reasons = tuple(dict.fromkeys(told[name] for name in _called(problem) if name in told))
    if not reasons and aiter.installed and _may_import():
        failure = import_failure(aiter, _called(problem))
        reasons = (failure,) if failure else ()
    return Weighed(reasons) if reasons else said


def surroundings() -> object:
    """What an answer depends on beside its arguments: what is set, and whether AITER may be imported."""
    return environment(), _may_import()


def tried(machine: Machine) -> dict[str, str]:
    """Why functions of a machine's AITER cannot be called, by importing what is installed apart from us."""
    aiter = aiter_of(machine)
    return import_apart(aiter) if aiter.installed and not aiter.missing else {}


def _may_import() -> bool:
    """Whether torch is here already: importing AITER brings it, and who only explains does without."""
    return "torch" in sys.modules


def report(machine: Machine) -> dict[str, object]:
    """What is known of a machine's AITER: for `anymla doctor`.

    Returns:
        "release", "commit" (of a source tree, else ""), "bound" (functions that can be called), "missing"
        (why others, or all, cannot), "advice" (what would help, "" where nothing is missing), "kernels" (rows
        of its table by dtypes and mode) and "quirks" (those that some kernel of the table has, and which).
    """
    aiter = aiter_of(machine)
    failures = dict(machine.failures)
    refusals = aiter.refusals(tuple(bindings.FUNCTIONS))
    counts = Counter(
        f"{k.q}/{k.kv} {'prefill' if k.prefill else mode(bool(k.persistent))}" for k in aiter.kernels
    )
    kernels: dict[Quirk, dict[str, None]] = {}
    for call in _every_call(aiter):
        for quirk in quirks_of(call, aiter):
            kernels.setdefault(quirk, {})[call.kernel] = None
    return {
        "release": aiter.release,
        "commit": commit_of(aiter.root),
        "bound": [
            name
            for name, found in aiter.bound.items()
            if isinstance(found, bindings.Binding) and name not in failures
        ],
        "missing": list(dict.fromkeys((*refusals, *failures.values()))),
        "advice": _advice(refusals, failures),
        "kernels": dict(sorted(counts.items())),
        "quirks": [
            {"does": str(quirk), "source": quirk.source, "kernels": sorted(names)}
            for quirk, names in kernels.items()
        ],
    }


def _advice(refusals: Collection[str], failures: Collection[str]) -> str:
    """What would help."""
    if refusals:
        return f"{PACKAGES['aiter'].install} whole, {facts.newest_release()} or another release known here"
    return "python -c 'import aiter.mla' shows the whole error" if failures else ""


def prefill_lanes(aiter: Aiter) -> tuple[int, ...]:
    """Heads that a launch of prefill may have, rising: what its reducer has, in sixteens as AITER is used."""
    return tuple(sorted(lanes for lanes in aiter.prefill_reducers if lanes % 16 == 0))


@lru_cache(maxsize=4096)
def route_of(problem: Problem, aiter: Aiter, q_len: int) -> tuple[Route | None, tuple[str, ...]]:
    """The route with the least padding, that without a plan first; or None and why there is none."""
    reasons = list(aiter.refusals(bindings.DECODE))
    if reasons:
        return None, tuple(reasons)
    assert aiter.dispatch is not None
    lse = bool(problem.features & {Feature.LSE, Feature.SINKS})
    q, kv = problem.q_dtype.partition("_")[0], problem.kv_format.partition("_")[0]
    refused: dict[str, None] = {}
    for call in _calls(aiter, aiter.dispatch, q, kv, problem.num_heads, q_len, lse):
        quirks = quirks_of(call, aiter)
        why = [quirk.refuse for quirk in quirks if quirk.refuse]
        if not why:
            return Route(call, quirks), ()
        refused.update(dict.fromkeys(why))
    what = f"{q} × {kv}, {problem.num_heads} heads{', lse' if lse else ''}"
    return None, (f"{aiter} has no kernel for {what}", *refused)


def quirks_of(call: KernelCall, aiter: Aiter) -> tuple[Quirk, ...]:
    """The quirks that a kernel has in this AITER."""
    # Builds name themselves as they like, so no row asks for a version.
    return tuple(q for q in KERNEL_QUIRKS if q.applies(call, "aiter", aiter.arch, {}))


def _called(problem: Problem) -> tuple[str, ...]:
    """The functions without which a call cannot be made."""
    if problem.op == "prefill":
        return bindings.CHUNKED if Feature.CACHED_CONTEXT in problem.features else bindings.PREFILL
    if problem.op == "index_topk":
        return (bindings.index_logits(problem.kv_format, problem.block_size)[0],)
    return (
        (bindings.cache_writer(problem.kv_format)[0],) if problem.op == "write_cache" else ("mla_decode_fwd",)
    )


def _decode(problem: Problem, aiter: Aiter) -> Weighed:
    """A decode needs a kernel of one query token; one of several is used beside it where a batch fits it."""
    route, reasons = route_of(problem, aiter, 1)
    return Weighed(reasons) if route is None else Weighed((), route.quirks, route.call.lanes)


def _prefill(problem: Problem, aiter: Aiter) -> Weighed:
    """A prefill needs a kernel with its mask and a reducer for some number of heads; in chunks, an lse."""
    if Feature.CACHED_CONTEXT in problem.features:
        triton = f"{aiter} has ENABLE_CK=0, and with it another attention, whose lse lies otherwise"
        return Weighed((*aiter.refusals(bindings.CHUNKED), *((triton,) if aiter.without_ck else ())))
    reasons = aiter.refusals(bindings.PREFILL)
    if reasons:
        return Weighed(reasons)
    causal, able = Feature.NON_CAUSAL not in problem.features, prefill_lanes(aiter)
    if not able or _row(aiter, ("fp8", "fp8", 1, 1, 0, 1, int(causal), 0, 0)) is None:
        return Weighed((f"{aiter} has no kernel for fp8 prefill{'' if causal else ', non-causal'}",))
    enough = next((lanes for lanes in able if lanes >= problem.num_heads), able[-1])
    return Weighed((), (), max(enough, problem.num_heads))


def _index_topk(problem: Problem, aiter: Aiter) -> Weighed:
    """Logits of keys in tiles, in pages of one token, or in pages of several: a function for each."""
    name, needs = bindings.index_logits(problem.kv_format, problem.block_size)
    reasons = _lacking(aiter, name, needs)
    if not reasons and name == "deepgemm_fp8_paged_mqa_logits_stage1" and not _reads_index_pages(aiter):
        # github.com/ROCm/aiter #4440: pages of more tokens were read as if of one.
        reasons = ("this AITER's indexer reads pages of one token, or shuffled keys",)
    return Weighed(reasons)


@lru_cache(maxsize=256)
def _reads_index_pages(aiter: Aiter) -> bool:
    """Whether its indexer takes pages of several tokens: by the source that is here, or as recorded."""
    if aiter.root is None:
        return facts.recorded_index_pages(aiter.release)
    modules = bindings.FUNCTIONS["deepgemm_fp8_paged_mqa_logits_stage1"].modules
    paths = [aiter.root.joinpath(*module.split(".")).with_suffix(".py") for module in modules]
    return any(
        facts.reads_index_pages(path.read_text(encoding="utf-8", errors="replace"))
        for path in paths
        if path.is_file()
    )


def _write_cache(problem: Problem, aiter: Aiter) -> Weighed:
    """A writer of keys, in tiles where the format says so, or of latents."""
    return Weighed(_lacking(aiter, *bindings.cache_writer(problem.kv_format)))


def _lacking(aiter: Aiter, name: str, needs: tuple[str, ...]) -> tuple[str, ...]:
    """Why a function cannot be called with these parameters; () if it can."""
    reasons = aiter.refusals((name,), by_tables=False)
    if reasons:
        return reasons
    binding = aiter.binding(name)
    return tuple(f"{binding} has no parameter {one!r}" for one in needs if not binding.takes(one))


def _every_call(aiter: Aiter) -> Iterator[KernelCall]:
    """Every decode that its tables have."""
    if aiter.dispatch is None:
        return
    for q, kv in (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")):
        for q_len in range(1, 9):
            for lse in (False, True):
                yield from _calls(aiter, aiter.dispatch, q, kv, 1, q_len, lse)


def _calls(
    aiter: Aiter, dispatch: Dispatch, q: str, kv: str, heads: int, q_len: int, lse: bool
) -> Iterator[KernelCall]:
    """Every call that has a kernel at each stage."""
    for lanes in (lanes for lanes in LANES if lanes >= heads):
        for persistent in (False, True):
            found = dispatch.look_up(aiter.arch, q, kv, persistent=persistent, heads=lanes, q_len=q_len)
            if found is None:
                continue
            if persistent and lanes // found.fold not in aiter.decode_reducers:
                continue
            lse_from = dispatch.lse_from[mode(persistent)]
            of_lse = int(lse and lse_from == "keyed")
            shape = (q, kv, found.heads, found.persistent, found.q_len)
            kernel = _row(aiter, (*shape, 0, int(dispatch.causal_rows), of_lse, 0))
            if kernel is not None:
                yield KernelCall(
                    q,
                    kv,
                    lanes,
                    found.fold,
                    q_len,
                    persistent,
                    lse,
                    lse_from,
                    dispatch.tokens_fold_in_order,
                    kernel.code_object,
                    digest := _digest(aiter, kernel.code_object),
                    aiter.takes_unrun or facts.was_run(aiter.arch, digest),
                    facts.reaches_far(aiter.arch, digest),
                    found.told_heads,
                    found.step,
                    dispatch.whole_tails,
                    aiter.switches,
                )


@lru_cache(maxsize=4096)
def _digest(aiter: Aiter, code_object: str) -> str:
    """What the bytes of a code object are known by: of the file that is here, or of a recorded one."""
    if aiter.objects is None:
        return facts.recorded_digest(aiter.release, aiter.arch, code_object)
    return facts.digest_of(aiter.objects / f"{code_object}.co")


def _row(aiter: Aiter, key: tuple[str | int, ...]) -> Kernel | None:
    """The row with a key: the first, as AITER takes it, unless several share the key."""
    rows = [kernel for kernel in aiter.kernels if kernel[:-1] == key]
    # AITER keeps its rows in an unordered map, so which of two it takes is not known.
    return rows[0] if len(rows) == 1 else None
