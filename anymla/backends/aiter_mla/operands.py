"""Operands of AITER: keys and values, decompressed or in fp8, the cache as rows of one token, lengths."""

from collections.abc import Mapping

import torch
from torch import Tensor

from anymla.contract import Batch
from anymla.errors import Reasons
from anymla.kv_cache import KVCache
from anymla.problem import Problem

GIB = 1 << 30
INT32_MAX = torch.iinfo(torch.int32).max
EXPANDED_BYTES = 512 << 20
"""Operands of one launch of a prefill, with what is between them and the latents."""


def host_lengths(batch: Batch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens before those of this step, a sequence, and offsets of query tokens, for planners on the host."""
    # Its row offers no Feature.DEVICE_LENGTHS.
    assert batch.context_lens_host is not None and batch.qo_indptr_host is not None
    return batch.context_lens_host, batch.qo_indptr_host


def expanded(latents: Tensor, rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [n, H, P + R] and values [n, H, V] of latents [n, L] and rope [n, R] for weights of H heads."""
    heads = w_uk.shape[0]
    every = latents.expand(heads, -1, -1)
    nope = torch.bmm(every, w_uk.mT).transpose(0, 1)
    return torch.cat((nope, rope[:, None].expand(-1, heads, -1)), -1), torch.bmm(every, w_uv).transpose(0, 1)


def rounded(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values as fp8 and the scale, [1] fp32, that gives them back; NaN stays, infinities saturate."""
    largest = torch.finfo(dtype).max
    # What is no number must not become the scale of all the rest.
    most = values.abs().nan_to_num_(0.0, 0.0).amax().float()
    scale = (most / largest).clamp_(min=torch.finfo(torch.float32).tiny)
    return (values.float() / scale).clamp_(-largest, largest).to(dtype), scale.reshape(1)


def rows_of(cache: KVCache, knobs: Mapping[str, int]) -> Tensor:
    """The cache as [rows, 1, 1, L + R], one token a page; rows between its pages belong to nobody."""
    reasons, data = Reasons("decode"), cache.data
    page, row, element = data.stride()
    fits = element == 1 and row >= data.shape[-1] and page % max(row, 1) == 0 and page >= row
    reasons.need(fits, "kv_cache", f"strides {data.stride()}", "pages of whole rows for backend aiter")
    reasons.raise_if_any()
    rows = (cache.num_blocks - 1) * (page // row) + cache.block_size
    reasons.need(rows <= INT32_MAX, "kv_cache", f"{rows} rows", "less than 2^31 for backend aiter")
    most, size = knobs.get("max_cache_gib", 0) * GIB, rows * row * data.element_size()
    needs = f"at most {most} with this AITER; backend triton has no such bound"
    reasons.need(not most or size <= most, "kv_cache", f"{size} bytes", needs)
    reasons.raise_if_any()
    return data.as_strided((rows, 1, 1, data.shape[-1]), (row, row, row, 1))


def dtype_of(name: str, problem: Problem) -> torch.dtype:
    """bf16, or the fp8 of the cache."""
    if name == "bf16":
        return torch.bfloat16
    return torch.float8_e4m3fnuz if problem.kv_format == "fp8_e4m3fnuz" else torch.float8_e4m3fn
