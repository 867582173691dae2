"""The Triton kernels on a CPU, in Triton's interpreter: every operation, every format, hostile memory."""

import struct
from dataclasses import replace
from importlib import import_module
from itertools import product

import kernel_calls
import pytest
import torch
import triton
import triton.language as tl
from kernel_calls import drawn, inputs, machine, require_right, run, same_bits, step

from anymla import fp8
from anymla.backends import triton_mla
from anymla.backends.triton_mla.store import e4m3_code
from anymla.contract import AttentionOutput, DecodeArgs, WriteArgs
from anymla.hardware.arches import ARCHES
from anymla.hardware.tiles import prefill_shared_bytes
from anymla.kv_cache import KV_FORMATS
from anymla.models import MODELS
from anymla.problem import Feature, Problem
from anymla.verification.batches import num_sequences, take
from anymla.verification.cases import DTYPES
from anymla.verification.inputs import Widths, decode_inputs, prefill_inputs, write_inputs

COUNTS = {"decode": 18, "sparse_decode": 12, "prefill": 14}
CASES = [case for op, count in COUNTS.items() for case in drawn(op, count)]
PLAIN = {case.problem.op: case for case in reversed(CASES) if case.problem.kv_format == "bf16"}
FLAVOURS = pytest.mark.parametrize("fnuz", [False, True], ids=["fn", "fnuz"])

prefill = import_module("anymla.backends.triton_mla.prefill")


def test_heads_may_lie_two_thousand_million_elements_apart():
    """Memory that is never touched is never there."""
    call = decode_inputs(Widths(3, 128, 32), (40,))

    def apart(t):
        whole = torch.empty(2**31 + t.shape[2], dtype=t.dtype)
        return whole.as_strided(t.shape, (1, 2**30, 1)).copy_(t)

    q, q_pe, cache = call.tensors
    out, options = apart(torch.empty(call.shape, dtype=q.dtype)), call.options
    asked = Problem("decode", "bf16", "bf16", 3, 128, 32, block_size=16, features=frozenset({Feature.SINKS}))
    args = DecodeArgs(apart(q), apart(q_pe), cache, options["sm_scale"], options["sinks"], out, None)
    triton_mla.decode(args, triton_mla.plan_decode(step(call, asked), asked, machine(), {}))
    require_right(call, AttentionOutput(out, None))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_it_is_right(case):
    call = inputs(case)
    require_right(call, run(call, case.problem))


@pytest.mark.parametrize("op", COUNTS)
def test_every_value_of_every_axis_is_run(op):
    problems = [case.problem for case in CASES if case.problem.op == op]
    for name in ("q_dtype", "kv_format", "block_size"):
        assert {getattr(problem, name) for problem in problems} == set(kernel_calls.AXES[name])
    if op != "prefill":
        assert {problem.num_heads for problem in problems} == set(kernel_calls.AXES["num_heads"])


@pytest.mark.parametrize("kv_format", ["fp8_e4m3fn", "fp8_ds_mla"])
@pytest.mark.parametrize("op", COUNTS)
def test_fp8_is_converted_by_a_chip_that_can(op, kv_format):
    case = next(c for c in CASES if c.problem.op == op and c.problem.kv_format == kv_format)
    call = inputs(case)
    require_right(call, run(call, case.problem, "gfx950"))


@pytest.mark.parametrize("arch", ["gfx90a", "gfx950", "sm80", "sm89"])
@pytest.mark.parametrize("op", ["decode", "sparse_decode"])
def test_queries_in_fp8_are_multiplied_as_they_are_or_converted_as_the_keys_are(op, arch):
    kv_format = "fp8_e4m3fn" if arch != "sm80" else "fp8_e4m3fnuz"
    case = next(c for c in CASES if c.problem.op == op and c.problem.kv_format == kv_format)
    case = replace(case, problem=replace(case.problem, q_dtype=kv_format))
    call = inputs(case)
    require_right(call, run(call, case.problem, arch))


