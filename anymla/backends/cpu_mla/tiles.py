"""KeyTiles: some keys of one sequence, out of any cache, as fp32 rows in memory that the plan owns."""

import torch
from torch import Tensor

from anymla.kv_cache import KV_FORMATS, KVCache

TILE = 512
"""Keys worked on at a time: with 512/64 rows, 1.2 MB of fp32, which stays in the caches of a core."""


class KeyTiles:
    """Scratch for up to TILE keys, and the ways to fill it. Only the keys asked for are read."""

    def __init__(self, kv_format: str, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
        row = KV_FORMATS[kv_format]
        width = kv_lora_rank + qk_rope_head_dim
        self._keys = torch.empty((TILE, width), dtype=torch.float32)
        self._is_copied_only = row.dtype == torch.float32
        self._raw = self._keys
        if not self._is_copied_only:
            stored = row.row_width(kv_lora_rank, qk_rope_head_dim)
            self._raw = torch.empty((TILE, stored), dtype=row.storage_dtype)
        self._dequant = row.dequant_scratch(TILE, kv_lora_rank, qk_rope_head_dim)
        self._count = torch.arange(TILE)
        self._token = torch.empty(TILE, dtype=torch.int64)
        self._block = torch.empty(TILE, dtype=torch.int64)
        self._page = torch.empty(TILE, dtype=torch.int32)

    def load(self, cache: KVCache, pages: Tensor, first: int, last: int) -> Tensor:
        """Tokens first to last - 1 of the sequence with these pages [max_blocks], as fp32 [n, L + R]."""
        size, count = cache.block_size, last - first
        if cache.format.block_flat:
            token = torch.add(self._count[:count], first, out=self._token[:count])
            blocks = torch.div(token, size, rounding_mode="floor", out=self._block[:count])
            page = torch.index_select(pages, 0, blocks, out=self._page[:count])
            cache.gather_into(page, token.remainder_(size), self._raw[:count])
            return self._values(cache, count)
        storage, at = cache.storage, first
        while at < last:
            block, position = divmod(at, size)
            whole = 0 if position else (last - at) // size
            if whole:
                raw = self._raw[at - first : at - first + whole * size]
                torch.index_select(storage, 0, pages[block : block + whole], out=raw.view(whole, size, -1))
                at += whole * size
            else:
                part = min(size - position, last - at)
                page = storage[int(pages[block])]
                self._raw[at - first : at - first + part].copy_(page[position : position + part])
                at += part
        return self._values(cache, count)

    def load_slots(self, cache: KVCache, slots: Tensor) -> Tensor:
        """The tokens in these slots [n] int64, as fp32 [n, L + R]."""
        count = slots.shape[0]
        pages = torch.div(slots, cache.block_size, rounding_mode="floor", out=self._block[:count])
        position = torch.remainder(slots, cache.block_size, out=self._token[:count])
        cache.gather_into(pages, position, self._raw[:count])
        return self._values(cache, count)

    def load_new(self, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        """Tokens that are in no cache, from kv_c [n, L] and k_pe [n, R], as fp32 [n, L + R]."""
        keys = self._keys[: kv_c.shape[0]]
        keys[:, : kv_c.shape[1]].copy_(kv_c)
        keys[:, kv_c.shape[1] :].copy_(k_pe)
        return keys

    def _values(self, cache: KVCache, count: int) -> Tensor:
        keys = self._keys[:count]
        if not self._is_copied_only:
            cache.dequantise(self._raw[:count], keys, self._dequant.first(count))
        return keys
