"""The workspace of a decode: its bound is said beforehand, is a sum and no product, and is never exceeded."""

from dataclasses import replace
from importlib import import_module
from itertools import product
from random import Random

import kernel_calls
import pytest
import torch
from torch import Tensor

import anymla
from anymla.backends import triton_mla
from anymla.backends.triton_mla.decode import PIECES_BYTES, decode_workspace_bytes
from anymla.contract import DecodeArgs, SparseArgs
from anymla.hardware.arches import ARCHES
from anymla.hardware.probe import Machine, machine_named
from anymla.models import MODELS
from anymla.problem import Feature
from anymla.verification.inputs import decode_inputs, sparse_inputs
from anymla.verification.needles import Widths

GPUS = [name for name in ARCHES if name != "cpu"]
HERE = import_module("anymla.backends.triton_mla.decode")
GUARD = 4
"""Slots before and behind the pieces that a step may write."""


def problem(heads=32, q_len=4, **facts):
    """A decode of DeepSeek's widths, by default that which once asked for 32 GiB."""
    asked = MODELS["deepseek-v3"].problem("decode", q_len=q_len)
    return replace(asked, num_heads=heads, **facts)


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("max_seq_len", [1, 4096, 163_840, 10_000_000])
def test_a_large_verify_step_asks_for_no_more_than_an_entry_a_tile_and_unit(arch, max_seq_len):
    # 512 sequences and 256 compute units: 768 pieces of 128 rows × 512 values in fp32.
    units = Machine(arch, (), True, "", 256)
    needed = decode_workspace_bytes(problem(), units, 512, max_seq_len)
    assert needed <= (512 + 256) * 128 * 512 * 4


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("op", ["decode", "sparse_decode"])
def test_batch_invariant_pieces_are_no_product_of_batch_and_splits(arch, op):
    units = Machine(arch, (), True, "", 256)
    for heads, num_seqs, keys in product((16, 32, 128), (1, 512, 4096), (4096, 8192, 163_840, 10_000_000)):
        asked = problem(heads, 4, features=frozenset({Feature.BATCH_INVARIANT}), op=op, topk=keys)
        one = decode_workspace_bytes(asked, units, 1, keys)
        # A line has a number a piece; rows have a number beside their 512 values, and stretches six each.
        numbers = 4 * num_seqs * (4 * heads // 16) * -(-keys // 4096) + num_seqs * 24 * 1024
        needed = decode_workspace_bytes(asked, units, num_seqs, keys)
        assert needed <= max(one, PIECES_BYTES * 513 / 512) + numbers


@pytest.mark.parametrize("features", [set(), {Feature.BATCH_INVARIANT}], ids=["", "invariant"])
@pytest.mark.parametrize("arch", GPUS)
def test_less_is_asked_for_less(arch, features):
    units, rng, asked = Machine(arch, (), True, "", 256), Random(2), problem(features=frozenset(features))
    for _ in range(200):
        bounds = rng.randint(0, 600), rng.randint(0, 400_000)
        within = [rng.randint(0, bound) for bound in bounds]
        assert decode_workspace_bytes(asked, units, *within) <= decode_workspace_bytes(asked, units, *bounds)


@pytest.mark.parametrize("arch", GPUS)
def test_pieces_do_not_grow_with_the_batch(arch):
    units = Machine(arch, (), True, "", 256)
    small, large = (decode_workspace_bytes(problem(), units, n, 8192) for n in (16, 4096))
    # What grows is the line, a number a tile.
    assert large - small < 4 * 4096 * 32


@pytest.mark.parametrize("arch", GPUS)
def test_every_width_that_is_offered_has_a_launch_row_that_fits(arch):
    units = Machine(arch, (), True, "", 256)
    ranks, ropes = (1, 40, 64, 100, 128, 256, 320, 384, 448, 500, 512), (0, 6, 64, 96, 128)
    for rank, rope, heads in product(ranks, ropes, (1, 32, 128)):
        for kv_format in ("bf16", "fp8_e4m3fn"):
            facts = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "kv_format": kv_format}
            for asked in (
                problem(heads, 1, **facts),
                problem(heads, 1, op="sparse_decode", topk=64, **facts),
            ):
                assert decode_workspace_bytes(asked, units, 4, 4096) > 0


