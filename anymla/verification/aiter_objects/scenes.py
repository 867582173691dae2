"""Scenes: queries, a cache of one token a page, the lists of slots, and what is right, for decode kernels.

T query tokens, B sequences, H heads. Slots that no sequence has hold NaN, but for slot 0, which kernels read
for lanes past a tail; it holds NaN where that is what is asked.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from anymla import reference
from anymla.contract import AttentionOutput
from anymla.hardware.arches import ARCHES
from anymla.kv_cache import KVCache
from anymla.kv_formats import KV_FORMATS
from anymla.verification.judge import Judgement, judge

WIDTH, LATENT = 576, 512
SM_SCALE = 0.07
Q_SCALES, KV_SCALE = {"e4m3fnuz": 1 / 64, "e4m3fn": 1 / 128}, 0.25
"""Of fp8 operands: powers of two, so that bf16 has their values; queries reach the end of the range."""
SPARE = 7
"""Slots that belong to nobody, the first of them slot 0."""
FP8 = {"e4m3fnuz": torch.float8_e4m3fnuz, "e4m3fn": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Scene:
    """One batch.

    Attributes:
        lens: Keys of each sequence; the last `q_len` of them are the query tokens' own.
        q_len: Query tokens a sequence.
        q: [T, H, 576] as the kernel takes them.
        q_scale: [1] fp32, or None.
        cache: Pages of one slot.
        slots: [sum of lens] int32, sequence by sequence.
        kv_indptr, qo_indptr: [B + 1] int32.
        expected: fp64.
        eager: Runs of the same maths that round what such kernels round.
    """

    lens: tuple[int, ...]
    q_len: int
    q: Tensor
    q_scale: Tensor | None
    cache: KVCache
    slots: Tensor
    kv_indptr: Tensor
    qo_indptr: Tensor
    expected: AttentionOutput
    eager: tuple[AttentionOutput, ...]

    def exact_q(self) -> Tensor:
        """[T, H, 576] bf16: the values that the kernel is given."""
        return self.q if self.q_scale is None else (self.q.float() * self.q_scale).bfloat16()

    def judged(self, got: AttentionOutput) -> Judgement:
        """Judge a result, out in bf16 as AITER gives it."""
        return judge(AttentionOutput(got.out.bfloat16(), got.lse), self.expected, *self.eager)


def scene(
    chip: str,
    q: str,
    kv: str,
    heads: int,
    lens: tuple[int, ...],
    q_len: int = 1,
    *,
    poisoned: bool = False,
    seed: int = 0,
) -> Scene:
    """Draw a scene.

    Args:
        chip: A key of ARCHES, for its fp8.
        q, kv: bf16 or fp8.
        heads: H.
        lens: Keys of each sequence, at least q_len.
        q_len: Query tokens of each.
        poisoned: Whether slot 0, which no sequence has, holds NaN.
        seed: Of all values.
    """
    draw = torch.Generator().manual_seed(seed)
    flavour = ARCHES[chip].fp8_flavour
    total, tokens = sum(lens), len(lens) * q_len
    queries = torch.randn(tokens, heads, WIDTH, generator=draw)
    rows = torch.randn(total + SPARE, WIDTH, generator=draw)
    slots = (torch.randperm(total + SPARE - 1, generator=draw) + 1)[:total].int()
    is_free = torch.ones(len(rows), dtype=torch.bool)
    is_free[slots.long()] = False
    is_free[0] = poisoned
    rows[is_free] = math.nan
    kv_format = f"fp8_{flavour}" if kv == "fp8" else "bf16"
    scale = torch.tensor([KV_SCALE]) if kv == "fp8" else None
    data = (rows / KV_SCALE).to(FP8[flavour]) if kv == "fp8" else rows.bfloat16()
    cache = KVCache(data[:, None], KV_FORMATS[kv_format], LATENT, WIDTH - LATENT, scale)
    scaled = queries / Q_SCALES[flavour]
    largest = torch.finfo(FP8[flavour]).max
    # Whoever derives the scale from the largest value finds the same.
    scaled[:1, :1, :1] = largest
    given = scaled.clamp(-largest, largest).to(FP8[flavour]) if q == "fp8" else queries.bfloat16()
    q_scale = torch.tensor([Q_SCALES[flavour]]) if q == "fp8" else None
    exact = given.double() * (1.0 if q_scale is None else q_scale.double())
    kv_indptr = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    qo_indptr = torch.arange(len(lens) + 1, dtype=torch.int32) * q_len
    pages = torch.zeros(len(lens), max(lens), dtype=torch.int32)
    for row, (start, end) in zip(pages, pairwise(kv_indptr.tolist()), strict=True):
        row[: end - start] = slots[start:end]
    expected = reference.decode(
        exact[..., :LATENT], exact[..., LATENT:], cache, block_table=pages,
        seq_lens=torch.tensor(lens, dtype=torch.int32), qo_indptr=qo_indptr, sm_scale=SM_SCALE,
    )  # fmt: skip
    weights = FP8[flavour] if q == "fp8" else torch.bfloat16
    made = (lens, q_len, given, q_scale, cache, slots, kv_indptr, qo_indptr, expected)
    return Scene(*made, eager=_eager(exact.float(), cache, lens, slots, kv_indptr, q_len, weights))


def _eager(
    q: Tensor,
    cache: KVCache,
    lens: tuple[int, ...],
    slots: Tensor,
    kv_indptr: Tensor,
    q_len: int,
    weights: torch.dtype,
) -> tuple[AttentionOutput, ...]:
    """Runs in fp32 that differ in the order of a logit's sum; weights up to 1, in a matrix unit's dtype."""
    orders = [torch.arange(WIDTH), *(torch.randperm(WIDTH, generator=_seeded(n)) for n in range(4))]
    outs = [torch.zeros(*q.shape[:2], LATENT) for _ in (torch.float32, weights)]
    lses = [torch.zeros(q.shape[:2]) for _ in orders]
    for row, (start, n) in enumerate(zip(kv_indptr.tolist(), lens, strict=False)):
        keys = cache.read(slots[start : start + n].long(), torch.float32)
        for t in range(q_len):
            token, seen = row * q_len + t, keys[: n - q_len + 1 + t]
            for lse, order in zip(lses, orders, strict=True):
                parts = [q[token][:, at] @ seen[:, at].T for at in order.chunk(3)]
                lse[token] = (sum(parts[1:], start=parts[0]) * SM_SCALE).logsumexp(-1)
            scores = q[token] @ seen.T * SM_SCALE
            likely = (scores - scores.amax(-1, keepdim=True)).exp()
            for out, dtype in zip(outs, (torch.float32, weights), strict=True):
                out[token] = likely.to(dtype).float() @ seen[:, :LATENT] / likely.sum(-1, keepdim=True)
    runs = [AttentionOutput(out.bfloat16(), lses[0]) for out in outs]
    return (*runs, *(AttentionOutput(runs[0].out, lse) for lse in lses[1:]))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
