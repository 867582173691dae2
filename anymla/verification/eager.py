"""Eager runs: every operation straightforwardly in the call's dtypes, to measure what rounding may do.

Operands are in the dtype of the queries, a cache dequantised into it; products accumulate in fp32 and are
rounded to that dtype, as a matrix product of that dtype is. The lse is fp32 arithmetic on the same operands.
Each function returns several runs that differ only in the order of their fp32 sums, most of them plain loops:
a matrix product that sums in parallel is more exact than a right kernel has to be. Of 16-bit operands the
last run adds as matrix units do.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anymla.contract import AttentionOutput
from anymla.kv_cache import KVCache

FP32 = torch.float32

LOOPS = 5
"""Loops beside the matrix product: two in the order given, the others in random orders; half scale q first.

Measured in fp32 over 60 seeds at five shapes, a right kernel that loops in the order given uses at most 0.6
of the budget, those that loop in another order or use exp2 at most 1.0. Against one matrix product it is 2.3.
"""


ORDERED_VALUES = 1 << 27
"""Of keys in other orders, at most about, held at a time."""


_FP8_KEYS = 4096
"""Keys whose fp8 products are added as matrix units do it."""


def loops_for(lse: Tensor) -> int:
    """Loops for a result with these values of lse.

    Of a few values all loops may be right by luck, so there are more; on a device they cost next to nothing.
    There, matrix units cut sums off instead of rounding: in the worst of 1,000 random calls on an H200, right
    kernels used 0.94 of the budget of six runs, and 0.78 of that of forty.
    """
    wanted = 200 if lse.device.type == "cpu" else 2000
    return max(LOOPS, min(40, wanted // max(lse.numel(), 1)))


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
    loops: int = LOOPS,
) -> tuple[AttentionOutput, ...]:
    """Run `reference.decode` in the dtype of the queries, in several orders; arguments as there."""
    ql_nope, q_pe, sm_scale = _in_16_bits(ql_nope, q_pe, sm_scale, q_scale)
    runs = _empty_runs(ql_nope, ql_nope.shape[2], loops)
    q = torch.cat((ql_nope, q_pe), -1)
    for group in _groups(_spans(seq_lens, qo_indptr), q.device):
        rows = pad_sequence([q[span.first : span.last] for span in group], batch_first=True).transpose(1, 2)
        slots = (_slots(block_table[span.seq], span.length, cache.block_size) for span in group)
        keys = [cache.read(own, dtype=FP32).to(q.dtype) for own in slots]
        padded = pad_sequence(keys, batch_first=True)[:, None]
        visible = torch.zeros(
            len(group), 1, rows.shape[2], padded.shape[2], dtype=torch.bool, device=q.device
        )
        for own, span in zip(visible, group, strict=True):
            own[0, : span.q_len, : span.length] = _visible(span.length, span.q_len, causal, q.device)
        values = padded[..., : ql_nope.shape[2]]
        found = _attend(rows, padded, values, visible, sm_scale, sinks, loops)
        for run, (out, lse) in zip(runs, found, strict=True):
            for own_out, own_lse, span in zip(out, lse, group, strict=True):
                run.out[span.first : span.last] = own_out[:, : span.q_len].transpose(0, 1)
                _lse(run)[span.first : span.last] = own_lse[:, : span.q_len].T
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
    q_scale: Tensor | None = None,
    loops: int = LOOPS,
) -> tuple[AttentionOutput, ...]:
    """Run `reference.sparse_decode` in the dtype of the queries, in several orders; arguments as there."""
    ql_nope, q_pe, sm_scale = _in_16_bits(ql_nope, q_pe, sm_scale, q_scale)
    runs = _empty_runs(ql_nope, ql_nope.shape[2], loops)
    tokens, topk = indices.shape
    if not tokens:
        return runs
    device = ql_nope.device
    counted = torch.full((tokens,), topk, device=device) if counts is None else counts
    visible = (indices >= 0) & (torch.arange(topk, device=device) < counted[:, None])
    keys = torch.zeros(tokens, topk, cache.width, dtype=ql_nope.dtype, device=device)
    keys[visible] = cache.read(indices[visible].long(), dtype=FP32).to(ql_nope.dtype)
    by_head = torch.cat((ql_nope, q_pe), -1)[:, :, None]
    keys = keys[:, None]
    values = keys[..., : ql_nope.shape[2]]
    found = _attend(by_head, keys, values, visible[:, None, None], sm_scale, sinks, loops)
    for run, (out, lse) in zip(runs, found, strict=True):
        run.out.copy_(out[:, :, 0])
        _lse(run).copy_(lse[:, :, 0])
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
    loops: int = LOOPS,
) -> tuple[AttentionOutput, ...]:
    """Run `reference.prefill` in the dtype of the queries, in several orders; arguments as there."""
    runs = _empty_runs(q_nope, w_uv.shape[2], loops)
    q = torch.cat((q_nope, q_pe), -1)
    for seq, (first, last) in enumerate(pairwise(qo_indptr.tolist())):
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
        keys = torch.cat((keys, rope.expand(len(keys), -1, -1)), -1)[None]
        values = torch.einsum("nl,hlv->hnv", latent.float(), w_uv.float()).to(q.dtype)[None]
        by_head = q[None, first:last].transpose(1, 2)
        visible = _visible(seq_len, last - first, causal, q.device)
        found = _attend(by_head, keys, values, visible, sm_scale, sinks, loops)
        for run, (out, lse) in zip(runs, found, strict=True):
            run.out[first:last] = out[0].transpose(0, 1)
            _lse(run)[first:last] = lse[0].T
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
    """Run `reference.index_logits` in fp32, or as fp8 is added; arguments and result as there.

    Queries in fp8 meet keys of another dtype as bf16, which holds them.
    """
    operands = {1: torch.bfloat16, 2: q.dtype, 4: FP32}[q.dtype.itemsize]
    logits = [torch.zeros(0, device=q.device) for _ in range(q.shape[0])]
    for span in _spans(seq_lens, qo_indptr):
        keys = cache.read(_slots(block_table[span.seq], span.length, cache.block_size), dtype=FP32)
        if cache.data.dtype.itemsize == 2:
            keys = keys.to(operands).float()
        visible = _visible(span.length, span.q_len, True, q.device)
        for row, seen in zip(range(span.first, span.last), visible, strict=True):
            scores = q[row].float() @ keys[seen].T
            if q.dtype.itemsize == 1:
                # As many as tell how large the noise is; the others are as they are in fp32.
                some = _fp8_sums(q[row].float(), keys[seen][:_FP8_KEYS])
                scores[:, : some.shape[1]] = some
            logits[row] = weights[row].float() @ scores.relu()
    return logits


def _in_16_bits(
    ql_nope: Tensor, q_pe: Tensor, sm_scale: float, q_scale: Tensor | None
) -> tuple[Tensor, Tensor, float]:
    """Queries in fp8 as bf16, which holds every one of them, and their scale in that of the scores."""
    if q_scale is None:
        return ql_nope, q_pe, sm_scale
    return ql_nope.bfloat16(), q_pe.bfloat16(), sm_scale * q_scale.item()


def _fp8_sums(q: Tensor, keys: Tensor) -> Tensor:
    """q·k [H, n] as matrix units add products of fp8: 32 at a time, each cut off 13 bits below the largest.

    Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2: about 14 bits of a sum are kept on H100.
    """
    total = q.new_zeros(q.shape[0], keys.shape[0])
    for x, y in zip(torch.split(q, 32, -1), torch.split(keys, 32, -1), strict=True):
        terms = torch.cat((total[..., None], x[:, None] * y), -1)
        largest = terms.abs().amax(-1, keepdim=True)
        unit = torch.exp2(torch.frexp(largest).exponent - 14.0)
        cut = ((terms / unit).trunc() * unit).sum(-1)
        total = torch.where(cut.isfinite(), cut, terms.sum(-1))
    return total


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    sm_scale: float,
    sinks: Tensor | None,
    loops: int,
) -> list[tuple[Tensor, Tensor]]:
    """Attend q [G, H, n, D] to keys [G, 1 or H, m, D] where visible [..., n, m].

    Returns:
        1 + loops times out [G, H, n, V] in the dtype of q, and lse [G, H, n].
    """
    q32, k32, v32 = q.float(), keys.float(), values.float()
    scores = [_product(q32, k32.mT) * sm_scale]
    # Half of the loops scale the queries, the others the scores.
    is_cut = loops > 0 and q.dtype != FP32
    plain = loops - is_cut
    scaled = torch.stack([q32 * sm_scale if i % 2 else q32 for i in range(plain)]) if plain else q32[None]
    looped = _looped(scaled, k32.mT, _orders(q.shape[-1], plain))
    looped[::2] *= sm_scale
    scores += list(looped)
    if is_cut:
        scores.append(_cut_sums(q32, k32.mT) * sm_scale)
    scores = [s.masked_fill(~visible, -torch.inf) for s in scores]
    nothing = scores[0].new_full(scores[0].shape[:-1], -torch.inf)
    lses = [s.logsumexp(-1) if s.shape[-1] else nothing for s in scores]
    if q.dtype != FP32:
        rounded = (_product(q32, k32.mT).to(q.dtype) * sm_scale).float().masked_fill(~visible, -torch.inf)
        weights = _weights(rounded, sinks).to(q.dtype).float()
        out = _product(weights, v32).to(q.dtype)
        return [(out, lse) for lse in lses]
    outs = [_product(_weights(scores[0], sinks), v32)]
    for order, exact in zip(_orders(keys.shape[-2], loops), scores[1:], strict=True):
        outs += list(_looped(_weights(exact, sinks)[None], v32, [order]))
    return list(zip(outs, lses, strict=True))


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [G, H, n, m], with one sink a head; 0 where there is nothing to attend to."""
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)
    keys = scores.shape[-1]
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
        is_empty = is_empty | (column == torch.inf)
    return scores.softmax(-1)[..., :keys].masked_fill(is_empty, 0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [G, H, n, D] @ b [G, 1 or H, D, m]; heads that share `b` become rows, so that nothing is expanded."""
    if b.shape[1] == a.shape[1]:
        return a @ b
    return (a.flatten(1, 2) @ b[:, 0]).view(*a.shape[:-1], b.shape[-1])


def _cut_sums(a: Tensor, b: Tensor) -> Tensor:
    """The same as matrix units add 16-bit products: 16 at a time, each sum cut off at 24 bits, not rounded.

    Source: Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Computer
    Science 7:e330, 2021.
    """
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for x, y in zip(torch.split(a.double(), 16, -1), torch.split(b.double(), 16, -2), strict=True):
        # The 29 bits that fp64 has and fp32 has not.
        total = (total + _product(x, y)).view(torch.int64).bitwise_and_(-1 << 29).view(torch.float64)
    return total.float()


def _looped(a: Tensor, b: Tensor, orders: list[Tensor]) -> Tensor:
    """Products of a [len(orders), ..., n, D] and b [..., D, m]; D is summed one by one, in each order."""
    if not orders:
        return torch.zeros(0, *a.shape[1:-1], b.shape[-1], device=a.device)
    some = max(1, ORDERED_VALUES // max(b.numel(), 1))
    if some < len(orders):
        return torch.cat([_looped(a[:some], b, orders[:some]), _looped(a[some:], b, orders[some:])])
    columns = torch.stack([own[..., order].movedim(-1, 0) for own, order in zip(a, orders, strict=True)], 1)
    rows = torch.stack([b[..., order, :].movedim(-2, 0) for order in orders], 1)
    total = torch.zeros(len(orders), *a.shape[1:-1], b.shape[-1], device=a.device)
    for column, row in zip(columns[..., None], rows[..., None, :], strict=True):
        total.addcmul_(column, row)
    return total


def _orders(size: int, loops: int) -> list[Tensor]:
    """Orders of `size` summands, the first two as given."""
    draw = torch.Generator().manual_seed(size)
    shuffled = (torch.randperm(size, generator=draw, device="cpu") for _ in range(loops - 2))
    return [torch.arange(size, device="cpu")] * min(loops, 2) + list(shuffled)


def _empty_runs(q: Tensor, width: int, loops: int) -> tuple[AttentionOutput, ...]:
    """Runs to fill; in a dtype below fp32 they differ in their lse only, and share one out."""
    rows = q.shape[:2]
    outs = [q.new_zeros(*rows, width) for _ in range(1 + loops if q.dtype == FP32 else 1)]
    lses = [q.new_full(rows, -torch.inf, dtype=FP32) for _ in range(1 + loops)]
    return tuple(AttentionOutput(outs[min(i, len(outs) - 1)], lse) for i, lse in enumerate(lses))


def _lse(run: AttentionOutput) -> Tensor:
    assert run.lse is not None
    return run.lse


class _Span(NamedTuple):
    """A sequence that has query tokens: its number, its length, its first row and the one after its last."""

    seq: int
    length: int
    first: int
    last: int

    @property
    def q_len(self) -> int:
        return self.last - self.first


def _spans(seq_lens: Tensor, qo_indptr: Tensor | None) -> list[_Span]:
    lens = seq_lens.tolist()
    indptr = list(range(len(lens) + 1)) if qo_indptr is None else qo_indptr.tolist()
    spans = (_Span(seq, n, *rows) for seq, (n, rows) in enumerate(zip(lens, pairwise(indptr), strict=True)))
    return [span for span in spans if span.q_len]


def _groups(spans: list[_Span], device: torch.device) -> list[list[_Span]]:
    """Sequences to attend at once: one on a CPU; on a device, which is slow to start, some of like length."""
    groups: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: span.length):
        if device.type != "cpu" and groups and span.length <= 4 * groups[-1][0].length + 128:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _visible(seq_len: int, q_len: int, causal: bool, device: torch.device) -> Tensor:
    """[q_len, seq_len] which keys each row sees."""
    tokens = torch.arange(q_len, device=device)
    last = seq_len - q_len + tokens if causal else tokens.fill_(seq_len)
    return torch.arange(seq_len, device=device)[None, :] <= last[:, None]


def _slots(pages: Tensor, seq_len: int, block_size: int) -> Tensor:
    tokens = torch.arange(seq_len, device=pages.device)
    return pages.long()[tokens // block_size] * block_size + tokens % block_size