def steps():
    """Steps of random lengths in a plan of their largest bounds."""
    rng = Random(9)
    for seed in range(6):
        lens = [rng.choice((0, 1, 16, 33, 64, 150, 400)) for _ in range(rng.choice((1, 5, 12)))]
        yield seed, rng.choice((1, 3, 16, 20)), lens, [rng.randint(0, 3) for _ in lens]


@pytest.mark.parametrize("features", [set(), {Feature.BATCH_INVARIANT}], ids=["", "invariant"])
@pytest.mark.parametrize(("seed", "heads", "lens", "q_lens"), [*steps()])
def test_a_plan_holds_what_was_said_and_a_run_stays_in_it(seed, heads, lens, q_lens, features):
    call = decode_inputs(Widths(heads, 128, 32), lens, q_lens, seed=seed)
    asked = problem(heads, 3, kv_lora_rank=128, qk_rope_head_dim=32, block_size=16)
    asked = replace(asked, features=frozenset({Feature.LSE, Feature.SINKS, Feature.MULTI_TOKEN, *features}))
    batch = replace(kernel_calls.step(call, asked), max_q_len=3)
    units = kernel_calls.machine()
    plan = triton_mla.plan_decode(batch, asked, units, {})
    assert held(plan) == decode_workspace_bytes(asked, units, len(lens), batch.max_seq_len)
    guarded = guard(plan)
    args = arguments(call)
    triton_mla.decode(args, plan)
    kernel_calls.require_right(call, kernel_calls.AttentionOutput(args.out, args.lse))
    require_kept(guarded)


SHORT = 64
"""Keys of a piece in place of thousands, so that rows have several."""


def grouped(op):
    """A call whose rows have several pieces, what it asks, and how many sequences it has."""
    features = frozenset({Feature.LSE, Feature.SINKS, Feature.MULTI_TOKEN, Feature.BATCH_INVARIANT})
    facts = {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "block_size": 16, "features": features}
    if op == "decode":
        call = decode_inputs(Widths(20, 128, 32), [150, 0, 64, 33, 400], [3, 1, 0, 2, 3], seed=3)
        return call, problem(20, 3, **facts), 5
    call = sparse_inputs(Widths(20, 128, 32), 200, 150, 7, seed=3)
    return call, problem(20, 1, **facts, op=op, topk=150), 7


