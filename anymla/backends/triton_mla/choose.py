"""Device code of top-k: a row is narrowed to few candidates, of which the largest are chosen in registers.

Of the largest of every BLOCK_N-th logit, no more than `topk` are needed to know a bound that at least `topk`
logits of the row reach, and hardly more do. Everything is counted, nothing races, so what is chosen is the
same every time.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOWEST = tl.constexpr(-0x80000000)
"""The key of no element; that of NaN is one more, and that of -inf follows far above."""
HIGHEST = tl.constexpr(0x7FFFFFFF)
NEGATIVE_INFINITY = tl.constexpr(-0x7F800001)
"""The key of -inf."""
LANES = tl.constexpr(512)
"""Rows of a tile: as many as a program has threads, so that each holds all of some rows."""


@triton.jit(do_not_specialize=["num_ids", "stride_one"])
def narrow_kernel(
    logits,
    visible,
    ids,
    kept,
    num_ids,
    topk,
    stride_logits,
    stride_one,
    stride_ids,
    stride_kept,
    PIECE,
    BLOCK_N: tl.constexpr,
    ROOM: tl.constexpr,
    HAS_IDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: rows, pieces. Of each piece at most ROOM ids, the `topk` largest among them, in any order.

    A piece is PIECE logits of a row [visible], or of those that `ids` [num_ids] names, where -1 names none.
    ROOM and BLOCK_N are at least `topk`; -1 follows the last. NUM_STAGES blocks are read at once. With
    OVERLAP the kernel after this one may start with it, and waits before it reads.
    """
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * PIECE
    end = tl.minimum(begin + PIECE, num_ids if HAS_IDS else tl.load(visible + row))
    logits += row * stride_logits
    if HAS_IDS:
        ids += row * stride_ids
    target = kept + row * stride_kept + tl.program_id(1) * ROOM
    tile = _tile(BLOCK_N)
    whole = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
    if HAS_IDS:
        largest = tl.full((LANES, BLOCK_N // LANES), LOWEST, tl.int32)
        there = tl.zeros((LANES, BLOCK_N // LANES), tl.int32)
        for start in range(begin, end, BLOCK_N):
            key, _ = _keys(logits, ids, start + tile, end, stride_one, True)
            largest = tl.maximum(largest, key)
            there += (key > LOWEST).to(tl.int32)
        there = _sum(there)
    else:
        best = tl.full((LANES, BLOCK_N // LANES), float("-inf"), tl.float32)
        for start in tl.range(begin, whole, BLOCK_N, loop_unroll_factor=NUM_STAGES):
            value = _values(logits, start, tile, end, True)
            # NaN is not more than anything.
            best = tl.where(value > best, value, best)
        if whole < end:
            value = _values(logits, whole, tile, end, False)
            best = tl.where(value > best, value, best)
        there = tl.maximum(end - begin, 0)
        largest = tl.where(tile < there, _key(best), LOWEST)
    wanted = tl.minimum(there, topk)
    bound, _ = _threshold(largest, there, wanted, wanted // 8)
    total = tl.full((), ROOM + 1, tl.int32)
    if not HAS_IDS and bound > NEGATIVE_INFINITY:
        # What is no less than a float is seen without keys.
        least = _float(bound)
        count = tl.zeros((LANES, BLOCK_N // LANES), tl.int32)
        for start in tl.range(begin, whole, BLOCK_N, loop_unroll_factor=NUM_STAGES):
            count += (_values(logits, start, tile, end, True) >= least).to(tl.int32)
        if whole < end:
            count += (_values(logits, whole, tile, end, False) >= least).to(tl.int32)
        total = _sum(count)
        if total <= ROOM:
            place = _places(count)
            for start in tl.range(begin, whole, BLOCK_N, loop_unroll_factor=NUM_STAGES):
                is_kept = _values(logits, start, tile, end, True) >= least
                tl.store(target + place, start + tile, mask=is_kept)
                place += is_kept.to(tl.int32)
            if whole < end:
                is_kept = _values(logits, whole, tile, end, False) >= least
                tl.store(target + place, whole + tile, mask=is_kept)
    if total > ROOM:
        # Many of the largest were the largest of the same few, or are equal, or are no numbers.
        low = _ranked(tl.full((), LOWEST + 1, tl.int32), HIGHEST)
        high = _ranked(tl.max(tl.max(largest, 1), 0) + 1, HIGHEST)
        # Not `low`: of two names of one value, a loop that assigns one from the other carries only one.
        middle = _ranked(bound, HIGHEST)
        count = tl.zeros((LANES, BLOCK_N // LANES), tl.int32)
        while total > ROOM:
            count = tl.zeros((LANES, BLOCK_N // LANES), tl.int32)
            for start in range(begin, end, BLOCK_N):
                key, token = _keys(logits, ids, start + tile, end, stride_one, HAS_IDS)
                count += ((key > LOWEST) & (_ranked(key, token) >= middle)).to(tl.int32)
            reached = _sum(count)
            if reached >= wanted:
                low = middle
                total = reached
            else:
                high = middle
            middle = (low & high) + ((low ^ high) >> 1)
        place = _places(count)
        for start in range(begin, end, BLOCK_N):
            key, token = _keys(logits, ids, start + tile, end, stride_one, HAS_IDS)
            is_kept = (key > LOWEST) & (_ranked(key, token) >= low)
            tl.store(target + place, token, mask=is_kept)
            place += is_kept.to(tl.int32)
    rest = tl.arange(0, ROOM)
    tl.store(target + rest, -1, mask=rest >= total)


@triton.jit(do_not_specialize=["num_ids", "stride_one"])
def choose_kernel(
    logits,
    visible,
    ids,
    sequences,
    block_table,
    chosen,
    num_ids,
    topk,
    stride_logits,
    stride_one,
    stride_ids,
    stride_table,
    stride_table_col,
    stride_chosen,
    stride_place,
    TOPK_PADDED: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    AS_SLOTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: rows. The `topk` largest of a row, of equal ones the earlier, in any order.

    A row is at most PIECE logits [visible], or those that `ids` [num_ids] names, where -1 names none. Ids,
    or AS_SLOTS of the pages of its sequence, come out in `topk` places of `chosen`, -1 after the last.
    """
    row = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        # Until here, nothing of the kernel before was needed; it may not have ended yet.
        gdc_wait()
    end = num_ids if HAS_IDS else tl.load(visible + row)
    if HAS_IDS:
        ids += row * stride_ids
    key, token = _keys(logits + row * stride_logits, ids, _tile(PIECE), end, stride_one, HAS_IDS)
    there = _sum((key > LOWEST).to(tl.int32))
    wanted = tl.minimum(there, topk)
    threshold, reached = _threshold(key, there, wanted, 0)
    is_chosen = key >= threshold
    if reached > wanted:
        is_equal = key == threshold
        equal = _sum(is_equal.to(tl.int32))
        earliness = tl.where(is_equal, -1 - token, LOWEST)
        earliest, _ = _threshold(earliness, equal, wanted - (reached - equal), 0)
        is_chosen = (key > threshold) | (is_equal & (earliness >= earliest))
    if AS_SLOTS:
        pages = block_table + tl.load(sequences + row).to(tl.int64) * stride_table
        page = tl.load(pages + token // BLOCK_SIZE * stride_table_col, mask=is_chosen, other=-1)
        slot = page.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        token = tl.where((slot >= 0) & (slot <= HIGHEST), slot, -1).to(tl.int32)
    target = chosen + row * stride_chosen
    place = _places(is_chosen.to(tl.int32))
    tl.store(target + place * stride_place, token, mask=is_chosen)
    rest = tl.arange(0, TOPK_PADDED)
    tl.store(target + rest * stride_place, -1, mask=(rest >= wanted) & (rest < topk))


@triton.jit
def _tile(SIZE: tl.constexpr):
    """The numbers below SIZE, LANES in a column."""
    tile = tl.arange(0, LANES)[:, None] + tl.arange(0, SIZE // LANES)[None, :] * LANES
    # So that loads have the layout of scattered stores.
    return tl.max_contiguous(tile, (1, 1))


@triton.jit
def _keys(logits, ids, place, end, stride, HAS_IDS: tl.constexpr):
    """Integers in the order of the logits, LOWEST where there is none, and their ids.

    The stride is 1. As that is not known, threads load single ones, in the layout that scattered stores have.
    """
    if HAS_IDS:
        token = tl.load(ids + place * stride, mask=place < end, other=-1)
        is_there = token >= 0
    else:
        token = place
        is_there = place < end
    key = _key(tl.load(logits + token * stride, mask=is_there, other=0.0))
    return tl.where(is_there, key, LOWEST), token


@triton.jit
def _values(logits, start, tile, end, IS_WHOLE: tl.constexpr):
    """The logits of a tile, -inf after the end."""
    # One address a row; from there to the columns it is known.
    row = tl.max_contiguous(tl.arange(0, LANES), 1)[:, None]
    column = tl.arange(0, tile.shape[1])[None, :] * LANES
    at = logits + start + row + column
    if IS_WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=tile < end - start, other=float("-inf"))


@triton.jit
def _key(value):
    """Integers in the order of floats, that of NaN below all others."""
    # -0 + 0 is +0: the two zeros are equal, but their bits are not.
    value += 0.0
    bits = value.to(tl.int32, bitcast=True)
    # Negative floats fall as their bits rise, so all bits but the sign are flipped.
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST + 1)


@triton.jit
def _float(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _ranked(key, token):
    """Of equal keys that of the earlier token is the larger; HIGHEST is the last token."""
    return (key.to(tl.int64) << 32) + (HIGHEST - token)


@triton.jit
def _threshold(key, count, wanted, slack):
    """What at least `wanted` of `count` keys reach, equal ones apart `slack` more at most; and how many."""
    low = tl.min(tl.min(tl.where(key > LOWEST, key, HIGHEST), 1), 0).to(tl.int64)
    high = tl.max(tl.max(key, 1), 0).to(tl.int64) + 1
    while (high - low > 1) & (count > wanted + slack):
        first = low + (high - low) // 3
        second = low + (high - low) * 2 // 3
        # Two counts in one sum; neither exceeds a tile, which fits sixteen bits.
        reach = (key >= first.to(tl.int32)).to(tl.int32) + ((key >= second.to(tl.int32)).to(tl.int32) << 16)
        counts = _sum(reach)
        reach_first, reach_second = counts & 0xFFFF, (counts >> 16) & 0xFFFF
        if reach_second >= wanted:
            low = second
            count = reach_second
        elif reach_first >= wanted:
            low = first
            high = second
            count = reach_first
        else:
            high = first
    return low.to(tl.int32), count


@triton.jit
def _sum(tile):
    return tl.sum(tl.sum(tile, 1), 0)


@triton.jit
def _places(count):
    """Where each begins if so many of each stand one after the other, row by row."""
    row = tl.sum(count, 1)
    return (tl.cumsum(row, 0) - row)[:, None] + tl.cumsum(count, 1) - count
