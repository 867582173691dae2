"""Models' own indexers on our index keys: the choice of stock in every way of generating, fp8 where asked."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

pytest.importorskip("transformers")

from hosting import (
    LARGER,
    PROMPTS,
    build,
    eager,
    exact_logits,
    fp64,
    fp64_rows,
    given,
    greedy,
    larger,
    make_pages_hostile,
    padded,
    real_logits,
    state,
)
from transformers import DynamicCache

from anymla import machine_named, select
from anymla.errors import InvalidInput, NoBackend
from anymla.hardware.arches import ARCHES
from anymla.integrations.transformers import attach, indexer
from anymla.integrations.transformers.families import Settings
from anymla.planned import IndexPlan
from anymla.verification.judge import judge_tensor

POOLED, NARROW = "Glm5NextForConditionalGeneration", "MistralLarge4ForConditionalGeneration"

WIDTHS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
"""Those of DeepSeek-V3.2."""


@pytest.fixture(autouse=True)
def hostile_pages(monkeypatch):
    make_pages_hostile(monkeypatch)


def made(name, **changes):
    """A tiny model, by preset or by class."""
    return larger(name, **changes) if name in LARGER else build(name, **changes)


def indexers(model):
    """Those of a model, in order of its layers."""
    return [module for name, module in model.named_modules() if name.endswith(".indexer")]


class Chosen:
    """Notes what every attached indexer chooses, call by call."""

    def __init__(self, monkeypatch):
        self.indices, run = [], indexer.run

        def noting(*args, **kwargs):
            self.indices.append(run(*args, **kwargs))
            return self.indices[-1]

        monkeypatch.setattr(indexer, "run", noting)

    def impose_on(self, stock):
        """Let the indexers of another model choose the same, and score nothing."""
        left = iter(self.indices)
        for module in indexers(stock):
            # A row of fewer keys than are chosen has chosen its first.
            module.forward = lambda *args, **kwargs: next(left).clamp(min=0)
        return stock


class TestKeysInFp8:
    @pytest.mark.parametrize("power_of_two", [False, True], ids=["exact-scales", "power-of-two-scales"])
    @pytest.mark.parametrize("index_format", ["index_k", "index_k_fnuz"])
    @pytest.mark.parametrize("name", ["tiny-deepseek-v32", "tiny-hy-v4"])
    def test_only_the_choice_is_rounded(self, monkeypatch, name, index_format, power_of_two):
        model, batch = build(name), padded(PROMPTS[0])
        chosen = Chosen(monkeypatch)
        with attach(model, index_format=index_format, index_power_of_two=power_of_two) as attached:
            got = real_logits(model, batch)
            assert attached.settings.index_format == index_format
        assert len(chosen.indices) == len(indexers(model))
        exact = real_logits(chosen.impose_on(fp64(model)), batch)
        noise = real_logits(chosen.impose_on(eager(model)), batch)
        judge_tensor("logits", got, exact, noise).require_pass()

    def test_a_cached_step_chooses_what_the_whole_prompt_does(self, monkeypatch):
        model, batch = build("tiny-glm-5"), padded(PROMPTS[0])
        chosen = Chosen(monkeypatch)
        with attach(model, index_format="index_k", block_size=4) as attached, torch.no_grad():
            model(**batch, use_cache=False)
            cache, whole = attached.new_cache(), chosen.indices[:]
            for start, end in ((0, 20), (20, 21), (21, 29), (29, 38)):
                model(input_ids=batch["input_ids"][:, start:end], **given(cache))
        for layer, first in enumerate(whole):
            parts = [rows for step in chosen.indices[len(whole) + layer :: len(whole)] for rows in step[0]]
            for row, (ours, theirs) in enumerate(zip(parts, first[0], strict=True)):
                assert {t for t in ours.tolist() if t >= 0} == {t for t in theirs.tolist() if 0 <= t <= row}

    def test_an_index_key_has_132_bytes_at_the_width_of_real_models(self):
        model = build("tiny-deepseek-v32", index_head_dim=128)
        plain = attach(model, index_format=None)
        plain.detach()
        with attach(model, index_format="index_k") as attached:
            layers = len(attached.sites)
            assert attached.bytes_per_token == plain.bytes_per_token - layers * (128 * 4 - 132)
            assert attached.stock_bytes_per_token == layers * (32 + 8 + 128) * 4
            greedy(model, padded(), new=2, **given(cache := attached.new_cache()))
            store = cache.layers[0].pool.stores["index", 0]
        assert store.bytes_per_token == 132 and store.tag == "anymla-kv/1 index_k L=128 R=0 block=64"

    def test_bf16_models_choose_among_bf16_keys(self, monkeypatch):
        model, batch = build("tiny-deepseek-v32", dtype=torch.bfloat16), padded(PROMPTS[0])
        chosen = Chosen(monkeypatch)
        with attach(model) as attached:
            assert attached.settings.index_format == "bf16"
            got = real_logits(model, batch)
        exact = real_logits(chosen.impose_on(fp64(model)), batch)
        judge_tensor("logits", got, exact, real_logits(chosen.impose_on(eager(model)), batch)).require_pass()


def test_a_choice_is_planned_once_a_step_and_run_by_all_layers(monkeypatch):
    plans, runs, plan = [], [], indexer.index_plan
    monkeypatch.setattr(indexer, "index_plan", lambda *a: plans.append(plan(*a)) or plans[-1])
    run = IndexPlan.run
    monkeypatch.setattr(IndexPlan, "run", lambda self, *a, **k: runs.append(self) or run(self, *a, **k))
    model, batch = build("tiny-deepseek-v32"), padded(PROMPTS[0])
    with attach(model):
        greedy(model, batch, new=4)
    layers = len(indexers(model))
    assert layers > 1 and len(plans) == 4
    assert [id(one) for one in runs] == [id(one) for one in plans for _ in range(layers)]


class TestRealWidths:
    def test_logits_stay_within_the_budget_of_the_judge(self):
        model, batch = build("tiny-deepseek-v32", **WIDTHS), padded(PROMPTS[0])
        reference = exact_logits(model, batch)
        with attach(model):
            got = real_logits(model, batch)
        judge_tensor("logits", got, reference, real_logits(eager(model), batch)).require_pass()

    def machine(self, monkeypatch, arch):
        """Let attach find a chip that is not here."""
        module = import_module("anymla.integrations.transformers.attach")
        monkeypatch.setattr(module, "machine_of", lambda device: machine_named(arch))
        return machine_named(arch)

    @pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch not in ("cpu", "gfx1250")])
    def test_every_gpu_serves_what_attach_asks_for(self, monkeypatch, arch):
        self.machine(monkeypatch, arch)
        model = build("tiny-hy-v4", dtype=torch.bfloat16, **{**WIDTHS, "index_topk": 2048})
        for options in ({}, {"index_format": "index_k", "kv_format": "fp8"}):
            with attach(model, **options) as attached:
                asked = {choice.problem.op for choice in attached.choices}
            assert asked == {"decode", "prefill", "sparse_decode", "index_topk", "write_cache"}

    @pytest.mark.parametrize("index_format", ["auto", "index_k", None])
    @pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
    def test_what_a_named_backend_does_not_take_goes_to_another(self, monkeypatch, arch, index_format):
        self.machine(monkeypatch, arch)
        model = build("tiny-hy-v4", dtype=torch.bfloat16, num_attention_heads=16, **WIDTHS)
        with attach(model, backend="aiter", index_format=index_format) as attached:
            served = {
                (one.problem.op, one.problem.kv_lora_rank): one.backend.name for one in attached.choices
            }
        # With bf16 queries it has no prefill that has sinks, and it has no index keys but in fp8.
        expected = {(op, 512): "aiter" for op in ("decode", "sparse_decode", "write_cache")}
        expected["prefill", 512] = "triton"
        if index_format:
            keys = "aiter" if index_format == "index_k" else "triton"
            expected |= {("index_topk", 128): keys, ("write_cache", 128): keys}
        assert served == expected

    @pytest.mark.parametrize("index_format", ["auto", "index_k"])
    def test_a_step_asks_for_the_problems_that_attach_chose_for_or_for_longer_ones(
        self, monkeypatch, index_format
    ):
        machine = self.machine(monkeypatch, "gfx942")
        asked, ask = {}, Settings.asked

        def noting(settings, problem):
            asked[problem] = ask(replace(settings, backend="aiter"), problem)
            return "auto"

        monkeypatch.setattr(Settings, "asked", noting)
        model = build("tiny-hy-v4", dtype=torch.bfloat16, num_attention_heads=16, **WIDTHS)
        with attach(model, backend="aiter", index_format=index_format) as attached:
            known = asked.copy()
            asked.clear()
            # The steps run here, on the CPU.
            attached.settings.backend = "auto"
            greedy(model, padded(PROMPTS[0]), new=2)
        assert {problem.op for problem in asked} == {"index_topk", "write_cache"}
        for problem, who in asked.items():
            assert replace(problem, q_len=1, features=frozenset()) in known
            verdicts = {one.backend.name: one.accepted for one in select.explain(problem, machine)}
            assert who == ("aiter" if verdicts["aiter"] else "auto")

    def test_every_kind_of_layer_is_asked_about_before_anything_changes(self, monkeypatch):
        model = larger(NARROW, num_attention_heads=16, **WIDTHS).bfloat16()
        before = state(model)
        with attach(model) as attached:
            widths = [one.problem.qk_rope_head_dim for one in attached.choices if one.problem.op == "decode"]
            assert widths == [64, 0]
            assert "layers 0, 2, 4: cpu serves this decode on cpu" in attached.explain()
            assert "layers 1, 3: cpu serves this decode on cpu" in attached.explain()
        self.machine(monkeypatch, "gfx942")
        needs = "qk_rope_head_dim got 0; needs 64"
        with pytest.raises(
            NoBackend, match=f"layers 1, 3: backend 'aiter' cannot serve this decode(.|\n)*{needs}"
        ):
            attach(model, backend="aiter", index_format="index_k")
        assert state(model) == before


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
    @pytest.mark.parametrize("name", [NARROW, POOLED])
    def test_tokens_equal_stock_where_latents_are_shared_and_keys_pooled(self, name, options):
        model, batch = made(name), padded()
        if name == POOLED and "prefill_chunk_size" in options:
            batch = padded(PROMPTS[0])
        expected = greedy(eager(model), batch, new=8, **options)
        with attach(model, block_size=4):
            assert torch.equal(greedy(model, batch, new=8, **options), expected)

    @pytest.mark.parametrize(
        ("name", "index_format"),
        [("tiny-glm-5", "auto"), ("tiny-hy-v4", "auto"), (NARROW, "auto"), (POOLED, None)],
    )
    def test_a_padded_batch_is_continued_with_padding_in_its_middle(self, name, index_format):
        model = made(name)
        first, later = padded(), padded("and then more", "words", "follow them on")
        stock = eager(model)
        with attach(model, block_size=4, index_format=index_format) as attached, torch.no_grad():
            ours, theirs = (
                attached.new_cache(),
                DynamicCache(config=getattr(stock.config, "text_config", stock.config)),
            )
            tokens = []
            for runner, cache in ((model, ours), (stock, theirs)):
                runner(**first, **given(cache))
                mask = torch.cat((first["attention_mask"], later["attention_mask"]), 1)
                out = runner(input_ids=later["input_ids"], attention_mask=mask, **given(cache))
                tokens.append(out.logits.argmax(-1)[later["attention_mask"].bool()])
        assert torch.equal(*tokens)

    @pytest.mark.parametrize("name", ["tiny-deepseek-v32", NARROW])
    def test_repeating_reordering_selecting_and_cropping_keep_keys_with_their_tokens(self, name):
        model, batch = made(name), padded(PROMPTS[0])
        stock = eager(model)
        ids = torch.tensor([[5, 6, 7, 8, 9], [8, 9, 10, 11, 12], [14, 15, 16, 17, 18]])
        with attach(model, block_size=8) as attached, torch.no_grad():
            cache = attached.new_cache()
            model(**batch, **given(cache))
            cache.batch_repeat_interleave(3)
            model(input_ids=ids, **given(cache))
            cache.crop(-3)
            cache.reorder_cache(torch.tensor([2, 0, 0]))
            got = model(input_ids=ids, **given(cache)).logits
            prompt = batch["input_ids"].expand(3, -1)
            expected = stock(input_ids=torch.cat((prompt, ids[[2, 0, 0], :2], ids), 1)).logits[:, -5:]
        assert torch.equal(got.argmax(-1), expected.argmax(-1))

    def test_hidden_tokens_at_the_end_see_what_is_stored_before_them(self):
        model, batch = build("tiny-deepseek-v32"), padded(PROMPTS[0])
        right = {key: torch.cat((value, value[:, :2]), 1) for key, value in batch.items()}
        right["attention_mask"][:, -2:] = 0
        with attach(model, block_size=4), torch.no_grad():
            got = model(**right).logits
        right["attention_mask"][:] = 1
        stock, exact = eager(model)(**right).logits.detach(), fp64_rows(model, right)
        judge_tensor("logits", *(rows[:, :-2] for rows in (got, exact, stock))).require_pass()
        assert got.isfinite().all()


class TestPools:
    def test_logits_stay_within_the_budget_of_the_judge(self):
        model, batch = larger(POOLED), padded(PROMPTS[0])
        reference = exact_logits(model, batch)
        with attach(model, block_size=4):
            got = real_logits(model, batch)
        judge_tensor("logits", got, reference, real_logits(eager(model), batch)).require_pass()

    @pytest.mark.parametrize("select_tail", [True, False], ids=["with-tail", "without-tail"])
    def test_the_pools_are_those_that_the_model_chooses(self, select_tail):
        model = larger(POOLED, index_kpool_always_select_tail=select_tail)
        module = indexers(model)[0]
        draw = torch.Generator().manual_seed(0)
        states = {
            "hidden_states": torch.randn(3, 38, 64, generator=draw),
            "q_resid": torch.randn(3, 38, 24, generator=draw),
            "attention_mask": torch.arange(38) >= torch.tensor([[0], [7], [33]]),
            **given(None),
        }
        stock = module(**states)
        with attach(model, block_size=8) as attached:
            ours = module(**states)
        asked = {choice.problem.op: choice.problem.topk for choice in attached.choices}
        assert asked["sparse_decode"] == 16 + 3 * select_tail
        for row, (got, right) in enumerate(
            zip(ours.flatten(0, 1).tolist(), stock.flatten(0, 1).tolist(), strict=True)
        ):
            assert sorted(t for t in got if t >= 0) == sorted(t for t in right if t >= 0), row
            assert len(got) == len(right) == 16 + 3 * select_tail

    def test_a_pool_that_a_crop_opens_again_gets_the_key_of_its_new_tokens(self):
        model = larger(POOLED)
        module = next(m for m in model.modules() if type(m).__name__ == "Glm5NextTextAttention")
        hidden = torch.randn(1, 38, 64, generator=torch.Generator().manual_seed(0))

        def keys(cache, start, end, states):
            with torch.no_grad():
                mask = torch.ones(1, end - start, dtype=torch.bool)
                module(states[:, start:end], attention_mask=mask, **given(cache))
            pool = cache.layers[module.layer_idx].pool
            table, size = pool.tables[0], module.indexer.index_kpool
            store = pool.stores["index", module.layer_idx]
            rows = torch.arange(pool.lengths[0] // size)
            per_page = pool.block_size // size
            return store.read(torch.tensor(table)[rows // per_page] * per_page + rows % per_page)

        with attach(model, block_size=8) as attached:
            cropped, fresh = attached.new_cache(), attached.new_cache()
            for cache in (cropped, fresh):
                # Only this layer runs, so it leads its pages.
                cache.layers[module.layer_idx].leads = True
            other = hidden.clone()
            other[:, 22:] = 1.0
            keys(cropped, 0, 38, other)
            cropped.layers[module.layer_idx].crop(-16)
            assert torch.equal(keys(cropped, 22, 38, hidden), keys(fresh, 0, 38, hidden))

    def with_a_gap(self, tokens):
        """A prompt whose second pool has a hidden token."""
        batch = {key: value[:, :tokens] for key, value in padded(PROMPTS[0]).items()}
        batch["attention_mask"][0, 5] = 0
        return batch

    @pytest.mark.parametrize("tokens", [12, 18, 38], ids=["fewer-than-chosen", "as-many", "more"])
    def test_its_own_indexer_chooses_no_pool_with_a_gap(self, tokens):
        model, batch = larger(POOLED), self.with_a_gap(tokens)
        expected = real_logits(eager(model), batch)
        with attach(model, block_size=4, index_format=None):
            got = real_logits(model, batch)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))

    def test_a_gap_is_refused_where_we_make_the_pools(self):
        model, needs = (
            larger(POOLED),
            "between seen ones in sequence 0; needs them at either end, as a pool is",
        )
        with attach(model, block_size=4) as attached, torch.no_grad():
            cache = attached.new_cache()
            with pytest.raises(InvalidInput, match=f"attention_mask got hidden tokens {needs}"):
                model(**self.with_a_gap(12), **given(cache))
            model(**padded(), **given(cache := attached.new_cache()))
            mask = torch.cat((padded()["attention_mask"], torch.tensor([[1, 1], [0, 1], [1, 0]])), 1)
            with pytest.raises(InvalidInput, match="seen ones in sequence 1; needs them at either end"):
                model(input_ids=torch.ones(3, 2, dtype=torch.int64), attention_mask=mask, **given(cache))
            assert cache.get_seq_length() == 38

    def test_hidden_tokens_at_the_end_are_no_gap(self):
        model, batch = larger(POOLED), padded(PROMPTS[0])
        exact, stock = exact_logits(model, batch)[:-2], real_logits(eager(model), batch)[:-2]
        batch["attention_mask"][:, -2:] = 0
        with attach(model, block_size=4):
            got = real_logits(model, batch)
        judge_tensor("logits", got, exact, stock).require_pass()

    def test_pages_must_hold_whole_pools(self):
        model = larger(POOLED)
        before = state(model)
        with pytest.raises(
            InvalidInput, match="block_size got 6; needs a multiple of 4, the tokens that share"
        ):
            attach(model, block_size=6)
        assert state(model) == before
        with attach(model, block_size=6, index_format=None):
            pass


class TestLeftToTheModel:
    @pytest.mark.parametrize("name", ["tiny-deepseek-v32", "tiny-glm-5", NARROW, POOLED])
    def test_its_indexer_scores_and_the_tokens_are_the_same(self, name):
        model, batch = made(name), padded()
        expected = greedy(eager(model), batch, new=6)
        with attach(model, index_format=None, block_size=8) as attached:
            assert torch.equal(greedy(model, batch, new=6), expected)
            assert not attached.settings.calls["indexed"] and attached.settings.calls["sparse"]
            assert all(choice.problem.op != "index_topk" for choice in attached.choices)

    @pytest.mark.parametrize(
        ("other", "call"),
        [
            (lambda q, k: q @ k.transpose(-1, -2).unsqueeze(1) @ q, "matmul"),
            (lambda q, k: torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)).sigmoid(), "sigmoid"),
            (lambda q, k: torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)) * -1.0, "mul"),
            (lambda q, k: torch.nn.functional.relu(k), "relu"),
            (lambda q, k: torch.nn.functional.gelu(k), "gelu"),
            (lambda q, k: k.transpose(0, 1), "transpose"),
            (lambda q, k: k.topk(3, dim=-1), "topk"),
        ],
        ids=["not-cut", "sigmoid", "negative", "relu-of-keys", "gelu", "transposed", "no-score"],
    )
    def test_an_indexer_that_scores_in_another_way_is_refused(self, other, call):
        model, batch = build("tiny-deepseek-v32"), padded()

        def forward(hidden, *args, **kwargs):
            (cache,) = kwargs.values()
            keys = cache.update_indexer(torch.ones(*hidden.shape[:2], 16), 0)
            return other(torch.ones(*hidden.shape[:2], 16, 16), keys)

        for module in indexers(model):
            module.forward = forward
        with attach(model), pytest.raises(InvalidInput, match=f"scores got {call}; needs sum over heads"):
            model(**batch)

    @pytest.mark.parametrize("index_format", ["fp8_e4m3fn", "int4", "fp8_ds_mla", 5])
    def test_a_format_that_index_keys_do_not_have_is_refused(self, index_format):
        with pytest.raises(InvalidInput, match=f"got {index_format!r}; needs None, auto or bf16"):
            attach(build("tiny-deepseek-v32"), index_format=index_format)

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            (
                "tiny-llama",
                {"index_format": "index_k"},
                "got 'index_k'; needs auto: there is no indexer",
            ),
            ("tiny-hy-v4", {"index_power_of_two": True}, "got True; needs an index format with scales"),
        ],
        ids=["no-indexer", "no-scales"],
    )
    def test_options_that_would_change_nothing_are_refused(self, name, options, message):
        model = build(name)
        with pytest.raises(InvalidInput, match=message):
            attach(model, **options)

    def test_keys_too_narrow_for_their_format_are_refused(self):
        model = build("tiny-deepseek-v32", index_head_dim=10)
        with pytest.raises(InvalidInput, match="kv_lora_rank got 10; needs a multiple of 4 for index_k"):
            attach(model, index_format="index_k")
