"""Inputs of a workload, drawn where it runs: a cache too large to be sent there, still with traps in it.

As in `verification.inputs`, pages lie in random order, dead slots and foreign pages are NaN, table entries
past the last page are absurd, and the last key that a row sees carries about half of its weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anymla.benchmarking.workloads import DTYPES, Workload
from anymla.indices import quantise_queries, to_slots
from anymla.kv_cache import KV_FORMATS, KVCache
from anymla.problem import Feature
from anymla.verification.inputs import Inputs
from anymla.verification.memory import ABSURD_PAGES, NAN_BYTE, Draw
from anymla.verification.needles import COMMON, Needles, Widths

K_SCALE = 0.03
"""Of fp8 caches with one scale: standard normal keys use the upper binades and hardly ever saturate."""

DRAWN_TOKENS = 1 << 19
"""Keys that exist in fp32 at a time."""


class Drawn(Draw):
    """Seeded tensors, drawn on a device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Independent standard normal values."""
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def permuted(self, n: int) -> Tensor:
        """The numbers below n in random order."""
        return torch.randperm(n, generator=self.generator, device=self.device)

    def chosen(self, rows: int, count: int, below: int) -> Tensor:
        """[rows, count] different numbers below `below`, in random order in each row."""
        order = torch.rand(rows, below, generator=self.generator, device=self.device)
        return order.topk(count).indices.int()


def drawn_inputs(work: Workload, device: torch.device, seed: int = 0) -> Inputs:
    """The tensors of a workload.

    Args:
        work: Of any operation.
        device: Where they are made and stay.
        seed: Of everything drawn.

    Returns:
        The call, with every query token in a sequence.
    """
    return _Maker.of(work, device, seed).call()


@dataclass(frozen=True)
class _Maker:
    """Draws one call."""

    work: Workload
    draw: Drawn
    needles: Needles

    @classmethod
    def of(cls, work: Workload, device: torch.device, seed: int) -> "_Maker":
        p, draw = work.problem, Drawn(seed, device)
        widths = Widths(
            p.num_heads, p.kv_lora_rank, p.qk_rope_head_dim, p.qk_nope_head_dim, p.v_head_dim, work.sm_scale
        )
        return cls(work, draw, Needles.of(draw, widths, rope_only=p.op == "prefill"))

    def call(self) -> Inputs:
        """The call of the operation of the workload."""
        makers = {
            "decode": self._decode,
            "sparse_decode": self._sparse,
            "prefill": self._prefill,
            "write_cache": self._write,
            "index_topk": self._index,
        }
        return makers[self.work.problem.op]()

    def _decode(self) -> Inputs:
        work, p = self.work, self.work.problem
        cache, table = self._cache(work.lens, p.q_len)
        ql_nope, q_pe = self.needles.queries(work.num_tokens, DTYPES[p.q_dtype], False)
        options = {
            "block_table": table,
            "seq_lens": self._integers(work.lens),
            "qo_indptr": None if p.q_len == 1 else self._indptr(),
            "sm_scale": work.sm_scale,
            "causal": True,
            "sinks": self._sinks(),
        }
        return self._inputs((ql_nope, q_pe, cache), options, p.kv_lora_rank)

    def _sparse(self) -> Inputs:
        """Each token over tokens of its sequence in random order, the last one always among them."""
        work, p = self.work, self.work.problem
        cache, table = self._cache(work.lens, 1)
        ids = torch.full((work.num_tokens, p.topk), -1, dtype=torch.int32, device=self.draw.device)
        for sequence, context in enumerate(work.lens):
            count, rows = min(p.topk, context), slice(sequence * p.q_len, (sequence + 1) * p.q_len)
            ids[rows, 0] = context - 1
            ids[rows, 1:count] = self.draw.chosen(p.q_len, count - 1, context - 1)
        ql_nope, q_pe = self.needles.queries(work.num_tokens, DTYPES[p.q_dtype], False)
        options = {
            "indices": to_slots(ids, table, self._indptr(), p.block_size),
            "counts": None,
            "sm_scale": work.sm_scale,
            "sinks": self._sinks(),
        }
        return self._inputs((ql_nope, q_pe, cache), options, p.kv_lora_rank)

    def _prefill(self) -> Inputs:
        work, p = self.work, self.work.problem
        # What is planned in fp8 comes in 16 bits.
        dtype = torch.bfloat16 if p.q_dtype.startswith("fp8") else DTYPES[p.q_dtype]
        heads, rank, rope = p.num_heads, p.kv_lora_rank, p.qk_rope_head_dim
        draw, direction = self.draw, self.needles.direction
        w_uk = (draw.normal(heads, p.qk_nope_head_dim, rank) / math.sqrt(rank)).to(dtype)
        w_uv = (draw.normal(heads, rank, p.v_head_dim) / math.sqrt(rank)).to(dtype)
        new = [self.needles.keys(p.q_len, p.q_len, n + p.q_len) for n in work.lens]
        rows = torch.cat(new).to(dtype)
        q_nope = draw.normal(work.num_tokens, heads, p.qk_nope_head_dim)
        towards = torch.einsum("l,hpl->hp", direction[:rank], w_uk.float())
        q_nope += COMMON * towards / towards.square().sum(-1, keepdim=True).clamp(min=1e-6)
        q_pe = draw.normal(work.num_tokens, heads, rope) + COMMON * direction[rank:]
        options: dict[str, Any] = {
            "qo_indptr": self._indptr(),
            "sm_scale": work.sm_scale,
            "causal": True,
            "sinks": self._sinks(),
        }
        if work.context:
            options["cache"], options["block_table"] = self._cache(work.lens, 1)
            options["seq_lens"] = self._integers([n + p.q_len for n in work.lens])
        latent, key = rows[:, :rank].contiguous(), rows[:, rank:].contiguous()
        return self._inputs(
            (q_nope.to(dtype), q_pe.to(dtype), latent, key, w_uk, w_uv), options, p.v_head_dim
        )

    def _index(self) -> Inputs:
        work, p = self.work, self.work.problem
        cache, table = self._cache(work.lens, 1)
        q = self.draw.normal(work.num_tokens, p.num_heads, p.kv_lora_rank)
        weights = self.draw.normal(work.num_tokens, p.num_heads)
        if p.q_dtype.startswith("fp8"):
            q, weights = quantise_queries(q, weights, kv_format=p.q_dtype)
        options = {
            "block_table": table,
            "seq_lens": self._integers(work.lens),
            "qo_indptr": None if p.q_len == 1 else self._indptr(),
            "topk": p.topk,
        }
        tensors = (q.to(DTYPES[p.q_dtype]), weights, cache)
        return Inputs("index_topk", tensors, options, work.num_tokens, (work.num_tokens, p.topk))

    def _write(self) -> Inputs:
        """New tokens for slots in random order, in a cache with as many again."""
        work, p = self.work, self.work.problem
        width, dtype = p.kv_lora_rank + p.qk_rope_head_dim, DTYPES[p.q_dtype]
        values = self.draw.normal(work.batch, width, dtype=dtype)
        latent, key = (part.contiguous() for part in values.tensor_split((p.kv_lora_rank,), -1))
        cache = self._poisoned(-(-2 * work.batch // p.block_size))
        slots = self.draw.permuted(cache.num_blocks * p.block_size)[: work.batch]
        return Inputs("write_cache", (latent, key, cache, slots), {}, work.batch, (work.batch, width))

    def _inputs(self, tensors: tuple[Any, ...], options: dict[str, Any], width: int) -> Inputs:
        tokens, p = self.work.num_tokens, self.work.problem
        return Inputs(p.op, tensors, options, tokens, (tokens, p.num_heads, width))

    def _cache(self, lens: Sequence[int], heavy: int) -> tuple[KVCache, Tensor]:
        """A cache with these sequences in it, the last `heavy` keys of each being needles, and its table."""
        p, draw = self.work.problem, self.draw
        counts = [-(-n // p.block_size) for n in lens]
        # Drawn apart, so that caches of the same lengths have the same pages.
        pages = Drawn(draw.seed, draw.device).permuted(sum(counts) + max(2, sum(counts) // 8)).int()
        traps = torch.tensor(ABSURD_PAGES, dtype=torch.int32, device=draw.device)
        columns = torch.arange(max(counts) + 2, device=draw.device)
        table = traps[columns % len(traps)].repeat(len(lens), 1)
        table[columns < self._integers(counts)[:, None]] = pages[: sum(counts)]
        cache = self._poisoned(len(pages))
        first = 0
        while first < len(lens):
            last = first + 1
            while last < len(lens) and sum(lens[first : last + 1]) <= DRAWN_TOKENS:
                last += 1
            keys = [self.needles.keys(n, min(n, heavy)) for n in lens[first:last]]
            slots = [self._slots(table[s], lens[s]) for s in range(first, last)]
            values = torch.cat(keys)
            cache.write(values[:, : p.kv_lora_rank], values[:, p.kv_lora_rank :], torch.cat(slots))
            first = last
        return cache, table

    def _poisoned(self, num_blocks: int) -> KVCache:
        """A cache of which every slot is NaN."""
        p = self.work.problem
        row = KV_FORMATS[p.kv_format]
        cache = KVCache.allocate(
            num_blocks,
            p.block_size,
            kv_lora_rank=p.kv_lora_rank,
            qk_rope_head_dim=p.qk_rope_head_dim,
            kv_format=p.kv_format,
            scale=torch.tensor([K_SCALE], device=self.draw.device) if row.scaled else None,
            device=self.draw.device,
        )
        cache.storage.fill_(NAN_BYTE[row.value_dtype] if row.storage_dtype == torch.uint8 else math.nan)
        return cache

    def _slots(self, pages: Tensor, count: int) -> Tensor:
        """The slots of a sequence's first tokens."""
        size = self.work.problem.block_size
        token = torch.arange(count, device=pages.device)
        return pages[token // size].long() * size + token % size

    def _sinks(self) -> Tensor | None:
        """Near the lse of a row, half of whose weight is one needle's."""
        if Feature.SINKS not in self.work.problem.features:
            return None
        needle = self.needles.needle(self.work.context + 1) @ self.needles.direction
        near = float(needle) * COMMON * self.work.sm_scale + math.log(2)
        return self.draw.normal(self.work.problem.num_heads) / 2 + near

    def _indptr(self) -> Tensor:
        ends = [i * self.work.problem.q_len for i in range(self.work.batch + 1)]
        return self._integers(ends)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.draw.device)
