"""Decode context parallel: W ranks share the tokens of every sequence, and their results are merged.

Tokens go around the ranks in runs of `interleave`: token t lives on rank (t // interleave) % W. Every rank
holds all heads. Each attends its own tokens; a merge, and the sinks once after it, make that attention over
all of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from anymla.arguments import check_count
from anymla.contract import AttentionOutput, check_tensor, on_host
from anymla.errors import Reasons
from anymla.merging import apply_sinks, merge
from anymla.problem import count_of


class Place(NamedTuple):
    """Where a token lives.

    Attributes:
        rank: The rank that holds it.
        local: Its place among that rank's tokens of the sequence.
    """

    rank: int
    local: int


class RankRows(NamedTuple):
    """One rank's share of a step, each query token a sequence of its own: for `decode` without qo_indptr.

    Attributes:
        block_table: [T, max_blocks] int32, for each query token the pages of its sequence on this rank.
        seq_lens: [T] int32, for each query token the keys on this rank that it sees.
    """

    block_table: Tensor
    seq_lens: Tensor


def dcp_local_len(num_tokens: int, world: int, rank: int, interleave: int = 1) -> int:
    """How many of a sequence's first tokens live on a rank.

    Args:
        num_tokens: Tokens, from 0.
        world: W, ranks.
        rank: 0 to W - 1.
        interleave: Neighbouring tokens that stay together.

    Returns:
        The tokens on that rank; over all ranks they add up to num_tokens.

    Raises:
        InvalidInput: an argument is out of range.
    """
    _check_layout("dcp_local_len", num_tokens=num_tokens, world=world, rank=rank, interleave=interleave)
    rounds, rest = divmod(num_tokens, world * interleave)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


def dcp_local_row_lens(seq_len: int, q_len: int, world: int, rank: int, interleave: int = 1) -> list[int]:
    """How many keys on a rank each of a sequence's new tokens sees.

    The causal limit is a place in the whole sequence, so it is taken first and shared out after: subtracting
    from the length on the rank gives another, wrong, answer.

    Args:
        seq_len: Tokens of the sequence, the new ones included.
        q_len: New tokens.
        world: W, ranks.
        rank: 0 to W - 1.
        interleave: Neighbouring tokens that stay together.

    Returns:
        q_len lengths; row t counts the keys of the rank among the first max(0, seq_len - q_len + 1 + t).

    Raises:
        InvalidInput: an argument is out of range.
    """
    _check_layout(
        "dcp_local_row_lens", seq_len=seq_len, q_len=q_len, world=world, rank=rank, interleave=interleave
    )
    return [dcp_local_len(max(0, seq_len - q_len + 1 + t), world, rank, interleave) for t in range(q_len)]


def dcp_place(token: int, world: int, interleave: int = 1) -> Place:
    """Where a token of a sequence lives.

    Args:
        token: Its place in the sequence, from 0.
        world: W, ranks.
        interleave: Neighbouring tokens that stay together.

    Returns:
        The rank, and the token's place there.

    Raises:
        InvalidInput: an argument is out of range.
    """
    _check_layout("dcp_place", token=token, world=world, interleave=interleave)
    rounds, rest = divmod(token, world * interleave)
    return Place(rest // interleave, rounds * interleave + rest % interleave)


def dcp_rows(
    block_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    *,
    num_tokens: int,
    world: int,
    rank: int,
    interleave: int = 1,
) -> RankRows:
    """One rank's share of a step, without a device sync.

    Rows of one sequence may differ in their lengths on a rank by any amount up to `interleave`, which no
    causal rule of the rank's own gives; so each row becomes a sequence.

    Args:
        block_table: [B, max_blocks] int32, pages on this rank.
        seq_lens: [B] int32 tokens on all ranks, those of this step included.
        qo_indptr: [B + 1] int32. None: one token a sequence.
        num_tokens: T. Rows from qo_indptr[-1] on see nothing.
        world: W, ranks.
        rank: 0 to W - 1.
        interleave: Neighbouring tokens that stay together.

    Returns:
        Page rows and lengths, both for T sequences of one query token each.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, or a number is out of range.
    """
    reasons = Reasons("dcp_rows")
    _note_layout(reasons, num_tokens=num_tokens, world=world, rank=rank, interleave=interleave)
    right = check_tensor(reasons, "seq_lens", seq_lens, (None,), (torch.int32,))
    if right:
        num_seqs, device = seq_lens.shape[0], seq_lens.device
        check_tensor(
            reasons, "block_table", block_table, (num_seqs, None), (torch.int32,), device, "B from seq_lens"
        )
        if qo_indptr is None:
            tokens = count_of(num_tokens)
            reasons.need(tokens in (None, num_seqs), "num_tokens", tokens, f"{num_seqs}, B: no qo_indptr")
        elif check_tensor(
            reasons, "qo_indptr", qo_indptr, (num_seqs + 1,), (torch.int32,), device, "B + 1 from seq_lens"
        ) and on_host(qo_indptr):
            grows = all(b >= a for a, b in pairwise(qo_indptr.tolist()))
            reasons.need(grows, "qo_indptr", qo_indptr.tolist(), "values that do not decrease")
    reasons.raise_if_any()
    if num_seqs == 0 or num_tokens == 0:
        empty = block_table.new_zeros(num_tokens, block_table.shape[1])
        return RankRows(empty, seq_lens.new_zeros(num_tokens))
    row = torch.arange(num_tokens, dtype=torch.int32, device=device)
    if qo_indptr is None:
        qo_indptr = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    sequence = torch.searchsorted(qo_indptr[1:].contiguous(), row, right=True)
    is_row = sequence < num_seqs
    sequence = sequence.clamp(max=num_seqs - 1)
    # Row t of q_len sees seq_len - q_len + 1 + t keys; t - q_len is how far the row is from the last.
    seen = (seq_lens[sequence] + 1 + row - qo_indptr[1:][sequence]).clamp(min=0)
    seen = torch.where(is_row, seen, 0)
    rest = seen % (world * interleave) - rank * interleave
    local = seen // (world * interleave) * interleave + rest.clamp(0, interleave)
    return RankRows(block_table[sequence], local.to(torch.int32))


def combine(parts: Sequence[AttentionOutput], sinks: Tensor | None = None) -> AttentionOutput:
    """Merge the results of all ranks, then apply the sinks, once.

    Args:
        parts: One result a rank, each out [T, H, X] and lse [T, H] over that rank's tokens, without sinks.
        sinks: [H] fp32, or None.

    Returns:
        out: [T, H, X], dtype of the parts; 0 where no rank has a key.
        lse: [T, H], sinks excluded; -inf where no rank has a key.

    Raises:
        InvalidInput: see `merge` and `apply_sinks`.
    """
    out, lse = merged = merge(parts)
    if sinks is None:
        return merged
    assert lse is not None
    return AttentionOutput(apply_sinks(out, lse, sinks), lse)


def all_gather_combine(
    part: AttentionOutput, *, sinks: Tensor | None = None, group: dist.ProcessGroup | None = None
) -> AttentionOutput:
    """Gather every rank's result and combine them; every rank of the group calls it.

    All ranks merge in the order of their ranks, so they get the same bits.

    Args:
        part: This rank's result, without sinks; the same shapes and dtypes on every rank.
        sinks: [H] fp32, the same on every rank, or None.
        group: The ranks that share the tokens. None: all.

    Returns:
        The result over all tokens, as `combine` has it.

    Raises:
        InvalidInput: part has no lse, or see `merge` and `apply_sinks`.
    """
    reasons = Reasons("all_gather_combine")
    needs = "an AttentionOutput, or a from_ constructor"
    if not reasons.need(isinstance(part, AttentionOutput), "part", type(part).__name__, needs):
        reasons.raise_if_any()
    reasons.need(part.lse is not None, "part.lse", None, "[T, H]: decode with return_lse=True")
    reasons.raise_if_any()
    assert part.lse is not None
    outs, lses = (_gather(tensor, group) for tensor in (part.out, part.lse))
    return combine([AttentionOutput(out, lse) for out, lse in zip(outs, lses, strict=True)], sinks)


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def _check_layout(what: str, **numbers: int) -> None:
    reasons = Reasons(what)
    _note_layout(reasons, **numbers)
    reasons.raise_if_any()


def _note_layout(reasons: Reasons, **numbers: int) -> None:
    """Note what is no count, a world or an interleave below 1, a rank outside the world."""
    for name, number in numbers.items():
        check_count(reasons, name, number, 1 if name in ("world", "interleave") else 0)
    rank, world = count_of(numbers.get("rank")), count_of(numbers.get("world"))
    if rank is not None and world is not None and world >= 1:
        reasons.need(rank < world, "rank", rank, f"less than {world}, the world")
