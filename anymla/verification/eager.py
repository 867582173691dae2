"""Eager runs: every operation straightforwardly in the call's dtypes, to measure how much rounding a result
may show.

Operands are in the dtype of the queries, a cache dequantised into it; products accumulate in fp32 and are
rounded to that dtype, as a matrix product of that dtype is. The lse is fp32 arithmetic on the same operands.
Each function returns several runs that differ only in the order of their sums.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from anymla.contract import AttentionOutput
from anymla.kv_cache import KVCache

FP32 = torch.float32

ORDERS = 4
"""Summation orders. Measured in fp32 over 150 seeds, a right blocked kernel uses at most 1.7 times the budget
of one order, 1.3 of two, 0.7 of four."""


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
    orders: int = ORDERS,
) -> tuple[AttentionOutput, ...]:
    """Run `reference.decode` in the dtype of the queries, in several orders; arguments as there."""
    runs = _empty_runs(ql_nope, ql_nope.shape[2], orders)
    q = torch.cat((ql_nope, q_pe), -1)
    for seq, (seq_len, first, last) in enumerate(_spans(seq_lens, qo_indptr)):
        if last == first:
            continue
        keys = cache.read(_slots(block_table[seq], seq_len, cache.block_size), dtype=FP32).to(q.dtype)
        visible = _visible(seq_len, last - first, causal, q.device)
        _fill(
            runs,
            range(first, last),
            q[first:last],
            keys,
            keys[:, : ql_nope.shape[2]],
            visible,
            sm_scale,
            sinks,
        )
    return runs


def sparse_decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    cache: KVCache,
    *,
    indices: Tensor,
    counts: Tensor | None = None,
    sm_scale: float,
    sinks: Tensor | None = None,
    orders: int = ORDERS,
) -> tuple[AttentionOutput, ...]:
    """Run `reference.sparse_decode` in the dtype of the queries, in several orders; arguments as there."""
    runs = _empty_runs(ql_nope, ql_nope.shape[2], orders)
    q = torch.cat((ql_nope, q_pe), -1)
    for row, named in enumerate(indices.long()):
        named = named if counts is None else named[: int(counts[row])]
        keys = cache.read(named[named >= 0], dtype=FP32).to(q.dtype)
        visible = torch.ones(1, len(keys), dtype=torch.bool, device=q.device)
        rows = range(row, row + 1)
        _fill(runs, rows, q[row : row + 1], keys, keys[:, : ql_nope.shape[2]], visible, sm_scale, sinks)
    return runs


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
    orders: int = ORDERS,
) -> tuple[AttentionOutput, ...]:
    """Run `reference.prefill` in the dtype of the queries, in several orders; arguments as there."""
    runs = _empty_runs(q_nope, w_uv.shape[2], orders)
    q = torch.cat((q_nope, q_pe), -1)
    indptr = qo_indptr.tolist()
    for seq, (first, last) in enumerate(pairwise(indptr)):
        if last == first:
            continue
        latent, rope, seq_len = kv_c[first:last], k_pe[first:last], last - first
        if cache is not None and block_table is not None and seq_lens is not None:
            seq_len = int(seq_lens[seq])
            slots = _slots(block_table[seq], seq_len - (last - first), cache.block_size)
            context = cache.read(slots, dtype=FP32).to(q.dtype)
            latent = torch.cat((context[:, : kv_c.shape[1]], latent))
            rope = torch.cat((context[:, kv_c.shape[1] :], rope))
        keys = torch.einsum("nl,hpl->hnp", latent.float(), w_uk.float()).to(q.dtype)
        keys = torch.cat((keys, rope.expand(len(keys), -1, -1)), -1)
        values = torch.einsum("nl,hlv->hnv", latent.float(), w_uv.float()).to(q.dtype)
        visible = _visible(seq_len, last - first, causal, q.device)
        _fill(runs, range(first, last), q[first:last], keys, values, visible, sm_scale, sinks)
    return runs


def index_logits(
    q: Tensor,
    weights: Tensor,
    cache: KVCache,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None = None,
) -> list[Tensor]:
    """Run `reference.index_logits` in fp32; arguments and result as there."""
    logits = [torch.zeros(0) for _ in range(q.shape[0])]
    for seq, (seq_len, first, last) in enumerate(_spans(seq_lens, qo_indptr)):
        if last == first:
            continue
        keys = cache.read(_slots(block_table[seq], seq_len, cache.block_size), dtype=FP32)
        for row, seen in zip(
            range(first, last), _visible(seq_len, last - first, True, q.device), strict=True
        ):
            logits[row] = weights[row].float() @ (q[row].float() @ keys[seen].T).relu()
    return logits


def _fill(
    runs: tuple[AttentionOutput, ...],
    rows: range,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    sm_scale: float,
    sinks: Tensor | None,
) -> None:
    """Attend q [n, H, D] to keys [m, D] or [H, m, D] where visible [n, m]; write those rows of every run."""
    if not keys.shape[-2]:
        return
    at = slice(rows.start, rows.stop)
    by_head = q.transpose(0, 1)  # [H, n, D]
    for run, (widths, tokens, scale_first) in zip(
        runs, _orders(keys.shape[-1], keys.shape[-2]), strict=False
    ):
        q32, k32 = by_head[..., widths].float(), keys[..., tokens, :][..., widths].float()
        seen = visible[:, tokens]
        exact = (q32 * sm_scale) @ k32.mT if scale_first else q32 @ k32.mT * sm_scale
        lse = exact.masked_fill(~seen, -torch.inf).logsumexp(-1)  # [H, n]
        scores = exact if q.dtype == FP32 else ((q32 @ k32.mT).to(q.dtype) * sm_scale).float()
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(*scores.shape[:2], 1)), -1)
        weights = scores.softmax(-1)[..., : len(tokens)].to(q.dtype)
        empty = (lse == -torch.inf)[..., None]
        out = (weights.masked_fill(empty, 0).float() @ values[..., tokens, :].float()).to(q.dtype)
        if sinks is not None:
            out = out.masked_fill((sinks == torch.inf)[:, None, None], 0)
        run.out[at] = out.transpose(0, 1)
        assert run.lse is not None
        run.lse[at] = lse.T


def _orders(width: int, tokens: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Orders of the summands over width and tokens, and whether the queries are scaled first."""
    draw = torch.Generator().manual_seed(width * 8191 + tokens)
    yield torch.arange(width), torch.arange(tokens), False
    for i in range(1, ORDERS):
        yield torch.randperm(width, generator=draw), torch.randperm(tokens, generator=draw), i % 2 == 1


