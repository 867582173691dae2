"""Hostile memory: pages in random order, traps behind every table row, poison in every slot not written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anymla.kv_cache import KV_FORMATS, KVCache

ABSURD_PAGES = (torch.iinfo(torch.int32).max, -7, 123_456_789)
"""Page ids past the end of a table row."""

POISONS = ("nan", "inf", "needle")
"""What dead memory holds: NaN, infinities (NaN where a format has none), or finite keys of large weight."""

NAN_BYTE = {torch.float8_e4m3fn: 0x7F, torch.float8_e4m3fnuz: 0x80}


class Draw:
    """Seeded tensors on torch's default device; drawn on the CPU, so that they are the same on any."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.source: dict[str, Any] = {"generator": self.generator, "device": "cpu"}

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Independent standard normal values, drawn in fp32."""
        return torch.randn(shape, **self.source).to(torch.get_default_device(), dtype)

    def permuted(self, n: int) -> Tensor:
        """The numbers below n in random order."""
        return torch.randperm(n, **self.source).to(torch.get_default_device())

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from low to high, both included, as fp32."""
        return torch.randint(low, high + 1, shape, **self.source).to(torch.get_default_device()).float()


@dataclass(frozen=True)
class Pages:
    """Where the tokens of some sequences lie.

    Attributes:
        block_table: [B, max_blocks] int32; absurd past each sequence's last page.
        num_blocks: Pages of the cache, foreign ones included.
        slots: The slots of each sequence's tokens, in order.
        dead: Slots just past the end of each sequence, on its last page.
    """

    block_table: Tensor
    num_blocks: int
    slots: tuple[Tensor, ...]
    dead: Tensor

    @property
    def live(self) -> Tensor:
        """The slots of all tokens, one sequence after another."""
        return _joined(self.slots)


@dataclass(frozen=True)
class Memory:
    """What a cache is like, and what stands where nobody wrote.

    Attributes:
        kv_format: Name of a row of KV_FORMATS.
        block_size: Tokens a page.
        poison: One of POISONS.
        views: Leave gaps between pages, table columns and, where the format allows it, tokens.
    """

    kv_format: str
    block_size: int
    poison: str = "nan"
    views: bool = False

    def pages(self, draw: Draw, seq_lens: Sequence[int]) -> Pages:
        """Give each sequence pages in random order, with foreign pages between them and traps behind them."""
        counts = [-(-n // self.block_size) for n in seq_lens]
        ids = draw.permuted(sum(counts) + max(2, sum(counts) // 8))
        columns = max(counts, default=0) + 2
        traps = torch.tensor(ABSURD_PAGES, dtype=torch.int32)
        table = traps[torch.arange(len(counts) * columns * 2) % len(traps)].view(len(counts), columns * 2)
        table = table[:, ::2] if self.views else table[:, :columns].contiguous()
        slots, dead, used = [], [], 0
        for row, (n, count) in enumerate(zip(seq_lens, counts, strict=True)):
            own = ids[used : used + count]
            used += count
            table[row, :count] = own.int()
            places = (own[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
            slots.append(places[:n])
            dead.append(places[n : n + 1])
        return Pages(table, len(ids), tuple(slots), _joined(dead))

    def poisoned(
        self, num_blocks: int, kv_lora_rank: int, qk_rope_head_dim: int, scale: Tensor | None = None
    ) -> KVCache:
        """A cache in which every slot is NaN or infinite, and every gap."""
        row = KV_FORMATS[self.kv_format]
        width = row.row_width(kv_lora_rank, qk_rope_head_dim)
        gap = 16 if self.views and not row.block_flat else 0
        step = 2 if self.views else 1
        whole = torch.zeros((num_blocks * step, self.block_size, width + gap), dtype=row.storage_dtype)
        bad = torch.inf if self.poison == "inf" else torch.nan
        _fill(whole, row.value_dtype, bad)
        data = whole[::step, :, :width]
        cache = KVCache(data.view(row.dtype), row, kv_lora_rank, qk_rope_head_dim, scale)
        if row.tile:
            every = torch.arange(num_blocks * self.block_size)
            raw = cache.gather(every)
            end = kv_lora_rank + 4 * row.num_tiles(kv_lora_rank)
            raw[:, kv_lora_rank:end] = torch.full((1, (end - kv_lora_rank) // 4), bad).view(torch.uint8)
            raw[:, end:] = torch.full((1, qk_rope_head_dim), bad, dtype=torch.bfloat16).view(torch.uint8)
            cache.scatter(raw, every)
        return cache


def _fill(storage: Tensor, value_dtype: torch.dtype, bad: float) -> None:
    """NaN, or infinities of both signs; NaN bytes where a format has no infinity."""
    if storage.dtype == torch.uint8:
        storage.fill_(NAN_BYTE[value_dtype])
        if value_dtype == torch.float8_e4m3fn:
            storage[..., ::2] = 0xFF
        return
    storage.fill_(bad)
    storage[..., ::2] = -bad


def _joined(slots: Sequence[Tensor]) -> Tensor:
    return torch.cat([*slots, torch.zeros(0, dtype=torch.int64)])
