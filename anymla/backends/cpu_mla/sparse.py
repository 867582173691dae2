"""Sparse decode: each query token over the slots named for it, a tile of them at a time."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.backends.cpu_mla.dense import RowBlock, score_scale
from anymla.backends.cpu_mla.tiles import TILE, KeyTiles
from anymla.contract import SparseArgs
from anymla.hardware.probe import Machine
from anymla.problem import Problem


@dataclass
class SparseState:
    """A planned sparse decode: all memory that it needs."""

    rows: RowBlock
    tiles: KeyTiles
    is_key: Tensor
    slots: Tensor
    keys: Tensor


def plan_sparse_decode(
    num_tokens: int, device: torch.device, problem: Problem, machine: Machine, knobs: Mapping[str, int]
) -> SparseState:
    """Allocate the scratch of one sparse decode step.

    Args:
        num_tokens: T; nothing depends on it, since tokens are worked on one by one.
        device: The CPU.
        problem: Facts of the call; `topk` bounds the indices of a token.
        machine: The CPU; nothing depends on it.
        knobs: None are known.

    Returns:
        The state that `sparse_decode` takes, for any number of layers.
    """
    return SparseState(
        RowBlock(1, problem.num_heads, problem.kv_lora_rank, problem.qk_rope_head_dim),
        KeyTiles(problem.kv_format, problem.kv_lora_rank, problem.qk_rope_head_dim),
        torch.empty(problem.topk, dtype=torch.bool),
        torch.empty(problem.topk, dtype=torch.int64),
        torch.empty(problem.topk, dtype=torch.int64),
    )


def sparse_decode(args: SparseArgs, state: SparseState) -> None:
    """Fill args.out, and args.lse if it is there, for every row; nothing is allocated but scalars.

    Args:
        args: Checked tensors.
        state: From `plan_sparse_decode`.
    """
    rows = state.rows
    counts = None if args.counts is None else args.counts.tolist()
    for token in range(args.ql_nope.shape[0]):
        one = slice(token, token + 1)
        slots = _keys_of(
            args.indices[token] if counts is None else args.indices[token, : counts[token]], state
        )
        q = rows.queries(args.ql_nope[one], args.q_pe[one], score_scale(args))
        sums = rows.sums(1)
        for begin in range(0, slots.shape[0], TILE):
            keys = state.tiles.load_slots(args.cache, slots[begin : begin + TILE])
            rows.softmax.add(sums, rows.softmax.scores(keys, q), keys[:, : args.out.shape[2]])
        rows.write(sums, args.sinks, args.out[one], None if args.lse is None else args.lse[one])


def _keys_of(indices: Tensor, state: SparseState) -> Tensor:
    """Indices [K] without the -1s, in order, as int64."""
    slots = state.slots[: indices.shape[0]].copy_(indices)
    is_key = torch.ge(slots, 0, out=state.is_key[: indices.shape[0]])
    if bool(is_key.all()):
        return slots
    # A tensor of no elements keeps its memory, so it can become one of any planned size.
    return torch.masked_select(slots, is_key, out=state.keys.resize_(0))
