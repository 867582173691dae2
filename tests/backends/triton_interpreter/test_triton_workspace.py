"""The workspace of a decode: its bound is said beforehand, is a sum and no product, and is never exceeded."""

from dataclasses import replace
from itertools import product
from random import Random

import kernel_calls
import pytest
import torch
from torch import Tensor

from anymla.backends import triton_mla
from anymla.contract import DecodeArgs
from anymla.hardware.arches import ARCHES
from anymla.hardware.probe import Machine
from anymla.models import MODELS
from anymla.problem import Feature
from anymla.verification.inputs import decode_inputs
from anymla.verification.needles import Widths

GPUS = [name for name in ARCHES if name != "cpu"]
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
    needed = triton_mla.workspace_bytes(problem(), units, 512, max_seq_len)
    assert needed <= (512 + 256) * 128 * 512 * 4


@pytest.mark.parametrize("arch", GPUS)
def test_pieces_do_not_grow_with_the_batch(arch):
    units = Machine(arch, (), True, "", 256)
    small, large = (triton_mla.workspace_bytes(problem(), units, n, 8192) for n in (16, 4096))
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
                assert triton_mla.workspace_bytes(asked, units, 4, 4096) > 0


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
    held = [value for value in vars(plan).values() if isinstance(value, Tensor)]
    said = triton_mla.workspace_bytes(asked, units, len(lens), batch.max_seq_len)
    assert sum(t.numel() * t.element_size() for t in held) == said
    guarded = {}
    for name in ("part_out", "part_lse"):
        pieces = getattr(plan, name)
        guarded[name] = torch.full((len(pieces) + 2 * GUARD, *pieces.shape[1:]), 77.0)
        setattr(plan, name, guarded[name][GUARD:-GUARD])
    out, lse = torch.full(call.shape, torch.nan, dtype=torch.bfloat16), torch.full(call.shape[:2], torch.nan)
    options = call.options
    triton_mla.decode(DecodeArgs(*call.tensors, options["sm_scale"], options["sinks"], out, lse), plan)
    kernel_calls.require_right(call, kernel_calls.AttentionOutput(out, lse))
    for whole in guarded.values():
        assert bool((whole[:GUARD] == 77).all()) and bool((whole[-GUARD:] == 77).all())
