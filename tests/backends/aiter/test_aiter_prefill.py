"""AITER's prefill in fp8: right against its double, whatever release and heads, or refused with a reason."""

import math
import random
import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from double_prefill import PrefillDouble
from double_stages import Aborted
from torch import Tensor

from anymla import select
from anymla.backends.aiter_mla import bindings, facts, manifest, prefill, staging
from anymla.backends.aiter_mla.provider import recorded_aiter
from anymla.contract import AttentionOutput, Batch
from anymla.errors import InvalidInput, NoBackend
from anymla.hardware.probe import Machine, machine_named
from anymla.kv_cache import KVCache
from anymla.planned import PrefillPlan
from anymla.plans import features, plan_prefill, prefill_plan
from anymla.problem import Feature, Problem
from anymla.verification.judge import judge

UNITS, SM_SCALE = 64, 0.11
LENGTHS = {
    "one token": (1,),
    "a tile and one": (257,),
    "ragged": (130, 1, 64, 0),
    "many short": (3, 1, 2, 5) * 3,
    "nothing": (0, 0),
}
"""New tokens of each sequence."""


def machine(release: str = "HEAD", arch: str = "gfx950", units: int = UNITS) -> Machine:
    """A chip with a release, small enough for short sequences to be cut, or large."""
    packages = (("aiter", release), ("torch", ""), ("triton", ""))
    return Machine(arch, packages, assumed=True, multiprocessors=units)


def problem_of(heads: int, q_len: int, *asked: Feature) -> Problem:
    """A prefill that may round to fp8."""
    return Problem(
        "prefill", "fp8_e4m3fn", "bf16", heads, 512, 64, 128, 128, q_len=q_len, features=frozenset(asked)
    )


def batch_of(lens: tuple[int, ...], *, causal: bool = True, spare: int = 1) -> Batch:
    """New tokens, and some that belong to no sequence."""
    indptr = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch.of(
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        qo_indptr=indptr,
        causal=causal,
        num_tokens=sum(lens) + spare,
        new_tokens_are_cached=False,
    )


def plan_of(heads: int, batch: Batch, where: Machine) -> PrefillPlan:
    """The plan of a step by AITER."""
    asked = features(batch)
    return prefill_plan(batch, problem_of(heads, batch.max_q_len, *asked), "aiter", where)


@lru_cache(maxsize=32)
def weights(heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[H, P, L] and [H, L, V]."""
    g = torch.Generator().manual_seed(heads)
    w = torch.randn(heads, 256, 512, generator=g).mul_(512**-0.5).to(dtype)
    return w[:, :128], w[:, 128:].mT


def tensors(heads: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """What a layer gives to a prefill; the last token belongs to no sequence and is NaN."""
    g = torch.Generator().manual_seed(heads)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    latents, rope = new(tokens, 512), new(tokens, 64)
    latents[-1], rope[-1] = torch.nan, torch.nan
    return new(tokens, heads, 128), new(tokens, heads, 64), latents, rope, *weights(heads, dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Of dense operands of every token, in their dtype."""
    out = torch.zeros(batch.num_tokens, q.shape[1], v.shape[2], dtype=q.dtype)
    assert batch.qo_indptr_host is not None
    for first, last in pairwise(batch.qo_indptr_host):
        scores = torch.einsum("qhd,khd->hqk", q[first:last], k[first:last]) * SM_SCALE
        if batch.causal:
            n = last - first
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[first:last])
    return out


