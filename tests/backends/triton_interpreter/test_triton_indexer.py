"""The indexer's kernels in Triton's interpreter: logits within their row, and exactly the largest of them."""

from dataclasses import replace
from importlib import import_module
from math import inf, nan

import pytest
import torch
from kernel_calls import index_state, machine, run_index

from anymla import quantise_queries, reference, to_slots
from anymla.backends import triton_mla
from anymla.contract import WriteArgs
from anymla.hardware import launch
from anymla.verification.checks import judge_ids
from anymla.verification.inputs import index_inputs, write_inputs
from anymla.verification.scores import hard_scores, planned_choice, right_choice

indexer = import_module("anymla.backends.triton_mla.index_topk")

LENS, Q_LENS = (130, 0, 33, 65, 7), (1, 0, 4, 2, 8)


@pytest.mark.parametrize("number", range(16))
def test_the_chosen_tokens_are_right(number):
    kv_format = ("index_k", "index_k_fnuz", "bf16", "fp16")[number % 4]
    q_dtype = torch.float16 if kv_format == "fp16" or number % 5 == 4 else torch.bfloat16
    call = index_inputs(
        (1, 20, 3, 64, 16)[number % 5],
        (128, 64)[number % 3 == 2],
        LENS,
        Q_LENS if number % 2 else None,
        (1, 5, 40, 200)[number // 2 % 4],
        seed=number,
        q_dtype=q_dtype,
        kv_format=kv_format,
        block_size=(16, 3, 64, 1)[number // 3 % 4],
        exact=number % 3 < 2,
        poison=("nan", "inf")[number % 2],
        views=number % 4 < 2,
    )
    arch = ("gfx90a", "sm90", "gfx950")[number % 3]
    judge_ids(call, run_index(call, arch, lengths_on_host=number % 2 == 0)).require_pass()


@pytest.mark.parametrize("block_size", [1, 3, 64])
@pytest.mark.parametrize("q_lens", [Q_LENS, None], ids=["ragged", "one each"])
def test_slots_are_those_of_the_chosen_tokens(block_size, q_lens):
    call = index_inputs(4, 64, LENS, q_lens, 40, block_size=block_size, views=True)
    ids, table, indptr = run_index(call), call.options["block_table"], call.options["qo_indptr"]
    assert torch.equal(run_index(call, as_slots=True), to_slots(ids, table, indptr, block_size))


# The interpreter has no type for e4m3fnuz: its products are left to the emulator.
@pytest.mark.parametrize("arch", ["gfx90a", "gfx950"])
@pytest.mark.parametrize("kv_format", ["index_k", "index_k_fnuz"])
@pytest.mark.parametrize("q_format", ["index_k", "index_k_fnuz"])
def test_fp8_queries_meet_fp8_keys_on_every_chip(arch, kv_format, q_format):
    call = index_inputs(8, 64, LENS, Q_LENS, 9, kv_format=kv_format, exact=False)
    q, weights, cache = call.tensors
    q, weights = quantise_queries(q, weights, kv_format=q_format, power_of_two=arch == "gfx950")
    call = replace(call, tensors=(q, weights, cache))
    judge_ids(call, run_index(call, arch)).require_pass()


@pytest.mark.parametrize("kv_format", ["index_k", "index_k_fnuz", "fp8_ds_mla"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power of two"])
def test_keys_are_stored_with_the_bytes_that_the_cache_gives_them(kv_format, power_of_two):
    kv_c, k_pe, cache, slots = write_inputs(128, 0, 23, kv_format=kv_format, block_size=5).tensors
    before = cache.data.clone()
    cache.write(kv_c, k_pe, slots, power_of_two=power_of_two)
    expected = cache.data.clone()
    cache.data.copy_(before)
    triton_mla.write_cache(WriteArgs(kv_c, k_pe, cache, slots, power_of_two))
    assert torch.equal(cache.data, expected)


def test_nothing_is_written_beside_what_a_row_sees():
    call = index_inputs(4, 64, LENS, Q_LENS, 3, exact=False)
    state = index_state(call, max_seq_len=150)
    state.logits.fill_(-7)
    run_index(call, state=state)
    seen = {name: value for name, value in call.options.items() if name != "topk"}
    for row, expected in zip(state.logits, reference.index_logits(*call.tensors, **seen), strict=True):
        count = len(expected)
        torch.testing.assert_close(row[:count].double(), expected, rtol=1e-4, atol=1e-4)
        assert bool((row[count:] == -7).all())


@pytest.mark.parametrize("q_lens", [None, (3, 0, 2)])
def test_long_rows_whose_scores_relu_cuts_to_nothing_give_their_first_tokens(q_lens):
    call = index_inputs(2, 64, (8300, 40, 8500), q_lens, 60, ties=True)
    judge_ids(call, run_index(call)).require_pass()


def test_little_memory_takes_the_rows_in_parts(monkeypatch):
    call = index_inputs(4, 64, LENS, Q_LENS, 40)
    whole = run_index(call)
    monkeypatch.setattr(indexer, "LOGITS_BYTES", 4 * 144 * 5)
    state = index_state(call)
    assert state.logits.shape[0] < call.num_rows
    assert torch.equal(whole, run_index(call, state=state))


class TestChoice:
    """The largest of a row, whatever its values, in one piece or in many."""

    def chosen(self, logits, topk, piece, monkeypatch, lens=None):
        rows, width = logits.shape
        row = launch.Launch(block_m=1, block_n=piece, num_warps=4, num_stages=1)
        monkeypatch.setitem(launch.LAUNCH, ("choose", "*"), (row,))
        counts = torch.full((rows,), width) if lens is None else torch.tensor(lens)
        args, state = planned_choice(triton_mla, machine(), logits, counts.int(), topk)
        indexer.index_choice(args, state)
        # In order of tokens, -1 left where it stands.
        out = args.indices
        return torch.where(out >= 0, out, width).sort().values.where(out >= 0, out), state

    def expected(self, values, topk):
        numbers = [j for j, value in enumerate(values) if value == value]
        order = sorted(numbers, key=lambda j: -values[j])
        order += [j for j in range(len(values)) if j not in set(numbers)]
        return sorted(order[:topk])

    @pytest.mark.parametrize("topk", [1, 7, 300, 512])
    @pytest.mark.parametrize("width", [5000, 1024])
    def test_it_is_the_set_that_sorting_gives_in_order_of_tokens(self, topk, width, monkeypatch):
        generator = torch.Generator().manual_seed(topk)
        logits = torch.randn(4, width, generator=generator)
        logits[1] = logits[1].round()
        logits[2, ::3] = nan
        logits[2, 1::3] = torch.tensor([inf, -inf])[torch.arange(len(logits[2, 1::3])) % 2]
        logits[3] = 0.0
        logits[3, ::2] = -0.0
        lens = [width, width, width - 3, width // 2]
        out, state = self.chosen(logits, topk, 1024, monkeypatch, lens)
        assert (len(state.ids) > 0) == (width > state.choice.block_n)
        for got, row, count in zip(out.tolist(), logits.tolist(), lens, strict=True):
            ids = self.expected(row[:count], topk)
            assert got == ids + [-1] * (topk - len(ids))

    @pytest.mark.parametrize("topk", [7, 512])
    def test_rows_full_of_ties_are_narrowed_to_what_is_chosen(self, topk, monkeypatch):
        scores, counts = hard_scores(20_000, 8192)
        out, state = self.chosen(scores, topk, 1024, monkeypatch, counts.tolist())
        assert state.ids
        assert torch.equal(out.sort().values, right_choice(scores, counts, topk))

    def test_rows_shorter_than_what_is_wanted_give_all_that_they_have(self, monkeypatch):
        logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
        logits[0, 3] = nan
        out, _ = self.chosen(logits, 16, 1024, monkeypatch, [9, 0, 1, 16])
        for got, count in zip(out.tolist(), [9, 0, 1, 16], strict=True):
            assert got == [*range(count)] + [-1] * (16 - count)

    def test_a_row_is_narrowed_where_the_largest_hide_behind_few(self, monkeypatch):
        logits = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(3))
        # A program looks at every 8192nd at a time: here 600 of them have all that is large.
        logits[0, torch.arange(100_000) % 8192 < 600] += 100
        out, state = self.chosen(logits, 512, 1024, monkeypatch)
        assert state.narrowing.block_n == 8192
        assert torch.equal(out[0].long(), logits[0].topk(512).indices.sort().values)

    def test_a_million_logits_are_chosen_from_in_three_levels(self, monkeypatch):
        logits = torch.randn(1, 1_000_000, generator=torch.Generator().manual_seed(2))
        out, state = self.chosen(logits, 4096, 16384, monkeypatch)
        assert len(state.ids) >= 2
        assert torch.equal(out[0].long(), logits[0].topk(4096).indices.sort().values)


def test_sequences_without_tokens_choose_nothing():
    call = index_inputs(4, 64, (0, 0), None, 3)
    assert bool((run_index(call) == -1).all())
    assert run_index(index_inputs(4, 64, (), None, 3)).shape == (0, 3)
