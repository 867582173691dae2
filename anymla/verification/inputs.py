"""Hostile inputs: seeded tensors of every operation whose dead memory, lengths, pages, strides and weights
lay traps.

Slots past a sequence's end, foreign pages, the gaps of strided caches and the table entries past the last
page hold what must never be read. Of the keys, the last one that a row sees carries about half of its weight,
and so would the one just past the end, so that an error of one token is an error of the result however long
the sequence is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anymla.contract import AttentionOutput
from anymla.kv_cache import KV_FORMATS, KVCache
from anymla.verification import eager
from anymla.verification.memory import Draw, Memory
from anymla.verification.needles import COMMON, Q_SCALE, Needles, Widths

SINKS = ("none", "near", "infinite")
"""Sinks: none, drawn near the lse of the rows, or those with +inf and -inf among them."""


@dataclass(frozen=True)
class Inputs:
    """One call of an operation: the arguments that `api`, `reference` and `eager` share.

    Attributes:
        op: One of problem.OPS.
        tensors: The positional arguments.
        options: The keyword arguments.
        num_rows: Query tokens, or tokens written.
        shape: Of the result.
    """

    op: str
    tensors: tuple[Any, ...]
    options: dict[str, Any]
    num_rows: int
    shape: tuple[int, ...]

    @property
    def cache(self) -> KVCache:
        """The cache of the call."""
        cache = self.options["cache"] if self.op == "prefill" else self.tensors[2]
        assert isinstance(cache, KVCache)
        return cache


def decode_inputs(
    widths: Widths,
    seq_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    seed: int = 0,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_format: str = "bf16",
    block_size: int = 16,
    causal: bool = True,
    sinks: str = "near",
    poison: str = "nan",
    views: bool = False,
) -> Inputs:
    """A dense decode over hostile memory.

    Args:
        widths: H, L, R and the scale.
        seq_lens: Tokens of each sequence, those of this call included; 0 is a sequence without any.
        q_lens: Query tokens of each sequence; None is one each, without qo_indptr. With them, one query token
            more belongs to no sequence.
        seed: Of everything drawn.
        q_dtype: Of the queries; an fp8 comes with a q_scale.
        kv_format: Name of a row of KV_FORMATS.
        block_size: Tokens a page.
        causal: See reference.decode.
        sinks: One of SINKS.
        poison: One of POISONS.
        views: Queries, cache and table are views with odd strides.

    Returns:
        The call.
    """
    draw = Draw(seed)
    asked = [1] * len(seq_lens) if q_lens is None else list(q_lens)
    tokens = sum(asked) + (q_lens is not None)
    needles, memory = Needles.of(draw, widths), Memory(kv_format, block_size, poison, views)
    pages = memory.pages(draw, seq_lens)
    keys = [needles.keys(n, min(n, q)) for n, q in zip(seq_lens, asked, strict=True)]
    cache = needles.cache(memory, pages, keys, q_dtype)
    ql_nope, q_pe = needles.queries(tokens, q_dtype, views)
    options: dict[str, Any] = {
        "block_table": pages.block_table,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "qo_indptr": None if q_lens is None else _indptr(asked),
        "sm_scale": widths.sm_scale,
        "causal": causal,
        **_scale_of(ql_nope),
    }
    plain = eager.decode(ql_nope, q_pe, cache, **options, loops=0)[0]
    options["sinks"] = _sinks(draw, plain, sinks)
    shape = (tokens, widths.num_heads, widths.kv_lora_rank)
    return Inputs("decode", (ql_nope, q_pe, cache), options, tokens, shape)


def sparse_inputs(
    widths: Widths,
    seq_len: int,
    topk: int,
    num_tokens: int = 4,
    *,
    seed: int = 0,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_format: str = "bf16",
    block_size: int = 16,
    sinks: str = "near",
    poison: str = "nan",
    views: bool = False,
) -> Inputs:
    """A sparse decode whose rows are, in turn: full, first a run of -1, cut by a count, all -1, of count 0.

    The last key that counts carries about half of a row's weight, and so would slot 0, which no row names,
    and the entries behind a count. -1 stands between the keys as well, and one slot is named twice.

    Args:
        widths: H, L, R and the scale.
        seq_len: Live tokens of the cache.
        topk: K.
        num_tokens: T.
        seed: Of everything drawn.
        q_dtype: Of the queries; an fp8 comes with a q_scale.
        kv_format: Name of a row of KV_FORMATS.
        block_size: Tokens a page.
        sinks: One of SINKS.
        poison: One of POISONS; also of slot 0.
        views: Queries, cache and indices are views with odd strides.

    Returns:
        The call.
    """
    draw = Draw(seed)
    needles, memory = Needles.of(draw, widths), Memory(kv_format, block_size, poison, views)
    pages = memory.pages(draw, (seq_len,))
    live = pages.live[pages.live != 0]
    live = live[draw.permuted(len(live))]
    trap = int(pages.dead[0]) if len(pages.dead) else 0
    keys = needles.keys(len(live), min(len(live), num_tokens), min(topk, len(live)))
    cache = needles.cache(memory, replace(pages, slots=(live,)), [keys], q_dtype)
    ql_nope, q_pe = needles.queries(num_tokens, q_dtype, views)
    plain, heavy = live[: max(1, len(live) - num_tokens)], live[-num_tokens:]
    indices = torch.full((num_tokens, 2 * topk if views else topk), 0, dtype=torch.int32)
    indices = indices[:, ::2] if views else indices
    counts = torch.full((num_tokens,), topk, dtype=torch.int32)
    for t in range(num_tokens):
        row = plain[draw.permuted(max(topk, len(plain))) % len(plain)][:topk].int()
        row[draw.permuted(topk)[: topk // 8]] = -1
        kind = t % 5
        if kind == 1:
            row[: min(32, topk - 1)] = -1
        if kind == 2:
            counts[t] = max(1, topk // 2)
        last = int(counts[t]) - 1
        row[last] = heavy[t % len(heavy)].int()
        row[last + 1 :] = trap
        if kind == 3 and topk > 1:
            row[:] = -1
        if kind == 4:
            counts[t] = 0
        if kind == 0 and topk > 2:
            row[0] = row[last]
        indices[t] = row
    options: dict[str, Any] = {"indices": indices, "counts": counts, "sm_scale": widths.sm_scale}
    options |= _scale_of(ql_nope)
    lse = eager.sparse_decode(ql_nope, q_pe, cache, **options, loops=0)[0]
    options["sinks"] = _sinks(draw, lse, sinks)
    shape = (num_tokens, widths.num_heads, widths.kv_lora_rank)
    return Inputs("sparse_decode", (ql_nope, q_pe, cache), options, num_tokens, shape)


def prefill_inputs(
    widths: Widths,
    contexts: Sequence[int] | None,
    q_lens: Sequence[int],
    *,
    seed: int = 0,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_format: str = "bf16",
    block_size: int = 16,
    causal: bool = True,
    sinks: str = "near",
    poison: str = "nan",
    views: bool = False,
) -> Inputs:
    """A prefill of new tokens over cached context, in hostile memory.

    Args:
        widths: H, L, R, P, V and the scale.
        contexts: Cached tokens of each sequence; None for no cache at all.
        q_lens: New tokens of each sequence, 0 for none. One query token more belongs to no sequence.
        seed: Of everything drawn.
        q_dtype: Of queries, latents and weights.
        kv_format: Name of a row of KV_FORMATS.
        block_size: Tokens a page.
        causal: See reference.prefill.
        sinks: One of SINKS.
        poison: One of POISONS.
        views: Queries, cache and table are views with odd strides.

    Returns:
        The call.
    """
    draw = Draw(seed)
    tokens, heads, rank = sum(q_lens) + 1, widths.num_heads, widths.kv_lora_rank
    needles, memory = Needles.of(draw, widths, rope_only=True), Memory(kv_format, block_size, poison, views)
    w_uk = (draw.normal(heads, widths.qk_nope_head_dim, rank) / math.sqrt(rank)).to(q_dtype)
    w_uv = (draw.normal(heads, rank, widths.v_head_dim) / math.sqrt(rank)).to(q_dtype)
    earlier = [0] * len(q_lens) if contexts is None else list(contexts)
    new = [needles.keys(q, q, c + q) for c, q in zip(earlier, q_lens, strict=True)]
    rows = torch.cat([*new, torch.full((1, rank + widths.qk_rope_head_dim), torch.nan)]).to(q_dtype)
    q_nope = draw.normal(tokens, heads, widths.qk_nope_head_dim)
    towards = torch.einsum("l,hpl->hp", needles.direction[:rank], w_uk.float())
    q_nope += COMMON * towards / towards.square().sum(-1, keepdim=True).clamp(min=1e-6)
    q_pe = draw.normal(tokens, heads, widths.qk_rope_head_dim) + COMMON * needles.direction[rank:]
    options: dict[str, Any] = {"qo_indptr": _indptr(q_lens), "sm_scale": widths.sm_scale, "causal": causal}
    if contexts is not None:
        pages = memory.pages(draw, contexts)
        keys = [needles.keys(c, min(c, 1), c + 1) for c in contexts]
        options["cache"] = needles.cache(memory, pages, keys, q_dtype)
        options["block_table"] = pages.block_table
        lens = [c + q for c, q in zip(earlier, q_lens, strict=True)]
        options["seq_lens"] = torch.tensor(lens, dtype=torch.int32)
    tensors = (
        _odd(q_nope.to(q_dtype), views),
        _odd(q_pe.to(q_dtype), views),
        _odd(rows[:, :rank], views),
        _odd(rows[:, rank:], views),
        w_uk,
        w_uv,
    )
    plain = eager.prefill(*tensors, **options, loops=0)[0]
    options["sinks"] = _sinks(draw, plain, sinks)
    return Inputs("prefill", tensors, options, tokens, (tokens, heads, widths.v_head_dim))


def write_inputs(
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    num_tokens: int,
    *,
    seed: int = 0,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_format: str = "bf16",
    block_size: int = 16,
    views: bool = False,
) -> Inputs:
    """A cache write of tokens small, huge, zero, NaN and infinite.

    Every fifth token is skipped; the slots are in random order and cover part of the cache.

    Args:
        kv_lora_rank: L.
        qk_rope_head_dim: R.
        num_tokens: S.
        seed: Of everything drawn.
        q_dtype: Of the latents.
        kv_format: Name of a row of KV_FORMATS.
        block_size: Tokens a page.
        views: Latents and cache are views with odd strides.

    Returns:
        The call.
    """
    draw = Draw(seed)
    row = KV_FORMATS[kv_format]
    width = kv_lora_rank + qk_rope_head_dim
    values = draw.normal(num_tokens, width) * torch.exp2(draw.integers(-12, 12, num_tokens, 1))
    traps = [0.0, -0.0, 1e-30, 60_000.0, -60_000.0, torch.nan, torch.inf, -torch.inf]
    for t in range(min(num_tokens, len(traps))):
        values[t, t % width :: 7] = traps[t]
    blocks = -(-num_tokens * 2 // block_size) + 1
    scale = torch.tensor([0.0371]) if row.scaled else None
    memory = Memory(kv_format, block_size, views=views)
    cache = memory.poisoned(blocks, kv_lora_rank, qk_rope_head_dim, scale)
    slots = draw.permuted(blocks * block_size)[:num_tokens]
    slots[4::5] = -1
    kv_c, k_pe = values.to(q_dtype).tensor_split((kv_lora_rank,), -1)
    tensors = (_odd(kv_c, views), _odd(k_pe, views), cache, slots)
    return Inputs("write_cache", tensors, {}, num_tokens, (num_tokens, width))


def index_inputs(
    num_heads: int,
    width: int,
    seq_lens: Sequence[int],
    q_lens: Sequence[int] | None,
    topk: int,
    *,
    seed: int = 0,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_format: str = "index_k",
    block_size: int = 16,
    exact: bool = True,
    ties: bool = False,
    poison: str = "nan",
    views: bool = False,
) -> Inputs:
    """An indexer's top-k over hostile memory.

    Args:
        num_heads: Hi.
        width: D of an index key.
        seq_lens: Tokens of each sequence.
        q_lens: Query tokens of each sequence; None is one each.
        topk: K.
        seed: Of everything drawn.
        q_dtype: Of the queries.
        kv_format: Name of a row of KV_FORMATS.
        block_size: Tokens a page.
        exact: Small whole numbers, so that fp32 gives every logit exactly, many tie, and one is NaN.
        ties: As `exact`, and row by row weights that tie all logits at 0, or half of them there or at an
            infinity.
        poison: "nan" or "inf".
        views: Queries, cache and table are views with odd strides.

    Returns:
        The call.
    """
    draw = Draw(seed)
    asked = [1] * len(seq_lens) if q_lens is None else list(q_lens)
    tokens = sum(asked) + (q_lens is not None)
    memory = Memory(kv_format, block_size, poison, views)
    pages = memory.pages(draw, seq_lens)
    total = sum(seq_lens)
    row, exact = KV_FORMATS[kv_format], exact or ties
    if exact:
        keys = draw.integers(-2, 2, total, width)
        # The largest value of a key makes its scale a power of two.
        keys[:, 0] = 7.5 if row.value_dtype == torch.float8_e4m3fnuz else 7.0
        q = draw.integers(-2, 2, tokens, num_heads, width)
        weights = draw.integers(-4, 4, tokens, num_heads) / 4
    else:
        keys = draw.normal(total, width)
        q, weights = draw.normal(tokens, num_heads, width), draw.normal(tokens, num_heads)
    if exact and total > 2:
        keys[total // 2, 1] = torch.nan
    if ties:
        # Of one head, what relu leaves: half of it is 0, and an infinity times 0 is no number.
        one = torch.tensor([0.0, -1.0, torch.inf, -torch.inf, 1.0]).to(weights)
        weights[:] = 0.0
        weights[:, 0] = one[torch.arange(tokens) % len(one)]
    scale = torch.tensor([2.0**-5]) if row.scaled else None
    cache = memory.poisoned(pages.num_blocks, width, 0, scale)
    cache.write(keys, torch.zeros(total, 0), pages.live)
    options: dict[str, Any] = {
        "block_table": pages.block_table,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "qo_indptr": None if q_lens is None else _indptr(asked),
        "topk": topk,
    }
    return Inputs("index_topk", (_odd(q.to(q_dtype), views), weights, cache), options, tokens, (tokens, topk))


def _sinks(draw: Draw, plain: AttentionOutput, kind: str) -> Tensor | None:
    """[H] sinks; of head h near the lse of row h, if it is a number."""
    if kind == "none":
        return None
    assert plain.lse is not None
    heads = plain.lse.shape[1]
    full = plain.lse[plain.lse.isfinite().all(-1)]
    near = draw.normal(heads) / 2
    if len(full):
        head = torch.arange(heads)
        near += full[head % len(full), head]
    if kind == "infinite":
        near[0::3] = torch.inf
        near[1::3] = -torch.inf
    return near


def _scale_of(q: Tensor) -> dict[str, Tensor]:
    """The scale of queries in fp8, as the argument that it is; nothing for others."""
    return {"q_scale": torch.tensor([Q_SCALE])} if q.dtype.itemsize == 1 else {}


def _odd(t: Tensor, views: bool) -> Tensor:
    """The same values, as a view into a wider tensor of NaN."""
    if not views:
        return t.contiguous()
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 5), torch.nan, dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def _indptr(q_lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
