"""Each row of KERNEL_QUIRKS is needed: without it a plan is another, and mostly its result is wrong."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import cases
import pytest
import torch
from cases import Case
from double import AiterDouble
from double_stages import Aborted

from anymla import select
from anymla.backends.aiter_mla import facts, manifest, operands
from anymla.backends.aiter_mla.provider import Aiter, recorded_aiter
from anymla.contract import Batch
from anymla.hardware.kernel_quirks import KERNEL_QUIRKS
from anymla.hardware.quirks import Quirk
from anymla.kv_cache import KVCache
from anymla.plans import decode_plan
from anymla.verification.judge import JudgementFailed


@dataclass(frozen=True)
class Example:
    """A case for which one row matters.

    Attributes:
        row: Words of the row's source, or of what it does.
        case: Where it matters.
        fails: What the double shows without the row; None where only the plan differs.
        switch: An environment variable that is set.
        unrun: Whether the bytes of code objects are others than were run.
    """

    row: str
    case: Case
    fails: type[BaseException] | None
    switch: str = ""
    unrun: bool = False


def at(release: str, arch: str, heads: int, kind: str = "bf16", q_len: int = 1, **more: object) -> Case:
    """A case, without lse or sinks unless said."""
    given = {"lse": False, "sinks": False, "lengths": "ragged"} | more
    return Case(release, arch, heads, kind, q_len, **given)  # type: ignore[arg-type]


WRONG, DEAD = JudgementFailed, Aborted
EXAMPLES = [
    Example("returns an lse that nothing wrote", at("0.1.12.post2", "gfx942", 16, lse=True), WRONG),
    Example("persistent kernels write no lse on gfx942", at("HEAD", "gfx942", 64, "fp8", lse=True), None),
    Example("for gfx942; emulated", at("HEAD", "gfx942", 16, "fp8", lse=True, lengths="many"), WRONG),
    Example("64 and 128 heads write no lse", at("HEAD", "gfx942", 128, lse=True, lengths="many"), WRONG),
    Example("fp32 into the bf16 output, past its end", at("HEAD", "gfx950", 8, lengths="many"), DEAD),
    Example("through a pointer that is null", at("HEAD", "gfx942", 32, lengths="many"), DEAD),
    Example("kernel of 32 heads faults", at("0.1.14", "gfx950", 32), DEAD),
    Example("ragged tails are wrong", at("HEAD", "gfx950", 32), WRONG),
    Example("bf16 kernel of 64 heads faults", at("0.1.12", "gfx942", 64), DEAD),
    Example("128 heads is not causal", at("HEAD", "gfx942", 128, q_len=2, lengths="a tail of one"), WRONG),
    Example(
        "32 heads is wrong for several", at("HEAD", "gfx942", 32, q_len=2, lengths="a tail of one"), WRONG
    ),
    Example("wrong for 3 tokens and more", at("HEAD", "gfx950", 32, q_len=3, lengths="a tail of one"), WRONG),
    Example("16 rows share a mask", at("HEAD", "gfx950", 24, q_len=2, lengths="a tail of one"), WRONG),
    Example("own number avoids", at("HEAD", "gfx942", 128, "fp8", 2, lengths="a tail of one"), WRONG),
    Example(
        "of several tokens gives no right lse",
        at("HEAD", "gfx942", 128, "fp8", 2, lse=True, lengths="a tail of one"),
        WRONG,
    ),
    Example("leaves the cache's scale out", at("HEAD", "gfx942", 8, "fp8"), WRONG),
    Example("tiles of 128 keys", at("HEAD", "gfx950", 16, "fp8", lengths="with empty"), WRONG),
    Example(
        "fp8 kernel of 16 heads gives no right lse",
        at("HEAD", "gfx950", 16, "fp8", lse=True, lengths="with empty"),
        WRONG,
    ),
    Example(
        "splits=1|tiles of 32 keys, merged as if of 16, so",
        at("HEAD", "gfx942", 16, "fp8", 4, lengths="a tail of one"),
        WRONG,
    ),
    Example(
        "16 heads and 4 tokens gives no right lse",
        at("HEAD", "gfx942", 16, "fp8", 4, lse=True, lengths="a tail of one"),
        WRONG,
    ),
    Example("overwrites its own splits", at("HEAD", "gfx950", 16, "fp8", 4, lengths="a tail of one"), WRONG),
    Example("tiles of 32 keys were merged", at("0.1.11", "gfx942", 128, "fp8"), WRONG),
    Example(
        "writes no lse of unsplit work", at("HEAD", "gfx950", 32, "fp8", lse=True, lengths="one key"), WRONG
    ),
    Example("is not known to be right", at("HEAD", "gfx950", 16, "fp8", 4), None),
    Example("never runs more than 4 tokens", at("HEAD", "gfx950", 16, q_len=8), None),
    Example(
        "8 heads are wrong for several tokens",
        at("0.1.16", "gfx942", 8, q_len=2, lengths="a tail of one"),
        DEAD,
    ),
    Example("does not fit gfx942", at("0.1.14", "gfx942", 8), DEAD),
    Example("permutes folded heads", at("0.1.11", "gfx942", 48, q_len=2, lengths="a tail of one"), WRONG),
    Example("were wrong for 3 tokens", at("HEAD", "gfx942", 48, q_len=3), None),
    Example(
        "AITER_ENABLE_EXPERIMENTAL is set",
        at("HEAD", "gfx950", 32, "fp8", 4, lengths="a tail of one"),
        AttributeError,
        "AITER_ENABLE_EXPERIMENTAL",
    ),
    Example("AITER_MLA_USE_OPUS is set", at("HEAD", "gfx950", 64, "fp8"), DEAD, "AITER_MLA_USE_OPUS"),
    Example("AITER_MLA_REDUCE_FLYDSL is set", at("HEAD", "gfx942", 48), DEAD, "AITER_MLA_REDUCE_FLYDSL"),
    Example("META_USE_PARALLEL is 0", at("HEAD", "gfx942", 48), None, "AITER_MLA_META_USE_PARALLEL"),
    Example("CU_NUM is set", at("HEAD", "gfx942", 48), None, "CU_NUM"),
    Example("sets own_out", at("HEAD", "gfx942", 48, q_len=2, lengths="a tail of one"), None),
    Example("sets keep_persistent", at("0.1.18", "gfx950", 16, lse=True, lengths="many"), DEAD),
    Example("sets max_cache_gib", at("HEAD", "gfx942", 16), None),
    Example("kernel of 32 heads and 4 tokens is wrong", at("0.1.16", "gfx950", 128, "fp8", lse=True), WRONG),
    Example("fp8 kernel of 32 heads is wrong", at("0.1.15", "gfx950", 32, "fp8"), WRONG),
    Example(
        "gives a wrong lse of several",
        at("0.1.14", "gfx950", 32, q_len=2, lse=True, lengths="a tail of one"),
        WRONG,
    ),
    Example("gives NaN at times", at("0.1.16", "gfx950", 128, lse=True), WRONG),
    Example("cuts off tails", at("0.1.10.post3", "gfx950", 16, "fp8", 4, lengths="a tail of one"), WRONG),
    Example("none that were run", at("HEAD", "gfx942", 16), None, unrun=True),
    Example("sets finite_slot_0", at("HEAD", "gfx942", 16), None),
]


def row_of(example: Example) -> Quirk:
    """The one row that an example is about."""
    words = example.row.split("|")
    found = [q for q in KERNEL_QUIRKS if all(word in f"{q.source} {q}" for word in words)]
    assert len(found) == 1, (example.row, [str(q) for q in found])
    return found[0]


def forget() -> None:
    """What was chosen before."""
    for cache in (manifest.route_of, select.explain, select.choose):
        cache.cache_clear()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Quirk], None]]:
    """Take a row out of the table until the test ends."""

    def remove(row: Quirk) -> None:
        monkeypatch.setattr(manifest, "KERNEL_QUIRKS", tuple(q for q in KERNEL_QUIRKS if q is not row))
        forget()

    yield remove
    forget()


def switched_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a switch of AITER, and have a recorded release look at it as one that is installed does."""
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(Aiter, "switches", property(lambda self: frozenset({name})))
    forget()