@pytest.mark.parametrize("op", ["decode", "sparse_decode"])
def test_sequences_in_groups_have_the_bits_that_they_have_together(op, monkeypatch):
    monkeypatch.setattr(HERE, "INVARIANT_KEYS", SHORT)
    (call, asked, num_seqs), plans, results = grouped(op), [], []
    plan_call, run_call = (getattr(triton_mla, name) for name in (f"plan_{op}", op))
    step = (kernel_calls.step(call, asked),) if op == "decode" else (7, torch.device("cpu"))
    for at_a_time in (num_seqs, 2, 1, 0):
        if plans:
            share = plans[0].part_out.numel() * 4 // num_seqs
            monkeypatch.setattr(HERE, "PIECES_BYTES", at_a_time * share)
        plan = plan_call(*step, asked, kernel_calls.machine(), {})
        longest = asked.topk or step[0].max_seq_len
        assert held(plan) == decode_workspace_bytes(asked, kernel_calls.machine(), num_seqs, longest)
        assert len(plan.groups) == -(-num_seqs // max(at_a_time, 1))
        guarded, args = guard(plan), arguments(call)
        run_call(args, plan)
        require_kept(guarded)
        plans.append(plan)
        results.append(kernel_calls.AttentionOutput(args.out, args.lse))
    kernel_calls.require_right(call, results[0])
    assert all(kernel_calls.same_bits(other, results[0], slice(None)) for other in results)


def test_a_step_in_groups_can_be_another_within_its_bounds(monkeypatch):
    monkeypatch.setattr(HERE, "INVARIANT_KEYS", SHORT)
    monkeypatch.setattr(HERE, "PIECES_BYTES", 0)
    _, asked, _ = grouped("decode")
    calls = [decode_inputs(Widths(20, 128, 32), lens, seed=4) for lens in ([33, 300, 70], [129, 1, 280])]
    steps = [replace(kernel_calls.step(call, asked), max_seq_len=300) for call in calls]
    plan = triton_mla.plan_decode(steps[0], asked, kernel_calls.machine(), {})
    for call, batch in zip(calls, steps, strict=True):
        triton_mla.update_decode(plan, batch)
        args = arguments(call)
        triton_mla.decode(args, plan)
        kernel_calls.require_right(call, kernel_calls.AttentionOutput(args.out, args.lse))


BOUNDS = {"num_seqs": 6, "num_tokens": 14, "max_seq_len": 9000}
WIDTHS = {"num_heads": 20, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "q_dtype": torch.bfloat16}
ASKED = {"kv_format": "bf16", "backend": "triton", "return_lse": True}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_holds_more_than_what_is_said_in_public(seed, batch_invariant):
    rng = Random(seed)
    q_lens = [rng.randint(0, 3) for _ in range(BOUNDS["num_seqs"])]
    lens = [q_len + rng.choice((0, 1, 150, 5000, 8997)) for q_len in q_lens]
    table = torch.zeros((len(lens), 1 + max(lens) // 16), dtype=torch.int32)
    offsets = [sum(q_lens[:i]) for i in range(len(lens) + 1)]
    step = {"seq_lens": torch.tensor(lens, dtype=torch.int32), "block_table": table, "block_size": 16}
    step |= {"qo_indptr": torch.tensor(offsets, dtype=torch.int32), "max_q_len": 3}
    where = replace(machine_named("gfx90a"), multiprocessors=3)
    asked = WIDTHS | ASKED | {"batch_invariant": batch_invariant, "machine": where}
    context = anymla.Batch.of(**step, new_tokens_are_cached=False)
    unknown = replace(context, seq_lens_host=None, qo_indptr_host=None)
    index = {"q_dtype": torch.bfloat16, "machine": where, "backend": "triton"}
    for plan in (
        anymla.plan_decode(anymla.Batch.of(**step), **asked),
        anymla.plan_sparse_decode(sum(q_lens), topk=4097, block_size=16, **asked),
        *(anymla.plan_prefill(b, qk_nope_head_dim=24, v_head_dim=40, **asked) for b in (context, unknown)),
        anymla.plan_index_topk(anymla.Batch.of(**step), topk=64, index_heads=2, index_head_dim=64, **index),
    ):
        said = anymla.workspace_bytes(plan.problem, **BOUNDS, backend="triton", machine=where)
        assert 0 < held(plan.state) <= said


def arguments(call):
    """The arguments of a call, into outputs full of NaN."""
    out, lse = torch.full(call.shape, torch.nan, dtype=torch.bfloat16), torch.full(call.shape[:2], torch.nan)
    last = (call.options["sm_scale"], call.options["sinks"], out, lse)
    if call.op == "decode":
        return DecodeArgs(*call.tensors, *last)
    return SparseArgs(*call.tensors, call.options["indices"], call.options["counts"], *last)


def held(plan):
    """Bytes of all tensors that a plan made."""
    parts = [part for value in vars(plan).values() if isinstance(value, tuple) for part in value]
    tensors = [tensor for part in parts if hasattr(part, "line") for tensor in (part.line, part.stretches)]
    tensors += [value for value in (*vars(plan).values(), *parts) if isinstance(value, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def guard(plan):
    """Slots before and behind those of a plan, which it must leave alone."""
    guarded = []
    for name in ("part_out", "part_lse"):
        pieces = getattr(plan, name)
        guarded.append(torch.full((len(pieces) + 2 * GUARD, *pieces.shape[1:]), 77.0))
        setattr(plan, name, guarded[-1][GUARD:-GUARD])
    return guarded


def require_kept(guarded):
    """Hold that nothing was written outside."""
    for whole in guarded:
        assert bool((whole[:GUARD] == 77).all()) and bool((whole[-GUARD:] == 77).all())
