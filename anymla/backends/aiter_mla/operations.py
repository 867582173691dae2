"""The operations of the AITER backend, as every backend has them."""

from anymla.backends.aiter_mla.cache_write import write_cache
from anymla.backends.aiter_mla.decode import (
    decode,
    plan_decode,
    plan_sparse_decode,
    sparse_decode,
    update_decode,
)
from anymla.backends.aiter_mla.index import index_topk, plan_index_topk, update_index_topk
from anymla.backends.aiter_mla.prefill import plan_prefill, prefill

__all__ = [
    "decode",
    "index_topk",
    "plan_decode",
    "plan_index_topk",
    "plan_prefill",
    "plan_sparse_decode",
    "prefill",
    "sparse_decode",
    "update_decode",
    "update_index_topk",
    "write_cache",
]
