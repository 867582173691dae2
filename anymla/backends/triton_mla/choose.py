"""Device code of top-k: the largest of a row, bit by bit from the top, on keys that stay in registers."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-0x80000000)
"""The key of no element; that of NaN is one more, and that of -inf follows far above."""


@triton.jit(do_not_specialize=["num_ids"])
def choose_kernel(
    logits,
    visible,
    ids,
    chosen,
    num_ids,
    topk,
    stride_logits,
    stride_ids,
    stride_chosen,
    stride_place,
    TOPK_PADDED: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """Grid: rows, pieces. Of each piece the `topk` largest, equal ones from the left, in order of their ids.

    A piece is PIECE logits of a row [visible], or of those that `ids` [num_ids] names, where -1 names none.
    Its ids come out in `topk` places of `chosen`, -1 after the last.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    if HAS_IDS:
        token = tl.load(ids + row * stride_ids + column, mask=column < num_ids, other=-1)
        is_there = token >= 0
    else:
        token = column
        is_there = column < tl.load(visible + row)
    # -0 + 0 is +0: the two zeros are equal, but their bits are not.
    value = tl.load(logits + row * stride_logits + token, mask=is_there, other=0.0) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    # Negative floats fall as their bits rise, so all bits but the sign are flipped.
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(value == value, key, LOWEST + 1)
    key = tl.where(is_there, key, LOWEST)

    there = tl.sum(is_there.to(tl.int32), 0)
    wanted = tl.minimum(there, topk)
    # The largest threshold that at least `wanted` keys reach; all of them, if there are no more.
    threshold = tl.where(there <= topk, LOWEST + 1, LOWEST).to(tl.int32)
    count = there
    step = tl.full((), LOWEST, tl.int32)
    while (count > wanted) & (step != 0):
        # The bit is not set yet; that of the sign, which is, is cleared to go up.
        higher = threshold ^ step
        reached = tl.sum((key >= higher).to(tl.int32), 0)
        if reached >= wanted:
            threshold = higher
            count = reached
        step = (step >> 1) & 0x7FFFFFFF
    above, equal = key > threshold, key == threshold
    lacking = wanted - tl.sum(above.to(tl.int32), 0)
    # Two counts in one sum; neither exceeds PIECE, which fits sixteen bits.
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    equal_before = (before >> 16) & 0xFFFF
    is_chosen = above | (equal & (equal_before < lacking))
    place = (before & 0xFFFF) + tl.minimum(equal_before, lacking)
    target = chosen + row * stride_chosen + tl.program_id(1) * topk * stride_place
    tl.store(target + place * stride_place, token, mask=is_chosen)
    rest = tl.arange(0, TOPK_PADDED)
    tl.store(target + rest * stride_place, -1, mask=(rest >= wanted) & (rest < topk))
