"""KV_FORMATS: how one token lies in a paged cache, and the tag that says so.

A stored fp8 value is x / scale in fp32, clamped to the largest finite value and rounded to nearest, ties to
even: ±inf saturates, NaN stays NaN. bf16, fp16 and fp32 parts are IEEE casts and keep ±inf. A scale in a row
is the largest magnitude that it covers over the largest stored value, NaN left out. L = kv_lora_rank, R =
qk_rope_head_dim.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anymla import fp8
from anymla.arguments import shown
from anymla.errors import Reasons
from anymla.problem import FOREIGN_FORMAT_NAMES, KV_FORMAT_NAMES, canonical_name

SHUFFLE = 16
"""Tokens of a tile of shuffled values, and values of each."""


@dataclass(frozen=True)
class KVFormat:
    """One way to store a token. A row of KV_FORMATS.

    Attributes:
        name: Key of KV_FORMATS, one of problem.KV_FORMAT_NAMES.
        dtype: Element of KVCache.data; uint8 where a row mixes kinds.
        value_dtype: Element of the stored latent.
        scaled: One fp32 scale for the whole cache is required.
        source: Where the layout is defined.
        tile: Latent values that share a scale in the row, -1 for all L of them, 0 for no scale in the row.
        block_flat: A page holds the values of all its tokens, then the scales of all its tokens.
        shuffled: Those values lie in tiles of 16 tokens by 16 values, a tile after another along the tokens'
            width, as matrix units take them; so a page has a multiple of 16 tokens.
    """

    name: str
    dtype: torch.dtype
    value_dtype: torch.dtype
    scaled: bool
    source: str
    tile: int = 0
    block_flat: bool = False
    shuffled: bool = False

    @property
    def largest(self) -> float:
        """The largest finite stored value."""
        return torch.finfo(self.value_dtype).max

    @property
    def storage_dtype(self) -> torch.dtype:
        """What rows are moved as: uint8 for one-byte elements, because few operations take float8."""
        return torch.uint8 if self.dtype in fp8.FLAVOURS else self.dtype

    def num_tiles(self, kv_lora_rank: int) -> int:
        """Scales in one row."""
        if not self.tile:
            return 0
        return 1 if self.tile < 0 else kv_lora_rank // self.tile

    def row_width(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Elements in the last axis of the cache."""
        if not self.tile:
            return kv_lora_rank + qk_rope_head_dim
        return kv_lora_rank + 4 * self.num_tiles(kv_lora_rank) + 2 * qk_rope_head_dim

    def bytes_per_token(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Cache bytes of one token, such as 1152 for bf16 at 512/64."""
        return self.row_width(kv_lora_rank, qk_rope_head_dim) * self.dtype.itemsize

    def dequant_scratch(self, num_tokens: int, kv_lora_rank: int, qk_rope_head_dim: int) -> "DequantScratch":
        """CPU memory to dequantise so many tokens in; of width 0 where none is needed."""
        stored = kv_lora_rank if self.tile else kv_lora_rank + qk_rope_head_dim if self.scaled else 0
        bits = torch.empty((num_tokens, stored), dtype=torch.int16)
        tiles = self.num_tiles(kv_lora_rank)
        return DequantScratch(bits, torch.empty((num_tokens, tiles), dtype=torch.float32))

    def refusal(self, kv_lora_rank: int, qk_rope_head_dim: int, block_size: int | None = None) -> str | None:
        """Why this format cannot store rows of these widths (in pages of this size), or None if it can."""
        reasons = Reasons(self.name)
        least = (SHUFFLE if self.shuffled else 4) if self.block_flat else max(self.tile, 1)
        if self.shuffled and block_size is not None:
            needs = f"a multiple of {SHUFFLE} for {self.name}"
            reasons.need(block_size % SHUFFLE == 0, "block_size", block_size, needs)
        fits = kv_lora_rank >= 1 and kv_lora_rank % least == 0
        needs = f"a multiple of {least} for {self.name}" if least > 1 else "at least 1"
        reasons.need(fits, "kv_lora_rank", kv_lora_rank, needs)
        if self.block_flat:
            reasons.need(qk_rope_head_dim == 0, "qk_rope_head_dim", qk_rope_head_dim, f"0 for {self.name}")
        elif self.tile:
            # Every row starts at a multiple of 4 bytes, for its fp32 scales.
            even = qk_rope_head_dim >= 0 and qk_rope_head_dim % 2 == 0
            reasons.need(even, "qk_rope_head_dim", qk_rope_head_dim, f"0 or an even number for {self.name}")
        else:
            reasons.need(qk_rope_head_dim >= 0, "qk_rope_head_dim", qk_rope_head_dim, "at least 0")
        return "; ".join(reasons.found) or None


def _plain(name: str, dtype: torch.dtype, source: str) -> KVFormat:
    return KVFormat(name, dtype, dtype, dtype in fp8.FLAVOURS, source)


_CONCAT = "vLLM csrc/cache_kernels.cu, concat_and_cache_mla"
_DS_MLA = "vLLM csrc/cache_kernels.cu, concat_and_cache_ds_mla; FlashMLA README, FP8 KV cache"
_INDEX_K = "vLLM csrc/cache_kernels.cu, indexer_k_quant_and_cache; DeepGEMM fp8_paged_mqa_logits"
_SHUFFLED = "AITER csrc/kernels/cache_kernels.cu, indexer_k_quant_and_cache, preshuffle"

KV_FORMATS = {
    row.name: row
    for row in (
        _plain("bf16", torch.bfloat16, _CONCAT),
        _plain("fp16", torch.float16, _CONCAT),
        _plain("fp32", torch.float32, _CONCAT),
        _plain("fp8_e4m3fn", fp8.FN, f"{_CONCAT}, kv_cache_dtype fp8; OCP OFP8 1.0"),
        _plain("fp8_e4m3fnuz", fp8.FNUZ, f"{_CONCAT}, kv_cache_dtype fp8; arXiv 2206.02915"),
        KVFormat("fp8_ds_mla", torch.uint8, fp8.FN, False, _DS_MLA, tile=128),
        KVFormat("fp8_ds_mla_fnuz", torch.uint8, fp8.FNUZ, False, _DS_MLA, tile=128),
        KVFormat("index_k", torch.uint8, fp8.FN, False, _INDEX_K, tile=-1, block_flat=True),
        KVFormat("index_k_fnuz", torch.uint8, fp8.FNUZ, False, _INDEX_K, tile=-1, block_flat=True),
    )
}
"""Every format that a backend for any chip may have, by name."""

FOREIGN_FORMATS = {
    row.name: row
    for row in (
        KVFormat("index_k_shuffled", torch.uint8, fp8.FN, False, _SHUFFLED, -1, True, True),
        KVFormat("index_k_shuffled_fnuz", torch.uint8, fp8.FNUZ, False, _SHUFFLED, -1, True, True),
    )
}
"""Those of one library, by name."""

assert tuple(KV_FORMATS) == KV_FORMAT_NAMES and tuple(FOREIGN_FORMATS) == FOREIGN_FORMAT_NAMES

NAME_OF_DTYPE = {row.dtype: row.name for row in KV_FORMATS.values() if row.dtype != torch.uint8}
"""The format of which data of a dtype is, where the dtype tells."""


class DequantScratch(NamedTuple):
    """Memory that `KVCache.dequantise` works in, so that it allocates nothing that grows with the tokens.

    Attributes:
        bits: [n, values of a token in fp8] int16.
        scales: [n, tiles] fp32.
    """

    bits: Tensor
    scales: Tensor

    def first(self, num_tokens: int) -> "DequantScratch":
        """That of the first tokens, a view."""
        return DequantScratch(self.bits[:num_tokens], self.scales[:num_tokens])


@dataclass(frozen=True)
class Tag:
    """What a cache's bytes mean, without the cache.

    Attributes:
        kv_format: Name of a row of KV_FORMATS.
        kv_lora_rank: L.
        qk_rope_head_dim: R.
        block_size: Tokens a page.
    """

    kv_format: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    block_size: int

    def __str__(self) -> str:
        widths = f"L={self.kv_lora_rank} R={self.qk_rope_head_dim}"
        return f"anymla-kv/1 {self.kv_format} {widths} block={self.block_size}"

    @classmethod
    def parse(cls, text: str) -> "Tag | None":
        """Read a tag, or None if it is none of this version or names no format."""
        pattern = r"anymla-kv/1 (\w+) L=(\d+) R=(\d+) block=(\d+)"
        match = re.fullmatch(pattern, text, re.ASCII) if isinstance(text, str) else None
        if match is None or match[1] not in KV_FORMATS | FOREIGN_FORMATS:
            return None
        return cls(match[1], int(match[2]), int(match[3]), int(match[4]))


def row_named(reasons: Reasons, argument: str, name: str) -> KVFormat | None:
    """The row of that name; a bare "fp8" names none, because its flavour differs from chip to chip."""
    known = KV_FORMATS | FOREIGN_FORMATS
    row = known.get(canonical_name(name, "")) if isinstance(name, str) else None
    reasons.need(row is not None, argument, shown(name), f"one of {', '.join(KV_FORMATS)}")
    return row
