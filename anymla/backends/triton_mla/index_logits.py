"""Device code of the indexer: logit[t, j] = scale_j · sum over heads of w[t, h] · relu(q[t, h] · k_j).

Keys are the rows of the product and query heads its columns, so that a sum over heads stays within a few
threads, and a tile holds several query tokens of one sequence, whose keys are read once for all of them. The
queries of a tile stay on the chip; its keys meet them in one product after the other.
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
    row_at,
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
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    PRODUCTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Grid: SPAN keys, PRODUCTS · TOKENS rows. Of a row, only the logits of keys that it sees are written.

    FORMAT and Q_FORMAT are those of `keys`, tiled ones being rows of L fp8 values with one scale, as index_k
    has them, uint8 where the chip cannot convert them; DTYPE is that of the products, of TOKENS rows each.
    Row `first_row` is the first of `logits` [rows, keys].
    """
    begin = tl.program_id(0) * SPAN
    first = first_row + tl.program_id(1) * (PRODUCTS * TOKENS)
    row = first + tl.arange(0, PRODUCTS * TOKENS)
    exists = row < last_row
    sequence = tl.load(sequences + row, mask=exists, other=-1)
    seen = tl.load(visible + row, mask=exists, other=0)
    if begin < tl.max(seen, 0):
        column = tl.arange(0, TOKENS * HEADS_PADDED)
        token_of, head = column // HEADS_PADDED, column % HEADS_PADDED
        width = tl.arange(0, L_PADDED)
        q += first.to(tl.int64) * stride_qt
        weights += first.to(tl.int64) * stride_wt
        logits += (first - first_row).to(tl.int64) * stride_row
        queries = ()
        for product in tl.static_range(PRODUCTS):
            # Instead of a row that is not there the last one, of which nothing is stored again.
            asking = tl.minimum(product * TOKENS + token_of, last_row - 1 - first)
            places = row_at(asking, head, stride_qt, stride_qh)
            values = tl.load(
                q + places[:, None] + width[None, :] * stride_qd,
                mask=(head < HEADS)[:, None] & (width < L)[None, :],
                other=0.0,
            )
            queries = queries + (tl.trans(_values(values, DTYPE, Q_FORMAT)),)
        # Most tiles lie in one sequence.
        for s in range(
            tl.min(tl.where(seen > 0, sequence, 0x7FFFFFFF), 0),
            tl.max(tl.where(seen > 0, sequence, -1), 0) + 1,
        ):
            end = tl.minimum(begin + SPAN, tl.max(tl.where(sequence == s, seen, 0), 0))
            limits = tl.where(sequence == s, seen, 0)
            pages = block_table + tl.cast(s, tl.int64) * stride_bs
            page = _page(pages, stride_bb, begin, end, BLOCK_N, BLOCK_SIZE)
            for start in range(begin, end, BLOCK_N):
                lane = tl.arange(0, BLOCK_N)
                valid = lane < end - start
                base = page.to(tl.int64) * stride_page
                # Read one block ahead, so that nothing waits for both.
                page = _page(pages, stride_bb, start + BLOCK_N, end, BLOCK_N, BLOCK_SIZE)
                position = _position(start, BLOCK_N, BLOCK_SIZE)
                place = base + position * (L if FORMAT >= TILED_FN else stride_token)
                keys = tl.load(
                    cache + place[:, None] + width[None, :],
                    mask=valid[:, None] & (width < L)[None, :],
                    other=0.0,
                )
                keys = _values(keys, DTYPE, FORMAT)
                scale = tl.full((BLOCK_N,), 1.0, tl.float32) * (_ratio(Q_FORMAT) * _ratio(FORMAT))
                if FORMAT >= TILED_FN:
                    scales = (cache + BLOCK_SIZE * L).to(tl.pointer_type(tl.float32))
                    scale *= tl.load(scales + base // 4 + position, mask=valid, other=0.0)
                found = ()
                for product in tl.static_range(PRODUCTS):
                    scores = tl.dot(keys, queries[product])
                    scores = tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL)
                    # Read where they are needed: those of all products would fill the registers.
                    asked = tl.minimum(product * TOKENS + token_of, last_row - 1 - first)
                    at = row_at(asked, head, stride_wt, stride_wh)
                    weight = tl.load(weights + at, mask=head < HEADS, other=0.0)
                    scores = scores * weight[None, :]
                    if HEADS < HEADS_PADDED:
                        # 0 times what is not finite is not 0.
                        scores = tl.where((head < HEADS)[None, :], scores, 0.0)
                    sums = tl.sum(tl.reshape(scores, (BLOCK_N, TOKENS, HEADS_PADDED)), 2) * scale[:, None]
                    found = found + (sums,)
                # Stored together, so that the threads exchange them once.
                sums = _joined(found, PRODUCTS)
                row_of = tl.arange(0, PRODUCTS * TOKENS)
                target = logits + start + row_of[None, :] * stride_row + lane[:, None]
                tl.store(target, sums, mask=lane[:, None] < (limits - start)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def index_rows_kernel(
    seq_lens, qo_indptr, sequences, visible, num_tokens, num_seqs, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: sequences, and the rows after them. A row's sequence and how many keys it sees, else -1 and 0."""
    sequence = tl.program_id(0)
    is_one = sequence < num_seqs
    first = tl.load(qo_indptr + sequence)
    last = tl.minimum(tl.load(qo_indptr + sequence + 1, mask=is_one, other=num_tokens), num_tokens)
    unseen = last - 1 - tl.load(seq_lens + sequence, mask=is_one, other=0)
    for start in range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(sequences + row, tl.where(is_one, sequence, -1), mask=row < last)
        tl.store(visible + row, tl.where(is_one, tl.maximum(row - unseen, 0), 0), mask=row < last)


@triton.jit
def _page(pages, stride, start, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The page of a block of keys, or of each of them."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(pages + start // BLOCK_SIZE * stride, mask=start < end, other=0)
    else:
        token = start + tl.arange(0, BLOCK_N)
        return tl.load(pages + token // BLOCK_SIZE * stride, mask=token < end, other=0)


@triton.jit
def _position(start, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where in its page each key of a block is, which begins at a multiple of BLOCK_N."""
    if BLOCK_N % BLOCK_SIZE == 0:
        return tl.arange(0, BLOCK_N) % BLOCK_SIZE
    else:
        return (start + tl.arange(0, BLOCK_N)) % BLOCK_SIZE


@triton.jit
def _joined(parts, N: tl.constexpr):
    """[M, K], one or two of them, as [M, N · K]."""
    tl.static_assert(N <= 2)
    if N == 1:
        return parts[0]
    else:
        pair = tl.permute(tl.join(parts[0], parts[1]), (0, 2, 1))
        return tl.reshape(pair, (parts[0].shape[0], 2 * parts[0].shape[1]))


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
