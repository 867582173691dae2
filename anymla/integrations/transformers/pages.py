"""Pages and lengths of the sequences of one cache: bookkeeping on the host, shared by all layers."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.errors import InvalidInput
from anymla.kv_cache import KV_FORMATS, KVCache, calibrate_scale

CALIBRATION_MARGIN = 2.0
"""A calibrated fp8 scale leaves room for later tokens twice as large as the first ones' largest value. It
costs one binade of the smallest values and no precision, since e4m3 is a floating point format."""


class PagePool:
    """What is stored for each sequence, and where.

    A sequence is what the model sees as one row of its batch: `tokens` tokens, of which those that its mask
    hides (padding) are never stored. Sequences may share pages; a shared page is copied before it is written.
    Pages are given out and the pool grows only between steps, never while layers run.

    Attributes:
        kv_format: Name of a row of KV_FORMATS.
        block_size: Tokens a page.
        num_blocks: Pages, the same number in every layer.
        max_length: The most tokens a sequence may have, or None.
        tokens: Tokens of each sequence, hidden ones included.
        kept: [B, tokens] bool on the host, which of them are stored; None: all.
        tables: The pages of each sequence, in order.
        lengths: The stored tokens of each sequence.
        stores: The pages of each layer, made when it first writes; those of an indexer's keys likewise.
        step: What the step that is running has decided; see `steps`.
    """

    def __init__(
        self,
        *,
        kv_format: str,
        block_size: int,
        device: torch.device,
        num_blocks: int | None = None,
        max_length: int | None = None,
        k_scale: Tensor | None = None,
    ) -> None:
        self.kv_format, self.block_size, self.device = kv_format, block_size, device
        self.max_length, self.k_scale = max_length, k_scale
        self.grows = num_blocks is None
        self.num_blocks = 0 if num_blocks is None else num_blocks
        self.stores: dict[Hashable, KVCache] = {}
        self._users: list[int] = []
        self._free: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Forget every sequence; the pages stay allocated."""
        self.tokens = 0
        self.kept: Tensor | None = None
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self.step: Any = None
        self._users = [0] * self.num_blocks
        self._free = list(reversed(range(self.num_blocks)))

    def __getstate__(self) -> dict[str, object]:
        """Copies of a cache do not carry the plans of a step."""
        return {**self.__dict__, "step": None}

    @property
    def num_seqs(self) -> int:
        """B, 0 before the first step."""
        return len(self.tables)

    def refusals(self, num_seqs: int, num_tokens: int) -> list[str]:
        """Why a step of `num_tokens` tokens a sequence cannot follow, as far as lengths say."""
        found = []
        if self.tables and num_seqs != self.num_seqs:
            found.append(f"batch got {num_seqs} sequences; needs {self.num_seqs}, as in the cache")
        total = self.tokens + num_tokens
        if self.max_length is not None and total > self.max_length:
            found.append(f"max_cache_len got {self.max_length}; needs at least {total}")
        return found

    def append(self, kept: Tensor) -> Tensor:
        """Give the next tokens of every sequence their places.

        Args:
            kept: [B, q] bool on the host: which of the q new tokens are stored.

        Returns:
            slot_mapping [T] int64 on the host, for the stored tokens, sequence by sequence.

        Raises:
            InvalidInput: a pool of a fixed size is full; nothing has changed.
        """
        if not self.tables:
            self._start(kept.shape[0])
        news = kept.sum(1).tolist()
        self._reserve(sum(map(self._pages_needed, range(self.num_seqs), news)))
        copies: list[tuple[int, int]] = []
        slots = []
        for table, length, new in zip(self.tables, self.lengths, news, strict=True):
            page, offset = divmod(length, self.block_size)
            if new and offset and self._users[table[page]] > 1:
                source, table[page] = table[page], self._take()
                self._users[source] -= 1
                copies.append((source, table[page]))
            while len(table) * self.block_size < length + new:
                table.append(self._take())
            positions = torch.arange(length, length + new)
            pages = torch.tensor(table, dtype=torch.int64)[positions // self.block_size]
            slots.append(pages * self.block_size + positions % self.block_size)
        self._copy_pages(copies)
        if self.kept is not None or not bool(kept.all()):
            self.kept = torch.cat((self.kept_so_far(), kept), dim=1)
        self.tokens += kept.shape[1]
        self.lengths = [length + new for length, new in zip(self.lengths, news, strict=True)]
        return torch.cat(slots)

    def kept_so_far(self) -> Tensor:
        """[B, tokens] bool on the host: which tokens are stored."""
        return torch.ones(self.num_seqs, self.tokens, dtype=torch.bool) if self.kept is None else self.kept

    def crop(self, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens of every sequence back."""
        num_tokens = min(num_tokens, self.tokens)
        gone = self.kept_so_far()[:, self.tokens - num_tokens :].sum(1).tolist()
        self.tokens -= num_tokens
        if self.kept is not None:
            self.kept = self.kept[:, : self.tokens]
        for b, lost in enumerate(gone):
            self.lengths[b] -= lost
            table, pages = self.tables[b], -(-self.lengths[b] // self.block_size)
            for page in table[pages:]:
                self._release(page)
            del table[pages:]

    def select(self, rows: Sequence[int]) -> None:
        """Make sequence i a continuation of what is now sequence rows[i]; pages are shared, not copied."""
        tables = [list(self.tables[row]) for row in rows]
        for table in tables:
            for page in table:
                self._users[page] += 1
        for table in self.tables:
            for page in table:
                self._release(page)
        self.tables, self.lengths = tables, [self.lengths[row] for row in rows]
        if self.kept is not None:
            self.kept = self.kept[list(rows)]

    def block_table(self, rows: Sequence[int] | None = None) -> Tensor:
        """[B, max_blocks] int32 on the host, of all or some sequences; 0 past a sequence's last page."""
        tables = self.tables if rows is None else [self.tables[row] for row in rows]
        table = torch.zeros(len(tables), max(map(len, tables), default=0), dtype=torch.int32)
        for line, pages in zip(table, tables, strict=True):
            line[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table

    def store(
        self,
        layer: Hashable,
        kv_c: Tensor,
        k_pe: Tensor,
        kv_format: str | None = None,
        per_page: int | None = None,
    ) -> KVCache:
        """Pages of one kind, made, and their fp8 scale calibrated, at their first tokens.

        Args:
            layer: Whose: a layer's number for its latents.
            kv_c: [T, L].
            k_pe: [T, R].
            kv_format: Name of a row of KV_FORMATS. None: that of the latents.
            per_page: Rows a page. None: one a token.
        """
        if layer not in self.stores:
            name, scale = kv_format or self.kv_format, None
            if KV_FORMATS[name].scaled:
                scale = self.k_scale
                if scale is None:
                    scale = calibrate_scale(kv_c, k_pe, name, margin=CALIBRATION_MARGIN)
            self.stores[layer] = KVCache.allocate(
                self.num_blocks,
                per_page or self.block_size,
                kv_lora_rank=kv_c.shape[1],
                qk_rope_head_dim=k_pe.shape[1],
                kv_format=name,
                scale=scale,
                device=self.device,
            )
        return self.stores[layer]

    def _start(self, num_seqs: int) -> None:
        self.tables, self.lengths = [[] for _ in range(num_seqs)], [0] * num_seqs
        if self.grows and self.max_length is not None:
            self._grow(num_seqs * -(-self.max_length // self.block_size))

    def _pages_needed(self, b: int, new: int) -> int:
        table, length = self.tables[b], self.lengths[b]
        more = max(0, -(-(length + new) // self.block_size) - len(table))
        page, offset = divmod(length, self.block_size)
        return more + bool(new and offset and self._users[table[page]] > 1)

    def _reserve(self, pages: int) -> None:
        wanted = self.num_blocks - len(self._free) + pages
        if wanted <= self.num_blocks:
            return
        if not self.grows:
            raise InvalidInput("cache", [f"num_blocks got {self.num_blocks}; needs at least {wanted}"])
        # Doubling keeps the copying of a long generation linear in its length.
        self._grow(max(2 * self.num_blocks, wanted + self.num_seqs))

    def _grow(self, num_blocks: int) -> None:
        old = self.num_blocks
        if num_blocks <= old:
            return
        for layer, store in self.stores.items():
            larger = KVCache.allocate(
                num_blocks,
                store.block_size,
                kv_lora_rank=store.kv_lora_rank,
                qk_rope_head_dim=store.qk_rope_head_dim,
                kv_format=store.format.name,
                scale=store.scale,
                device=self.device,
            )
            larger.storage[:old] = store.storage
            self.stores[layer] = larger
        self.num_blocks = num_blocks
        self._users += [0] * (num_blocks - old)
        self._free[:0] = reversed(range(old, num_blocks))

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if not copies:
            return
        sources, targets = (torch.tensor(pages, device=self.device) for pages in zip(*copies, strict=True))
        for store in self.stores.values():
            store.storage[targets] = store.storage[sources]
