"""The operations of the AITER backend, as every backend has them."""

from anymla.backends.aiter_mla.decode import (
    decode,
    plan_decode,
    plan_sparse_decode,
    sparse_decode,
    update_decode,
)
from anymla.backends.aiter_mla.prefill import plan_prefill, prefill

__all__ = [
    "decode",
    "plan_decode",
    "plan_prefill",
    "plan_sparse_decode",
    "prefill",
    "sparse_decode",
    "update_decode",
]
