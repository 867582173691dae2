"""The portable GPU backend: Triton kernels for AMD and NVIDIA from one source."""

from anymla.backends.triton_mla.cache_write import write_cache
from anymla.backends.triton_mla.decode import (
    decode,
    plan_decode,
    plan_sparse_decode,
    sparse_decode,
    update_decode,
)
from anymla.backends.triton_mla.index_topk import (
    index_choice,
    index_scores,
    index_topk,
    index_workspace_bytes,
    plan_index_topk,
    update_index_topk,
)
from anymla.backends.triton_mla.prefill import plan_prefill, prefill, prefill_workspace_bytes
from anymla.backends.triton_mla.workspace import workspace_bytes

__all__ = [
    "decode",
    "index_choice",
    "index_scores",
    "index_topk",
    "index_workspace_bytes",
    "plan_decode",
    "plan_index_topk",
    "plan_prefill",
    "plan_sparse_decode",
    "prefill",
    "prefill_workspace_bytes",
    "sparse_decode",
    "update_decode",
    "update_index_topk",
    "workspace_bytes",
    "write_cache",
]
