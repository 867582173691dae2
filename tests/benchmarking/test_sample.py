"""A few rows, each over a copy of what it sees, are enough to tell right from wrong."""

from dataclasses import replace

import pytest
import torch

from anymla.benchmarking import sample
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.run import bench, planned
from anymla.benchmarking.sample import spread, verified
from anymla.planned import IndexPlan

CPU = torch.device("cpu")

CALLS = {
    "decode": ("decode", {}),
    "verify block, fp8": ("decode", {"q_len": 3, "kv_format": "fp8_e4m3fn"}),
    "uneven, fp32": ("decode", {"turns": (5, 90), "q_dtype": "fp32"}),
    "sparse, 656 bytes": ("sparse_decode", {"topk": 33, "kv_format": "fp8_ds_mla"}),
    "sparse prefill": ("sparse_decode", {"topk": 100, "batch": 2, "q_len": 7}),
    "prefill": ("prefill", {"q_len": 9, "context": 0}),
    "prefill after fp8 context": ("prefill", {"q_len": 9, "kv_format": "fp8_ds_mla"}),
    "index": ("index_topk", {"topk": 7}),
}


@pytest.fixture(params=CALLS)
def made(request, small):
    """A call and what runs it."""
    op, facts = CALLS[request.param]
    work = small(op, **facts)
    call = drawn_inputs(work, CPU)
    return call, planned(call, work, "cpu").run


def test_a_right_result_passes(made):
    call, run = made
    found = verified(call, run())
    assert found.judgement.passed, found.judgement.reasons
    assert found.rows > 0


def test_an_error_in_one_row_is_seen(made):
    call, run = made
    got = run()
    out = got if call.op == "index_topk" else got.out
    out[-1] += 1 if call.op == "index_topk" else 0.1 * out[-1].abs().max()
    assert not verified(call, got).judgement.passed


@pytest.mark.parametrize("off", [-1, 1])
def test_one_key_too_few_or_too_many_is_seen(small, off):
    work = small("decode", batch=2, context=1000)
    call = drawn_inputs(work, CPU)
    wrong = replace(call, options=call.options | {"seq_lens": call.options["seq_lens"] + off})
    got = planned(wrong, replace(work, context=1000 + off), "cpu").run()
    assert not verified(call, got).judgement.passed


def test_a_cache_write_is_read_back(small):
    work = small("write_cache", batch=40, kv_format="fp8_ds_mla")
    call = drawn_inputs(work, CPU)
    planned(call, work, "cpu").run()
    assert verified(call, None).judgement.passed
    call.cache.storage[:, :, 0] += 1
    assert not verified(call, None).judgement.passed


def test_rows_are_spread_from_the_first_to_the_last():
    assert spread(4, 10) == [0, 1, 2, 3]
    assert spread(101, 3) == [0, 50, 100]


def test_of_many_heads_some_are_looked_at(small):
    work = small("decode", tp=1, batch=1, context=40)
    call = drawn_inputs(work, CPU)
    assert verified(call, planned(call, work, "cpu").run()).heads == sample.MOST_HEADS


@pytest.mark.parametrize("wrong", [None, "ids", "slots"])
def test_of_a_sparse_step_the_choice_is_judged_too(small, wrong, monkeypatch):
    index = small("index_topk", topk=7)
    work = replace(small("sparse_decode", topk=7), index=index)
    if wrong:
        run = IndexPlan.run

        def misled(plan, *tensors, as_slots=False, out=None):
            found = run(plan, *tensors, as_slots=as_slots, out=out)
            return found.fill_(-1) if as_slots or wrong == "ids" else found

        monkeypatch.setattr(IndexPlan, "run", misled)
    record = bench(work, "cpu", CPU, repeats=1)
    assert record.passed == (wrong is None), record.verified.judgement.reasons
