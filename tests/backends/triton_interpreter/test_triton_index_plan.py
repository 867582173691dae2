"""The plan of an indexer on Triton's kernels: step after step in the same buffers."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from anymla.backends import triton_mla
from anymla.backends.triton_mla.index_topk import LOGITS_BYTES
from anymla.contract import Batch
from anymla.hardware.arches import ARCHES
from anymla.hardware.probe import Machine, machine_named
from anymla.models import MODELS
from anymla.plans import plan_index_topk
from anymla.verification.checks import judge_ids
from anymla.verification.inputs import index_inputs

STEPS = (
    ((130, 0, 33, 65), (1, 0, 4, 2)),
    ((1, 64, 0, 100), (1, 4, 0, 3)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),
    ((130, 130, 130, 130), (3, 1, 2, 2)),
)
"""Lengths and query tokens of one step after another."""
TOKENS = 11


def padded(values):
    """TOKENS rows, of which those after `values` are NaN and belong to no sequence."""
    return torch.cat((values, values.new_full((TOKENS - len(values), *values.shape[1:]), torch.nan)))


@pytest.mark.parametrize(
    ("kv_format", "arch", "host"),
    [("index_k", "gfx90a", False), ("bf16", "sm90", True)],
    ids=["bounds alone", "lengths known"],
)
def test_a_plan_serves_step_after_step_in_the_same_buffers(kv_format, arch, host):
    calls = [
        index_inputs(3, 64, *step, 40, seed=seed, kv_format=kv_format, block_size=16, views=seed % 2 == 1)
        for seed, step in enumerate(STEPS)
    ]
    batches = []
    for call in calls:
        step = {name: call.options[name] for name in ("block_table", "seq_lens", "qo_indptr")}
        bounds = {"num_tokens": TOKENS, "max_q_len": 4, "max_seq_len": 130}
        batch = Batch.of(**step, block_size=16, **bounds)
        batches.append(batch if host else replace(batch, seq_lens_host=None, qo_indptr_host=None))
    plan = plan_index_topk(
        batches[0],
        topk=40,
        index_heads=3,
        index_head_dim=64,
        q_dtype=torch.bfloat16,
        kv_format=kv_format,
        backend="triton",
        machine=replace(machine_named(arch), multiprocessors=3),
    )
    held = [plan.state.sequences, plan.state.visible, plan.state.logits, *plan.state.ids]
    out = torch.full((TOKENS, 80), -7, dtype=torch.int32)[:, ::2]
    for call, batch in zip((*calls, calls[0]), (*batches, batches[0]), strict=True):
        plan.update(batch)
        q, weights, cache = call.tensors
        out.fill_(-7)
        assert plan.run(padded(q), padded(weights), cache, out=out) is out
        judge_ids(call, out[: call.num_rows]).require_pass()
        assert bool((out[call.num_rows :] == -1).all())
    said = triton_mla.index_workspace_bytes(plan.problem, plan.choice.machine, TOKENS, 130)
    assert sum(t.numel() * t.element_size() for t in held) == said
    now = [plan.state.sequences, plan.state.visible, plan.state.logits, *plan.state.ids]
    assert all(one is other for one, other in zip(held, now, strict=True))


@pytest.mark.parametrize("arch", [name for name in ARCHES if name != "cpu"])
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.index_heads])
def test_memory_is_that_of_a_pass_or_of_one_tile_whatever_the_step(name, arch):
    asked = MODELS[name].problem("index_topk", q_len=4)
    units = Machine(arch, (), True, "", 256)
    for tokens, keys in product((1, 64, 16_384), (1, 4096, 1_000_000)):
        needed = triton_mla.index_workspace_bytes(asked, units, tokens, keys)
        # Each narrowing leaves at most a quarter: of all of them together, a third.
        assert needed <= max(LOGITS_BYTES, 4 * asked.q_len * keys) * 4 / 3 + 8 * tokens
