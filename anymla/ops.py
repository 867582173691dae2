"""torch custom ops: `anymla::x` returns new tensors, `anymla::x_out` writes into the caller's.

Importing this module registers them; `torch.ops.anymla.decode` and its kin then work under torch.compile with
fullgraph=True. Both forms call the function of the same name in `api`: arguments, results and errors
are its own. Attention returns its lse, always; in place it writes one only where it is given the memory,
which more kernels can serve.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla import api, contract

_CACHE = "str? kv_format=None, Tensor? k_scale=None, str backend='auto'"
_QUERIES = "Tensor? q_scale=None"
_BOUND = "SymInt? max_q_len=None"
_PAGES = "Tensor block_table, Tensor seq_lens"

_SCHEMAS = {
    "decode": "Tensor ql_nope, Tensor q_pe, Tensor kv_cache, *, "
    f"{_PAGES}, float sm_scale, Tensor? qo_indptr=None, bool causal=True, Tensor? sinks=None, "
    f"{_CACHE}, {_QUERIES}, {_BOUND}",
    "sparse_decode": "Tensor ql_nope, Tensor q_pe, Tensor kv_cache, *, "
    f"Tensor indices, float sm_scale, Tensor? counts=None, Tensor? sinks=None, {_CACHE}, {_QUERIES}",
    "prefill": "Tensor q_nope, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor w_uk, Tensor w_uv, *, "
    "Tensor qo_indptr, float sm_scale, Tensor? kv_cache=None, Tensor? block_table=None, "
    f"Tensor? seq_lens=None, bool causal=True, Tensor? sinks=None, {_CACHE}, {_BOUND}",
    "index_topk": "Tensor q, Tensor weights, Tensor index_cache, *, "
    f"{_PAGES}, int topk, Tensor? qo_indptr=None, bool as_slots=False, str? kv_format=None, "
    f"str backend='auto', {_BOUND}",
    "write_cache": f"Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, *, "
    f"bool power_of_two=False, {_CACHE}",
}


def _attention(name: str, function: Callable[..., Any], out_shape: Callable[..., Sequence[int]]) -> None:
    def functional(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return tuple(function(*args, return_lse=True, **kwargs))

    def in_place(*args: Any, lse: Tensor | None = None, **kwargs: Any) -> None:
        function(*args, return_lse=lse is not None, lse=lse, **kwargs)

    def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        queries, shape = args[0], out_shape(*args)
        dtype = contract.out_dtypes(queries.dtype)[0]
        return queries.new_empty(shape, dtype=dtype), queries.new_empty(shape[:2], dtype=torch.float32)

    _register(name, f"({_SCHEMAS[name]}) -> (Tensor, Tensor)", functional, fake)
    written = "Tensor(a!) out, Tensor(b!)? lse=None"
    _register(f"{name}_out", f"({_SCHEMAS[name]}, {written}) -> ()", in_place, _nothing)


def _register(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    torch.library.define(f"anymla::{name}", schema)
    torch.library.impl(f"anymla::{name}", "CompositeExplicitAutograd", function)
    torch.library.register_fake(f"anymla::{name}", fake)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op that only writes into its arguments."""


def _index_topk(*args: Any, **kwargs: Any) -> Tensor:
    return api.index_topk(*args, **kwargs)


def _index_topk_out(*args: Any, **kwargs: Any) -> None:
    api.index_topk(*args, **kwargs)


def _index_topk_fake(q: Tensor, *args: Any, topk: int, **kwargs: Any) -> Tensor:
    return q.new_empty((q.shape[0], topk), dtype=torch.int32)


_attention("decode", api.decode, lambda ql_nope, *rest: ql_nope.shape)
_attention("sparse_decode", api.sparse_decode, lambda ql_nope, *rest: ql_nope.shape)
_attention("prefill", api.prefill, lambda q_nope, *rest: (*q_nope.shape[:2], rest[4].shape[-1]))
_register("index_topk", f"({_SCHEMAS['index_topk']}) -> Tensor", _index_topk, _index_topk_fake)
_register("index_topk_out", f"({_SCHEMAS['index_topk']}, Tensor(a!) out) -> ()", _index_topk_out, _nothing)
_register("write_cache", f"({_SCHEMAS['write_cache']}) -> ()", api.write_cache, _nothing)