def _empty_runs(q: Tensor, width: int, orders: int) -> tuple[AttentionOutput, ...]:
    tokens, heads = q.shape[:2]
    return tuple(
        AttentionOutput(
            torch.zeros(tokens, heads, width, dtype=q.dtype, device=q.device),
            torch.full((tokens, heads), -torch.inf, device=q.device),
        )
        for _ in range(orders)
    )


def _spans(seq_lens: Tensor, qo_indptr: Tensor | None) -> list[tuple[int, int, int]]:
    """Of each sequence its length and its first and last query row."""
    lens = seq_lens.tolist()
    indptr = list(range(len(lens) + 1)) if qo_indptr is None else qo_indptr.tolist()
    return list(zip(lens, indptr, indptr[1:], strict=False))


def _visible(seq_len: int, q_len: int, causal: bool, device: torch.device) -> Tensor:
    """[q_len, seq_len] which keys each row sees."""
    keys = torch.arange(seq_len, device=device)
    last = (
        seq_len - q_len + torch.arange(q_len, device=device)
        if causal
        else torch.full((q_len,), seq_len, device=device)
    )
    return keys[None, :] <= last[:, None]


def _slots(pages: Tensor, seq_len: int, block_size: int) -> Tensor:
    tokens = torch.arange(seq_len, device=pages.device)
    return pages.long()[tokens // block_size] * block_size + tokens % block_size
