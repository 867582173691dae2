"""Operands of AITER: values in fp8, the cache as rows of one token, dtypes by their names."""

from collections.abc import Mapping

import torch
from torch import Tensor

from anymla.errors import Reasons
from anymla.kv_cache import KVCache
from anymla.problem import Problem

GIB = 1 << 30
INT32_MAX = torch.iinfo(torch.int32).max


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
    reasons.need(not most or size <= most, "kv_cache", f"{size} bytes", f"at most {most} with this AITER")
    reasons.raise_if_any()
    return data.as_strided((rows, 1, 1, data.shape[-1]), (row, row, row, 1))


def dtype_of(name: str, problem: Problem) -> torch.dtype:
    """bf16, or the fp8 of the cache."""
    if name == "bf16":
        return torch.bfloat16
    return torch.float8_e4m3fnuz if problem.kv_format == "fp8_e4m3fnuz" else torch.float8_e4m3fn
