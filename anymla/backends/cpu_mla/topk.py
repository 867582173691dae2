"""Indexer: logits of index keys, a tile at a time, and the largest of them, ties decided."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.backends.cpu_mla.tiles import TILE, KeyTiles
from anymla.contract import Batch, IndexArgs
from anymla.hardware.probe import Machine
from anymla.indices import rank_logits, to_slots
from anymla.problem import Problem

ROWS = 512
"""Query rows (tokens × index heads) worked on at a time, unless one token has more."""

RANKS_BYTES = 64 << 20
"""Ranks that exist at a time, unless one token has more."""


@dataclass
class IndexState:
    """A planned top-k: the lengths of the step, and all memory that it needs.

    Attributes:
        batch: The step.
        block_tokens: Query tokens worked on at a time.
        tiles: Index keys.
        q: [D · tokens · Hi] fp32.
        weights: [tokens, Hi] fp32.
        scores: [TILE · tokens · Hi] fp32.
        logits: [TILE · tokens] fp32.
        is_nan: [TILE · tokens].
        ranks: [tokens, max_seq_len] int64, all different; larger ones come first.
        earlier_first: [TILE] int64, 0 down to 1 - TILE.
        best: [2, topk] int64, the ranks chosen and their tokens.
    """

    batch: Batch
    block_tokens: int
    tiles: KeyTiles
    q: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor
    is_nan: Tensor
    ranks: Tensor
    earlier_first: Tensor
    best: Tensor


def plan_index_topk(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> IndexState:
    """Allocate the scratch of one top-k step.

    Args:
        batch: Lengths and pages, known to the host.
        problem: Facts of the call; `topk` bounds the tokens chosen.
        machine: The CPU; nothing depends on it.
        knobs: None are known.

    Returns:
        The state that `index_topk` takes, for any number of layers.
    """
    heads, width = problem.num_heads, problem.kv_lora_rank
    tokens = min(ROWS // heads, RANKS_BYTES // (8 * max(1, batch.max_seq_len)), batch.max_q_len)
    tokens = max(1, tokens)
    return IndexState(
        batch,
        tokens,
        KeyTiles(problem.kv_format, width, 0),
        torch.empty(width * tokens * heads, dtype=torch.float32),
        torch.empty((tokens, heads), dtype=torch.float32),
        torch.empty(TILE * tokens * heads, dtype=torch.float32),
        torch.empty(TILE * tokens, dtype=torch.float32),
        torch.empty(TILE * tokens, dtype=torch.bool),
        torch.empty((tokens, batch.max_seq_len), dtype=torch.int64),
        -torch.arange(TILE),
        torch.empty((2, problem.topk), dtype=torch.int64),
    )


def update_index_topk(state: IndexState, batch: Batch) -> None:
    """Take the lengths of another step within the planned bounds; no buffer moves."""
    state.batch = batch


def index_topk(args: IndexArgs, state: IndexState) -> None:
    """Fill args.indices: larger logits first, of equal ones the earlier token, NaN below -inf, then -1.

    Args:
        args: Checked tensors.
        state: From `plan_index_topk`.
    """
    batch = state.batch
    assert batch.seq_lens_host is not None and batch.qo_indptr_host is not None
    bounds = batch.qo_indptr_host
    args.indices.fill_(-1)
    for sequence, seq_len in enumerate(batch.seq_lens_host):
        start, end = bounds[sequence], bounds[sequence + 1]
        for first in range(start, end, state.block_tokens):
            last = min(first + state.block_tokens, end)
            visible = seq_len - (end - first) + 1
            _rank(args, state, batch.block_table[sequence], first, last, visible + last - first - 1)
            for token in range(first, last):
                _choose(args.indices[token], state, token - first, visible + token - first)
    if args.as_slots:
        table, indptr = batch.block_table, batch.qo_indptr
        args.indices.copy_(to_slots(args.indices, table, indptr, args.cache.block_size))


def _rank(args: IndexArgs, state: IndexState, pages: Tensor, first: int, last: int, num_keys: int) -> None:
    """Fill state.ranks for query tokens first to last - 1 and the first num_keys keys of their sequence."""
    count, heads, width = last - first, args.q.shape[1], args.q.shape[2]
    q = state.q[: width * count * heads].view(width, count, heads)
    q.copy_(args.q[first:last].permute(2, 0, 1))
    weights = state.weights[:count].copy_(args.weights[first:last])
    for begin in range(0, num_keys, TILE):
        keys = state.tiles.load(args.cache, pages, begin, min(begin + TILE, num_keys))
        tokens = keys.shape[0]
        scores = state.scores[: tokens * count * heads].view(tokens, count * heads)
        torch.mm(keys, q.view(width, -1), out=scores).relu_()
        logits = state.logits[: tokens * count].view(tokens, count)
        torch.sum(scores.view(tokens, count, heads).mul_(weights), 2, out=logits)
        ranks = state.ranks[:count, begin : begin + tokens].t()
        rank_logits(logits, state.is_nan[: tokens * count].view(tokens, count), ranks)
        ranks.add_(state.earlier_first[:tokens, None]).sub_(begin)


def _choose(indices: Tensor, state: IndexState, token: int, visible: int) -> None:
    """Write the best of the first `visible` tokens into indices [K]."""
    best = min(indices.shape[0], visible)
    if best > 0:
        ranks, chosen = state.best[0, :best], state.best[1, :best]
        torch.topk(state.ranks[token, :visible], best, out=(ranks, chosen))
        indices[:best].copy_(chosen)
