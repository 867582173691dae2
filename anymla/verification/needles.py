"""Needles: keys that carry about half of a row's weight, so that one token too few or too many shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.kv_cache import KV_FORMATS, KVCache, calibrate_scale
from anymla.verification.memory import Draw, Memory, Pages

COMMON = 8.0
"""How far the queries lean towards the needles, in standard deviations of a latent."""

Q_SCALE = 0.0371
"""Of queries in fp8: no power of two, and none of them saturates."""


@dataclass(frozen=True)
class Widths:
    """The sizes of one attention call.

    Attributes:
        num_heads: H.
        kv_lora_rank: L.
        qk_rope_head_dim: R.
        qk_nope_head_dim: P, for prefill.
        v_head_dim: V, for prefill.
        sm_scale: Multiplies q·k.
    """

    num_heads: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    sm_scale: float = 192**-0.5


@dataclass(frozen=True)
class Needles:
    """Queries and keys with one direction in common, along which a key becomes heavy.

    Attributes:
        draw: Where randomness comes from.
        widths: Sizes and scale of the call.
        direction: [L + R] unit vector.
    """

    draw: Draw
    widths: Widths
    direction: Tensor

    @classmethod
    def of(cls, draw: Draw, widths: Widths, *, rope_only: bool = False) -> "Needles":
        """Draw a direction; with `rope_only` it lies in the RoPE part, if there is one."""
        direction = draw.normal(widths.kv_lora_rank + widths.qk_rope_head_dim)
        if rope_only and widths.qk_rope_head_dim:
            direction[: widths.kv_lora_rank] = 0
        return cls(draw, widths, direction / direction.square().sum().sqrt())

    def needle(self, among: int) -> Tensor:
        """[L + R] what makes a key weigh about half among `among` others: a score of log(sum of theirs)."""
        variance = self.widths.sm_scale**2 * len(self.direction)
        score = math.log(max(among, 1)) + variance / 2 + 0.5
        return score / (COMMON * self.widths.sm_scale) * self.direction

    def keys(self, count: int, heavy: int, among: int | None = None) -> Tensor:
        """[count, L + R] keys, the last `heavy` of which are needles among `among`, or among `count`."""
        keys = self.draw.normal(count, len(self.direction))
        if heavy:
            keys[count - heavy :] += self.needle(count if among is None else among)
        return keys

    def queries(self, tokens: int, q_dtype: torch.dtype, views: bool) -> tuple[Tensor, Tensor]:
        """[T, H, L] and [T, H, R] absorbed queries, which lean towards the direction; in fp8 with Q_SCALE."""
        width, rank = len(self.direction), self.widths.kv_lora_rank
        q = self.draw.normal(tokens, self.widths.num_heads, width) + COMMON * self.direction
        q = q / Q_SCALE if q_dtype.itemsize == 1 else q
        if not views:
            return q[..., :rank].to(q_dtype).contiguous(), q[..., rank:].to(q_dtype).contiguous()
        # Heads outermost, in one buffer with the RoPE part and three elements more.
        buffer = torch.full((self.widths.num_heads, tokens, width + 3), torch.nan, dtype=q_dtype)
        buffer[..., :width] = q.transpose(0, 1)
        return buffer.transpose(0, 1)[..., :rank], buffer.transpose(0, 1)[..., rank:width]

    def cache(self, memory: Memory, pages: Pages, keys: Sequence[Tensor], q_dtype: torch.dtype) -> KVCache:
        """The cache of these pages, with the keys of each sequence; everything else in it is poison."""
        rank, rope = self.widths.kv_lora_rank, self.widths.qk_rope_head_dim
        new_dtype = torch.bfloat16 if q_dtype.itemsize == 1 else q_dtype
        live = torch.cat([*keys, torch.zeros(0, rank + rope)]).to(new_dtype)
        row = KV_FORMATS[memory.kv_format]
        scale = calibrate_scale(live[:, :rank], live[:, rank:], row.name) if row.scaled else None
        cache = memory.poisoned(pages.num_blocks, rank, rope, scale)
        if memory.poison == "needle":
            every = torch.arange(pages.num_blocks * memory.block_size)
            longest = max(map(len, keys), default=0)
            traps = self.draw.normal(len(every), rank + rope) + self.needle(longest)
            cache.write(traps[:, :rank], traps[:, rank:], every)
        cache.write(live[:, :rank], live[:, rank:], pages.live)
        return cache
