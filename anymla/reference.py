"""The definition of right: every operation in fp64, one row after another, independent of every backend.

T query tokens, B sequences, H heads, L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim,
V = v_head_dim, S new tokens of latent, K indices a query token.

Inputs are those that `contract` accepts, on any device; results are fp64 on the device of the queries. Values
that are live propagate as softmax arithmetic has it: a score of NaN or +inf makes its row NaN, one of -inf
is a key of weight 0, and a row whose scores are all -inf attends to nothing.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.contract import AttentionOutput
from anymla.errors import Reasons
from anymla.kv_cache import KVCache

FP64 = torch.float64


def decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    cache: KVCache,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
    sm_scale: float,
    causal: bool = True,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> AttentionOutput:
    """Attend each query token to its sequence's paged latent cache (absorbed form).

    Args:
        ql_nope: [T, H, L], any float dtype. Queries after `absorb_q`.
        q_pe: [T, H, R]. Rotated.
        cache: The paged latent; only live slots are read.
        block_table: [B, max_blocks] int32. Pages past seq_lens are never read.
        seq_lens: [B] int32. Includes the tokens of this call.
        qo_indptr: [B + 1] int32. None: one token a sequence. Rows from its last value on are empty.
        sm_scale: Multiplies q·k.
        causal: Row t of a sequence's q_len tokens sees its first
            max(0, seq_len - q_len + 1 + t) keys; False: all.
        sinks: [H] logits, added to each row's denominator.
        q_scale: [1], multiplies queries in fp8.

    Returns:
        out: [T, H, L] fp64. 0 where a row attends to nothing.
        lse: [T, H] fp64, natural log, sinks excluded, -inf where a row attends to nothing.

    Raises:
        Nothing of its own; `contract` has checked the arguments.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """
    q = torch.cat((_fp64(ql_nope), _fp64(q_pe)), -1) * (1 if q_scale is None else _fp64(q_scale))
    out, lse = _empty_rows(ql_nope, ql_nope.shape[2])
    for sequence, seq_len, rows in _sequences(seq_lens, qo_indptr):
        if not rows:
            continue
        keys = _read(cache, _slots(block_table[sequence], seq_len, cache.block_size))
        for t, row in enumerate(rows):
            visible = keys[: _visible(seq_len, len(rows), t, causal)]
            scores = sm_scale * (q[row] @ visible.T)
            out[row], lse[row] = _softmax_sum(scores, visible[:, : out.shape[2]])
    return AttentionOutput(out if sinks is None else apply_sinks(out, lse, sinks), lse)


def sparse_decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    cache: KVCache,
    *,
    indices: Tensor,
    counts: Tensor | None = None,
    sm_scale: float,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> AttentionOutput:
    """Attend each query token to the slots named for it (absorbed form).

    Args:
        ql_nope: [T, H, L], any float dtype.
        q_pe: [T, H, R]. Rotated.
        cache: The paged latent; only the slots named are read.
        indices: [T, K] int32 slots of the cache. -1 is no key; a slot given twice counts twice.
        counts: [T] int32. Entries of a row from its count on are not read. None: all K.
        sm_scale: Multiplies q·k.
        sinks: [H] logits, added to each row's denominator.
        q_scale: [1], multiplies queries in fp8.

    Returns:
        out: [T, H, L] fp64. 0 where a row attends to nothing.
        lse: [T, H] fp64, natural log, sinks excluded, -inf where a row attends to nothing.

    Raises:
        Nothing of its own; `contract` has checked the arguments.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.
    """
    q = torch.cat((_fp64(ql_nope), _fp64(q_pe)), -1) * (1 if q_scale is None else _fp64(q_scale))
    out, lse = _empty_rows(ql_nope, ql_nope.shape[2])
    for row in range(q.shape[0]):
        slots = indices[row].to(torch.int64)
        if counts is not None:
            slots = slots[: int(counts[row])]
        keys = _read(cache, slots[slots != -1])
        scores = sm_scale * (q[row] @ keys.T)
        out[row], lse[row] = _softmax_sum(scores, keys[:, : out.shape[2]])
    return AttentionOutput(out if sinks is None else apply_sinks(out, lse, sinks), lse)


def prefill(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    qo_indptr: Tensor,
    sm_scale: float,
    cache: KVCache | None = None,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    context_chunk: int | None = None,
) -> AttentionOutput:
    """Attend new tokens to the cached context, chunk by chunk, and to each other (decompressed form).

    Args:
        q_nope: [T, H, P], any float dtype. Queries before absorption.
        q_pe: [T, H, R]. Rotated.
        kv_c: [T, L] latent of the new tokens, as it is before any cache format rounds it.
        k_pe: [T, R]. Rotated.
        w_uk: [H, P, L] and
        w_uv: [H, L, V], the two halves of kv_b_proj.
        qo_indptr: [B + 1] int32, offsets of the new tokens. Rows from its last value on are empty.
        sm_scale: Multiplies q·k.
        cache: Holds the context, the first seq_len - q_len tokens of each sequence. None: there is no
            context.
        block_table: [B, max_blocks] int32, with a cache.
        seq_lens: [B] int32, with a cache. Includes the new tokens.
        causal: New token t sees the context and the new tokens up to itself; False: all new tokens.
        sinks: [H] logits, added to each row's denominator.
        context_chunk: Context tokens taken at a time and merged. None: all at once.

    Returns:
        out: [T, H, V] fp64. 0 where a row attends to nothing.
        lse: [T, H] fp64, natural log, sinks excluded, -inf where a row attends to nothing.

    Raises:
        InvalidInput: block_table or seq_lens is missing beside a cache, or a sequence is shorter than its new
            tokens.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix B.
    """
    indptr = qo_indptr.tolist()
    contexts = [0] * (len(indptr) - 1)
    if cache is not None:
        contexts = _context_lens(indptr, block_table, seq_lens)
    q_nope, q_pe, kv_c, k_pe, w_uk, w_uv = map(_fp64, (q_nope, q_pe, kv_c, k_pe, w_uk, w_uv))
    latent_width = kv_c.shape[1]
    out, lse = _empty_rows(q_nope, w_uv.shape[2])

    def expand(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [H, n, P + R] and values [H, n, V]."""
        keys = torch.einsum("nl,hpl->hnp", latent, w_uk)
        keys = torch.cat((keys, rope.expand(w_uk.shape[0], -1, -1)), -1)
        return keys, torch.einsum("nl,hlv->hnv", latent, w_uv)

    for sequence, context in enumerate(contexts):
        first, last = indptr[sequence], indptr[sequence + 1]
        if first == last:
            continue
        context_parts = []
        if cache is not None and block_table is not None and context:
            cached = _read(cache, _slots(block_table[sequence], context, cache.block_size))
            context_parts = [
                expand(c[:, :latent_width], c[:, latent_width:])
                for c in torch.split(cached, context_chunk or context)
            ]
        new_keys, new_values = expand(kv_c[first:last], k_pe[first:last])
        for row in range(first, last):
            seen = row + 1 - first if causal else last - first
            q = torch.cat((q_nope[row], q_pe[row]), -1)
            outs, lses = [], []
            for keys, values in (*context_parts, (new_keys[:, :seen], new_values[:, :seen])):
                part_out, part_lse = _softmax_sum(sm_scale * torch.einsum("hd,hnd->hn", q, keys), values)
                outs.append(part_out)
                lses.append(part_lse)
            out[row], lse[row] = _merge(outs, lses)
    return AttentionOutput(out if sinks is None else apply_sinks(out, lse, sinks), lse)


