"""What attach and attention refuse, by reason, instead of computing something else."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hosting import PROMPTS, build, eager, fp64_rows, given, make_pages_hostile, padded, state
from transformers import DynamicCache, EncoderDecoderCache

from anymla.errors import InvalidInput, NoBackend, UnknownBackend
from anymla.integrations.transformers import attach, versions
from anymla.verification.judge import judge_tensor


@pytest.fixture(autouse=True)
def hostile_pages(monkeypatch):
    make_pages_hostile(monkeypatch)


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
            expected, exact = eager(model)(**batch).logits, fp64_rows(model, batch)
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
            model(**batch, **given(cache))
            mask = torch.cat((batch["attention_mask"], torch.ones(3, 1, dtype=torch.int64)), 1)
            if change is not None:
                mask[change[0], change[1]] = change[2]
            step = {"input_ids": torch.zeros(3, 1, dtype=torch.int64)}
            with pytest.raises(InvalidInput, match=message):
                model(**step, attention_mask=None if change is None else mask, **given(cache))

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
            model(**batch, **given(cache))
            with attach(model), pytest.raises(InvalidInput, match="layer 0 got 38 tokens; needs 0"):
                model(input_ids=batch["input_ids"][:, :1], **given(cache))

    def test_a_cache_of_another_kind_is_refused(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        with (
            attach(model),
            torch.no_grad(),
            pytest.raises(InvalidInput, match="cache got EncoderDecoderCache"),
        ):
            model(**batch, **given(cache))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"kv_format": "int4"}, InvalidInput, "kv_format got 'int4'; needs auto or one of bf16"),
            ({"kv_format": 5}, InvalidInput, "kv_format got 5; needs auto or one of bf16"),
            ({"index_format": 5}, InvalidInput, "index_format got 5; needs auto: there is no indexer"),
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
        before = state(model)
        with pytest.raises(error, match=message):
            attach(model, **options)
        assert state(model) == before

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
            InvalidInput, match=r"weights of torch.float64; needs float32, bfloat16 or float16"
        ):
            attach(build("tiny-llama").double())

    @pytest.mark.parametrize("name", ["tiny-mistral", "tiny-qwen2"])
    def test_sliding_windows_are_refused(self, name):
        window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
        with pytest.raises(InvalidInput, match=r"sliding_window got 8|layer_types got sliding_attention"):
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
