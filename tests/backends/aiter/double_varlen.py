"""AITER's varlen attention in 16 bits, with the lse of its heads first, and how it fails."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from double_part import Part
from torch import Tensor

BLOCK = 128
NAN = math.nan


class VarlenDouble(Part):
    """One release on one chip.

    Attributes:
        keys: Keys of each launch.
        rows: Rows of each launch.
        heads: Heads of each launch.
    """

    def __init__(self, release: str = "HEAD", arch: str = "gfx950", units: int = 64) -> None:
        super().__init__(release, arch, units)
        self.keys: list[int] = []
        self.rows: list[int] = []
        self.heads: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "VarlenDouble":
        """Stand in for `aiter` until the test ends."""
        self.offer(monkeypatch, {"flash_attn_varlen_func": self._attend}, compiled=False)
        return self

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        starts, kv_starts = given["cu_seqlens_q"], given["cu_seqlens_k"]
        if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if any(t.dtype != torch.int32 or not t.is_contiguous() for t in (starts, kv_starts)):
            raise RuntimeError("cu_seqlens_q must have dtype int32, and be contiguous")
        if any(t.stride(-1) != 1 for t in (q, k, v)) or (q.shape[2], v.shape[2]) != (192, 128):
            raise RuntimeError("invalid argument for fmha_fwd")
        if starts.shape != kv_starts.shape or not q.shape[0] or not given["max_seqlen_k"]:
            raise RuntimeError("batch size must be postive")
        assert given["return_lse"] and given["out"] is None and given["sink_ptr"] is None
        q_ends, k_ends = starts.tolist(), kv_starts.tolist()
        assert (q_ends[0], q_ends[-1], k_ends[0], k_ends[-1]) == (0, q.shape[0], 0, k.shape[0])
        assert given["max_seqlen_q"] >= max(b - a for a, b in pairwise(q_ends))
        assert given["max_seqlen_k"] >= max(b - a for a, b in pairwise(k_ends))
        self.keys.append(k.shape[0]), self.rows.append(q.shape[0]), self.heads.append(q.shape[1])
        # Rows without keys: whatever was there, and an lse that is none.
        out = torch.full((*q.shape[:2], v.shape[2]), NAN, dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), math.inf)
        spans = zip(pairwise(q_ends), pairwise(k_ends), strict=True)
        for (first, last), (begin, end) in ((rows, keys) for rows, keys in spans if keys[0] < keys[1]):
            n, m = last - first, end - begin
            logits = torch.einsum("qhd,khd->hqk", q[first:last].float(), k[begin:end].float())
            logits *= given["softmax_scale"]
            if given["causal"]:
                logits.masked_fill_(torch.ones(n, m, dtype=torch.bool).triu(1 + m - n), -math.inf)
            lse[:, first:last] = logits.logsumexp(-1)
            weights = (logits - lse[:, first:last, None]).exp()
            values = torch.einsum("hqk,khd->qhd", weights, v[begin:end].float())
            # Lanes past the tail read what follows, and 0 · NaN is NaN.
            tile = slice(begin, begin + -(-m // BLOCK) * BLOCK)
            bad = (k[tile].isnan().any(-1) | v[tile].isnan().any(-1)).any(0)
            out[first:last] = torch.where(bad[:, None], NAN, values).to(q.dtype)
        return out, lse