def write_cache(
    kv_c: Tensor, k_pe: Tensor, cache: KVCache, slot_mapping: Tensor, *, power_of_two: bool = False
) -> Tensor:
    """The rows that a cache must give back after these tokens were written to it; nothing is written.

    A stored fp8 value is x / scale in fp32, clamped to the largest finite value, rounded to nearest, ties to
    even; NaN stays NaN. A scale in the row is the largest magnitude it covers over the largest stored value,
    in fp32, NaN left out, or the next power of two from there on. bf16, fp16 and fp32 are IEEE casts.

    Args:
        kv_c: [S, L], any float dtype.
        k_pe: [S, R].
        cache: Says the format and the scale.
        slot_mapping: [S] int64. -1: the token is not written.
        power_of_two: Whether scales in a row are powers of two.

    Returns:
        [S, L + R] fp64, what `cache.read(slot_mapping)` must return; NaN rows where the slot is -1;
        [0, L + R] for no tokens.

    Raises:
        Nothing of its own; `contract` has checked the arguments.
    """
    kv_c, k_pe = kv_c.to(torch.float32), k_pe.to(torch.float32)
    flavour = "fnuz" if cache.format.name.endswith("fnuz") else "fn"
    if cache.format.tile:
        width = cache.format.tile if cache.format.tile > 0 else kv_c.shape[1]
        tiles = kv_c.reshape(kv_c.shape[0], kv_c.shape[1] // width, width)
        scales = _tile_scales(tiles, flavour)
        if power_of_two:
            scales = torch.exp2(scales.to(FP64).log2().ceil()).to(torch.float32)
        values = (_round_e4m3(tiles / scales, flavour) * scales.to(FP64)).flatten(-2)
        expected = torch.cat((values, k_pe.to(torch.bfloat16).to(FP64)), -1)
    elif cache.scale is not None:
        expected = _round_e4m3(torch.cat((kv_c, k_pe), -1) / cache.scale, flavour) * cache.scale.to(FP64)
    else:
        expected = torch.cat((kv_c, k_pe), -1).to(cache.format.dtype).to(FP64)
    expected[slot_mapping == -1] = torch.nan
    return expected


def index_logits(
    q: Tensor,
    weights: Tensor,
    cache: KVCache,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
) -> list[Tensor]:
    """Score the index keys that each query token sees: logit_j = sum over heads of w_h · relu(q_h · k_j).

    Args:
        q: [T, Hi, D] index queries, any float dtype. Rotated.
        weights: [T, Hi]. Every scale is in them.
        cache: Paged index keys of width D; only live slots are read.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32. Includes the tokens of this call.
        qo_indptr: [B + 1] int32. None: one token a sequence. Rows from its last value on see nothing.

    Returns:
        For each query token the fp64 logits [n] of the first n = max(0, seq_len - q_len + 1 + t) tokens of
        its sequence; [0] for a row that sees nothing.

    Raises:
        Nothing of its own; `contract` has checked the arguments.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.
    """
    logits = [torch.zeros(0, dtype=FP64, device=q.device) for _ in range(q.shape[0])]
    for sequence, seq_len, rows in _sequences(seq_lens, qo_indptr):
        if not rows:
            continue
        keys = _read(cache, _slots(block_table[sequence], seq_len, cache.block_size))
        for t, row in enumerate(rows):
            visible = keys[: _visible(seq_len, len(rows), t, causal=True)]
            logits[row] = weights[row].to(FP64) @ (q[row].to(FP64) @ visible.T).relu()
    return logits


def index_topk(
    q: Tensor,
    weights: Tensor,
    cache: KVCache,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    topk: int,
    qo_indptr: Tensor | None = None,
) -> Tensor:
    """Name the tokens with the largest index logits, for each query token.

    A larger logit comes first; of equal logits the earlier token; NaN ranks below -inf.

    Args:
        q: [T, Hi, D] index queries, any float dtype. Rotated.
        weights: [T, Hi].
        cache: Paged index keys of width D.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32.
        topk: K, the most tokens of a row.
        qo_indptr: [B + 1] int32. None: one token a sequence.

    Returns:
        [T, K] int32 token ids counted from the start of the row's sequence; -1 after the last that it sees,
        and everywhere in a row that sees nothing.

    Raises:
        Nothing of its own; `contract` has checked the arguments.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.
    """
    logits = index_logits(q, weights, cache, block_table=block_table, seq_lens=seq_lens, qo_indptr=qo_indptr)
    chosen = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    for row, values in enumerate(logits):
        logit = values.tolist()
        # Python's sort is stable, so equal logits stay in order; NaN is kept out of it, for it has no order.
        order = sorted((j for j, x in enumerate(logit) if not math.isnan(x)), key=lambda j: -logit[j])
        ranked = [*order, *(j for j, x in enumerate(logit) if math.isnan(x))][:topk]
        chosen[row, : len(ranked)] = torch.tensor(ranked, dtype=torch.int32, device=q.device)
    return chosen


def merge(parts: Sequence[AttentionOutput]) -> AttentionOutput:
    """Join attention over disjoint key sets into attention over their union.

    Args:
        parts: One or more of out [..., X] and lse [...], natural log, -inf for a part without keys, whose out
            is not read.

    Returns:
        out and lse in fp64; 0 and -inf where every part is empty.

    Raises:
        Nothing of its own.
    """
    lses = [_fp64(part.lse) for part in parts if part.lse is not None]
    return AttentionOutput(*_merge([_fp64(part.out) for part in parts], lses))


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Give each head one more key, of logit `sinks` and value zero: out · exp(lse) / (exp(lse) + exp(sink)).

    Args:
        out: [T, H, X] without sinks.
        lse: [T, H], natural log, sinks excluded.
        sinks: [H] logits. -inf changes nothing, +inf takes everything.

    Returns:
        [T, H, X] fp64; 0 for an empty row, whatever the sink.

    Raises:
        Nothing of its own.
    """
    out, lse, sinks = map(_fp64, (out, lse, sinks))
    share = 1.0 / (1.0 + torch.exp(sinks - lse))
    return torch.where((lse == -torch.inf)[..., None], 0.0, share[..., None] * out)


def _merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Out and lse of the union of parts."""
    each_out, each_lse = torch.stack(list(outs)), torch.stack(list(lses))
    weights, lse = _softmax(each_lse, 0)
    is_empty = (each_lse == -torch.inf)[..., None]
    return torch.where(is_empty, 0.0, weights[..., None] * each_out).sum(0), lse


def _softmax_sum(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Out [H, X] and lse [H] of scores [H, n] over values [n, X] or [H, n, X]."""
    weights, lse = _softmax(scores, -1)
    out = (weights[:, None, :] @ values).squeeze(1)
    return torch.where(lse[:, None] == -torch.inf, 0.0, out), lse


def _softmax(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Softmax and log-sum-exp: 0 and -inf where no score is above -inf, NaN where one is +inf or NaN."""
    if scores.shape[dim] == 0:
        return scores, scores.sum(dim).fill_(-torch.inf)
    top = scores.amax(dim, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    terms = torch.exp(scores - top)
    total = terms.sum(dim, keepdim=True)
    return terms / torch.where(total == 0, 1.0, total), (top + total.log()).squeeze(dim)


def _sequences(seq_lens: Tensor, qo_indptr: Tensor | None) -> list[tuple[int, int, range]]:
    """Of each sequence: its number, its length, its query rows."""
    lens = seq_lens.tolist()
    indptr = list(range(len(lens) + 1)) if qo_indptr is None else qo_indptr.tolist()
    return [(b, n, range(indptr[b], indptr[b + 1])) for b, n in enumerate(lens)]


def _visible(seq_len: int, q_len: int, t: int, causal: bool) -> int:
    """Keys that row t of q_len sees."""
    return max(0, seq_len - q_len + 1 + t) if causal else seq_len


def _slots(pages: Tensor, num_tokens: int, block_size: int) -> Tensor:
    """Slots of a sequence's first tokens, int64."""
    token = torch.arange(num_tokens, dtype=torch.int64, device=pages.device)
    return pages.to(torch.int64)[token // block_size] * block_size + token % block_size


def _empty_rows(q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Out and lse of rows that attend to nothing, for queries [T, H, any]."""
    out = torch.zeros(*q.shape[:2], width, dtype=FP64, device=q.device)
    return out, torch.full(q.shape[:2], -torch.inf, dtype=FP64, device=q.device)


def _context_lens(indptr: list[int], block_table: Tensor | None, seq_lens: Tensor | None) -> list[int]:
    """Cached tokens of each sequence that are not among the new ones."""
    reasons = Reasons("reference.prefill")
    reasons.need(block_table is not None, "block_table", None, "a tensor beside a cache")
    reasons.need(seq_lens is not None, "seq_lens", None, "a tensor beside a cache")
    contexts: list[int] = []
    for b, seq_len in enumerate([] if seq_lens is None else seq_lens.tolist()):
        q_len = indptr[b + 1] - indptr[b]
        reasons.need(seq_len >= q_len, "seq_lens", f"{seq_len} at {b}", f"at least {q_len}, its new tokens")
        contexts.append(seq_len - q_len)
    reasons.raise_if_any()
    return contexts


def _fp64(tensor: Tensor) -> Tensor:
    """The tensor in fp64."""
    return tensor.to(FP64)


def _read(cache: KVCache, slots: Tensor) -> Tensor:
    """The rows [n, L + R] of the cache at these slots."""
    return _fp64(cache.read(slots.to(cache.device), dtype=FP64))


def _tile_scales(tiles: Tensor, flavour: str) -> Tensor:
    """fp32 scales [S, n, 1] of tiles [S, n, width], kept where they are normal and scale to finite values."""
    # A divisor on the device: CUDA divides by a number as a product with its rounded reciprocal.
    largest = _e4m3_grid(flavour)[-1].to(tiles)
    amax = tiles.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)
    return (amax / largest.expand_as(amax)).clamp(2.0**-126, 2.0 ** (127 - int(largest.log2())))


def _e4m3_grid(flavour: str) -> Tensor:
    """Every finite value of e4m3 from 0 up; a value's place is its code."""
    bias, codes = (8, 128) if flavour == "fnuz" else (7, 127)
    values = []
    for code in range(codes):
        exponent, mantissa = divmod(code, 8)
        values.append(
            (mantissa / 8) * 2.0 ** (1 - bias)
            if exponent == 0
            else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
        )
    return torch.tensor(values, dtype=FP64)


def _round_e4m3(x: Tensor, flavour: str) -> Tensor:
    """The nearest finite e4m3 value in fp64, ties to the even code; NaN stays NaN."""
    grid = _e4m3_grid(flavour).to(x.device)
    middles = (grid[1:] + grid[:-1]) / 2
    size = x.abs().to(FP64).contiguous()
    code = torch.searchsorted(middles, size)
    is_tie = size == middles[code.clamp(max=len(middles) - 1)]
    code = code + (is_tie & (code % 2 == 1))
    rounded = torch.copysign(grid[code.clamp(max=len(grid) - 1)], x.to(FP64))
    return torch.where(x.isnan(), torch.nan, rounded)