def planned(case: Case) -> object:
    """The kernel and knobs of a case."""
    aiter = recorded_aiter(case.release, case.arch)
    route, _ = manifest.route_of(cases.problem_of(case), aiter, case.q_len)
    return route and (route.call, route.knobs)


def test_every_row_has_an_example() -> None:
    assert {id(row_of(example)) for example in EXAMPLES} == {id(row) for row in KERNEL_QUIRKS}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.row)
def test_a_row_is_needed(example: Example, without, monkeypatch: pytest.MonkeyPatch) -> None:
    if example.switch:
        switched_on(example.switch, monkeypatch)
    # What one row refuses was not run, so that another would refuse it too.
    monkeypatch.setattr(facts, "was_run", lambda arch, digest: not example.unrun)
    forget()
    kept = planned(example.case)
    cases.run(example.case, monkeypatch)
    without(row_of(example))
    assert planned(example.case) != kept
    if example.fails:
        with pytest.raises(example.fails):
            cases.run(example.case, monkeypatch)


@pytest.mark.parametrize("row", KERNEL_QUIRKS, ids=str)
def test_a_row_refuses_or_sets_one_knob_and_cites(row: Quirk) -> None:
    assert bool(row.refuse) != bool(row.knob)
    assert row.source
    assert not row.until


def folded_step(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Two tokens of 48 heads into a part of a larger buffer; the difference to what the call returned."""
    case = at("HEAD", "gfx942", 48, q_len=2, lengths="a tail of one")
    AiterDouble(case.release, case.arch, cases.UNITS).install(monkeypatch)
    batch: Batch = cases._batch(cases.LENGTHS[case.lengths], case.q_len)
    cache: KVCache = cases._values("bf16")
    buffer = torch.zeros(10, 48, 512, dtype=torch.bfloat16)
    part = buffer[2:6]
    plan = decode_plan(batch, cases.problem_of(case), "aiter", cases.machine_of(case))
    fresh = plan.run(*cases._queries(48, 4), cache, sm_scale=cases.SM_SCALE)
    plan.run(*cases._queries(48, 4), cache, sm_scale=cases.SM_SCALE, out=part)
    return (buffer[2:6].float() - fresh.out.float()).abs().max()


def test_folded_heads_do_not_stay_permuted_in_the_memory_of_the_caller(
    without, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folded_step(monkeypatch) == 0
    without(row_of(next(example for example in EXAMPLES if example.row == "sets own_out")))
    assert folded_step(monkeypatch) > 0


def test_a_cache_beyond_what_a_release_can_address_is_refused() -> None:
    full = cases._values("bf16")
    huge = torch.empty(1 << 19, 8, 576, dtype=torch.bfloat16, device="meta")
    knobs = {"max_cache_gib": 4}
    assert operands.rows_of(full, knobs).shape == (cases.SLOTS, 1, 1, 576)
    with pytest.raises(ValueError, match=r"kv_cache got 4831838208 bytes; needs at most 4294967296"):
        operands.rows_of(KVCache(huge, full.format, 512, 64, None), knobs)
    assert operands.rows_of(KVCache(huge, full.format, 512, 64, None), {}).shape[0] == 1 << 22
