"""The line of key blocks, its stretches and joins, worked out on the device: no length is read back."""

import triton
import triton.language as tl

_NEVER = tl.constexpr(2147483647)
JOIN = tl.constexpr(8)
"""Numbers of a join, of which six are used: its tile, that sequence's first token and number of tokens, the
slots of the first piece and of the one after it less two, and how many pieces there are, 0 for no join."""


@triton.jit(do_not_specialize=["num_items", "num_seqs", "num_keys"])
def schedule_kernel(
    seq_lens,
    qo_indptr,
    line,
    stretches,
    joins,
    num_items,
    num_seqs,
    num_heads,
    num_keys,
    num_stretches,
    least_blocks,
    INVARIANT: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPARSE: tl.constexpr,
    CHUNK: tl.constexpr,
    STRETCHES_POW2: tl.constexpr,
):
    """One program: `line` [num_items + 1], `stretches` [num_stretches + 1, 3]: first item, end, start.

    Tiles that are cut come first in `joins` [num_stretches, JOIN], which only a line has that is not
    batch-invariant: there any tile may be.
    """
    total = 0
    most = 0
    least = _NEVER
    for first in range(0, num_items, CHUNK):
        blocks = _blocks(
            first + tl.arange(0, CHUNK), seq_lens, qo_indptr, num_items, num_seqs, num_heads, num_keys,
            INVARIANT, PIECES, PIECE_BLOCKS, BLOCK_M, BLOCK_N, CAUSAL, SPARSE,
        )  # fmt: skip
        total += tl.sum(blocks, 0)
        most = tl.maximum(most, tl.max(blocks, 0))
        least = tl.minimum(least, tl.min(tl.where(blocks > 0, blocks, _NEVER), 0))

    quota = tl.maximum((total + num_stretches - 1) // num_stretches, least_blocks)
    # Equal items are not cut at all where that costs less than their pieces would: 1/16 of the time.
    even = (quota + most - 1) // tl.maximum(most, 1) * most
    quota = tl.where((most == least) & (even - quota <= quota // 16), even, quota)

    programs = tl.arange(0, STRETCHES_POW2)
    starts = tl.minimum(programs * quota, total)
    ends = tl.minimum(starts + quota, total)
    at_or_before = tl.zeros((STRETCHES_POW2,), tl.int32)
    before_start = tl.zeros((STRETCHES_POW2,), tl.int32)
    before_end = tl.zeros((STRETCHES_POW2,), tl.int32)
    next_start = tl.zeros((STRETCHES_POW2,), tl.int32) + total
    tile_start = tl.zeros((STRETCHES_POW2,), tl.int32)
    placed = 0
    for first in range(0, num_items, CHUNK):
        items = first + tl.arange(0, CHUNK)
        blocks = _blocks(
            items, seq_lens, qo_indptr, num_items, num_seqs, num_heads, num_keys,
            INVARIANT, PIECES, PIECE_BLOCKS, BLOCK_M, BLOCK_N, CAUSAL, SPARSE,
        )  # fmt: skip
        inside = items < num_items
        begins = placed + tl.cumsum(blocks, 0) - blocks
        tl.store(line + items, begins, mask=inside)
        begins = tl.where(inside, begins, _NEVER)
        at_or_before += tl.sum((begins[None, :] <= starts[:, None]).to(tl.int32), 1)
        before_start += tl.sum((begins[None, :] < starts[:, None]).to(tl.int32), 1)
        before_end += tl.sum((begins[None, :] < ends[:, None]).to(tl.int32), 1)
        if INVARIANT:
            later = tl.where(begins[None, :] >= starts[:, None], begins[None, :], _NEVER)
            next_start = tl.minimum(next_start, tl.min(later, 1))
        else:
            earlier = tl.where(begins[None, :] <= starts[:, None], begins[None, :], 0)
            tile_start = tl.maximum(tile_start, tl.max(earlier, 1))
        placed += tl.sum(blocks, 0)
    tl.store(line + num_items, total)

    if not INVARIANT:
        busy = starts < total
        first_items = tl.where(busy, at_or_before - 1, 0)
        end_items = tl.where(busy, before_end, 0)
    else:
        # Never inside an item: a stretch begins with the next one that does.
        first_items = before_start
        end_items = before_end
        starts = next_start
    here = programs <= num_stretches
    tl.store(stretches + 3 * programs, first_items, mask=here)
    tl.store(stretches + 3 * programs + 1, end_items, mask=here)
    tl.store(stretches + 3 * programs + 2, starts, mask=here)

    if not INVARIANT:
        tile_end = tile_start + _blocks(
            first_items, seq_lens, qo_indptr, num_items, num_seqs, num_heads, num_keys,
            INVARIANT, PIECES, PIECE_BLOCKS, BLOCK_M, BLOCK_N, CAUSAL, SPARSE,
        )  # fmt: skip
        # The cuts inside tiles, but of each tile the first alone: the stretch before begins no later.
        before = starts - quota
        here = (programs > 0) & (programs < num_stretches)
        cut = here & busy & (starts > tile_start) & (starts < tile_end) & (before <= tile_start)
        joined = tl.cumsum(cut.to(tl.int32), 0)
        place = tl.where(cut, joined, tl.sum(cut.to(tl.int32), 0) + programs - joined) - 1
        pieces = tl.where(cut, (tile_end - 1) // quota - programs + 2, 0)
        if SPARSE:
            q_start = first_items % num_seqs
            q_len = tl.zeros_like(first_items) + 1
        else:
            q_start = tl.load(qo_indptr + first_items % num_seqs, mask=here & busy, other=0)
            q_len = tl.load(qo_indptr + first_items % num_seqs + 1, mask=here & busy, other=0) - q_start
        join = joins + JOIN * place
        tl.store(join, first_items, mask=here)
        tl.store(join + 1, q_start, mask=here)
        tl.store(join + 2, q_len, mask=here)
        # What is first in a stretch has its even slot.
        tl.store(join + 3, 2 * programs - 2 + (before < tile_start).to(tl.int32), mask=here)
        tl.store(join + 4, 2 * programs - 2, mask=here)
        tl.store(join + 5, pieces, mask=here)


@triton.jit
def _blocks(
    items, seq_lens, qo_indptr, num_items, num_seqs, num_heads, num_keys,
    INVARIANT: tl.constexpr, PIECES: tl.constexpr, PIECE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """Key blocks of each item; 0 for an item without rows, at least 1 for a tile with rows to write."""
    inside = items < num_items
    tiles = items // PIECES
    seqs = tiles % num_seqs
    first_row = tiles // num_seqs * BLOCK_M
    if SPARSE:
        visible = tl.zeros_like(items) + num_keys
        has_rows = inside & (first_row < num_heads)
    else:
        q_start = tl.load(qo_indptr + seqs, mask=inside, other=0)
        q_len = tl.load(qo_indptr + seqs + 1, mask=inside, other=0) - q_start
        visible = tl.load(seq_lens + seqs, mask=inside, other=0)
        has_rows = inside & (first_row < q_len * num_heads)
        if CAUSAL:
            last_token = tl.minimum((first_row + BLOCK_M - 1) // num_heads, q_len - 1)
            visible = visible - q_len + 1 + last_token
    blocks = tl.maximum((visible + BLOCK_N - 1) // BLOCK_N, 1)
    if INVARIANT:
        blocks = tl.minimum(tl.maximum(blocks - items % PIECES * PIECE_BLOCKS, 0), PIECE_BLOCKS)
    return tl.where(has_rows, blocks, 0)
