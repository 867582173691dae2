"""transformers on a GPU: a prompt, then tokens one at a time, through our pages, as near to fp64 as stock."""

import sys
from pathlib import Path

import pytest
import torch
from device_calls import DEVICE

pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
from hosting import DENSE, SPARSE, build, eager, fp64_rows, given

from anymla.integrations.transformers import attach
from anymla.verification.judge import judge_tensor

PROMPT, STEPS = 40, 8
"""Tokens: more than any of these models chooses."""
SEEDS = {"tiny-deepseek-v32": 1}
"""Of prompts without a near tie among the chosen, in which rounding takes another; 0 where none is here."""


def stepped(model, ids):
    """[B, STEPS + 1, vocabulary] logits: those of the prompt's last token, then of each token given alone."""
    with torch.no_grad():
        said = model(input_ids=ids[:, :PROMPT], use_cache=True)
        logits = [said.logits[:, -1]]
        for at in range(PROMPT, PROMPT + STEPS):
            said = model(input_ids=ids[:, at : at + 1], use_cache=True, **given(said.past_key_values))
            logits.append(said.logits[:, -1])
    return torch.stack(logits, 1).cpu()


def whole(model, ids):
    """The same logits of one call."""
    with torch.no_grad():
        return model(input_ids=ids).logits[:, PROMPT - 1 :].cpu()


@pytest.mark.parametrize("threshold", [pytest.param(2, id="decompressed"), pytest.param(None, id="absorbed")])
@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_an_attached_model_is_as_near_to_fp64_as_stock_is(name, threshold):
    # In bf16 a near tie sends tokens to other experts, and the budget knows only some of them.
    model = build(name, dtype=torch.float16)
    draw = torch.Generator().manual_seed(SEEDS.get(name, 0))
    ids = torch.randint(250, (3, PROMPT + STEPS), generator=draw)
    exact = fp64_rows(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[:, PROMPT - 1 :]
    model, ids = model.to(DEVICE), ids.to(DEVICE)
    noise = [run(stock, ids) for stock in (eager(model), model) for run in (stepped, whole)]
    # An indexer of our own rounds otherwise than stock's, so near ties would be chosen otherwise.
    with attach(model, prefill_threshold=threshold, index_format=None) as attached:
        got = stepped(model, ids)
        assert attached.settings.calls["sparse" if name in SPARSE else "absorbed"]
    judge_tensor("logits", got, exact, *noise).require_pass()


@pytest.mark.parametrize("name", SPARSE)
def test_our_indexer_chooses_for_an_attached_model(name):
    model = build(name, dtype=torch.bfloat16).to(DEVICE)
    ids = torch.randint(250, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for index_format in ("auto", "index_k"):
        with attach(model, index_format=index_format) as attached:
            assert bool(stepped(model, ids).isfinite().all())
            assert attached.settings.calls["indexed"] and attached.settings.calls["sparse"]
