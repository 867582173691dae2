"""Device code of the indexer: logit[t, j] = scale_j · sum over heads of w[t, h] · relu(q[t, h] · k_j).

Keys are the rows of the product and query heads its columns, so that a sum over heads stays within a few
threads, and a tile holds several query tokens of one sequence, whose keys are read once for all of them.
"""

import triton
import triton.language as tl

from anymla.backends.triton_mla.keys import (
    FN_RATIO,
    FNUZ_RATIO,
    FP8_FN_BYTES,
    FP8_FNUZ_BYTES,
    TILED_FN,
    TILED_FN_BYTES,
    TILED_FNUZ_BYTES,
    converted,
)


@triton.jit(do_not_specialize=["first_row", "last_row"])
def index_logits_kernel(
    q,
    weights,
    cache,
    block_table,
    sequences,
    visible,
    logits,
    first_row,
    last_row,
    num_heads,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_wt,
    stride_wh,
    stride_page,
    stride_token,
    stride_bs,
    stride_bb,
    stride_row,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Grid: SPAN keys, TOKENS rows. Of a row, only the logits of keys that it sees are written.

    FORMAT and Q_FORMAT are those of `keys`, tiled ones being rows of L fp8 values with one scale, as index_k
    has them, uint8 where the chip cannot convert them; DTYPE is that of the products. Row `first_row` is the
    first of `logits` [rows, keys].
    """
    HEADS: tl.constexpr = TOKENS * HEADS_PADDED
    begin = tl.program_id(0) * SPAN
    first = first_row + tl.program_id(1) * TOKENS
    row = first + tl.arange(0, TOKENS)
    exists = row < last_row
    sequence = tl.load(sequences + row, mask=exists, other=-1).to(tl.int64)
    seen = tl.load(visible + row, mask=exists, other=0)
    if begin < tl.max(seen, 0):
        column = tl.arange(0, HEADS)
        token_of, head = column // HEADS_PADDED, column % HEADS_PADDED
        width = tl.arange(0, L_PADDED)
        is_head = head < num_heads
        asked = is_head & (first + token_of < last_row)
        offsets = (first + token_of).to(tl.int64) * stride_qt + head * stride_qh
        queries = tl.load(
            q + offsets[:, None] + width[None, :] * stride_qd,
            mask=asked[:, None] & (width < L)[None, :],
            other=0.0,
        )
        queries = tl.trans(_values(queries, DTYPE, Q_FORMAT))
        weight_offsets = (first + token_of).to(tl.int64) * stride_wt + head * stride_wh
        weight = tl.load(weights + weight_offsets, mask=asked, other=0.0) * _ratio(Q_FORMAT) * _ratio(FORMAT)
        # Most tiles lie in one sequence.
        for s in range(
            tl.min(tl.where(seen > 0, sequence, 0x7FFFFFFF), 0),
            tl.max(tl.where(seen > 0, sequence, -1), 0) + 1,
        ):
            limit = tl.where(sequence == s, seen, 0)
            end = tl.minimum(begin + SPAN, tl.max(limit, 0))
            pages = block_table + s * stride_bs
            for start in range(begin, end, BLOCK_N):
                token = start + tl.arange(0, BLOCK_N)
                valid = token < end
                page = tl.load(pages + token // BLOCK_SIZE * stride_bb, mask=valid, other=0)
                base = page.to(tl.int64) * stride_page
                position = token % BLOCK_SIZE
                place = base + position * (L if FORMAT >= TILED_FN else stride_token)
                keys = tl.load(
                    cache + place[:, None] + width[None, :],
                    mask=valid[:, None] & (width < L)[None, :],
                    other=0.0,
                )
                scores = tl.dot(_values(keys, DTYPE, FORMAT), queries)
                scores = tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL)
                scores = tl.where(is_head[None, :], scores * weight[None, :], 0.0)
                logit = tl.sum(tl.reshape(scores, (BLOCK_N, TOKENS, HEADS_PADDED)), 2)
                if FORMAT >= TILED_FN:
                    scales = (cache + BLOCK_SIZE * L).to(tl.pointer_type(tl.float32))
                    scale = tl.load(scales + base // 4 + position, mask=valid, other=0.0)
                    logit = logit * scale[:, None]
                target = logits + (row - first_row).to(tl.int64)[None, :] * stride_row + token[:, None]
                tl.store(target, logit, mask=token[:, None] < limit[None, :])


@triton.jit
def _values(raw, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Elements as `dtype`; bytes that the chip cannot convert come out smaller by `_ratio`."""
    if FORMAT == TILED_FN_BYTES:
        return converted(raw, dtype, FP8_FN_BYTES)
    elif FORMAT == TILED_FNUZ_BYTES:
        return converted(raw, dtype, FP8_FNUZ_BYTES)
    else:
        return raw.to(dtype)


@triton.jit
def _ratio(FORMAT: tl.constexpr):
    """What `_values` leaves to multiply by."""
    if FORMAT == TILED_FN_BYTES:
        return FN_RATIO
    elif FORMAT == TILED_FNUZ_BYTES:
        return FNUZ_RATIO
    else:
        return 1.0
