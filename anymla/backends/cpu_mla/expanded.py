"""Prefill in decompressed form: per head, keys [W_UK c ; k_pe] and values c W_UV of one tile at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.backends.cpu_mla.dense import clear_rows
from anymla.backends.cpu_mla.softmax import FEW, RunningSums, Softmax, columns, not_few
from anymla.backends.cpu_mla.tiles import TILE, KeyTiles
from anymla.contract import Batch, PrefillArgs
from anymla.hardware.probe import Machine
from anymla.problem import Problem

ROWS = 256
"""Query tokens of one head in one product."""

HEADS = 8
"""Heads that share the reading of a tile; their queries and sums are kept for SPAN tokens."""

SPAN = 4096
"""Query tokens that share the expansion of a tile to keys and values."""


class HeadRows:
    """Scratch for HEADS heads of SPAN query tokens, and for one head's keys and values of a tile."""

    def __init__(self, max_tokens: int, problem: Problem) -> None:
        heads, tokens = min(HEADS, problem.num_heads), min(SPAN, max_tokens) + FEW
        self._nope, self._rope = problem.qk_nope_head_dim, problem.qk_rope_head_dim
        self._latent, self._value = problem.kv_lora_rank, problem.v_head_dim
        self._q = torch.empty(heads, (self._nope + self._rope) * tokens)
        self._acc = torch.empty(heads, self._value * tokens)
        self._row_max = torch.empty(heads, tokens)
        self._row_sum = torch.empty(heads, tokens)
        self._keys = torch.empty(TILE, self._nope + self._rope)
        self._values = torch.empty(TILE, self._value)
        self._w_uk = torch.empty(self._nope * self._latent)
        self._w_uv = torch.empty(self._latent * self._value)
        self.softmax = Softmax(min(ROWS, tokens), TILE, ROWS)

    def take_queries(self, head: int, first: int, q_nope: Tensor, q_pe: Tensor, sm_scale: float) -> None:
        """Keep queries [t, P] and [t, R] of tokens `first` and on of the span, scaled; start their sums."""
        count = q_nope.shape[0]
        q = self.queries(head, first, count)
        q[:, count:].zero_()
        q[: self._nope, :count].copy_(q_nope.t())
        q[self._nope :, :count].copy_(q_pe.t())
        q.mul_(sm_scale)
        self.sums(head, first, count).reset()

    def queries(self, head: int, first: int, count: int) -> Tensor:
        """[P + R, columns]."""
        width = self._nope + self._rope
        return self._q[head, width * first : width * (first + columns(count))].view(width, -1)

    def sums(self, head: int, first: int, count: int) -> RunningSums:
        """Those of tokens first to first + count - 1 of the span."""
        width, last = self._value, first + columns(count)
        return RunningSums(
            self._row_max[head : head + 1, first:last],
            self._row_sum[head : head + 1, first:last],
            self._acc[head, width * first : width * last].view(width, -1),
        )

    def expand(self, tile: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, P + R] and values [n, V] of one head from a tile [n, L + R]."""
        count, latent = tile.shape[0], not_few(tile)[:, : self._latent]
        keys, values = self._keys[: latent.shape[0]], self._values[: latent.shape[0]]
        torch.mm(latent, _as_fp32(w_uk, self._w_uk).t(), out=keys[:, : self._nope])
        torch.mm(latent, _as_fp32(w_uv, self._w_uv), out=values)
        keys[:count, self._nope :].copy_(tile[:, self._latent :])
        return keys[:count], values[:count]


@dataclass
class PrefillState:
    """A planned prefill: the lengths of the step, and all memory that it needs."""

    batch: Batch
    rows: HeadRows
    tiles: KeyTiles


@dataclass(frozen=True)
class _Span:
    """Query tokens worked on together: `count` from row `row` on, the first at `position` of its sequence."""

    row: int
    count: int
    position: int

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First token and number of tokens of each block, counted from the start of the span."""
        for first in range(0, self.count, ROWS):
            yield first, min(ROWS, self.count - first)


