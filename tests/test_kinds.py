"""Arguments of the wrong kind: each is refused by its name, and none by what Python or torch says of it."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import anymla
from anymla import (
    AnyMLAError,
    AttentionOutput,
    Batch,
    InvalidInput,
    KVCache,
    UnknownBackend,
    latent,
    merging,
    select,
)
from anymla import distributed as dcp
from anymla.heads import HeadPadding
from anymla.kv_cache import convert


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
PAGES = {"block_table": TABLE, "seq_lens": ints(5, 3)}
BATCH = Batch.of(**PAGES, block_size=4)
NEW = Batch.of(seq_lens=ints(2, 1), qo_indptr=ints(0, 2, 3), new_tokens_are_cached=False)
WIDTHS = {"num_heads": 3, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
INDEX_WIDTHS = {"index_heads": 3, "index_head_dim": 8, "kv_format": "fp32"}
PLANNED = {"q_dtype": torch.float32, "machine": None, "backend": "auto"}
FLAGS = {"sinks": False, "return_lse": False, "batch_invariant": False}
QUERIES = {"ql_nope": torch.zeros(2, 3, 8), "q_pe": torch.zeros(2, 3, 4), "kv_cache": torch.zeros(4, 4, 12)}
OUTPUTS = {"sm_scale": 0.25, "sinks": None, "return_lse": False, "out": None, "lse": None}
INDEX_QUERIES = {
    "q": torch.zeros(2, 3, 8), "weights": torch.zeros(2, 3), "index_cache": torch.zeros(4, 4, 8)
}  # fmt: skip
CHOSEN = {"indices": TABLE, "counts": None, "check": False}
SPANS = {"qo_indptr": None, "max_q_len": None}
NEW_TOKENS = {
    "q_nope": torch.zeros(3, 3, 6), "q_pe": torch.zeros(3, 3, 4), "kv_c": torch.zeros(3, 8),
    "k_pe": torch.zeros(3, 4), "w_uk": torch.zeros(3, 6, 8), "w_uv": torch.zeros(3, 8, 5),
}  # fmt: skip
MHA_WIDTHS = {"qk_nope_head_dim": 6, "v_head_dim": 5}
CHOSEN_BY_NAME = {"backend": "auto"}
CACHE = KVCache.allocate(4, 4, kv_lora_rank=8, qk_rope_head_dim=4, kv_format="fp32")
CACHE_WIDTHS = {"kv_lora_rank": 8, "qk_rope_head_dim": 4}
FP8 = {"kv_format": "fp8_e4m3fn", "scale": 1.0}
INDEXED = anymla.MODELS["glm-5.3-flash"]
ASKED = {
    "tp": 1, "q_dtype": "bf16", "kv_format": None, "block_size": 64, "q_len": 1, "topk": None, "lse": False,
    "sinks": None, "cached_context": False,
}  # fmt: skip
RESULT = AttentionOutput(torch.zeros(2, 3, 8), torch.zeros(2, 3))
TAKEN = {"out": RESULT.out, "lse": RESULT.lse}
PADDING = HeadPadding.between(3, 6)
RANKS = {"world": 2, "rank": 0, "interleave": 1}


def planned(planner: str, *step: Any, **facts: Any) -> Any:
    return getattr(anymla, planner)(*step, **facts, q_dtype=torch.float32)


RUNS = {
    "decode": planned("plan_decode", BATCH, **WIDTHS, kv_format="fp32").run,
    "sparse_decode": planned("plan_sparse_decode", 2, topk=2, **WIDTHS, block_size=4, kv_format="fp32").run,
    "prefill": planned("plan_prefill", NEW, **WIDTHS, **MHA_WIDTHS).run,
    "index_topk": planned("plan_index_topk", BATCH, topk=4, **INDEX_WIDTHS).run,
    "update": planned("plan_decode", BATCH, **WIDTHS, kv_format="fp32").update,
}

CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "decode": (anymla.decode, QUERIES | PAGES | OUTPUTS | SPANS | {"causal": True} | CHOSEN_BY_NAME),
    "sparse_decode": (anymla.sparse_decode, QUERIES | OUTPUTS | CHOSEN | CHOSEN_BY_NAME),
    "prefill": (
        anymla.prefill,
        NEW_TOKENS | OUTPUTS | {"qo_indptr": ints(0, 2, 3), "causal": True} | CHOSEN_BY_NAME,
    ),
    "write_cache": (
        anymla.write_cache,
        {
            "kv_c": torch.zeros(2, 8),
            "k_pe": torch.zeros(2, 4),
            "kv_cache": torch.zeros(4, 4, 12),
            "slot_mapping": torch.tensor([0, 1]),
            "power_of_two": False,
            "check": False,
        }
        | CHOSEN_BY_NAME,
    ),
    "index_topk": (
        anymla.index_topk,
        INDEX_QUERIES | PAGES | SPANS | {"topk": 4, "as_slots": False} | CHOSEN_BY_NAME,
    ),
    "batch": (
        Batch.of,
        PAGES
        | {"qo_indptr": ints(0, 1, 2), "block_size": 4, "num_blocks": 4, "num_tokens": 2, "max_q_len": 1}
        | {"max_seq_len": 5, "seq_lens_host": [5, 3], "qo_indptr_host": [0, 1, 2], "causal": True}
        | {"new_tokens_are_cached": True, "check": False},
    ),
    "compacted": (anymla.compacted, {"indices": TABLE}),
    "quantise_queries": (
        anymla.quantise_queries,
        {
            "q": torch.zeros(2, 3, 8),
            "weights": torch.zeros(2, 3),
            "kv_format": "index_k",
            "power_of_two": False,
        },
    ),
    "to_slots": (
        anymla.to_slots,
        {"indices": TABLE, "block_table": TABLE, "qo_indptr": ints(0, 1, 2), "block_size": 4},
    ),
    "explain": (anymla.explain, {"problem": anymla.MODELS["deepseek-v3"].problem(), "machine": None}),
    "plan_decode": (
        anymla.plan_decode,
        {"batch": BATCH, "kv_format": "fp32"} | WIDTHS | PLANNED | FLAGS,
    ),
    "plan_sparse_decode": (
        anymla.plan_sparse_decode,
        {"num_tokens": 2, "topk": 4, "block_size": 4, "kv_format": "fp32", "device": "cpu"}
        | WIDTHS
        | PLANNED
        | FLAGS,
    ),
    "plan_prefill": (
        anymla.plan_prefill,
        {"batch": NEW, "kv_format": None} | WIDTHS | MHA_WIDTHS | PLANNED | FLAGS,
    ),
    "plan_index_topk": (anymla.plan_index_topk, {"batch": BATCH, "topk": 4} | INDEX_WIDTHS | PLANNED),
    "run a decode": (RUNS["decode"], QUERIES | OUTPUTS),
    "run a sparse decode": (RUNS["sparse_decode"], QUERIES | OUTPUTS | CHOSEN),
    "run a prefill": (RUNS["prefill"], NEW_TOKENS | OUTPUTS),
    "run an indexer": (RUNS["index_topk"], INDEX_QUERIES | {"as_slots": False, "out": None}),
    "update": (RUNS["update"], {"batch": BATCH}),
    "allocate": (KVCache.allocate, {"num_blocks": 4, "block_size": 4, "device": "cpu"} | CACHE_WIDTHS | FP8),
    "open_cache": (
        anymla.open_cache,
        {"data": torch.zeros(4, 4, 12).to(torch.float8_e4m3fn), "check": False} | CACHE_WIDTHS | FP8,
    ),
    "open_cache by its tag": (
        anymla.open_cache,
        {"data": CACHE.data, "tag": CACHE.tag, "convert_to": "bf16"} | CACHE_WIDTHS,
    ),
    "convert": (convert, {"cache": CACHE} | FP8),
    "read": (CACHE.read, {"slots": torch.tensor([0, 15]), "dtype": torch.float32}),
    "calibrate_scale": (
        anymla.calibrate_scale,
        {"kv_c": torch.ones(2, 8), "k_pe": torch.ones(2, 4), "kv_format": "fp8_e4m3fn", "margin": 1.0},
    ),
    "absorb_q": (anymla.absorb_q, {"q_nope": torch.zeros(2, 3, 6), "w_uk": torch.zeros(3, 6, 8)}),
    "project_v": (anymla.project_v, {"out": torch.zeros(2, 3, 8), "w_uv": torch.zeros(3, 8, 5)}),
    "split_kv_b": (anymla.split_kv_b, {"weight": torch.zeros(33, 8), "num_heads": 3} | MHA_WIDTHS),
    "block_selectors": (
        latent.block_selectors,
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "dtype": torch.float32, "device": "cpu"},
    ),
    "absorb_gqa": (latent.absorb_gqa, {"q": torch.zeros(2, 4, 3), "num_kv_heads": 2}),
    "project_gqa": (latent.project_gqa, {"out": torch.zeros(2, 4, 12), "num_kv_heads": 2}),
    "gqa_latent": (latent.gqa_latent, {"k": torch.zeros(2, 4, 3), "v": torch.zeros(2, 4, 3)}),
    "problem": (INDEXED.problem, {"op": "decode"} | ASKED),
    "problem of an indexer": (INDEXED.problem, {"op": "index_topk"} | ASKED),
    "local_heads": (INDEXED.local_heads, {"tp": 1}),
    "model_named": (anymla.model_named, {"name": "glm-5.3-flash"}),
    "machine_named": (anymla.machine_named, {"name": "cpu"}),
    "this_machine": (anymla.this_machine, {"device": "cpu"}),
    "having": (anymla.machine_named("cpu").having, {"package": "torch", "version": "2.13.0"}),
    "weighed": (select.explain, {"problem": INDEXED.problem(), "machine": anymla.machine_named("cpu")}),
    "choose": (
        select.choose,
        {"problem": INDEXED.problem(), "machine": anymla.machine_named("cpu")} | CHOSEN_BY_NAME,
    ),
    "workspace_bytes": (
        anymla.workspace_bytes,
        {"problem": INDEXED.problem("prefill"), "num_seqs": 1, "num_tokens": 2, "max_seq_len": 4}
        | {"context_tokens": None, "machine": None}
        | CHOSEN_BY_NAME,
    ),
    "merge": (anymla.merge, {"parts": [RESULT, RESULT]}),
    "combine": (dcp.combine, {"parts": [RESULT, RESULT], "sinks": None}),
    "all_gather_combine": (lambda part: part is None or dcp.all_gather_combine(part), {"part": None}),
    "apply_sinks": (anymla.apply_sinks, TAKEN | {"sinks": torch.zeros(3)}),
    "from_sink_included": (merging.from_sink_included, TAKEN | {"sinks": torch.zeros(3)}),
    "from_base2": (merging.from_base2, TAKEN),
    "from_plus_inf_empty": (merging.from_plus_inf_empty, TAKEN),
    "from_head_first": (merging.from_head_first, TAKEN | {"lse": torch.zeros(3, 2)}),
    "from_bhq": (merging.from_bhq, {"out": torch.zeros(2, 3, 4, 8), "lse": torch.zeros(2, 4, 3)}),
    "padding": (HeadPadding, {"num_heads": 3, "padded": 6, "rule": "interleave"}),
    "between": (HeadPadding.between, {"num_heads": 3, "padded": 6}),
    "pad_q": (PADDING.pad_q, {"q": torch.zeros(2, 3, 8), "padded_q": None}),
    "pad_sinks": (PADDING.pad_sinks, {"sinks": torch.zeros(3)}),
    "unpad_out": (PADDING.unpad_out, {"out": torch.zeros(2, 6, 8)}),
    "unpad_lse": (PADDING.unpad_lse, {"lse": torch.zeros(2, 6)}),
    "dcp_local_len": (dcp.dcp_local_len, {"num_tokens": 5} | RANKS),
    "dcp_local_row_lens": (dcp.dcp_local_row_lens, {"seq_len": 5, "q_len": 2} | RANKS),
    "dcp_place": (dcp.dcp_place, {"token": 5, "world": 2, "interleave": 1}),
    "dcp_rows": (dcp.dcp_rows, PAGES | RANKS | {"qo_indptr": ints(0, 1, 2), "num_tokens": 2}),
    "dcp_rows of one token each": (dcp.dcp_rows, PAGES | RANKS | {"qo_indptr": None, "num_tokens": 2}),
}
"""Right calls with the arguments that are tried."""

OTHER_KINDS = {
    "None": None,
    "a half": 3.5,
    "a word": "foo",
    "a list": [1],
    "a dict": {},
    "a list in a tuple": ([1],),
    "nothing": (),
    "an object": object(),
    "-1": -1,
    "numpy": np.int64(3),
    "a dtype": torch.float64,
    "a number": torch.zeros(()),
    "four axes": torch.zeros(3, 2, 2, 2),
    "no elements": torch.zeros(0, dtype=torch.int32),
    "no width": torch.zeros(2, 3, 0),
    "elsewhere": torch.zeros(2, 3, 8, device="meta"),
    "sparse": torch.zeros(2, 3, 8).to_sparse(),
    "complex": torch.zeros(2, 3, 8, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_taken_or_refused_by_us(name: str) -> None:
    function, right = CALLS[name]
    function(**right)
    for argument in right:
        for kind, value in OTHER_KINDS.items():
            try:
                function(**(right | {argument: value}))
            except AnyMLAError:
                pass
            except Exception as error:
                pytest.fail(f"{argument} of {kind}: {type(error).__name__}: {error}")


COUNTS = [
    *(("batch", n) for n in ("block_size", "num_blocks", "num_tokens", "max_q_len", "max_seq_len")),
    *(("plan_sparse_decode", n) for n in ("num_tokens", "topk", "block_size", *WIDTHS)),
    *(("plan_prefill", n) for n in (*WIDTHS, *MHA_WIDTHS)),
    *(("plan_index_topk", n) for n in ("topk", "index_heads", "index_head_dim")),
    *(("plan_decode", n) for n in WIDTHS),
    *(("index_topk", n) for n in ("topk", "max_q_len")),
    ("decode", "max_q_len"),
    ("to_slots", "block_size"),
    *(("allocate", n) for n in ("num_blocks", "block_size", *CACHE_WIDTHS)),
    *(("open_cache", n) for n in CACHE_WIDTHS),
    *(("split_kv_b", n) for n in ("num_heads", *MHA_WIDTHS)),
    *(("block_selectors", n) for n in ("num_heads", "head_dim")),
    *(("problem", n) for n in ("block_size", "q_len", "topk")),
    *(("workspace_bytes", n) for n in ("num_seqs", "num_tokens", "max_seq_len", "context_tokens")),
    *(("dcp_local_len", n) for n in ("num_tokens", "world", "interleave")),
    *(("dcp_local_row_lens", n) for n in ("seq_len", "q_len")),
    *(("dcp_place", n) for n in ("token", "world", "interleave")),
    ("dcp_rows", "num_tokens"),
    ("padding", "num_heads"),
]


@pytest.mark.parametrize(("name", "argument"), COUNTS, ids="-".join)
def test_a_count_is_an_integer_of_any_library_and_nothing_else(name: str, argument: str) -> None:
    function, right = CALLS[name]
    function(**(right | {argument: np.int64(right[argument] or 4)}))
    for value in (True, 3.0, "3", np.float32(3), torch.tensor(3)):
        with pytest.raises(InvalidInput, match=rf"{argument} got .*; needs an integer, at least [01]"):
            function(**(right | {argument: value}))
    with pytest.raises(InvalidInput, match=rf"{argument} got -1; needs at least [01]"):
        function(**(right | {argument: np.int64(-1)}))


FLAGGED = [
    (name, flag) for name, (_, right) in CALLS.items() for flag, value in right.items() if value is False
]


@pytest.mark.parametrize(
    ("name", "flag"), [*FLAGGED, ("batch", "causal"), ("decode", "causal")], ids="-".join
)
def test_a_flag_is_true_or_false_and_nothing_that_may_mean_either(name: str, flag: str) -> None:
    function, right = CALLS[name]
    for value in (None, 0, "no", torch.ones(3)):
        with pytest.raises(InvalidInput, match=rf"{flag} got .*; needs True or False"):
            function(**(right | {flag: value}))


@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), 1], ids=repr)
def test_a_scale_is_a_number_of_any_library(scale: Any) -> None:
    anymla.decode(**(QUERIES | PAGES), sm_scale=scale)


@pytest.mark.parametrize("scale", [True, "1", torch.ones(())], ids=["True", "a word", "a tensor"])
def test_a_scale_is_no_flag_and_no_tensor(scale: Any) -> None:
    with pytest.raises(InvalidInput, match=r"sm_scale got .*; needs a positive finite number"):
        anymla.decode(**(QUERIES | PAGES), sm_scale=scale)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("plan_sparse_decode", {"device": "foo"}), "device got 'foo'; needs a torch.device or the name"),
        (("plan_sparse_decode", {"device": None}), "device got None; needs a torch.device or the name"),
        (("plan_decode", {"machine": "gfx942"}), "machine got 'gfx942'; needs a Machine, from machine_named"),
        (("plan_decode", {"q_dtype": "float32"}), "q_dtype got 'float32'; needs torch.float32, torch"),
        (("plan_decode", {"kv_format": torch.float32}), "kv_format got torch.float32; needs one of bf16"),
        (("plan_decode", {"batch": None}), "batch got NoneType; needs a Batch, from Batch.of"),
        (("update", {"batch": None}), "batch got NoneType; needs a Batch, from Batch.of"),
        (("batch", {"seq_lens_host": [5.0, 3]}), r"seq_lens_host got \[5.0, 3\]; needs integers that"),
        (("batch", {"qo_indptr_host": 3}), "qo_indptr_host got 3; needs integers that the host knows"),
        (("batch", {"qo_indptr": None}), "qo_indptr got None; needs a tensor: qo_indptr_host is given"),
        (("compacted", {"indices": TABLE.to_sparse()}), "indices got layout torch.sparse_coo; needs"),
        (("allocate", {"device": "foo"}),
         "device got 'foo'; needs a torch.device or the name of one of this"),
        (("allocate", {"device": "cuda:99"}), "device got 'cuda:99'; needs a torch.device or the name of"),
        (("allocate", {"kv_lora_rank": None, "qk_rope_head_dim": "4"}),
         "kv_lora_rank got None; needs an integer, at least 1; qk_rope_head_dim got '4'; needs an integer"),
        (("allocate", {"scale": True}), "scale got True; needs .1. fp32 on cpu, above 0 and at most 7.6e"),
        (("allocate", {"scale": 10**400}), "scale got 1000*; needs .1. fp32 on cpu"),
        (("open_cache", {"kv_lora_rank": "8"}),
         "open_cache: kv_lora_rank got '8'; needs an integer, at least 1$"),
        (("open_cache", {"data": CACHE.data.to_sparse(), "kv_format": "fp32", "scale": None}),
         "kv_cache got layout torch.sparse_coo; needs torch.strided"),
        (("open_cache by its tag", {"tag": 3}),
         "tag got 3; needs one of this version, such as 'anymla-kv/1 "),
        (("open_cache by its tag", {"kv_lora_rank": None}),
         "open_cache: kv_lora_rank got None; needs an integer, at least 1$"),
        (("convert", {"cache": CACHE.data}),
         "cache got Tensor; needs a KVCache, from KVCache.allocate or open_"),
        (("read", {"dtype": "float32"}), "dtype got 'float32'; needs a floating torch.dtype"),
        (("calibrate_scale", {"kv_c": None, "k_pe": ints(1)}),
         "kv_c got NoneType; needs a torch.Tensor; k_pe got dtype int32; needs float32 or bfloat16 or"),
        (("calibrate_scale", {"kv_c": torch.zeros(2, 8, device="meta")}),
         "kv_c got device meta; needs values"),
        (("calibrate_scale", {"margin": "2"}), "margin got '2'; needs a finite number, at least 1"),
        (("split_kv_b", {"num_heads": "3", "weight": None}),
         "num_heads got '3'; needs an integer, at least 1; weight got NoneType; needs a torch.Tensor"),
        (("absorb_gqa", {"num_kv_heads": None}), "num_kv_heads got None; needs a divisor of 4, the heads"),
        (("block_selectors", {"dtype": "float32"}),
         "dtype got 'float32'; needs torch.float32 or torch.bfloat16"),
        (("problem", {"op": "decoed", "tp": 3, "q_len": 1.5, "lse": 0}),
         "model: op got decoed; needs one of decode, .*; tp got 3; needs a divisor of 64 heads: 1, 2, .*; "
         "q_len got 1.5; needs an integer, at least 0; lse got 0; needs True or False$"),
        (("problem of an indexer", {"block_size": "64"}),
         "model: block_size got '64'; needs an integer, at least 1$"),
        (("problem of an indexer", {"block_size": 40}),
         "block_size got 40; needs a multiple of 16, the tokens"),
        (("local_heads", {"tp": torch.zeros(2)}), "tp got a tensor on cpu; needs a divisor of 64 heads"),
        (("model_named", {"name": 3}), "model got 3; needs one of deepseek-v2, "),
        (("machine_named", {"name": []}), r"machine got \[\]; needs one of "),
        (("this_machine", {"device": []}),
         r"device got \[\]; needs a torch.device or the name of one of this"),
        (("this_machine", {"device": "foo"}), "device got 'foo'; needs a torch.device or the name of one of"),
        (("having", {"package": "vllm"}), "package got vllm; needs one of torch, triton or aiter"),
        (("choose", {"problem": None, "machine": []}),
         r"problem got None; needs a Problem, .*; machine got \[\]; needs a Machine, from machine_named"),
        (("workspace_bytes", {"machine": ()}),
         r"machine got \(\); needs a Machine, from machine_named or this"),
        (("merge", {"parts": None}), "parts got NoneType; needs a list of AttentionOutput"),
        (("all_gather_combine", {"part": RESULT.out}), "part got Tensor; needs an AttentionOutput"),
        (("padding", {"rule": None}), "rule got None; needs identity or interleave or tile or zero"),
        (("padding", {"padded": "6"}), "padded got '6'; needs at least 3, num_heads"),
        (("pad_q", {"q": None}), "q got NoneType; needs a torch.Tensor"),
        (("dcp_local_len", {"world": "2", "rank": 7}),
         "dcp_local_len: world got '2'; needs an integer, at least 1$"),
    ],
    ids=str,
)  # fmt: skip
def test_the_reason_says_what_is_needed(call: tuple[str, dict[str, Any]], message: str) -> None:
    name, changes = call
    function, right = CALLS[name]
    with pytest.raises(InvalidInput, match=message):
        function(**(right | changes))


@pytest.mark.parametrize("name", [name for name, (_, right) in CALLS.items() if "backend" in right])
@pytest.mark.parametrize("backend", [["cpu"], {}, None, 3, "cup"], ids=repr)
def test_a_backend_is_a_name_in_the_registry(name: str, backend: Any) -> None:
    function, right = CALLS[name]
    with pytest.raises(UnknownBackend, match=rf"backend got {re.escape(repr(backend))}; needs one of auto, "):
        function(**(right | {"backend": backend}))


def test_a_reason_is_given_once() -> None:
    function, right = CALLS["sparse_decode"]
    with pytest.raises(InvalidInput) as caught:
        function(**(right | {"check": 0}))
    assert caught.value.reasons == ("check got 0; needs True or False",)


@pytest.mark.parametrize("known", [(5, 3), np.array([5, 3]), ints(5, 3)], ids=lambda v: type(v).__name__)
def test_lengths_that_the_host_knows_may_stand_in_any_list(known: Any) -> None:
    batch = Batch.of(**{name: t.to("meta") for name, t in PAGES.items()}, block_size=4, seq_lens_host=known)
    assert batch.seq_lens_host == (5, 3)


MORE_QUERIES = {"ql_nope": torch.zeros(3, 3, 8), "q_pe": torch.zeros(3, 3, 4)}
MORE_INDEX_QUERIES = {"q": torch.zeros(3, 3, 8), "weights": torch.zeros(3, 3)}


class TestQueryTokensWithoutOffsets:
    """Without qo_indptr there is one query token a sequence; only offsets say that more rows are padding."""

    REASON = r"qo_indptr got None; needs \[3\] int32: 3 query tokens are more than 2, one a sequence"

    def test_more_than_sequences_are_refused_by_every_operation_alike(self) -> None:
        with pytest.raises(InvalidInput, match=self.REASON):
            anymla.decode(**(QUERIES | MORE_QUERIES | PAGES), sm_scale=0.25)
        with pytest.raises(InvalidInput, match=self.REASON):
            anymla.index_topk(**(INDEX_QUERIES | MORE_INDEX_QUERIES | PAGES), topk=4)
        with pytest.raises(
            InvalidInput, match=r"indices got shape \(3, 2\); needs \(2, any\), B from block_table"
        ):
            anymla.to_slots(torch.zeros(3, 2, dtype=torch.int32), TABLE, None, 4)

    def test_offsets_that_end_before_the_last_row_leave_padding_that_comes_out_empty(self) -> None:
        offsets = {"qo_indptr": ints(0, 1, 2)}
        out, lse = anymla.decode(
            **(QUERIES | MORE_QUERIES | PAGES), **offsets, sm_scale=0.25, return_lse=True
        )
        assert lse is not None and bool((lse[2] == -torch.inf).all()) and bool((out[2] == 0).all())
        ids = anymla.index_topk(**(INDEX_QUERIES | MORE_INDEX_QUERIES | PAGES), **offsets, topk=4)
        assert ids[2].tolist() == [-1] * 4
        assert anymla.to_slots(ids, TABLE, offsets["qo_indptr"], 4)[2].tolist() == [-1] * 4

    def test_a_batch_that_names_its_tokens_has_padding_too(self) -> None:
        assert Batch.of(**PAGES, block_size=4, num_tokens=3).num_tokens == 3
