"""Models that choose their keys, on our pages: the tokens of stock, with fewer keys than tokens."""

from importlib import import_module

import pytest
import torch

pytest.importorskip("transformers")

from hosting import (
    LARGER,
    PROMPTS,
    SPARSE,
    build,
    eager,
    exact_logits,
    given,
    greedy,
    larger,
    make_pages_hostile,
    padded,
    real_logits,
    state,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import anymla
from anymla.errors import InvalidInput
from anymla.integrations.transformers import attach, steps
from anymla.verification.judge import judge_tensor


@pytest.fixture(autouse=True)
def hostile_pages(monkeypatch):
    make_pages_hostile(monkeypatch)


def calls(attached, steps):
    """What is counted in steps of chosen keys: every attention, and every indexer but for shared choices."""
    indexers = [site for site in attached.sites.values() if site.scores]
    assert indexers
    return {"sparse": steps * len(attached.sites), "indexed": steps * len(indexers)}


class TestEveryFamily:
    @pytest.mark.parametrize("name", SPARSE)
    def test_greedy_tokens_of_a_padded_batch_equal_stock(self, name):
        model, batch = build(name), padded()
        assert batch["input_ids"].shape[1] > 2 * model.config.index_topk
        expected = greedy(eager(model), batch, new=32)
        before = state(model)
        with attach(model, block_size=8) as attached:
            assert torch.equal(greedy(model, batch, new=32), expected)
            assert attached.settings.calls == calls(attached, 32)
        assert state(model) == before

    @pytest.mark.parametrize("name", LARGER)
    def test_greedy_tokens_of_a_text_model_that_shares_keys_or_pools_them_equal_stock(self, name):
        model, batch = larger(name), padded()
        expected = greedy(eager(model), batch, new=16)
        before = state(model)
        with attach(model, block_size=8) as attached:
            assert torch.equal(greedy(model, batch, new=16), expected)
            assert attached.settings.calls == calls(attached, 16)
        assert state(model) == before

    @pytest.mark.parametrize("name", ["tiny-deepseek-v32", "tiny-glm-5", "tiny-hy-v4"])
    def test_up_to_as_many_tokens_as_are_chosen_attention_is_dense(self, name):
        model, batch = build(name, index_topk=48), padded()
        expected = greedy(eager(model), batch, new=20)
        with attach(model, block_size=8, prefill_threshold=2) as attached:
            assert torch.equal(greedy(model, batch, new=20), expected)
            layers, dense = len(attached.sites), 48 - batch["input_ids"].shape[1]
            dense_calls = {"decompressed": layers, "absorbed": layers * dense}
            assert attached.settings.calls == dense_calls | calls(attached, 19 - dense)

    @pytest.mark.parametrize("name", ["tiny-deepseek-v32", "tiny-glm-5", "tiny-hy-v4"])
    def test_logits_stay_within_the_budget_of_the_judge(self, name):
        model, batch = build(name), padded()
        reference = exact_logits(model, batch)
        with attach(model, block_size=4):
            got = real_logits(model, batch)
        judge_tensor("logits", got, reference, real_logits(eager(model), batch)).require_pass()


class TestEveryWayOfGenerating:
    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({"num_beams": 3}, id="beams"),
            pytest.param({"cache_implementation": "static"}, id="static-cache"),
            pytest.param({"prefill_chunk_size": 5}, id="chunked-prefill"),
            pytest.param({"use_cache": False}, id="no-cache"),
        ],
    )
    @pytest.mark.parametrize("name", ["tiny-glm-5", "tiny-hy-v4"])
    def test_tokens_equal_stock(self, name, options):
        model, batch = build(name), padded()
        expected = greedy(eager(model), batch, new=12, **options)
        with attach(model, block_size=4):
            assert torch.equal(greedy(model, batch, new=12, **options), expected)

    def test_taken_back_tokens_are_forgotten_by_the_indexer_too(self):
        model, batch = build("tiny-deepseek-v32"), padded()
        with attach(model, block_size=4) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**batch, **given(cache))
            more = torch.arange(6).repeat(3, 1)
            mask = torch.cat((batch["attention_mask"], torch.ones_like(more)), 1)
            first = model(input_ids=more, attention_mask=mask, **given(cache)).logits
            cache.crop(-6)
            again = model(input_ids=more, attention_mask=mask, **given(cache)).logits
        assert torch.equal(first, again)


def step_of(grid, table, tokens, **places):
    """A step that only turns chosen tokens into slots."""
    none = dict.fromkeys(("rows", "batch", "hidden_rows", "hidden", "places", "positions"))
    slots = torch.zeros(0, dtype=torch.int64)
    table = torch.tensor(table, dtype=torch.int32)
    return steps.Step(grid=grid, slot_mapping=slots, table=table, tokens=tokens, **none | places)