@pytest.mark.parametrize("op", COUNTS)
def test_a_batch_invariant_row_has_the_same_bits_alone_and_in_any_batch(op):
    case = PLAIN[op]
    features = case.problem.features | {Feature.BATCH_INVARIANT, Feature.LSE}
    problem = replace(case.problem, features=features)
    call = inputs(replace(case, poison="nan"))
    whole = run(call, problem)
    require_right(call, whole)
    order = list(range(num_sequences(call)))
    for sequences in ([*order[1::2], *order[::2]], *([s] for s in order)):
        part, rows = take(call, sequences)
        # A plan for a part knows only the longest of that part.
        q_len = problem.q_len if op == "sparse_decode" else max(kernel_calls.step(part, problem).max_q_len, 1)
        assert same_bits(run(part, replace(problem, q_len=q_len)), whole, rows), sequences


class TestPrefill:
    """Passes: however the keys are cut into them, the result is the same."""

    widths = Widths(2, 128, 32, 64, 64)
    call = prefill_inputs(widths, (300, 5, 0, 200), (3, 150, 0, 131), sinks="near", kv_format="fp8_e4m3fn")
    problem = replace(
        PLAIN["prefill"].problem,
        q_dtype="bf16",
        kv_format="fp8_e4m3fn",
        num_heads=2,
        kv_lora_rank=128,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        block_size=16,
        q_len=150,
        features=frozenset({Feature.LSE}),
    )

    def test_many_passes_have_the_bits_of_one(self, monkeypatch):
        invariant = replace(self.problem, features=self.problem.features | {Feature.BATCH_INVARIANT})
        one = run(self.call, invariant)
        require_right(self.call, one)
        monkeypatch.setattr(prefill, "EXPANDED_BYTES", 1)
        many = run(self.call, invariant)
        assert same_bits(many, one, torch.arange(self.call.num_rows))

    @pytest.mark.parametrize("q_dtype", ["bf16", "fp16"])
    def test_a_plan_that_may_round_to_fp8_has_the_bits_of_16(self, q_dtype):
        call = prefill_inputs(self.widths, (70, 5), (3, 20), q_dtype=DTYPES[q_dtype], sinks="near")
        problem = replace(self.problem, q_dtype=q_dtype, kv_format=q_dtype, q_len=20)
        rounding = [replace(problem, q_dtype=fp8) for fp8 in ("fp8_e4m3fn", "fp8_e4m3fnuz")]
        whole = run(call, problem)
        assert all(same_bits(run(call, one), whole, torch.arange(call.num_rows)) for one in rounding)

    def test_lengths_may_be_on_the_device_only(self, monkeypatch):
        monkeypatch.setattr(prefill, "EXPANDED_BYTES", 512 * prefill._expanded_bytes(self.problem))
        require_right(self.call, run(self.call, self.problem, lengths_on_host=False))

    def test_a_sequence_without_new_tokens_has_no_context_to_read(self):
        call = prefill_inputs(self.widths, (300, 17), (0, 2))
        problem = replace(self.problem, kv_format="bf16", q_len=2)
        plan = triton_mla.plan_prefill(kernel_calls.step(call, problem), problem, machine(), {})
        assert plan.context == 17
        require_right(call, run(call, problem))

    @pytest.mark.parametrize("name", MODELS)
    def test_memory_stays_below_3_gib(self, name):
        for tokens, context in product((8192, 16384), (0, 10_000_000)):
            problem = MODELS[name].problem("prefill", q_len=tokens)
            needed = triton_mla.prefill_workspace_bytes(problem, machine("sm90"), tokens, 512, context)
            assert needed <= 3 << 30

    @pytest.mark.parametrize("tokens", [1, 128, 400])
    @pytest.mark.parametrize("context", [0, 70, 1000])
    def test_memory_is_what_was_said(self, monkeypatch, tokens, context):
        monkeypatch.setattr(prefill, "EXPANDED_BYTES", 256 * prefill._expanded_bytes(self.problem))
        call = prefill_inputs(self.widths, (context,), (tokens - 1,))
        problem = replace(self.problem, kv_format="bf16", q_len=max(tokens - 1, 1))
        context = context if tokens > 1 else 0
        plan = triton_mla.plan_prefill(kernel_calls.step(call, problem), problem, machine(), {})
        held = [value for value in vars(plan).values() if isinstance(value, torch.Tensor)]
        said = triton_mla.prefill_workspace_bytes(problem, machine(), tokens, 1, context)
        assert sum(t.numel() * t.element_size() for t in held) == said

    @pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch != "cpu"])
    def test_a_row_fits_for_every_model(self, arch):
        for name, q_len in product(MODELS, (1, 1000)):
            problem = MODELS[name].problem("prefill", q_len=q_len)
            row = prefill._launch_for(problem, machine(arch))
            widths = problem.qk_nope_head_dim, problem.qk_rope_head_dim, problem.v_head_dim
            assert prefill_shared_bytes(row, arch, *widths) <= ARCHES[arch].shared_bytes
            assert prefill.ALIGN % row.block_n == 0


