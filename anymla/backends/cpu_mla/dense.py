"""Dense decode: each sequence by itself, a tile of its keys at a time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.backends.cpu_mla.softmax import RunningSums, Softmax, columns
from anymla.backends.cpu_mla.tiles import TILE, KeyTiles
from anymla.contract import Batch, DecodeArgs, SparseArgs
from anymla.hardware.probe import Machine
from anymla.problem import Problem

ROWS = 512
"""Query rows (tokens × heads) worked on at a time, unless one token has more."""


class RowBlock:
    """Scratch for the rows of a few query tokens: their queries, sums and results."""

    def __init__(self, max_tokens: int, num_heads: int, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
        rows = columns(max_tokens * num_heads)
        self._num_heads, self._latent = num_heads, kv_lora_rank
        self._q = torch.empty((kv_lora_rank + qk_rope_head_dim) * rows, dtype=torch.float32)
        self._acc = torch.empty(kv_lora_rank * rows, dtype=torch.float32)
        self._row_max = torch.empty((1, rows), dtype=torch.float32)
        self._row_sum = torch.empty((1, rows), dtype=torch.float32)
        self._sinks = torch.empty((max_tokens, num_heads), dtype=torch.float32)
        self.softmax = Softmax(rows, TILE, max_tokens)

    def queries(self, ql_nope: Tensor, q_pe: Tensor, sm_scale: float) -> Tensor:
        """Queries [t, H, L] and [t, H, R] as scaled fp32 [L + R, columns]."""
        tokens = ql_nope.shape[0]
        width, rows = self._latent + q_pe.shape[2], tokens * self._num_heads
        q = self._q[: width * columns(rows)].view(width, -1)
        q[:, rows:].zero_()
        real = q[:, :rows].view(width, tokens, self._num_heads)
        real[: self._latent].copy_(ql_nope.permute(2, 0, 1))
        real[self._latent :].copy_(q_pe.permute(2, 0, 1))
        return q.mul_(sm_scale)

    def sums(self, num_tokens: int) -> RunningSums:
        """Fresh sums for the rows of so many tokens."""
        rows = columns(num_tokens * self._num_heads)
        acc = self._acc[: self._latent * rows].view(self._latent, rows)
        sums = RunningSums(self._row_max[:, :rows], self._row_sum[:, :rows], acc)
        sums.reset()
        return sums

    def write(self, sums: RunningSums, sinks: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
        """Finish the sums into out [t, H, L] and lse [t, H]."""
        shape = out.shape[:2]
        if sinks is not None:
            sinks = self._sinks[: shape[0]].copy_(sinks).view(-1)
        result, result_lse = self.softmax.finish(sums.rows(0, shape[0] * shape[1]), sinks)
        out.copy_(result.view(-1, *shape).permute(1, 2, 0))
        if lse is not None:
            lse.copy_(result_lse.view(shape))


@dataclass
class DecodeState:
    """A planned decode: the lengths of the step, and all memory that it needs."""

    batch: Batch
    block_tokens: int
    rows: RowBlock
    tiles: KeyTiles


def plan_decode(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> DecodeState:
    """Allocate the scratch of one decode step.

    Args:
        batch: Lengths and pages, known to the host.
        problem: Facts of the call.
        machine: The CPU; nothing depends on it.
        knobs: None are known.

    Returns:
        The state that `decode` takes, for any number of layers.
    """
    tokens = min(max(1, ROWS // problem.num_heads), batch.max_q_len)
    rows = RowBlock(tokens, problem.num_heads, problem.kv_lora_rank, problem.qk_rope_head_dim)
    tiles = KeyTiles(problem.kv_format, problem.kv_lora_rank, problem.qk_rope_head_dim)
    return DecodeState(batch, tokens, rows, tiles)


def update_decode(state: DecodeState, batch: Batch) -> None:
    """Take the lengths of another step within the planned bounds; no buffer moves."""
    assert batch.max_q_len <= state.batch.max_q_len
    state.batch = batch


def decode(args: DecodeArgs, state: DecodeState) -> None:
    """Fill args.out, and args.lse if it is there, for every row; nothing is allocated but scalars.

    Args:
        args: Checked tensors.
        state: From `plan_decode`.
    """
    batch = state.batch
    assert batch.seq_lens_host is not None and batch.qo_indptr_host is not None
    bounds = batch.qo_indptr_host
    for sequence, seq_len in enumerate(batch.seq_lens_host):
        pages = batch.block_table[sequence]
        start, end = bounds[sequence], bounds[sequence + 1]
        for first in range(start, end, state.block_tokens):
            last = min(first + state.block_tokens, end)
            visible = seq_len - (end - first) + 1 if batch.causal else seq_len
            _attend(args, state, pages, first, last, seq_len, visible)
    clear_rows(args.out, args.lse, bounds[-1])


def score_scale(args: DecodeArgs | SparseArgs) -> float:
    """What multiplies q·k, the scale of queries in fp8 included."""
    return args.sm_scale if args.q_scale is None else args.sm_scale * args.q_scale.item()


def clear_rows(out: Tensor, lse: Tensor | None, first: int) -> None:
    """Write the rows that belong to no sequence."""
    out[first:].zero_()
    if lse is not None:
        lse[first:].fill_(-math.inf)


def _attend(
    args: DecodeArgs, state: DecodeState, pages: Tensor, first: int, last: int, seq_len: int, visible: int
) -> None:
    """Tokens first to last - 1; the first sees `visible` keys, each later one one more if causal."""
    count, rows, causal = last - first, state.rows, state.batch.causal
    q = rows.queries(args.ql_nope[first:last], args.q_pe[first:last], score_scale(args))
    sums = rows.sums(count)
    num_keys = min(visible + count - 1, seq_len) if causal else seq_len
    for begin in range(0, num_keys, TILE):
        end = min(begin + TILE, num_keys)
        keys = state.tiles.load(args.cache, pages, begin, end)
        scores, values = rows.softmax.scores(keys, q), keys[:, : args.out.shape[2]]
        if causal:
            rows.softmax.add_causal(sums, scores, values, visible - begin, count, args.out.shape[1])
        else:
            rows.softmax.add(sums, scores, values)
    rows.write(sums, args.sinks, args.out[first:last], None if args.lse is None else args.lse[first:last])
