"""Sparse attention around the indexer: its queries in fp8, and its token ids as slots of the cache."""

import torch
from torch import Tensor

from anymla import fp8
from anymla.contract import Q_DTYPES, check_count, check_flags, check_offsets, check_tensor, on_host
from anymla.errors import Reasons
from anymla.kv_formats import row_named

INT32_MAX = torch.iinfo(torch.int32).max
NAN_RANK = torch.iinfo(torch.int32).min + 1
"""Below that of -inf, and far enough from the end of int64 to subtract a token from 2**32 times it."""


def quantise_queries(
    q: Tensor, weights: Tensor, *, kv_format: str, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """Round index queries to the fp8 of an index cache, their scales moved into the weights.

    A scale is positive, so relu(q·k) scales with it.

    Args:
        q: [T, H, D] fp32, bf16 or fp16 index queries, rotated.
        weights: [T, H] fp32.
        kv_format: An fp8 row of KV_FORMATS, such as "index_k".
        power_of_two: Round each scale up to a power of two, as some models are trained.

    Returns:
        q / scale in fp8 and weights · scale in fp32, one scale a query token and head: its largest magnitude
        over the largest fp8 value. [0, H, D] and [0, H] for no tokens.

    Raises:
        InvalidInput: shapes or dtypes do not fit, D is 0, or the format is not fp8.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2; its inference/kernel.py, act_quant.
    """
    reasons = Reasons("quantise_queries")
    check_flags(reasons, power_of_two=power_of_two)
    row = row_named(reasons, "kv_format", kv_format)
    if row is not None:
        reasons.need(row.value_dtype in fp8.FLAVOURS, "kv_format", kv_format, "a format with fp8 values")
    if check_tensor(reasons, "q", q, (None, None, None), Q_DTYPES):
        reasons.need(
            q.shape[2] > 0, "q", f"shape {tuple(q.shape)}", "D of at least 1, to have a largest value"
        )
        check_tensor(reasons, "weights", weights, q.shape[:2], (torch.float32,), q.device, "T, H from q")
    reasons.raise_if_any()
    assert row is not None
    values = q.to(torch.float32, copy=True)
    scales = fp8.tile_scales(values, row.value_dtype, power_of_two=power_of_two)
    codes = fp8.to_bytes(values.div_(scales), row.value_dtype)
    return codes.view(row.value_dtype), weights * scales.squeeze(-1)


def to_slots(indices: Tensor, block_table: Tensor, qo_indptr: Tensor | None, block_size: int) -> Tensor:
    """Turn token ids that count from the start of each row's sequence into slots of the paged cache.

    Args:
        indices: [T, K] int32 token ids. -1 is no key.
        block_table: [B, max_blocks] int32 page ids; only the pages of the tokens named are read.
        qo_indptr: [B + 1] int32 query token offsets, at most T. None: one token a sequence, T = B.
        block_size: Tokens a page.

    Returns:
        [T, K] int32 slots, page * block_size + offset. -1 stays -1; rows from qo_indptr[-1] on are all -1. On
        a device, where values are not looked at, an id or page out of range becomes -1 too. [0, K] for no
        tokens.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit, block_size is no integer from 1, or, on the CPU,
            the offsets cannot be, an id is beyond the table, its page is negative, or a slot does not fit
            int32.
    """
    reasons = Reasons("to_slots")
    block_size = check_count(reasons, "block_size", block_size)
    right = check_tensor(reasons, "indices", indices, (None, None), (torch.int32,))
    device = indices.device if right else None
    right &= check_tensor(reasons, "block_table", block_table, (None, None), (torch.int32,), device)
    if right and qo_indptr is not None:
        like = (block_table.shape[0] + 1,), (torch.int32,), device, "B + 1 from block_table"
        if check_tensor(reasons, "qo_indptr", qo_indptr, *like) and on_host(qo_indptr):
            check_offsets(reasons, qo_indptr.tolist(), indices.shape[0])
    elif right:
        shape = (block_table.shape[0], None)
        check_tensor(
            reasons, "indices", indices, shape, (torch.int32,), origin="B from block_table: no qo_indptr"
        )
    reasons.raise_if_any()

    num_seqs, max_blocks = block_table.shape
    if num_seqs == 0 or max_blocks == 0:
        page = torch.full(indices.shape, -1, dtype=torch.int64, device=device)
        in_sequence = torch.full((indices.shape[0], 1), num_seqs > 0, device=device)
    else:
        row = torch.arange(indices.shape[0], device=device, dtype=torch.int32)
        sequence = (
            row if qo_indptr is None else torch.searchsorted(qo_indptr[1:].contiguous(), row, right=True)
        )
        in_sequence = (sequence < num_seqs)[:, None]
        block = (indices // block_size).clamp(0, max_blocks - 1)
        page = block_table[sequence.clamp(max=num_seqs - 1)[:, None], block].to(torch.int64)
    slot = page * block_size + indices.to(torch.int64) % block_size
    is_key = in_sequence & (indices != -1)
    is_known = (indices >= 0) & (indices < max_blocks * block_size)
    is_right = is_known & (page >= 0) & (slot <= INT32_MAX)
    if on_host(indices):
        _check_values(reasons, indices, page, slot, is_key, is_known, max_blocks * block_size)
        reasons.raise_if_any()
    return torch.where(is_key & is_right, slot, -1).to(torch.int32)


def rank_logits(logits: Tensor, is_nan: Tensor, ranks: Tensor) -> None:
    """Turn logits into integers in their order, so that ties can be decided by subtracting tokens.

    Args:
        logits: fp32, of any shape; zeros lose their sign.
        is_nan: bool of that shape, filled.
        ranks: int64 of that shape, filled: 2**32 apart, the same for equal logits, the lowest for NaN.
    """
    torch.ne(logits, logits, out=is_nan)
    # -0 + 0 is +0: the two zeros are equal, but their bits are not.
    bits = logits.add_(0.0).view(torch.int32)
    # Negative floats fall as their bits rise, so all bits but the sign are flipped.
    ranks.copy_(bits)
    ranks.bitwise_right_shift_(31).bitwise_and_(INT32_MAX).bitwise_xor_(bits)
    ranks.masked_fill_(is_nan, NAN_RANK).mul_(2**32)


def compacted(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Move the keys of each row to its front, in order, and count them.

    Args:
        indices: [T, K] int32 token ids or slots. -1, anywhere, is no key.

    Returns:
        [T, K] int32 indices, -1 after the last, and [T] int32 counts, as `sparse_decode` takes them; [0, K]
        and [0] for no tokens.

    Raises:
        InvalidInput: the shape or dtype does not fit.
    """
    reasons = Reasons("compacted")
    check_tensor(reasons, "indices", indices, (None, None), (torch.int32,))
    reasons.raise_if_any()
    is_key = indices != -1
    order = (~is_key).to(torch.uint8).argsort(dim=1, stable=True)
    return indices.gather(1, order), is_key.sum(1, dtype=torch.int32)


def _check_values(
    reasons: Reasons,
    indices: Tensor,
    page: Tensor,
    slot: Tensor,
    is_key: Tensor,
    is_known: Tensor,
    capacity: int,
) -> None:
    """Note the first value of each kind that names no slot."""
    for name, values, wrong, needs in (
        (
            "indices",
            indices,
            is_key & ~is_known,
            f"-1 (no key) or a token id below {capacity}, the pages of block_table",
        ),
        ("block_table", page, is_key & is_known & (page < 0), "the page of a token that is named, 0 or more"),
        ("slots", slot, is_key & is_known & (slot > INT32_MAX), f"at most {INT32_MAX}, to fit int32"),
    ):
        if (at := wrong.nonzero()).numel():
            t, k = at[0].tolist()
            reasons.need(False, name, f"{int(values[t, k])} for indices[{t}, {k}]", needs)
