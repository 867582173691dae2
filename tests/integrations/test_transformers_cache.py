"""The paged cache of a transformers model: what it shares, copies, refuses, and rounds."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from hosting import (
    PROMPTS,
    build,
    eager,
    exact_logits,
    given,
    greedy,
    make_pages_hostile,
    padded,
    real_logits,
)
from transformers import DynamicCache

from anymla.errors import InvalidInput
from anymla.integrations import presets
from anymla.integrations.transformers import attach, steps
from anymla.kv_cache import KVCache, calibrate_scale
from anymla.verification.judge import judge_tensor

BOTH = ["tiny-deepseek-v3", "tiny-llama"]


@pytest.fixture(autouse=True)
def hostile_pages(monkeypatch):
    make_pages_hostile(monkeypatch)


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
            model(**batch, **given(cache))
            pool = cache.layers[0].pool
            lengths = batch["attention_mask"].sum(1).tolist()
            assert pool.lengths == lengths
            assert [len(table) for table in pool.tables] == [-(-n // 4) for n in lengths]
            assert cache.get_seq_length() == batch["input_ids"].shape[1]

    def test_beams_share_the_pages_of_their_prompt(self):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0])
        with attach(model, block_size=4) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**batch, **given(cache))
            pages = len(cache.layers[0].pool.tables[0])
            cache.batch_repeat_interleave(5)
            ids = torch.arange(5)[:, None]
            model(
                input_ids=ids, attention_mask=torch.ones(5, 1 + batch["input_ids"].shape[1]), **given(cache)
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
                runner(**batch, **given(cache))
                cache.batch_repeat_interleave(2)
                cache.reorder_cache(torch.tensor([5, 0, 0, 3, 2, 1]))
                cache.batch_select_indices(torch.tensor([0, 1, 4, 5]))
                mask = batch["attention_mask"].repeat_interleave(2, 0)[[5, 0, 0, 3, 2, 1]][[0, 1, 4, 5]]
                mask = torch.cat((mask, torch.ones(4, 3, dtype=torch.int64)), 1)
                runner(input_ids=ids, attention_mask=mask, **given(cache))
                cache.crop(-2)
                step = runner(input_ids=ids.flip(1)[:, :2], attention_mask=mask, **given(cache))
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
                model(**shorter, **given(cache))
            twin = copy.deepcopy(cache)
            assert torch.equal(greedy(model, batch, new=20, **given(cache)), expected)
            assert torch.equal(greedy(model, batch, new=20, **given(twin)), expected)

    def test_a_cache_that_was_reset_starts_anew_with_another_batch(self):
        model = build("tiny-deepseek-v3")
        with attach(model, block_size=4) as attached:
            cache = attached.new_cache()
            greedy(model, padded(), **given(cache))
            cache.reset()
            assert cache.get_seq_length() == 0
            alone = padded(PROMPTS[1])
            assert torch.equal(greedy(model, alone, **given(cache)), greedy(model, alone))

    def test_preallocated_pages_are_refused_when_they_run_out_and_the_cache_is_as_it_was(self):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0])
        with attach(model, block_size=8, num_blocks=6) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**batch, **given(cache))
            more = {"input_ids": torch.zeros(1, 20, dtype=torch.int64)}
            with pytest.raises(InvalidInput, match="num_blocks got 6; needs at least 8"):
                model(**more, **given(cache))
            assert cache.get_seq_length() == batch["input_ids"].shape[1]
            model(input_ids=torch.zeros(1, 4, dtype=torch.int64), **given(cache))

    def test_a_static_cache_is_refused_past_its_length(self):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0])
        with (
            attach(model) as attached,
            pytest.raises(InvalidInput, match="max_cache_len got 40; needs at least 41"),
        ):
            greedy(model, batch, **given(attached.new_cache(max_cache_len=40)))

    def test_another_batch_size_is_refused(self):
        model = build("tiny-deepseek-v3")
        with attach(model) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**padded(), **given(cache))
            with pytest.raises(InvalidInput, match="batch got 1 sequences; needs 3, as in the cache"):
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64), **given(cache))

    def test_a_cache_whose_layers_fell_apart_is_refused_until_it_is_reset(self, monkeypatch):
        model, batch = build("tiny-deepseek-v3"), padded(PROMPTS[0])
        with attach(model) as attached, torch.no_grad():
            cache = attached.new_cache()
            broken = monkeypatch.context()
            with broken as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(model.model.layers[1].self_attn, "forward", lambda *a, **k: 1 // 0)
                model(**batch, **given(cache))
            with pytest.raises(
                InvalidInput, match="0 tokens in layer 1 and 38 in others, a forward stopped midway"
            ):
                model(**batch, **given(cache))
            cache.reset()
            model(**batch, **given(cache))

    def test_computing_with_what_a_paged_cache_returns_is_refused_by_name(self):
        model, batch = build("tiny-deepseek-v3"), padded()
        attached = attach(model)
        cache = attached.new_cache()
        with torch.no_grad():
            model(**batch, **given(cache))
        attached.detach()
        with pytest.raises(
            InvalidInput, match="needs the attention function of anymla; is the model detached"
        ):
            model(input_ids=batch["input_ids"][:, :1], **given(cache))


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
            model(**batch, **given(cache))
            scales = [store.scale.item() for store in cache.layers[0].pool.stores.values()]
        assert len(set(scales)) == 2
        assert all(scale > 0 for scale in scales)


def _round_latents(module, kv_format, k_scale):
    """Let a stock module see its latents as a cache in this format gives them back.

    The first run's rounded latents are kept for later ones, so that an fp64 copy rounds nothing differently.
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
