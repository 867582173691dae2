"""Indexer through AITER: logits of as many rows as memory is set aside for, then the largest of each.

T query tokens, H index heads, D = 128. Each query token is a sequence of its own to AITER, which shares no
keys between those of one sequence either; so a step may be ragged.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.backends.aiter_mla import bindings
from anymla.backends.aiter_mla.calls import Call, call_of
from anymla.backends.aiter_mla.operands import GIB
from anymla.backends.aiter_mla.pages import keys_seen
from anymla.backends.aiter_mla.provider import aiter_of
from anymla.contract import Batch, IndexArgs
from anymla.errors import Reasons
from anymla.hardware.probe import Machine
from anymla.indices import rank_logits, to_slots
from anymla.problem import Problem

LOGITS_BYTES = 128 << 20
"""Logits that exist at a time, those of each head where AITER leaves their sum to us, or of one row."""
CHUNK_K = 256
"""Keys that AITER scores at a time; it writes whole chunks."""
LANES = (32, 64)
"""Heads that it is given: less would leave threads of its Gluon layouts without any, more it never tests."""

NOT_SEEN = torch.iinfo(torch.int64).min
"""Below every rank."""


@dataclass
class IndexState:
    """A planned top-k.

    Attributes:
        batch: The step.
        call: AITER's function.
        lanes: H, padded.
        by_head: Whether it leaves the sum over heads to us.
        sequences: [T] int64, the sequence of each row.
        visible: [T] int32, the keys that it sees.
        logits: [rows, keys] fp32, or [lanes, rows, keys] of each head.
        optional: What is passed beside the tensors.
    """

    batch: Batch
    call: Call
    lanes: int
    by_head: bool
    sequences: Tensor
    visible: Tensor
    logits: Tensor
    optional: Mapping[str, object]
    knobs: Mapping[str, int]


def plan_index_topk(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> IndexState:
    """Plan one top-k step; lengths stay on the device.

    Args:
        batch: Lengths and pages.
        problem: Facts of the call.
        machine: The chip.
        knobs: `chunk_q` when AITER's own ChunkQ is more than there are heads; `max_cache_gib`.

    Returns:
        The state that `index_topk` takes, for any number of layers.
    """
    name, needs = bindings.index_logits(problem.kv_format, problem.block_size)
    call = call_of(aiter_of(machine), name)
    lanes = next(lanes for lanes in LANES if lanes >= problem.num_heads)
    by_head = "ChunkQ" in needs
    optional: dict[str, object] = {"ChunkK": CHUNK_K}
    if by_head:
        optional |= {"ChunkQ": lanes} if "chunk_q" in knobs else {}
    else:
        optional |= {"Preshuffle": "shuffled" in problem.kv_format, "KVBlockSize": problem.block_size}
    if machine.multiprocessors and call.binding.takes("TotalCuCount"):
        optional["TotalCuCount"] = machine.multiprocessors
    width = max(-(-batch.max_seq_len // CHUNK_K), 1) * CHUNK_K
    of_heads = (lanes,) if by_head else ()
    at_once = max(LOGITS_BYTES // (4 * width * (lanes if by_head else 1)), 1)
    at_once = min(at_once, max(batch.num_tokens, 1))
    sequences, visible = keys_seen(batch)
    device = batch.seq_lens.device
    return IndexState(
        batch=batch,
        call=call,
        lanes=lanes,
        by_head=by_head,
        sequences=sequences,
        visible=visible,
        logits=torch.empty((*of_heads, at_once, width), dtype=torch.float32, device=device),
        optional=optional,
        knobs=knobs,
    )


def update_index_topk(state: IndexState, batch: Batch) -> None:
    """Take another step into the same buffers."""
    sequences, visible = keys_seen(batch)
    state.sequences.copy_(sequences)
    state.visible.copy_(visible)
    state.batch = batch


def index_topk(args: IndexArgs, state: IndexState) -> None:
    """Write the chosen tokens of every row into args.indices; -1 after the last.

    Args:
        args: Checked tensors.
        state: From `plan_index_topk`.
    """
    tokens, at_once = state.batch.num_tokens, state.logits.shape[-2]
    pages = _pages_of(args, state)
    if not state.batch.num_seqs:
        args.indices.fill_(-1)
        return
    for first in range(0, tokens, at_once):
        rows = slice(first, min(first + at_once, tokens))
        logits = _logits(args, state, pages, rows)
        write_largest(logits, state.visible[rows], args.indices[rows])
    if args.as_slots:
        table, indptr = state.batch.block_table, state.batch.qo_indptr
        args.indices.copy_(to_slots(args.indices, table, indptr, args.cache.block_size))


def write_largest(logits: Tensor, visible: Tensor, chosen: Tensor) -> None:
    """Choose the largest logits of each row.

    Args:
        logits: [n, keys] fp32; zeros lose their sign.
        visible: [n] int32, how many of the keys count.
        chosen: [n, K] int32, filled: places of the largest, of equal ones the first, NaN after everything
            else; then -1.
    """
    ranks = torch.empty_like(logits, dtype=torch.int64)
    rank_logits(logits, torch.empty_like(logits, dtype=torch.bool), ranks)
    column = torch.arange(logits.shape[1], device=logits.device)
    # All different, and an earlier key above a later one of the same logit.
    ranks.sub_(column).masked_fill_(column >= visible[:, None], NOT_SEEN)
    most = min(chosen.shape[1], logits.shape[1])
    best, places = ranks.topk(most, dim=1)
    chosen[:, :most] = places.masked_fill_(best == NOT_SEEN, -1)
    chosen[:, most:] = -1


def _pages_of(args: IndexArgs, state: IndexState) -> Tensor:
    """The cache as [pages, block_size, 1, row], as AITER takes it."""
    data = args.cache.data
    most, size = state.knobs.get("max_cache_gib", 0) * GIB, data.stride(0) * data.shape[0]
    reasons = Reasons("index_topk")
    needs = f"at most {most} for AITER's indexer; backend triton has no such bound"
    reasons.need(not most or size <= most, "index_cache", f"{size} bytes", needs)
    reasons.raise_if_any()
    return data.unsqueeze(2)


def _logits(args: IndexArgs, state: IndexState, pages: Tensor, rows: slice) -> Tensor:
    """Logits [n, keys] of some rows; what a row does not see is left as it was, or -inf."""
    count, heads = rows.stop - rows.start, args.q.shape[1]
    q, weights = args.q[rows], args.weights[rows]
    if heads < state.lanes:
        # Heads of weight 0 change no sum. Zeros are made of bytes, of which few operations take fp8.
        shape = (count, state.lanes, q.shape[2])
        spread = torch.zeros(shape, dtype=torch.uint8, device=q.device).view(q.dtype)
        spread[:, :heads] = q
        q = spread
        weights = torch.nn.functional.pad(weights, (0, state.lanes - heads))
    logits = state.logits[..., :count, :]
    into = {"out_qk" if state.by_head else "out_logits": logits}
    state.call(
        q_fp8=q.contiguous().unsqueeze(1),
        kv_cache=pages,
        weights=weights.contiguous(),
        context_lens=state.visible[rows],
        kv_indices=state.batch.block_table[state.sequences[rows]],
        max_model_len=logits.shape[-1],
        **into,
        **state.optional,
    )
    return logits.sum(0) if state.by_head else logits
