"""A model of transformers with an indexer, sinks and shared choices, served by Triton kernels alone."""

import copy
from importlib import import_module
from inspect import signature

import pytest
import torch
from kernel_calls import machine

from anymla.integrations import presets
from anymla.verification.judge import judge_tensor

transformers = pytest.importorskip("transformers")

# With all experts, no rounding of bf16 picks another one.
CHANGES = {
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "num_experts_per_tok": 4,
    "index_topk": 4,
}
IDS = torch.tensor([[5, 9, 200, 31, 77, 5, 18, 64, 90]])


def logits(model, ids, **options):
    """[tokens, vocabulary]."""
    with torch.no_grad():
        return model(input_ids=ids, **options).logits[0]


def test_a_prompt_and_a_step_are_those_of_stock_for_the_same_choice(monkeypatch):
    if not hasattr(transformers, "HYV4ForCausalLM"):
        pytest.skip(f"HYV4ForCausalLM is newer than transformers {transformers.__version__}")
    from anymla import plans
    from anymla.integrations.transformers import attach, indexer

    for module in (plans, import_module("anymla.integrations.transformers.attach")):
        monkeypatch.setattr(module, "machine_of", lambda device: machine().having("triton", "3.6.0"))
    chosen, run = [], indexer.run
    monkeypatch.setattr(indexer, "run", lambda *a, **k: chosen.append(run(*a, **k)) or chosen[-1])
    model = presets.build("tiny-hy-v4", dtype=torch.bfloat16, **CHANGES)
    stock, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    with attach(model, block_size=4, index_format="index_k") as attached:
        assert {choice.backend.name for choice in attached.choices} == {"triton"}
        whole = logits(model, IDS)
        # transformers 5.24 renamed the argument.
        name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        cache = {name: attached.new_cache()}
        logits(model, IDS[:, :8], **cache)
        step = logits(model, IDS[:, 8:], **cache)
    assert set(chosen[2][0, 0].tolist()) == set(chosen[0][0, 8].tolist())
    exact.set_experts_implementation("eager")
    runs = []
    for plain in (exact, stock):
        plain.set_attn_implementation("eager")
        # A row of fewer keys than are chosen has chosen its first.
        plain.model.layers[0].self_attn.indexer.forward = lambda *a, **k: chosen[0].clamp(min=0)
        runs.append(logits(plain, IDS))
    judge_tensor("logits", whole, *runs).require_pass()
    judge_tensor("logits", step, *(rows[8:] for rows in runs)).require_pass()
