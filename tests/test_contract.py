"""Every refusal of a wrong call, by its words; nothing is written, and nothing on a device is read back."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import anymla
from anymla import Batch, InvalidInput, KVCache, plans
from anymla.contract import check_tensor
from anymla.errors import Reasons
from anymla.models import MODELS
from anymla.planned import check_output
from anymla.problem import Feature


def step(**changes):
    """A right decode of two sequences, 5 and 3 tokens long, pages of 4, as keyword arguments."""
    call = {
        "ql_nope": torch.zeros(2, 3, 8),
        "q_pe": torch.zeros(2, 3, 4),
        "kv_cache": torch.zeros(4, 4, 12),
        "block_table": torch.tensor([[0, 1], [2, -7]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 3], dtype=torch.int32),
        "sm_scale": 0.25,
    }
    return call | changes


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG_DECODES = {
    "heads": (
        {"ql_nope": torch.zeros(2, 0, 8), "q_pe": torch.zeros(2, 0, 4)},
        "num_heads got 0; needs at least 1",
    ),
    "q axes": ({"ql_nope": torch.zeros(2, 8)}, r"ql_nope got shape \(2, 8\); needs \(any, any, any\)"),
    "q dtype": (
        {"ql_nope": torch.zeros(2, 3, 8, dtype=torch.float64)},
        "ql_nope got dtype float64; needs float32 or bfloat16 or float16",
    ),
    "not a tensor": ({"ql_nope": [1.0]}, "ql_nope got list; needs a torch.Tensor"),
    "q_pe of other tokens": (
        {"q_pe": torch.zeros(1, 3, 4)},
        r"q_pe got shape \(1, 3, 4\); needs \(2, 3, 4\)",
    ),
    "q_pe of other dtype": (
        {"q_pe": torch.zeros(2, 3, 4, dtype=torch.bfloat16)},
        "q_pe got dtype bfloat16; needs float32",
    ),
    "row width": ({"kv_cache": torch.zeros(4, 4, 13)}, "13"),
    "cache dtype": ({"kv_cache": torch.zeros(4, 4, 12, dtype=torch.int8)}, "int8"),
    "raw bytes without a format": ({"kv_cache": torch.zeros(4, 4, 12, dtype=torch.uint8)}, "kv_format"),
    "unknown format": ({"kv_format": "fp7"}, "fp7"),
    "another format": ({"kv_format": "bf16"}, "bf16"),
    "fp8 without a scale": ({"kv_cache": torch.zeros(4, 4, 12).to(torch.float8_e4m3fn)}, "scale"),
    "scale of zero": (
        {"kv_cache": torch.zeros(4, 4, 12).to(torch.float8_e4m3fn), "k_scale": torch.zeros(1)},
        "scale",
    ),
    "scale of NaN": (
        {
            "kv_cache": torch.zeros(4, 4, 12).to(torch.float8_e4m3fn),
            "k_scale": torch.full((1,), float("nan")),
        },
        "scale",
    ),
    "scale without fp8": ({"k_scale": torch.ones(1)}, "scale"),
    "table rows": (
        {"block_table": torch.zeros(1, 2, dtype=torch.int32)},
        r"block_table got shape \(1, 2\); needs \(2, any\)",
    ),
    "table dtype": (
        {"block_table": torch.zeros(2, 2, dtype=torch.int64)},
        "block_table got dtype int64; needs int32",
    ),
    "page past the cache": (
        {"block_table": torch.tensor([[0, 4], [2, 9]], dtype=torch.int32)},
        r"block_table got 4 at \[0, 1\]; needs 0 to 3",
    ),
    "page below the cache": (
        {"block_table": torch.tensor([[-1, 1], [2, 9]], dtype=torch.int32)},
        r"block_table got -1 at \[0, 0\]",
    ),
    "length past the table": (
        {"seq_lens": ints(9, 3)},
        "seq_lens got 9 at 0; needs 0 to 8, the pages of block_table",
    ),
    "negative length": ({"seq_lens": ints(5, -1)}, "seq_lens got -1 at 1; needs 0 to 8"),
    "lengths dtype": ({"seq_lens": torch.tensor([5, 3])}, "seq_lens got dtype int64; needs int32"),
    "lengths with a stride": (
        {"seq_lens": ints(5, 0, 3, 0)[::2]},
        "seq_lens got stride 2; needs contiguous memory",
    ),
    "indptr with a stride": (
        {"qo_indptr": ints(0, 9, 1, 9, 2, 9)[::2]},
        "qo_indptr got stride 2; needs contiguous memory",
    ),
    "indptr does not start at 0": ({"qo_indptr": ints(1, 1, 2)}, "qo_indptr got first value 1; needs 0"),
    "indptr decreases": (
        {"qo_indptr": ints(0, 2, 1)},
        "qo_indptr got 1 after 2 at 2; needs values that do not decrease",
    ),
    "indptr past the queries": ({"qo_indptr": ints(0, 1, 3)}, "qo_indptr got last value 3; needs at most 2"),
    "indptr size": ({"qo_indptr": ints(0, 2)}, r"qo_indptr got shape \(2,\); needs \(3,\)"),
    "no scale": ({"sm_scale": None}, "sm_scale got None; needs a positive finite number"),
    "scale of infinity": ({"sm_scale": float("inf")}, "sm_scale got inf"),
    "negative scale": ({"sm_scale": -0.1}, "sm_scale got -0.1"),
    "sinks of other heads": (
        {"sinks": torch.zeros(4)},
        r"sinks got shape \(4,\); needs \(3,\), H from the queries",
    ),
    "sinks dtype": (
        {"sinks": torch.zeros(3, dtype=torch.bfloat16)},
        "sinks got dtype bfloat16; needs float32",
    ),
    "sinks with a stride": ({"sinks": torch.zeros(6)[::2]}, "sinks got stride 2; needs contiguous memory"),
    "out of other shape": ({"out": torch.zeros(2, 3, 9)}, r"out got shape \(2, 3, 9\); needs \(2, 3, 8\)"),
    "out that shares memory": (
        {"out": torch.zeros(1, 3, 8).expand(2, 3, 8)},
        r"out got strides \(0, 8, 1\); needs memory of its own",
    ),
    "lse not asked for": ({"lse": torch.zeros(2, 3)}, "lse got a tensor; needs return_lse=True"),
    "backend unknown": ({"backend": "cudnn"}, "backend got 'cudnn'; needs one of auto, "),
}


@pytest.mark.parametrize(("changes", "words"), WRONG_DECODES.values(), ids=list(WRONG_DECODES))
def test_a_wrong_decode_is_refused_in_words(changes, words) -> None:
    call = step(**changes)
    out = call.setdefault("out", torch.full((2, 3, 8), 7.0))
    before = out.clone()
    with pytest.raises((InvalidInput, anymla.UnknownBackend), match=words):
        anymla.decode(**call)
    assert torch.equal(out, before)


FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def fp8_step(q_dtype=FN, **changes):
    """The same with queries and a cache in fp8."""
    call = step(k_scale=torch.full((1,), 0.5), q_scale=torch.full((1,), 2.0))
    call |= {name: torch.zeros_like(call[name], dtype=q_dtype) for name in ("ql_nope", "q_pe")}
    return call | {"kv_cache": torch.zeros(4, 4, 12).to(FN)} | changes


WRONG_FP8_QUERIES = {
    "no scale": (
        {"q_scale": None},
        r"q_scale got None; needs \[1\] fp32, what multiplies queries in fp8_e4m3fn",
    ),
    "scale of zero": ({"q_scale": torch.zeros(1)}, "q_scale got 0.0; needs a positive finite number"),
    "scale of NaN": ({"q_scale": torch.full((1,), torch.nan)}, "q_scale got nan; needs a positive finite"),
    "scale of infinity": ({"q_scale": torch.full((1,), torch.inf)}, "q_scale got inf; needs a positive"),
    "scale a head": ({"q_scale": torch.ones(3)}, r"q_scale got shape \(3,\); needs \(1,\)"),
    "scale in 16 bits": ({"q_scale": torch.ones(1).bfloat16()}, "q_scale got dtype bfloat16; needs float32"),
    "a cache in more bits": (
        {"kv_cache": torch.zeros(4, 4, 12), "k_scale": None},
        "kv_cache got format fp32; needs fp8_e4m3fn, as the queries have it",
    ),
    "the other flavour": (
        {"kv_cache": torch.zeros(4, 4, 12).to(FNUZ)},
        "kv_cache got format fp8_e4m3fnuz; needs fp8_e4m3fn, as the queries have it",
    ),
    "q_pe in more bits": (
        {"q_pe": torch.zeros(2, 3, 4)},
        "q_pe got dtype float32; needs float8_e4m3fn",
    ),
    "out in fp8": (
        {"out": torch.zeros(2, 3, 8).to(FN)},
        "out got dtype float8_e4m3fn; needs bfloat16 or float16",
    ),
    "out in fp32": ({"out": torch.zeros(2, 3, 8)}, "out got dtype float32; needs bfloat16 or float16"),
    "a scale beside more bits": (
        step(q_scale=torch.ones(1), k_scale=None),
        "q_scale got a tensor; needs None: queries in float32 have no scale",
    ),
}


@pytest.mark.parametrize(("changes", "words"), WRONG_FP8_QUERIES.values(), ids=list(WRONG_FP8_QUERIES))
def test_wrong_queries_in_fp8_are_refused_in_words(changes, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        anymla.decode(**fp8_step(**changes))


def test_queries_in_fp8_name_all_that_they_lack_at_once() -> None:
    with pytest.raises(InvalidInput) as refusal:
        anymla.decode(**fp8_step(kv_cache=torch.zeros(4, 4, 12), k_scale=None, q_scale=None, sm_scale=0.0))
    assert [reason.split()[0] for reason in refusal.value.reasons] == ["sm_scale", "kv_cache", "q_scale"]


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16], ids=["none", "bf16", "fp16"])
def test_out_of_queries_in_fp8_is_bf16_or_what_is_given(out_dtype) -> None:
    out = None if out_dtype is None else torch.full((2, 3, 8), torch.nan, dtype=out_dtype)
    got = anymla.decode(**fp8_step(out=out), return_lse=True)
    assert got.out.dtype == (out_dtype or torch.bfloat16) and not got.out.isnan().any()
    assert got.lse is not None and got.lse.dtype == torch.float32
    none = fp8_step(seq_lens=ints(0, 0))
    assert torch.equal(anymla.decode(**none).out, torch.zeros(2, 3, 8, dtype=torch.bfloat16))


def test_a_plan_for_fp8_takes_queries_in_it_and_in_more_bits_and_no_other_plan_takes_fp8() -> None:
    call = fp8_step()
    queries = [call.pop(name) for name in ("ql_nope", "q_pe", "kv_cache")]
    batch = Batch.of(seq_lens=call.pop("seq_lens"), block_table=call.pop("block_table"), block_size=4)
    widths = {"num_heads": 3, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "kv_format": "fp8_e4m3fn"}
    plan = anymla.plan_decode(batch, **widths, q_dtype=FN)
    assert plan.run(*queries, **call).out.dtype == torch.bfloat16
    in_16_bits = *(q.half() for q in queries[:2]), queries[2]
    assert plan.run(*in_16_bits, **(call | {"q_scale": None})).out.dtype == torch.float16
    other = anymla.plan_decode(batch, **widths, q_dtype=torch.bfloat16)
    words = (
        r"ql_nope got dtype fp8_e4m3fn; needs bf16, as planned; plan again with q_dtype=torch.float8_e4m3fn"
    )
    with pytest.raises(InvalidInput, match=words):
        other.run(*queries, **call)


def test_all_reasons_come_at_once() -> None:
    with pytest.raises(InvalidInput) as refusal:
        anymla.decode(
            **step(sm_scale=0.0, sinks=torch.zeros(4), seq_lens=ints(9, 3), qo_indptr=ints(0, 1, 3))
        )
    named = [reason.split()[0] for reason in refusal.value.reasons]
    assert named == ["sm_scale", "sinks", "qo_indptr", "seq_lens"]


def test_a_length_at_the_edge_of_the_table_is_taken() -> None:
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    out, _ = anymla.decode(**step(seq_lens=ints(8, 0), block_table=table))
    assert out.shape == (2, 3, 8)


WRONG_SPARSE = {
    "index below -1": ({"indices": ints(-2, 0).view(2, 1)}, "indices got -2; needs -1"),
    "index past the cache": ({"indices": ints(16, 0).view(2, 1)}, "indices got 16; needs less than 16"),
    "rows": (
        {"indices": torch.zeros(3, 1, dtype=torch.int32)},
        r"indices got shape \(3, 1\); needs \(2, any\)",
    ),
    "dtype": ({"indices": torch.zeros(2, 1, dtype=torch.int64)}, "indices got dtype int64; needs int32"),
    "counts past the columns": ({"counts": ints(2, 0)}, "counts got 0 to 2; needs 0 to 1"),
    "counts rows": ({"counts": ints(1)}, r"counts got shape \(1,\); needs \(2,\)"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG_SPARSE.values(), ids=list(WRONG_SPARSE))
def test_a_wrong_sparse_decode_is_refused_in_words(changes, words) -> None:
    call = {k: v for k, v in step().items() if k not in ("block_table", "seq_lens")}
    call |= {"indices": torch.zeros(2, 1, dtype=torch.int32)} | changes
    with pytest.raises(InvalidInput, match=words):
        anymla.sparse_decode(**call)


def new_tokens(**changes):
    """A right prefill of 2 and 1 new tokens without context."""
    call = {
        "q_nope": torch.zeros(3, 2, 6),
        "q_pe": torch.zeros(3, 2, 4),
        "kv_c": torch.zeros(3, 8),
        "k_pe": torch.zeros(3, 4),
        "w_uk": torch.zeros(2, 6, 8),
        "w_uv": torch.zeros(2, 8, 5),
        "qo_indptr": ints(0, 2, 3),
        "sm_scale": 0.25,
    }
    return call | changes


WRONG_PREFILLS = {
    "w_uk transposed": ({"w_uk": torch.zeros(2, 8, 6)}, r"w_uk got shape \(2, 8, 6\); needs \(2, 6, 8\)"),
    "tokens differ": ({"kv_c": torch.zeros(4, 8)}, r"kv_c got shape \(4, 8\); needs \(3, 8\)"),
    "half a context": (
        {"kv_cache": torch.zeros(4, 4, 12)},
        "context got kv_cache; needs block_table, seq_lens too",
    ),
    "lengths below the new tokens": (
        {
            "kv_cache": torch.zeros(4, 4, 12),
            "block_table": torch.zeros(2, 1, dtype=torch.int32),
            "seq_lens": ints(1, 1),
        },
        "seq_lens got 1 at 0; needs 2 to 6, the pages of block_table and the new tokens",
    ),
    "no scale": ({"sm_scale": float("nan")}, "sm_scale got nan"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG_PREFILLS.values(), ids=list(WRONG_PREFILLS))
def test_a_wrong_prefill_is_refused_in_words(changes, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        anymla.prefill(**new_tokens(**changes))


WRONG_WRITES = {
    "slot past the cache": (
        {"slot_mapping": torch.tensor([0, 16])},
        "slot_mapping got 16; needs less than 16",
    ),
    "slot below -1": ({"slot_mapping": torch.tensor([0, -2])}, "slot_mapping got -2; needs -1"),
    "slot twice": (
        {"slot_mapping": torch.tensor([3, 3])},
        "slot_mapping got 1 slots twice; needs each slot once",
    ),
    "slots dtype": ({"slot_mapping": ints(0, 1)}, "slot_mapping got dtype int32; needs int64"),
    "slots size": ({"slot_mapping": torch.tensor([0])}, r"slot_mapping got shape \(1,\); needs \(2,\)"),
    "row width": ({"k_pe": torch.zeros(2, 5)}, "12"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG_WRITES.values(), ids=list(WRONG_WRITES))
def test_a_wrong_write_is_refused_and_writes_nothing(changes, words) -> None:
    cache = torch.full((4, 4, 12), 7.0)
    call = {
        "kv_c": torch.zeros(2, 8),
        "k_pe": torch.zeros(2, 4),
        "slot_mapping": torch.tensor([0, 1]),
    } | changes
    with pytest.raises(InvalidInput, match=words):
        anymla.write_cache(kv_cache=cache, **call)
    assert torch.equal(cache, torch.full_like(cache, 7.0))


def test_skipped_slots_may_repeat() -> None:
    cache = torch.full((4, 4, 12), 7.0)
    anymla.write_cache(torch.zeros(3, 8), torch.zeros(3, 4), cache, torch.tensor([-1, 5, -1]))
    assert torch.equal(cache.view(16, 12)[5], torch.zeros(12)) and cache.sum() == 7.0 * 15 * 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topk": 0}, "topk got 0; needs at least 1"),
        ({"weights": torch.zeros(2, 2)}, r"weights got shape \(2, 2\); needs \(2, 3\)"),
        ({"weights": torch.zeros(2, 3, dtype=torch.bfloat16)}, "weights got dtype bfloat16; needs float32"),
        ({"out": torch.zeros(2, 5, dtype=torch.int32)}, r"out got shape \(2, 5\); needs \(2, 4\)"),
        ({"out": ints(0).expand(2, 4)}, r"out got strides \(0, 0\); needs memory of its own"),
        (
            {"q": torch.zeros(2, 0, 8), "weights": torch.zeros(2, 1), "seq_lens": ints(9, 3)},
            r"num_heads got 0; .*weights got shape \(2, 1\); .*seq_lens got 9 at 0; needs 0 to 8",
        ),
    ],
    ids=["topk", "weights shape", "weights dtype", "out shape", "out of one element", "all at once"],
)
def test_a_wrong_top_k_is_refused_in_words(changes, words) -> None:
    call = {
        **index_step(),
        "block_table": torch.tensor([[0, 1], [2, -7]], dtype=torch.int32),
        "seq_lens": ints(5, 3),
        "topk": 4,
    }
    with pytest.raises(InvalidInput, match=words):
        anymla.index_topk(**(call | changes))


def index_step() -> dict[str, torch.Tensor]:
    """Index queries of two tokens, with three heads of width 8, over pages of 4."""
    return {"q": torch.zeros(2, 3, 8), "weights": torch.zeros(2, 3), "index_cache": torch.zeros(4, 4, 8)}


def index_plan(**changes):
    """A plan of two sequences, 5 and 3 tokens long, that may grow to 6."""
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    batch = Batch.of(seq_lens=ints(5, 3), block_table=table, block_size=4, max_seq_len=6)
    facts = {"topk": 4, "index_heads": 3, "index_head_dim": 8, "q_dtype": torch.float32, "kv_format": "fp32"}
    return anymla.plan_index_topk(**({"batch": batch} | facts | changes))


def test_an_indexer_that_cannot_be_planned_is_refused_with_every_reason() -> None:
    wrong = {"topk": 0, "index_heads": 0, "index_head_dim": 0, "q_dtype": torch.float64, "kv_format": "fp7"}
    batch = Batch.of(seq_lens=ints(5), block_table=ints(0, 1)[None], block_size=4, causal=False)
    with pytest.raises(InvalidInput) as refusal:
        index_plan(batch=batch, **wrong)
    assert [reason.split(";")[0] for reason in refusal.value.reasons] == [
        "topk got 0",
        "causal got False",
        "index_heads got 0",
        "index_head_dim got 0",
        "q_dtype got torch.float64",
        "kv_format got 'fp7'",
    ]


def test_a_plan_of_an_indexer_refuses_what_it_was_not_made_for_and_writes_nothing() -> None:
    plan, out = index_plan(), torch.full((2, 4), -7, dtype=torch.int32)
    for changes, words in [
        ({"q": torch.zeros(3, 3, 8)}, r"q got shape \(3, 3, 8\); needs \(2, 3, 8\)"),
        ({"q": torch.zeros(2, 3, 8).bfloat16()}, "q got dtype bf16; needs fp32, as planned"),
        ({"weights": torch.zeros(2, 4)}, r"weights got shape \(2, 4\); needs \(2, 3\), T, H from q"),
        ({"index_cache": torch.zeros(4, 8, 8)}, "block_size got 8; needs 4, as planned"),
        ({"index_cache": torch.zeros(4, 4, 9)}, r"needs \(pages, block_size, 8\)"),
        ({"index_cache": torch.zeros(4, 4, 8).bfloat16()}, "got dtype bfloat16; needs float32 for fp32"),
    ]:
        with pytest.raises(InvalidInput, match=words):
            plan.run(**(index_step() | changes), out=out)
    with pytest.raises(InvalidInput, match=r"out got shape \(2, 3\); needs \(2, 4\)"):
        plan.run(**index_step(), out=out[:, :3])
    assert bool((out == -7).all())
    assert plan.run(**index_step(), out=out) is out
    assert out.tolist() == [[0, 1, 2, 3], [0, 1, 2, -1]]


def test_a_plan_refuses_what_it_was_not_made_for() -> None:
    batch = Batch.of(
        seq_lens=ints(5, 3), block_table=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), block_size=4
    )
    plan = anymla.plan_decode(
        batch, num_heads=3, kv_lora_rank=8, qk_rope_head_dim=4, q_dtype=torch.float32, kv_format="fp32"
    )
    call = {k: v for k, v in step().items() if k not in ("block_table", "seq_lens")}
    for changes, words in [
        ({"sinks": torch.zeros(3)}, "sinks got a tensor; needs None, as planned; plan again with sinks=True"),
        (
            {"return_lse": True},
            "return_lse got True; needs False, as planned; plan again with return_lse=True",
        ),
        ({"kv_cache": torch.zeros(2, 8, 12)}, "block_size got 8; needs 4, as planned"),
        ({"ql_nope": torch.zeros(2, 5, 8), "q_pe": torch.zeros(2, 5, 4)}, r"ql_nope got shape \(2, 5, 8\)"),
    ]:
        with pytest.raises(InvalidInput, match=words):
            plan.run(**(call | changes))


@pytest.mark.parametrize("op", ["decode", "index_topk"])
def test_an_update_stays_within_the_plan(op: str) -> None:
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    batch = Batch.of(seq_lens=ints(5, 3), block_table=table, block_size=4, max_seq_len=6)
    widths = {"num_heads": 3, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    plan = (
        index_plan()
        if op == "index_topk"
        else anymla.plan_decode(batch, **widths, q_dtype=torch.float32, kv_format="fp32")
    )
    plan.update(Batch.of(seq_lens=ints(6, 1), block_table=table, block_size=4))
    with pytest.raises(InvalidInput, match="max_seq_len got 7; needs at most 6, as planned"):
        plan.update(Batch.of(seq_lens=ints(7, 1), block_table=table, block_size=4))
    with pytest.raises(InvalidInput, match="seq_lens got 1 sequences; needs 2, as planned"):
        plan.update(Batch.of(seq_lens=ints(6), block_table=table[:1], block_size=4))


def test_a_tagged_cache_is_not_opened_as_something_else() -> None:
    cache = KVCache.allocate(
        4, 4, kv_lora_rank=8, qk_rope_head_dim=4, kv_format="fp8_e4m3fnuz", scale=torch.ones(1)
    )
    call = step(kv_cache=cache)
    anymla.decode(**call)
    with pytest.raises(
        InvalidInput, match=r"kv_cache got tag anymla-kv/1 fp8_e4m3fnuz .*; needs format fp8_e4m3fn"
    ):
        anymla.decode(**call, kv_format="fp8_e4m3fn")
    with pytest.raises(InvalidInput, match="k_scale got a tensor; needs None: the KVCache carries its scale"):
        anymla.decode(**call, k_scale=torch.ones(1))
    with pytest.raises(InvalidInput, match="needs L=9 R=4"):
        anymla.decode(**(call | {"ql_nope": torch.zeros(2, 3, 9)}))


@pytest.mark.parametrize(
    ("seq_lens", "known", "pages", "named"),
    [((2, 3), True, 1, False), ((2, 4), True, 1, True), ((2, 3), False, 1, True), ((2, 3), False, 0, False)],
    ids=["none", "one token", "only the device knows", "no pages for any"],
)
def test_a_plan_of_a_prefill_names_the_context_that_its_batch_may_have(
    seq_lens, known, pages, named, monkeypatch
):
    monkeypatch.setattr(plans, "_planned", lambda *step: None)
    table = torch.zeros(2, pages, dtype=torch.int32)
    batch = Batch.of(
        seq_lens=ints(*seq_lens),
        qo_indptr=ints(0, 2, 5),
        block_table=table,
        block_size=4,
        new_tokens_are_cached=False,
    )
    batch = batch if known else replace(batch, seq_lens_host=None)
    problem = MODELS["minicpm3"].problem("prefill", q_dtype="fp32", block_size=4, q_len=3)
    found = plans.prefill_plan(batch, problem).problem.features
    lengths = set() if known else {Feature.DEVICE_LENGTHS}
    assert found == problem.features | lengths | ({Feature.CACHED_CONTEXT} if named else set())


def test_a_cache_that_lost_its_scale_is_refused() -> None:
    facts = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "kv_format": "fp8_e4m3fn"}
    cache = replace(anymla.KVCache.allocate(2, 4, **facts, scale=1.0), scale=None)
    plan = plans.plan_decode(
        Batch.of(seq_lens=ints(1), block_table=torch.zeros(1, 1, dtype=torch.int32), block_size=4),
        num_heads=1,
        q_dtype=torch.bfloat16,
        **facts,
    )
    q = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    with pytest.raises(InvalidInput, match="kv_cache got no scale; needs the one of its fp8_e4m3fn"):
        plan.run(q, q[..., :4], cache, sm_scale=1.0)


def test_a_bound_above_the_longest_changes_no_result_and_one_below_is_refused_where_it_is_seen() -> None:
    call = step(qo_indptr=ints(0, 2, 2), check=True)
    right = anymla.decode(**call).out
    assert torch.equal(anymla.decode(**call, max_q_len=7).out, right)
    with pytest.raises(InvalidInput, match="max_q_len got 1; needs at least 2, from qo_indptr"):
        anymla.decode(**call, max_q_len=1)


class TestOnADevice:
    """Meta tensors have no values: whoever reads one back fails."""

    def on_device(self, **changes):
        return {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in step(**changes).items()}

    def test_a_batch_needs_no_values(self) -> None:
        call = self.on_device()
        batch = Batch.of(seq_lens=call["seq_lens"], block_table=call["block_table"], block_size=4)
        assert (batch.seq_lens_host, batch.max_seq_len, batch.max_q_len, batch.num_tokens) == (None, 8, 1, 2)

    def test_lengths_that_the_host_knows_are_checked(self) -> None:
        call = self.on_device()
        with pytest.raises(InvalidInput, match="seq_lens got 9 at 0; needs 0 to 8"):
            Batch.of(
                seq_lens=call["seq_lens"], block_table=call["block_table"], block_size=4, seq_lens_host=[9, 3]
            )

    def test_offsets_that_nobody_knows_need_bounds(self) -> None:
        call = self.on_device()
        with pytest.raises(InvalidInput, match=r"num_tokens got None.*max_q_len got None"):
            Batch.of(
                seq_lens=call["seq_lens"],
                block_table=call["block_table"],
                qo_indptr=torch.zeros(3, dtype=torch.int32, device="meta"),
                block_size=4,
            )

    @pytest.mark.parametrize(("bound", "planned"), [({}, 2), ({"max_q_len": 1}, 1)], ids=["all", "told"])
    def test_a_call_is_planned_for_the_bound_that_is_told_or_for_all_tokens(
        self, monkeypatch, bound, planned
    ) -> None:
        steps = []

        def decode_plan(batch, problem, backend):
            steps.append((batch.max_q_len, problem.q_len, Feature.MULTI_TOKEN in problem.features))
            return SimpleNamespace(run=lambda *tensors, **options: None)

        monkeypatch.setattr(plans, "decode_plan", decode_plan)
        offsets = torch.zeros(3, dtype=torch.int32)
        anymla.decode(**self.on_device(qo_indptr=offsets, **bound))
        assert steps == [(planned, planned, planned > 1)]

    def test_devices_must_agree(self) -> None:
        with pytest.raises(InvalidInput, match="kv_cache got device cpu; needs meta, that of the queries"):
            anymla.decode(**self.on_device() | {"kv_cache": torch.zeros(4, 4, 12)})


def bf16_plan():
    """A decode of one sequence of 3 tokens."""
    batch = Batch.of(seq_lens=ints(3), block_table=ints(0)[None], block_size=4)
    facts = {"num_heads": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    return anymla.plan_decode(batch, q_dtype=torch.bfloat16, kv_format="bf16", **facts)


def test_a_plan_takes_queries_of_the_planned_dtype_alone():
    plan = bf16_plan()
    cache = torch.zeros(1, 4, 12).bfloat16()
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(InvalidInput, match=r"ql_nope got dtype fp(32|16); needs bf16, as planned"):
            plan.run(
                torch.zeros(1, 2, 8, dtype=dtype), torch.zeros(1, 2, 4, dtype=dtype), cache, sm_scale=1.0
            )


@pytest.mark.parametrize(
    ("strides", "right"), [((8, 4, 1), True), ((4, 8, 1), True), ((1, 8, 1), False), ((8, 1, 1), False)]
)
def test_no_two_elements_of_an_output_share_memory(strides, right):
    reasons = Reasons("run")
    out = torch.zeros(64).as_strided((2, 2, 4), strides)
    check_output(reasons, "out", out, (2, 2, 4), (torch.float32,), out.device)
    assert bool(reasons.found) is not right


def test_columns_that_32_bits_cannot_count_are_refused():
    reasons = Reasons("run")
    far = torch.empty(1, device="meta").as_strided((1, 3), (1, 2**30))
    check_tensor(reasons, "q", far, (1, 3), (torch.float32,))
    assert "columns 2147483648 elements apart" in str(reasons.found)


def test_updating_a_plan_reads_no_value_of_the_step(monkeypatch):
    plan = bf16_plan()
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor: pytest.fail("a tensor was printed"))
    plan.update(plan.batch)
