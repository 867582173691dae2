"""What MODELS says: published softmax scales, widths as in the source, heads after tensor parallelism."""

import re
import warnings

import pytest

from anymla.errors import InvalidInput
from anymla.models import MODELS, Model, Yarn, model_named
from anymla.problem import OPS, Feature

PUBLISHED_SCALES = {
    "deepseek-v3": 0.135234,
    "deepseek-r1": 0.135234,
    "deepseek-v3.2": 0.135234,
    "deepseek-v2": 0.114721,
    "deepseek-v2-lite": 0.114721,
    "kimi-k2": 0.130861,
    "kimi-k2-0905": 0.144680,
    "kimi-k2.5": 0.144680,
    "kimi-k3": 192**-0.5,
    "kimi-linear": 192**-0.5,
    "openpangu-ultra-moe": 192**-0.5,
    "longcat-flash": 192**-0.5,
    "glm-4.7-flash": 0.0625,
    "glm-5": 0.0625,
    "glm-5.3-flash": 0.0625,
    "hy-v4": 0.0625,
    "minicpm3": 96**-0.5,
    "deepseek-v4-flash": 512**-0.5,
}


@pytest.mark.parametrize("name", PUBLISHED_SCALES)
def test_the_softmax_scale_is_the_published_one(name: str) -> None:
    assert MODELS[name].sm_scale == pytest.approx(PUBLISHED_SCALES[name], abs=5e-7)


@pytest.mark.parametrize(
    ("factor", "mscale_all_dim", "mscale"),
    [(40, 1.0, 1.368888), (40, 0.707, 1.260804), (64, 1.0, 2.004740**0.5), (1, 1.0, 1.0), (40, 0.0, 1.0)],
)
def test_yarn_multiplies_the_scale_by_mscale_squared(
    factor: float, mscale_all_dim: float, mscale: float
) -> None:
    yarn = Yarn(factor, mscale_all_dim)
    assert yarn.mscale == pytest.approx(mscale, abs=5e-7)
    model = Model(16, None, 512, 128, 64, 128, yarn=yarn)
    assert model.sm_scale == pytest.approx(192**-0.5 * mscale**2, abs=5e-7)


def test_the_scale_is_that_of_the_decompressed_width_not_of_the_cache_row() -> None:
    assert MODELS["kimi-linear"].sm_scale == pytest.approx((128 + 64) ** -0.5)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_is_whole_and_sourced(name: str) -> None:
    model = MODELS[name]
    assert name == name.lower()
    assert model.source
    assert min(model.num_heads, model.kv_lora_rank, model.qk_nope_head_dim, model.v_head_dim) > 0
    assert bool(model.index_topk) == bool(model.index_heads) == bool(model.index_head_dim)
    assert model.index_topk % model.index_pool == 0 and (model.index_pool == 1 or model.index_topk)
    assert 0 < model.sm_scale < 1


