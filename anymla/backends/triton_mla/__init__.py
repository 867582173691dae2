"""The portable GPU backend: Triton kernels for AMD and NVIDIA from one source."""

from anymla.backends.triton_mla.decode import (
    decode,
    plan_decode,
    plan_sparse_decode,
    sparse_decode,
    update_decode,
    workspace_bytes,
)

__all__ = ["decode", "plan_decode", "plan_sparse_decode", "sparse_decode", "update_decode", "workspace_bytes"]