def require_right(double: PrefillDouble, heads: int, batch: Batch, where: Machine) -> None:
    """Run, and judge the result on what the kernel was given, and that on what it stands for."""
    given = tensors(heads, batch.num_tokens)
    plan = plan_of(heads, batch, where)
    double.operands.clear()
    got = plan.run(*given, sm_scale=SM_SCALE).out
    total, lanes, spread = plan.state.tokens, plan.state.lanes, []
    for launch, operands in enumerate(double.operands):
        own = min(lanes, heads - launch * lanes)
        step = lanes // own if lanes % own == 0 else 1
        spread.append([t[:, : own * step : step] for t in operands])
    assert (got[total:] == 0).all()
    if not total:
        return
    q, k, v = (torch.cat(parts, 1) for parts in zip(*spread, strict=True))
    q_nope, q_pe, latents, rope, w_uk, w_uv = (t.double() for t in given)
    exact = (
        torch.cat((q_nope, q_pe), -1)[:total],
        torch.cat(
            (
                torch.einsum("tl,hpl->thp", latents[:total], w_uk),
                rope[:total, None].expand(-1, heads, -1),
            ),
            -1,
        ),
        torch.einsum("tl,hlv->thv", latents[:total], w_uv),
    )
    for rounded, one in zip((q, k, v), exact, strict=True):
        # A half unit of fp8 above its smallest normal numbers, and one of bf16 before it.
        bound = one.abs() * (2**-4 + 2**-8) + one.abs().max() * 2**-14
        assert ((rounded.double() - one).abs() <= bound).all()
    reference = attention(q.double(), k.double(), v.double(), batch)[:total]
    eager = attention(q, k, v, batch)[:total].bfloat16()
    none = torch.zeros(reference.shape[:2], dtype=torch.float64)
    judge(
        AttentionOutput(got[:total], None),
        AttentionOutput(reference, none),
        AttentionOutput(eager, none.float()),
    ).require_pass()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> PrefillDouble:
    """The newest AITER on gfx950."""
    return PrefillDouble("HEAD", "gfx950", UNITS).install(monkeypatch)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", [1, 16])
def test_any_step_is_right(double: PrefillDouble, heads: int, lens: tuple[int, ...], causal: bool) -> None:
    require_right(double, heads, batch_of(lens, causal=causal), machine())


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 20, 32, 40, 56, 80, 112, 128])
def test_any_number_of_heads_is_right(double: PrefillDouble, heads: int) -> None:
    require_right(double, heads, batch_of((5, 0, 17)), machine())


def releases() -> list[str]:
    """The first of those that are alike in all that a prefill depends on."""
    first: dict[object, str] = {}
    for release in facts.releases():
        parts = [facts.recorded_parameters(name, release) for name in bindings.PREFILL]
        kernels = [k for k in facts.recorded_kernels(release, "gfx950") if k.prefill]
        if kernels:
            first.setdefault((*parts, *kernels, facts.recorded_reducers(release, 128)), release)
    return list(first.values())


