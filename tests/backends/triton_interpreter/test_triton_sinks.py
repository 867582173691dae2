"""Sinks in the Triton kernels: with every operation and format, beside the lse, through every merge."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from kernel_calls import require_right, run

from anymla.distributed import combine
from anymla.problem import Feature, Problem
from anymla.verification.batches import tokens_alone
from anymla.verification.inputs import Widths, decode_inputs, prefill_inputs, sparse_inputs

prefill = import_module("anymla.backends.triton_mla.prefill")

WIDTHS = Widths(5, 128, 32, 64, 48, 0.09)
KINDS = [
    ("bf16", "infinite"),
    ("fp8_e4m3fn", "near"),
    ("fp8_e4m3fnuz", "infinite"),
    ("fp8_ds_mla", "near"),
    ("fp8_ds_mla_fnuz", "infinite"),
]
WITH_LSE = frozenset({Feature.LSE, Feature.SINKS})
HALF = {"q_dtype": torch.bfloat16, "block_size": 16}


def problem(op, kv_format, q_len=1, **more):
    facts = {"features": WITH_LSE, "block_size": 16, "q_len": q_len, **more}
    if op == "prefill":
        facts |= {"qk_nope_head_dim": 64, "v_head_dim": 48}
    return Problem(op, "bf16", kv_format, WIDTHS.num_heads, 128, 32, **facts)


class TestEveryFormat:
    @pytest.mark.parametrize(("kv_format", "sinks"), KINDS)
    def test_verify_blocks_of_a_decode(self, kv_format, sinks):
        call = decode_inputs(WIDTHS, (70, 0, 33), (4, 0, 8), sinks=sinks, kv_format=kv_format, **HALF)
        require_right(call, run(call, problem("decode", kv_format, 8)))

    @pytest.mark.parametrize(("kv_format", "sinks"), KINDS)
    def test_chosen_keys(self, kv_format, sinks):
        call = sparse_inputs(WIDTHS, 90, 40, 3, sinks=sinks, kv_format=kv_format, **HALF)
        require_right(call, run(call, problem("sparse_decode", kv_format, topk=40)))

    @pytest.mark.parametrize(("kv_format", "sinks"), KINDS[:2])
    def test_a_prefill_in_passes_that_are_merged(self, kv_format, sinks, monkeypatch):
        monkeypatch.setattr(prefill, "EXPANDED_BYTES", 1)
        call = prefill_inputs(WIDTHS, (150, 0), (3, 9), sinks=sinks, kv_format=kv_format, **HALF)
        require_right(call, run(call, problem("prefill", kv_format, 9)))


def test_ranks_that_hold_a_part_of_the_chosen_keys_merge_before_the_sink_counts_once():
    whole = sparse_inputs(WIDTHS, 90, 40, 3, sinks="near", **HALF)
    indices, sinks = whole.options["indices"], whole.options["sinks"]
    parts = []
    for rank in range(3):
        held = torch.where(indices % 3 == rank, indices, -1)
        call = replace(whole, options={**whole.options, "indices": held, "sinks": None})
        asked = problem("sparse_decode", "bf16", topk=40, features=frozenset({Feature.LSE}))
        parts.append(run(call, asked))
    require_right(whole, combine(parts, sinks))


def test_a_sink_leaves_a_row_the_bits_that_it_has_alone():
    """The second token sees a key more, so that a piece of its tile begins behind those of the first."""
    block = decode_inputs(WIDTHS, (4097,), (2,), q_dtype=torch.float32, kv_format="fp32")
    features = WITH_LSE | {Feature.BATCH_INVARIANT}
    asked = Problem("decode", "fp32", "fp32", 5, 128, 32, block_size=16, q_len=2, features=features)
    got, one = run(block, asked), run(tokens_alone(block), replace(asked, q_len=1))
    assert torch.equal(got.out[0], one.out[0]) and torch.equal(got.lse[0], one.lse[0])


@pytest.mark.parametrize("leading", [0, 16, 32, 64])
def test_chosen_keys_may_begin_behind_whole_blocks_of_none(leading):
    """vllm#48364: if the first 16 of a choice are all -1, the row is NaN for ever."""
    call = sparse_inputs(WIDTHS, 40, 64, 1, sinks="near", **HALF)
    live = call.options["indices"][call.options["indices"] >= 0][:5]
    indices = torch.full((1, 64 + 5), -1, dtype=torch.int32)
    indices[0, leading : leading + 5] = live
    call = replace(call, options={**call.options, "indices": indices[:, :64].contiguous(), "counts": None})
    got = run(call, problem("sparse_decode", "bf16", topk=64))
    require_right(call, got)
    if leading == 64:
        assert not got.out.any() and bool((got.lse == -torch.inf).all())