def plan_prefill(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> PrefillState:
    """Allocate the scratch of one prefill step; it does not grow with heads × tokens beyond HEADS × SPAN.

    Args:
        batch: Lengths and pages, known to the host.
        problem: Facts of the call.
        machine: The CPU; nothing depends on it.
        knobs: None are known.

    Returns:
        The state that `prefill` takes, for any number of layers.
    """
    tiles = KeyTiles(problem.kv_format, problem.kv_lora_rank, problem.qk_rope_head_dim)
    return PrefillState(batch, HeadRows(batch.max_q_len, problem), tiles)


def prefill(args: PrefillArgs, state: PrefillState) -> None:
    """Fill args.out, and args.lse if it is there, for every row; nothing is allocated but scalars.

    Args:
        args: Checked tensors.
        state: From `plan_prefill`.
    """
    batch = state.batch
    assert batch.context_lens_host is not None and batch.qo_indptr_host is not None
    bounds = batch.qo_indptr_host
    for sequence, context in enumerate(batch.context_lens_host):
        start, end = bounds[sequence], bounds[sequence + 1]
        for row in range(start, end, SPAN):
            span = _Span(row, min(SPAN, end - row), context + row - start)
            for head in range(0, args.q_nope.shape[1], HEADS):
                heads = range(head, min(head + HEADS, args.q_nope.shape[1]))
                _attend(args, state, span, heads, batch.block_table[sequence], (context, start, end))
    clear_rows(args.out, args.lse, bounds[-1])


def _attend(
    args: PrefillArgs,
    state: PrefillState,
    span: _Span,
    heads: range,
    pages: Tensor,
    bounds: tuple[int, int, int],
) -> None:
    """One span of queries of some heads over the context and the new tokens of its sequence."""
    rows, causal = state.rows, state.batch.causal
    for lane, head in enumerate(heads):
        for first, count in span.blocks():
            part = slice(span.row + first, span.row + first + count)
            rows.take_queries(lane, first, args.q_nope[part, head], args.q_pe[part, head], args.sm_scale)
    last_position = span.position + span.count - 1
    for begin, tile in _tiles(args, state, pages, bounds, last_position if causal else None):
        for lane, head in enumerate(heads):
            keys, values = rows.expand(tile, args.w_uk[head], args.w_uv[head])
            for first, count in span.blocks():
                visible = span.position + first + 1 - begin
                if causal and visible + count <= 1:
                    continue
                sums = rows.sums(lane, first, count)
                scores = rows.softmax.scores(keys, rows.queries(lane, first, count))
                if causal:
                    rows.softmax.add_causal(sums, scores, values, visible, count, 1)
                else:
                    rows.softmax.add(sums, scores, values)
    for lane, head in enumerate(heads):
        sinks = None if args.sinks is None else args.sinks[head : head + 1]
        for first, count in span.blocks():
            part = slice(span.row + first, span.row + first + count)
            out, lse = rows.softmax.finish(rows.sums(lane, first, count).rows(0, count), sinks)
            args.out[part, head].copy_(out.t())
            if args.lse is not None:
                args.lse[part, head].copy_(lse)


def _tiles(
    args: PrefillArgs,
    state: PrefillState,
    pages: Tensor,
    bounds: tuple[int, int, int],
    last_position: int | None,
) -> Iterator[tuple[int, Tensor]]:
    """The keys of a sequence up to a position, a tile at a time, each with the position of its first key."""
    context, start, end = bounds
    for begin in range(0, context, TILE):
        assert args.cache is not None
        yield begin, state.tiles.load(args.cache, pages, begin, min(begin + TILE, context))
    last = end if last_position is None else start + last_position + 1 - context
    for begin in range(start, last, TILE):
        part = slice(begin, min(begin + TILE, last))
        yield context + begin - start, state.tiles.load_new(args.kv_c[part], args.k_pe[part])


def _as_fp32(weight: Tensor, scratch: Tensor) -> Tensor:
    """A weight as a matrix product takes it: itself, or a copy in scratch."""
    if weight.dtype == torch.float32 and 1 in weight.stride():
        return weight
    if weight.stride(1) == 1:
        return scratch.view(weight.shape).copy_(weight)
    return scratch.view(weight.shape[1], weight.shape[0]).t().copy_(weight)