@pytest.mark.parametrize("release", releases())
def test_every_release_is_right(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    double = PrefillDouble(release, "gfx950", UNITS).install(monkeypatch)
    for heads in (33, 65):
        require_right(double, heads, batch_of((9, 3)), machine(release))


def test_a_sample_of_all_releases_chips_heads_and_lengths_is_right_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, outcomes = random.Random(1), Counter[str]()
    for _ in range(30):
        release, arch = rng.choice(facts.releases()), rng.choice(("gfx950", "gfx950", "gfx950", "gfx942"))
        heads, units = rng.choice((1, 2, 6, 12, 16, 20, 24, 32, 48, 64)), rng.choice((8, 64, 256))
        lens = tuple(rng.choice((0, 1, 2, 17, 33, 130)) for _ in range(rng.randrange(1, 4)))
        where, batch = machine(release, arch, units), batch_of(lens, causal=rng.random() < 0.7)
        with monkeypatch.context() as patch:
            made = PrefillDouble(release, arch, units).install(patch)
            try:
                require_right(made, heads, batch, where)
            except NoBackend as refusal:
                assert any(reason for reason in refusal.verdicts[0].reasons)
                outcomes["refused"] += 1
            else:
                outcomes["right"] += 1
    assert outcomes["right"] > 7 and outcomes["refused"] > 7


def test_tiles_are_cut_and_merged_and_scratch_is_as_long_as_their_parts(double: PrefillDouble) -> None:
    batch = batch_of((400,))
    require_right(double, 16, batch, machine())
    state = plan_of(16, batch, machine()).state
    heads_parts = double.parts[-1]
    assert heads_parts > 0
    assert state.partial_out.shape[0] * 16 == heads_parts * prefill.TILE_Q
    uncut = plan_of(16, batch_of((100,) * 64), machine()).state
    assert uncut.partial_out.shape[0] == 0


@pytest.mark.parametrize("units", [1, 7, 64, 256])
@pytest.mark.parametrize("lanes", [16, 48, 96, 128])
def test_a_plan_never_outgrows_its_buffers(units: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    PrefillDouble("HEAD", "gfx950", units).install(monkeypatch)
    for lens in (*LENGTHS.values(), (5000,), (1, 4097, 256, 255), (256,) * 40):
        # The double aborts where one is written past its end.
        plan_of(lanes, batch_of(lens), machine(units=units))


def test_heads_that_do_not_fit_together_run_one_group_after_another(
    double: PrefillDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of((9, 20))
    require_right(double, 40, batch, machine())
    assert len(double.operands) == 1
    monkeypatch.setattr(prefill, "EXPANDED_BYTES", 1 << 20)
    require_right(double, 40, batch, machine())
    assert [q.shape[1] for q, _, _ in double.operands] == [16, 16, 16]


def test_strided_operands_and_outputs_in_parts_of_larger_ones(double: PrefillDouble) -> None:
    batch = batch_of((40, 7), spare=0)
    given = [t[: batch.num_tokens] if at < 4 else t for at, t in enumerate(tensors(6, 48))]
    plan = plan_of(6, batch, machine())
    dense = plan.run(*given, sm_scale=SM_SCALE).out
    odd = [torch.cat((t, t), -1)[..., : t.shape[-1]] for t in given]
    into = torch.full((47, 6, 200), torch.nan, dtype=torch.bfloat16)
    plan.run(*odd, sm_scale=SM_SCALE, out=into[..., :128])
    assert torch.equal(into[..., :128], dense) and into[..., 128:].isnan().all()


def test_a_value_that_is_no_number_is_no_scale_of_the_rest(double: PrefillDouble) -> None:
    batch = batch_of((120, 150), spare=0)
    given = [t.nan_to_num() for t in tensors(16, 270)]
    given[2][260], given[0][200, 3, 0] = torch.nan, torch.inf
    got = plan_of(16, batch, machine()).run(*given, sm_scale=SM_SCALE).out
    assert got[:120].isfinite().all() and got[260:].isnan().all()


def test_what_is_no_number_reaches_other_sequences_and_explain_says_so(double: PrefillDouble) -> None:
    plan = plan_of(16, batch_of((20, 30), spare=0), machine())
    assert plan.choice.knobs == {"finite_tokens": 1}
    for token, hit in ((0, slice(20, 50)), (49, slice(0, 20))):
        given = [t.nan_to_num() for t in tensors(16, 50)]
        given[2][token] = torch.nan
        assert plan.run(*given, sm_scale=SM_SCALE).out[hit].isnan().all()


def test_fp16_comes_out_in_fp16_though_the_kernel_writes_bf16(double: PrefillDouble) -> None:
    batch = batch_of((12,))
    got = plan_of(4, batch, machine()).run(*tensors(4, 13, torch.float16), sm_scale=SM_SCALE).out
    assert got.dtype == torch.float16 and got.isfinite().all()


def test_lengths_that_only_the_device_knows_are_left_to_our_own_prefill() -> None:
    batch = replace(batch_of((4, 9)), qo_indptr_host=None, seq_lens_host=None)
    with pytest.raises(NoBackend, match="aiter: features lacks lengths that only the device knows"):
        plan_of(16, batch, machine())
    assert prefill_plan(batch, problem_of(16, 9), "auto", machine()).backend == "triton"


REFUSED = {
    "bf16, which is never rounded unasked": ({"q_dtype": "bf16"}, "q_dtype got bf16; needs fp8_e4m3fn"),
    "an lse": ({"features": frozenset({Feature.LSE})}, "lacks lse"),
    "sinks": ({"features": frozenset({Feature.SINKS})}, "lacks sinks"),
    "other widths": ({"v_head_dim": 256}, "v_head_dim got 256; needs 128"),
    "too many heads": ({"num_heads": 129}, "num_heads got 129; needs 1 to 128"),
}


@pytest.mark.parametrize(("changed", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_do_is_refused_with_a_reason(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(NoBackend, match=reason):
        select.choose(replace(problem_of(16, 1), **changed), machine(), "aiter")


def test_our_own_prefill_stands_behind_it_and_explain_says_so() -> None:
    asked = replace(problem_of(16, 1), q_dtype="bf16")
    choice = select.choose(asked, machine_named("gfx950").having("aiter", "HEAD"))
    assert choice.backend.name == "triton"
    assert "aiter: q_dtype got bf16; needs fp8_e4m3fn" in str(choice)


def test_a_plan_asks_for_it_by_an_fp8_dtype(double: PrefillDouble) -> None:
    widths = {"num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    asked = {**widths, "v_head_dim": 128, "machine": machine()}
    batch = batch_of((9, 4))
    assert plan_prefill(batch, q_dtype=torch.float8_e4m3fn, **asked).backend == "aiter"
    assert plan_prefill(batch, q_dtype=torch.bfloat16, **asked).backend == "triton"


@pytest.mark.parametrize("asked", [{"return_lse": True}, {"sinks": True}, {"v_head_dim": 256}], ids=str)
def test_what_it_refuses_of_such_a_plan_is_served_in_16_bits_and_explain_says_so(
    asked: dict[str, object],
) -> None:
    widths = {"num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    facts = {**widths, "v_head_dim": 128, "machine": machine(), "q_dtype": torch.float8_e4m3fn, **asked}
    plan = plan_prefill(batch_of((9, 4)), **facts)
    assert plan.backend == "triton"
    assert "triton: accepts; sets operand_bits=16" in plan.explain()
    assert re.search("aiter: (features lacks (lse|sinks)|v_head_dim got 256; needs 128)", plan.explain())


def test_such_a_plan_takes_tensors_of_16_bits(double: PrefillDouble) -> None:
    plan = plan_of(16, batch_of((9, 4)), machine())
    with pytest.raises(InvalidInput, match="q_nope got dtype fp32; needs bf16 or fp16, as planned"):
        plan.run(*(t.float() for t in tensors(16, 14)), sm_scale=SM_SCALE)


def test_gfx942_and_releases_without_a_kernel_are_refused() -> None:
    with pytest.raises(NoBackend, match="arch got gfx942; needs gfx950"):
        select.choose(problem_of(16, 1), machine(arch="gfx942"), "aiter")
    with pytest.raises(NoBackend, match=r"aiter 0\.1\.10 has no mla_prefill_ps_asm_fwd"):
        select.choose(problem_of(16, 1), machine("0.1.10"), "aiter")


def test_a_number_of_heads_that_the_reducer_lacks_would_end_the_process(
    double: PrefillDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = manifest.prefill_lanes(recorded_aiter("0.1.19", "gfx950"))
    assert able == (16, 32, 64, 128)
    monkeypatch.setattr(prefill, "prefill_lanes", lambda aiter: (80,))
    batch = batch_of((300,))
    with pytest.raises(Aborted, match="the reducer has no 80 heads"):
        plan_of(80, batch, machine()).run(*tensors(80, 301), sm_scale=SM_SCALE)


class Event:
    """Of a copy."""

    made: ClassVar[list["Event"]] = []

    def __init__(self) -> None:
        self.waited = 0
        Event.made.append(self)

    def record(self) -> None:
        """Nothing to wait for here."""

    def synchronize(self) -> None:
        """Count."""
        self.waited += 1


def test_plans_are_staged_in_two_sets_by_turns_and_none_is_written_before_its_copy_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    made = staging.Staging(torch.device("cpu"))
    monkeypatch.setattr(made, "_device", _Cuda())
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda n, dtype, pin_memory: empty(n, dtype=dtype))
    monkeypatch.setattr(torch, "empty_like", lambda t, device: empty_like(t))
    Event.made.clear()
    places = []
    for length in (4, 3, 4, 2, 8):
        host = made.host({"plan": (length,)})
        host["plan"].fill_(length)
        copy = made.to_device(host)
        assert copy["plan"].tolist() == [length] * length
        assert copy["plan"].data_ptr() != host["plan"].data_ptr()
        places.append(host["plan"].data_ptr())
    assert places[0] == places[2] and places[1] == places[3] and places[0] != places[1]
    assert [event.waited for event in Event.made] == [1, 1, 1, 0, 0]


class _Cuda:
    type = "cuda"


@pytest.mark.parametrize("kv_format", ["fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_ds_mla"])
def test_a_cache_that_nothing_is_read_of_may_have_any_format(double: PrefillDouble, kv_format: str) -> None:
    batch, given = batch_of((9,), spare=0), [t.nan_to_num() for t in tensors(16, 9)]
    alone = plan_of(16, batch, machine()).run(*given, sm_scale=SM_SCALE)
    scale = None if kv_format == "fp8_ds_mla" else 1.0
    cache = KVCache.allocate(2, 8, kv_lora_rank=512, qk_rope_head_dim=64, kv_format=kv_format, scale=scale)
    asked = replace(problem_of(16, 9, *features(batch)), kv_format=kv_format, block_size=8)
    beside = replace(batch, block_table=torch.zeros(1, 1, dtype=torch.int32), block_size=8)
    plan = prefill_plan(beside, asked, "aiter", machine())
    assert torch.equal(plan.run(*given, sm_scale=SM_SCALE, kv_cache=cache).out, alone.out)