class TestCacheWrite:
    """Bytes, in every format, and nothing beside them."""

    @pytest.mark.parametrize("kv_format", KV_FORMATS)
    @pytest.mark.parametrize("q_dtype", DTYPES)
    @pytest.mark.parametrize("views", [False, True], ids=["", "views"])
    def test_it_stores_the_bytes_that_the_cache_does(self, kv_format, q_dtype, views):
        rank, rope = (128, 0) if kv_format.startswith("index_k") else (256, 6)
        hostile = {"q_dtype": DTYPES[q_dtype], "kv_format": kv_format, "block_size": 5, "views": views}
        call = write_inputs(rank, rope, 23, **hostile)
        kv_c, k_pe, cache, slots = call.tensors
        if cache.format.tile:
            # Which bits a NaN of bf16 has is left open.
            k_pe = k_pe.nan_to_num(nan=3.0, posinf=torch.inf, neginf=-torch.inf)
        memory = torch.empty(0, dtype=cache.format.storage_dtype).set_(cache.data.untyped_storage())
        before = memory.clone()
        cache.write(kv_c, k_pe, slots)
        expected = memory.clone()
        memory.copy_(before)
        # Where the cache has no such slot, nothing is written either.
        beyond = slots.clone()
        beyond[4::5] = torch.tensor([-1, cache.num_blocks * 5, 1 << 40, -(1 << 40)])
        triton_mla.write_cache(WriteArgs(kv_c, k_pe, cache, beyond))
        assert torch.equal(memory.isnan(), expected.isnan())
        assert torch.equal(memory.nan_to_num(), expected.nan_to_num())

    def test_no_tokens_are_no_launch(self):
        call = write_inputs(128, 32, 0)
        triton_mla.write_cache(WriteArgs(*call.tensors))

    @FLAVOURS
    def test_codes_are_those_of_torch(self, fnuz):
        # Each sign, exponent and first seven bits, at, above and below the places where roundings change.
        high = torch.arange(1 << 16, dtype=torch.int64) << 16
        low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
        values = (high[:, None] + low).flatten().to(torch.int32).view(torch.float32)
        codes = torch.full(values.shape, 77, dtype=torch.uint8)
        _codes[(len(values) >> 16,)](values, codes, FNUZ=fnuz, BLOCK=1 << 16)
        assert torch.equal(codes, fp8.to_bytes(values.clone(), fp8.FNUZ if fnuz else fp8.FN))

    def test_minus_zero_is_no_nan_in_fnuz(self):
        tiny = struct.unpack("f", struct.pack("I", 1))[0]
        values = torch.tensor([-0.0, -1e-30, -tiny, 0.0] * 16384)
        codes = torch.full(values.shape, 77, dtype=torch.uint8)
        _codes[(1,)](values, codes, FNUZ=True, BLOCK=1 << 16)
        assert not bool(codes.any())


@triton.jit
def _codes(values, codes, FNUZ: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + places, e4m3_code(tl.load(values + places), FNUZ))