DEFAULTS = {
    name: match[1] for name in MODELS if (match := re.search(r"defaults of (\w+Config)", MODELS[name].source))
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_row_from_transformers_matches_the_installed_class(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, DEFAULTS[name], None) or _config_class(DEFAULTS[name])
        config = kind()
    model, published = MODELS[name], vars(config)
    for field in ("q_lora_rank", "index_topk", "index_head_dim"):
        assert (getattr(model, field) or 0) == (published.get(field) or 0), field
    assert model.index_heads == (published.get("index_n_heads") or 0)
    assert model.index_pool == published.get("index_kpool", 1)
    if "kv_lora_rank" not in published:  # one vector that is key and value
        assert (model.kv_lora_rank, model.qk_rope_head_dim) == (published["head_dim"], 0)
        assert model.num_heads == published["num_attention_heads"]
        return
    for field in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert getattr(model, field) == published[field], field
    assert model.num_heads == published["num_attention_heads"]


def _config_class(name: str) -> type:
    from transformers.models import dots3_note, glm5_next

    return next(getattr(module, name) for module in (dots3_note, glm5_next) if hasattr(module, name))


@pytest.mark.parametrize(
    ("name", "tp", "heads"),
    [
        ("deepseek-v3", 16, 8),
        ("kimi-k3", 4, 24),
        ("kimi-k3", 16, 6),
        ("minicpm3", 8, 5),
        ("glm-4.7-flash", 4, 5),
    ],
)
def test_tensor_parallelism_splits_the_heads_and_only_them(name: str, tp: int, heads: int) -> None:
    model = MODELS[name]
    assert model.local_heads(tp) == heads
    assert model.problem(tp=tp).num_heads == heads
    assert model.problem(tp=tp).kv_lora_rank == model.kv_lora_rank


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("minicpm3", 16, "model: tp got 16; needs a divisor of 40 heads: 1, 2, 4, 5, 8, 10, 20, 40"),
        ("glm-4.7-flash", 8, "model: tp got 8; needs a divisor of 20 heads: 1, 2, 4, 5, 10, 20"),
        ("deepseek-v2-lite", 0, "model: tp got 0; needs a divisor of 16 heads: 1, 2, 4, 8, 16"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do(
    name: str, tp: int, message: str
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        MODELS[name].local_heads(tp)
    assert str(refusal.value) == message


@pytest.mark.parametrize("spelling", ["deepseek-v3", "DeepSeek_V3", "deepseek-ai/DeepSeek-V3"])
def test_a_model_answers_to_its_repository_too(spelling: str) -> None:
    assert model_named(spelling) is MODELS["deepseek-v3"]


def test_an_unknown_model_is_refused_with_all_names() -> None:
    with pytest.raises(InvalidInput) as refusal:
        model_named("gpt-2")
    assert str(refusal.value) == f"model: model got 'gpt-2'; needs one of {', '.join(MODELS)}"


def test_index_heads_are_not_split_and_index_keys_have_no_rope_part() -> None:
    problem = MODELS["glm-5"].problem("index_topk", tp=8)
    assert (problem.num_heads, problem.kv_lora_rank, problem.qk_rope_head_dim, problem.topk) == (
        32,
        128,
        0,
        2048,
    )
    assert problem.kv_format == "index_k"


def test_an_indexer_of_pools_chooses_pools_in_pages_of_the_same_tokens() -> None:
    model = MODELS["glm-5.3-flash"]
    problem = model.problem("index_topk", block_size=64)
    assert (problem.topk, problem.block_size) == (2048 // 16, 64 // 16)
    assert model.problem("index_topk", topk=7).topk == 7
    attention = model.problem("sparse_decode", block_size=64)
    # The tokens of 128 pools, and up to 15 of the last, which is not whole.
    assert (attention.topk, attention.block_size) == (2048 + 15, 64)
    assert model.problem("sparse_decode", topk=9).topk == 9
    assert MODELS["glm-5.1"].problem("sparse_decode").topk == 2048


def test_query_tokens_of_an_indexer_of_pools_are_sequences_of_their_own() -> None:
    problem = MODELS["glm-5.3-flash"].problem("index_topk", q_len=4)
    assert problem.q_len == 1 and Feature.MULTI_TOKEN not in problem.features


def test_a_page_has_whole_pools() -> None:
    with pytest.raises(InvalidInput, match="block_size got 24; needs a multiple of 16, the tokens of an"):
        MODELS["glm-5.3-flash"].problem("index_topk", block_size=24)


def test_only_a_prefill_can_come_after_a_cached_context() -> None:
    asked = {op: MODELS["glm-5"].problem(op, cached_context=True).features for op in OPS}
    assert [op for op, features in asked.items() if Feature.CACHED_CONTEXT in features] == ["prefill"]
    assert Feature.CACHED_CONTEXT not in MODELS["glm-5"].problem("prefill").features


def test_a_model_without_an_index_is_refused_one() -> None:
    with pytest.raises(InvalidInput, match="op got index_topk; needs a model with an index: deepseek-v3"):
        MODELS["deepseek-v3"].problem("index_topk")


@pytest.mark.parametrize("op", OPS)
def test_a_problem_carries_what_its_operation_looks_at(op: str) -> None:
    problem = MODELS["hy-v4"].problem(op, q_len=3, lse=True)
    attends = op in ("decode", "sparse_decode", "prefill")
    assert (Feature.SINKS in problem.features) == (Feature.LSE in problem.features) == attends
    assert (Feature.MULTI_TOKEN in problem.features) == (op in ("decode", "prefill", "index_topk"))
    assert (problem.qk_nope_head_dim, problem.v_head_dim) == ((192, 256) if op == "prefill" else (0, 0))
    assert problem.topk == (2048 if op in ("sparse_decode", "index_topk") else 0)
