"""Prefill after a cached context through AITER's varlen attention, in 16 bits: chunk by chunk, then merged.

T query tokens, of which N belong to sequences, H heads, L = kv_lora_rank. The contexts of all sequences lie
in one line, which is cut where EXPANDED_BYTES are full: a chunk is a few sequences with what they have of it.
Each is gathered, decompressed, attended to without a mask, and joined with the rest by its lse. The fp8
prefill has no lse, so it cannot take part.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from anymla.backends.aiter_mla import bindings
from anymla.backends.aiter_mla.calls import Call, call_of
from anymla.backends.aiter_mla.operands import EXPANDED_BYTES, expanded, host_lengths
from anymla.backends.aiter_mla.pages import keys_seen, write_lists
from anymla.backends.aiter_mla.provider import aiter_of
from anymla.contract import AttentionOutput, Batch, PrefillArgs
from anymla.hardware.probe import Machine
from anymla.merging import merge
from anymla.problem import Problem

BYTES_A_VALUE = 4
"""Of a value of q, k, v or out of 16 bits, with what it is made from."""


@dataclass(frozen=True)
class Chunk:
    """Keys, and the rows that attend to them.

    Attributes:
        keys: Where they lie in the line of contexts.
        rows: The query tokens of their sequences.
        q_indptr, k_indptr: [n + 1] int32 offsets of these sequences, from 0.
        max_q_len, max_k_len: Of the longest.
        blind: [rows] bool, those of a sequence without a key here; None where there is none.
    """

    keys: slice
    rows: slice
    q_indptr: Tensor
    k_indptr: Tensor
    max_q_len: int
    max_k_len: int
    blind: Tensor | None = None


@dataclass(frozen=True)
class ChunkedState:
    """A planned prefill after a cached context.

    Attributes:
        call: AITER's function.
        lanes: Heads of a launch.
        slots: Every token of the contexts, in the order of the line.
        new: The new tokens as keys.
        chunks: The line, cut.
    """

    batch: Batch
    call: Call
    lanes: int
    slots: Tensor
    new: Chunk
    chunks: tuple[Chunk, ...]


def plan_chunked(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> ChunkedState:
    """Cut the contexts of one prefill step into chunks; nothing waits for the device.

    Args:
        batch: Lengths, known to the host.
        problem: Facts of the call.
        machine: The chip.
        knobs: None are known.

    Returns:
        The state that `attend_chunked` takes, for any number of layers.
    """
    contexts, indptr = host_lengths(batch)
    tokens, heads, device = indptr[-1], problem.num_heads, batch.seq_lens.device
    key = problem.qk_nope_head_dim + problem.qk_rope_head_dim + problem.v_head_dim
    lanes = max(min(heads, EXPANDED_BYTES // max(BYTES_A_VALUE * 2 * key * tokens, 1)), 1)
    lengths = batch.seq_lens - batch.qo_indptr.diff()
    line = torch.zeros(batch.num_seqs + 1, dtype=torch.int32, device=device)
    slots = torch.empty(sum(contexts), dtype=torch.int32, device=device)
    write_lists(line, slots, lengths, None, batch, sum(contexts))
    qo_indptr = batch.qo_indptr.contiguous()
    whole = slice(0, tokens)
    return ChunkedState(
        batch=batch,
        call=call_of(aiter_of(machine), bindings.CHUNKED[0]),
        lanes=lanes,
        slots=slots.long(),
        new=Chunk(whole, whole, qo_indptr, qo_indptr, batch.max_q_len, batch.max_q_len),
        chunks=tuple(_chunks(batch, contexts, indptr, line, EXPANDED_BYTES // (BYTES_A_VALUE * key * lanes))),
    )


def attend_chunked(args: PrefillArgs, state: ChunkedState) -> None:
    """Fill args.out for every row.

    Args:
        args: Checked tensors, without sinks and without a place for an lse.
        state: From `plan_chunked`.
    """
    assert args.lse is None and args.sinks is None
    rows, heads = state.new.rows.stop, args.q_nope.shape[1]
    args.out[rows:].zero_()
    for first in range(0, heads if rows else 0, state.lanes):
        _attend(args, state, slice(first, min(first + state.lanes, heads)))


def _chunks(
    batch: Batch, contexts: Sequence[int], indptr: Sequence[int], line: Tensor, most: int
) -> Iterator[Chunk]:
    """The line in pieces of at most so many keys; of sequences without query tokens none is wanted."""
    ends = (0, *accumulate(contexts))
    sequence = keys_seen(batch)[0]
    for begin in range(0, ends[-1], max(most, 1)):
        end = min(begin + max(most, 1), ends[-1])
        first, last = bisect_right(ends, begin) - 1, bisect_left(ends, end)
        rows = slice(indptr[first], indptr[last])
        if rows.start == rows.stop:
            continue
        k_indptr = line[first : last + 1].clamp(begin, end) - begin
        seen = [min(b, end) - max(a, begin) for a, b in pairwise(ends[first : last + 1])]
        yield Chunk(
            keys=slice(begin, end),
            rows=rows,
            q_indptr=batch.qo_indptr[first : last + 1] - indptr[first],
            k_indptr=k_indptr,
            max_q_len=max(b - a for a, b in pairwise(indptr[first : last + 1])),
            max_k_len=max(seen),
            blind=(k_indptr.diff() == 0)[sequence[rows] - first] if 0 in seen else None,
        )


def _attend(args: PrefillArgs, state: ChunkedState, heads: slice) -> None:
    """Some of the heads, over all keys."""
    rows, cache = state.new.rows, args.cache
    assert cache is not None
    q = torch.cat((args.q_nope[rows, heads], args.q_pe[rows, heads]), -1)

    def over(chunk: Chunk, latents: Tensor, rope: Tensor, *, causal: bool) -> AttentionOutput:
        k, v = expanded(latents, rope, args.w_uk[heads], args.w_uv[heads])
        out, lse = state.call(
            q=q[chunk.rows],
            k=k,
            v=v.contiguous(),
            cu_seqlens_q=chunk.q_indptr,
            cu_seqlens_k=chunk.k_indptr,
            max_seqlen_q=chunk.max_q_len,
            max_seqlen_k=chunk.max_k_len,
            softmax_scale=args.sm_scale,
            causal=causal,
            return_lse=True,
        )
        lse = lse.T.contiguous()
        # What it says of a row without keys differs between its kernels.
        lse = lse if chunk.blind is None else lse.masked_fill(chunk.blind[:, None], -torch.inf)
        return AttentionOutput(out.float(), lse)

    found = over(state.new, args.kv_c[rows], args.k_pe[rows], causal=state.batch.causal)
    assert found.lse is not None
    for chunk in state.chunks:
        keys, rank = cache.read(state.slots[chunk.keys], q.dtype), cache.kv_lora_rank
        part = over(chunk, keys[:, :rank], keys[:, rank:], causal=False)
        joined = merge((AttentionOutput(found.out[chunk.rows], found.lse[chunk.rows]), part))
        assert joined.lse is not None
        found.out[chunk.rows], found.lse[chunk.rows] = joined.out, joined.lse
    args.out[rows, heads].copy_(found.out)