class Made(TorchDispatchMode):
    """Notes the bytes of each tensor that an operation makes, views of its arguments left out."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given:
                self.sizes.append(one.nbytes)
        return result


class TestSlots:
    PLACES = torch.tensor([[0, 1, -1, 2, 3, 4], [-1, 0, 1, 2, 3, 4]])
    CHOSEN = torch.tensor([[[5, 0, 2, 3], [3, 4, 5, 3]], [[0, 1, -1, 4], [5, 1, -1, 1]]], dtype=torch.int32)

    @pytest.mark.parametrize("at_a_time", [1, 8, 1 << 19])
    def test_a_token_that_is_hidden_later_or_named_twice_takes_no_slot(self, monkeypatch, at_a_time):
        monkeypatch.setattr(steps, "_SLOTS", at_a_time)
        step = step_of((2, 2), [[7, 3, 1], [2, 9, 4]], 6, places=self.PLACES, has_gap=True)
        slots, counts = step.slots(self.CHOSEN, 2)
        # Pages of two: place 2 of the first sequence is the first slot of page 3, place 4 that of page 1.
        assert slots.tolist() == [[6, 14, -1, -1], [2, 6, 7, -1], [4, 19, -1, -1], [4, 8, -1, -1]]
        assert counts.tolist() == [2, 3, 2, 2] and slots.dtype == counts.dtype == torch.int32

    def test_more_chosen_tokens_take_no_more_memory_at_a_time(self, monkeypatch):
        monkeypatch.setattr(steps, "_SLOTS", 1 << 10)
        step = step_of((1, 512), [list(range(8))], 512, places=torch.arange(512)[None], has_gap=True)
        chosen = torch.arange(512, dtype=torch.int32).flip(0).expand(1, 512, 512).contiguous()
        with Made() as made:
            slots, counts = step.slots(chosen, 64)
        assert counts.tolist() == list(range(1, 513)) and slots[-1].tolist() == list(range(512))
        *rest, largest = sorted(made.sizes)
        assert largest == slots.nbytes and rest[-1] == 8 << 10


class Indexers(TorchFunctionMode):
    """Notes what each indexer of a forward pass multiplies and what it chooses."""

    def __init__(self):
        self.queries, self.keys, self.weights, self.chosen = [], [], [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.matmul and args[0].dim() == 4 and args[1].dim() == 4:
            if args[1].shape[1] == 1 < args[0].shape[1]:
                self.queries.append(args[0])
                self.keys.append(args[1].transpose(-1, -2)[:, 0])
            elif args[0].shape[-2] == 1:
                self.weights.append(args[0][:, :, 0])
        result = function(*args, **(kwargs or {}))
        # A router chooses among experts, an indexer among as many tokens as ask.
        if function is torch.Tensor.topk and args[0].dim() == 3 and args[0].shape[1] == args[0].shape[2]:
            self.chosen.append(result.indices)
        return result


@pytest.mark.parametrize("name", ["tiny-deepseek-v32", "tiny-glm-5", "tiny-hy-v4", "tiny-axk2"])
def test_our_indexer_chooses_the_tokens_that_the_one_of_the_model_does(name):
    model, ids = eager(build(name)), padded(PROMPTS[0])["input_ids"]
    with torch.no_grad(), Indexers() as noted:
        model(input_ids=ids, use_cache=False)
    assert len(noted.chosen) == len(noted.queries) == len(noted.weights) > 0
    tokens, topk = ids.shape[1], model.config.index_topk
    table = torch.arange(-(-tokens // 4), dtype=torch.int32).flip(0)[None]
    span, lens = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    steps = zip(noted.queries, noted.keys, noted.weights, noted.chosen, strict=True)
    for queries, keys, weights, chosen in steps:
        width = keys.shape[2]
        cache = anymla.KVCache.allocate(
            table.shape[1], 4, kv_lora_rank=width, qk_rope_head_dim=0, kv_format="fp32"
        )
        slots = anymla.to_slots(torch.arange(tokens, dtype=torch.int32)[None], table, None, 4)[0].long()
        anymla.write_cache(keys[0], keys[0, :, :0], cache, slots)
        step = {"block_table": table, "seq_lens": lens, "qo_indptr": span, "topk": topk}
        got = anymla.index_topk(queries[0].contiguous(), weights[0].contiguous(), cache, **step)
        for row, (ours, theirs) in enumerate(zip(got.tolist(), chosen[0].tolist(), strict=True)):
            assert {t for t in ours if t >= 0} == {t for t in theirs if t <= row}


@pytest.mark.parametrize("threshold", [1, None], ids=["decompressed-prompt", "absorbed-prompt"])
def test_learned_sinks_are_applied_to_all_keys_as_well(threshold):
    model, batch = build("tiny-hy-v4", index_topk=256), padded()
    expected = greedy(eager(model), batch, new=16)
    with attach(model, prefill_threshold=threshold):
        got = real_logits(model, batch)
        assert torch.equal(greedy(model, batch, new=16), expected)
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-torch.inf)
        assert not torch.allclose(real_logits(model, batch), got, atol=0.01)


def test_an_attention_with_an_indexer_that_is_not_known_is_refused_by_name(monkeypatch):
    model = build("tiny-deepseek-v32")
    before = state(model)
    monkeypatch.setattr(
        import_module("anymla.integrations.transformers.attach"), "LATENT", ("YoutuAttention",)
    )
    needs = "self_attn got DeepseekV32Attention, a latent attention that is not known; needs one of Youtu"
    with pytest.raises(InvalidInput, match=needs):
        attach(model)
    assert state(model) == before
