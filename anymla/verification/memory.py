"""Hostile memory: pages in random order, traps behind every table row, poison in every slot not written."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.kv_cache import KV_FORMATS, KVCache

ABSURD_PAGES = (torch.iinfo(torch.int32).max, -7, 123_456_789)
"""Page ids past the end of a table row."""

NAN_BYTE = {torch.float8_e4m3fn: 0x7F, torch.float8_e4m3fnuz: 0x80}


class Draw:
    """Seeded tensors, drawn on the CPU in fp32 and rounded to the dtype asked for."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Independent standard normal values."""
        return torch.randn(shape, generator=self.generator).to(dtype)

    def permuted(self, n: int) -> Tensor:
        """The numbers below n in random order."""
        return torch.randperm(n, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from low to high, both included, as fp32."""
        return torch.randint(low, high + 1, shape, generator=self.generator).float()


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


def lay_out(draw: Draw, seq_lens: Sequence[int], block_size: int, *, views: bool = False) -> Pages:
    """Give each sequence pages in random order, with foreign pages between them and traps behind them."""
    counts = [-(-n // block_size) for n in seq_lens]
    foreign = max(2, sum(counts) // 8)
    ids = draw.permuted(sum(counts) + foreign)
    columns = max(counts, default=0) + 2
    traps = torch.tensor(ABSURD_PAGES, dtype=torch.int32)
    table = traps[torch.arange(len(counts) * columns * 2) % len(traps)].view(len(counts), columns * 2)
    table = table[:, ::2] if views else table[:, :columns].contiguous()
    slots, dead, used = [], [], 0
    for row, (n, count) in enumerate(zip(seq_lens, counts, strict=True)):
        pages = ids[used : used + count]
        used += count
        table[row, :count] = pages.int()
        own = (pages[:, None] * block_size + torch.arange(block_size)).flatten()
        slots.append(own[:n])
        dead.append(own[n : n + 1])
    return Pages(
        table, len(ids), tuple(slots), torch.cat(dead) if dead else torch.zeros(0, dtype=torch.int64)
    )


def poisoned_cache(
    num_blocks: int,
    block_size: int,
    *,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    kv_format: str,
    scale: Tensor | None = None,
    poison: str = "nan",
    views: bool = False,
) -> KVCache:
    """A cache in which every slot is poison, its gaps too.

    Args:
        num_blocks: Pages.
        block_size: Tokens a page.
        kv_lora_rank: L.
        qk_rope_head_dim: R.
        kv_format: Name of a row of KV_FORMATS.
        scale: [1] fp32 for the formats with one scale.
        poison: "nan" or "inf".
        views: Leave gaps between pages and, where the format allows it, between tokens.

    Returns:
        The cache.
    """
    row = KV_FORMATS[kv_format]
    width = row.row_width(kv_lora_rank, qk_rope_head_dim)
    gap = 16 if views and not row.block_flat else 0
    whole = torch.zeros((num_blocks * (2 if views else 1), block_size, width + gap), dtype=row.storage_dtype)
    _poison(whole, row.value_dtype, poison)
    data = whole[:: 2 if views else 1, :, :width]
    cache = KVCache(data.view(row.dtype), row, kv_lora_rank, qk_rope_head_dim, scale)
    if row.tile:
        every = torch.arange(num_blocks * block_size)
        raw = cache.gather(every)
        end = kv_lora_rank + 4 * row.num_tiles(kv_lora_rank)
        bad = torch.nan if poison == "nan" else torch.inf
        raw[:, kv_lora_rank:end] = torch.full((1, (end - kv_lora_rank) // 4), bad).view(torch.uint8)
        raw[:, end:] = torch.full((1, qk_rope_head_dim), bad, dtype=torch.bfloat16).view(torch.uint8)
        cache.scatter(raw, every)
    return cache


def _poison(storage: Tensor, value_dtype: torch.dtype, poison: str) -> None:
    if storage.dtype == torch.uint8:
        storage.fill_(NAN_BYTE[value_dtype])
        if poison == "inf" and value_dtype == torch.float8_e4m3fn:
            storage[..., ::2] = 0xFF
        return
    storage.fill_(torch.nan if poison == "nan" else torch.inf)
    if poison == "inf":
        storage[..., ::2] = -torch.inf
