"""Lists of slots for AITER: one page is one token there, whatever a page is in the cache.

T query tokens, B sequences, K indices a query token. Nothing here reads a value back from the device.
"""

import torch
from torch import Tensor

from anymla.contract import Batch


def keys_seen(batch: Batch) -> tuple[Tensor, Tensor]:
    """For each query token its sequence and how many keys it sees.

    Args:
        batch: The step.

    Returns:
        [T] int64 sequences, 0 for a row of none, and [T] int32 counts, 0 for a row that attends to nothing.
    """
    row = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.seq_lens.device)
    if not batch.num_seqs:
        return torch.zeros_like(row, dtype=torch.int64), torch.zeros_like(row)
    sequence = torch.searchsorted(batch.qo_indptr[1:].contiguous(), row, right=True)
    is_row = sequence < batch.num_seqs
    sequence = sequence.clamp(max=batch.num_seqs - 1)
    seen = batch.seq_lens[sequence]
    if batch.causal:
        seen = seen - (batch.qo_indptr[1:][sequence] - 1 - row)
    return sequence, torch.where(is_row, seen, 0).clamp(min=0)


def write_lists(
    indptr: Tensor,
    indices: Tensor,
    lengths: Tensor,
    sequence: Tensor | None,
    batch: Batch,
    total: int | None,
) -> None:
    """Write the slots of the first `lengths` keys of each row, one row after another.

    Args:
        indptr: [n + 1] int32, filled.
        indices: [capacity] int32, filled up to the last key.
        lengths: [n] int32 keys of each row.
        sequence: [n] int64 sequence of each row. None: row i is sequence i.
        batch: Pages.
        total: Sum of `lengths` where the host knows it.
    """
    torch.cumsum(lengths, 0, dtype=torch.int32, out=indptr[1:])
    count = indices.shape[0] if total is None else total
    if not count or not batch.block_table.shape[1]:
        return
    place = torch.arange(count, dtype=torch.int32, device=indices.device)
    row = torch.searchsorted(indptr[1:].contiguous(), place, right=True).clamp_(max=lengths.shape[0] - 1)
    key = (place - indptr[row]).long()
    # Past the last key there is nothing to look up; slot 0 exists.
    is_key = place < indptr[-1]
    block = torch.where(is_key, key // batch.block_size, 0)
    page = batch.block_table[row if sequence is None else sequence[row], block].long()
    slot = page * batch.block_size + key % batch.block_size
    indices[:count] = torch.where(is_key, slot, 0).int()


def write_chosen(
    indptr: Tensor, indices: Tensor, lengths: Tensor, chosen: Tensor, counts: Tensor | None
) -> None:
    """Write the slots that each row names, closed up; -1 is never written.

    Args:
        indptr: [T + 1] int32, filled.
        indices: [T · K + 1] int32; the last is for what is no key.
        lengths: [T] int32, filled: keys of each row.
        chosen: [T, K] int32 slots.
        counts: [T] int32, how many columns count, or None for all.
    """
    width = chosen.shape[1]
    is_key = chosen != -1
    if counts is not None:
        is_key &= torch.arange(width, dtype=torch.int32, device=chosen.device) < counts[:, None]
    torch.sum(is_key, 1, dtype=torch.int32, out=lengths)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=indptr[1:])
    if not width:
        return
    place = indptr[:-1, None] + is_key.cumsum(1) - 1
    place = torch.where(is_key, place, indices.shape[0] - 1)
    indices.scatter_(0, place.flatten(), chosen.flatten())
