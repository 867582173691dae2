"""The choice from long rows that are hard to choose from, at the sizes that are narrowed, and in a graph."""

from importlib import import_module

import pytest
import torch
from device_calls import BACKENDS_HERE, DEVICE, MACHINE
from test_graphs import graph_of

from anymla.backends import BACKENDS
from anymla.verification.checks import judge_ids, run_call
from anymla.verification.inputs import index_inputs
from anymla.verification.scores import hard_scores, planned_choice, right_choice

if "triton" not in BACKENDS_HERE:
    pytest.skip("the portable kernels are not offered here", allow_module_level=True)

MODULE = import_module(next(row.module for row in BACKENDS if row.name == "triton"))


@pytest.mark.parametrize("topk", [1, 100, 2048, 4096])
@pytest.mark.parametrize("width", [32768, 131072, 1_000_003])
def test_rows_full_of_ties_are_chosen_from_rightly(width, topk):
    drawn = [hard_scores(width, block, block) for block in (4096, 8192)]
    scores, counts = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    args, state = planned_choice(MODULE, MACHINE, scores.to(DEVICE), counts.to(DEVICE), topk)
    right = right_choice(scores.to(DEVICE), counts.to(DEVICE), topk)
    assert state.ids
    for kept in state.ids:
        kept.fill_(-7)
    graph = graph_of(lambda: MODULE.index_choice(args, state))
    assert torch.equal(args.indices.sort().values, right)
    for _ in range(3):
        args.indices.fill_(-7)
        graph.replay()
        assert torch.equal(args.indices.sort().values, right)
    # Each narrowing stays within its room: ids of the row, and of none twice, then -1.
    for kept in state.ids:
        named = kept.sort().values
        assert bool(((named >= -1) & (named < counts.to(DEVICE)[:, None])).all())
        assert not bool(((named[:, 1:] == named[:, :-1]) & (named[:, 1:] >= 0)).any())


@pytest.mark.parametrize("kv_format", ["index_k", "bf16"])
@pytest.mark.parametrize("q_lens", [None, (1, 6, 2, 1)])
def test_indexers_whose_scores_relu_cuts_to_nothing_choose_their_first_tokens(kv_format, q_lens):
    with DEVICE:
        call = index_inputs(64, 128, (40_000, 9000, 3, 70_000), q_lens, 2048, kv_format=kv_format, ties=True)
    judge_ids(call, run_call(call, "triton")).require_pass()
