"""Batch invariance, bit by bit: a row alone is that row in every batch."""

from importlib import import_module
from random import Random

import pytest
import torch
from device_calls import DEVICE, graph_of, is_offered, problem_of

from anymla.problem import Feature
from anymla.verification.batches import num_sequences, tokens_alone
from anymla.verification.checks import outputs_of, planned, run_planned, same_bits
from anymla.verification.inputs import decode_inputs, prefill_inputs, sparse_inputs
from anymla.verification.judge import together
from anymla.verification.needles import Widths

LENS = (1, 0, 63, 64, 65, 700, 9000, 4096, 4097, 3, 0, 129, 1000, 257, 33, 5000, 64, 1, 511, 2048)
Q_LENS = (1, 2, 0, 4, 3, 1, 4, 2, 1, 3, 0, 4, 4, 1, 2, 4, 3, 1, 0, 2)
FORMATS = ("bf16", "fp8_e4m3fn", "fp8_ds_mla")


def call_of(op, heads, kv_format, seed=0):
    """A call of many sequences, lengths at the edges of tiles and pieces among them."""
    hostile = {"kv_format": kv_format, "block_size": 64, "sinks": "near", "seed": seed}
    with torch.device(DEVICE):
        if op == "sparse_decode":
            return sparse_inputs(Widths(heads), 9000, 5000 if heads == 16 else 700, 21, **hostile)
        if op == "prefill":
            return prefill_inputs(Widths(heads), LENS[:10], (*Q_LENS[:6], 200, 64, 65, 1), **hostile)
        q_lens = Q_LENS if op == "verify" else None
        return decode_inputs(Widths(heads), LENS, q_lens, **hostile)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("op", ["decode", "verify", "sparse_decode", "prefill"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(backend, op, heads, kv_format):
    call = call_of(op, heads, kv_format)
    q_len = {"verify": 4, "prefill": 200}.get(op, 1)
    problem = problem_of(call, Feature.LSE, Feature.BATCH_INVARIANT, q_len=q_len)
    if not is_offered(problem, backend):
        pytest.skip(f"{problem} is not offered here")
    whole = run_planned(call, planned(call, problem, backend), return_lse=True)
    order, rng = list(range(num_sequences(call))), Random(f"{op} {heads} {kv_format}")
    batches = [[sequence] for sequence in order]
    batches += [rng.sample(order, len(order)) for _ in range(2)]
    batches += [rng.sample(order, rng.randint(2, len(order) - 1)) for _ in range(6)]
    # The same sequence many times is a batch too.
    batches += [[order[5]] * 40, [order[6], *[order[0]] * 30]]
    together(*(same_bits(call, whole, batch, problem, backend) for batch in batches)).require_pass()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [4, 16, 128])
def test_a_token_of_a_verify_block_has_the_bits_that_it_has_alone(backend, heads, kv_format):
    """Its neighbours see a key more or less, so that a piece begins behind some of them only."""
    with torch.device(DEVICE):
        lens, q_lens = (4097, 4099, 64, 8193, 4096, 3), (2, 4, 3, 1, 4, 4)
        call = decode_inputs(Widths(heads), lens, q_lens, kv_format=kv_format, block_size=64, sinks="near")
    features = (Feature.LSE, Feature.BATCH_INVARIANT)
    problem, apart = problem_of(call, *features, q_len=4), tokens_alone(call)
    if not is_offered(problem, backend):
        pytest.skip(f"{problem} is not offered here")
    block = run_planned(call, planned(call, problem, backend), return_lse=True)
    one = run_planned(apart, planned(apart, problem_of(apart, *features), backend), return_lse=True)
    rows = apart.num_rows
    assert torch.equal(block.out[:rows], one.out) and torch.equal(block.lse[:rows], one.lse)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("op", ["decode", "verify"])
def test_sequences_that_take_turns_in_a_workspace_have_the_bits_that_they_have_beside_each_other(
    backend, op, heads, kv_format, monkeypatch
):
    call = call_of(op, heads, kv_format)
    problem = problem_of(call, Feature.LSE, Feature.BATCH_INVARIANT, q_len=4 if op == "verify" else 1)
    if backend != "triton" or not is_offered(problem, backend):
        pytest.skip(f"{problem} is not offered here, or has no workspace of pieces")
    whole = run_planned(call, planned(call, problem, backend), return_lse=True)
    monkeypatch.setattr(import_module("anymla.backends.triton_mla.decode"), "PIECES_BYTES", 0)
    plan, outputs = planned(call, problem, backend), outputs_of(call, return_lse=True)
    assert len(plan.state.groups) == len(LENS)
    graph = graph_of(lambda: run_planned(call, plan, **outputs))
    for output in (outputs["out"], outputs["lse"]):
        output.fill_(torch.nan)
    graph.replay()
    assert torch.equal(outputs["out"], whole.out) and torch.equal(outputs["lse"], whole.lse)
