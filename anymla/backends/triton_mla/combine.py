"""The combine kernel: joins the pieces of a tile, applies sinks once, writes out and lse."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from anymla.backends.triton_mla.attend import sink_share
from anymla.backends.triton_mla.keys import row_at
from anymla.backends.triton_mla.schedule import JOIN


@triton.jit(do_not_specialize=["num_seqs"])
def combine_kernel(
    part_out,
    part_lse,
    line,
    joins,
    qo_indptr,
    sinks,
    out,
    lse,
    num_seqs,
    num_heads,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lt,
    stride_lh,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INVARIANT: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_BLOCKS: tl.constexpr,
    SPARSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: a join (or, batch-invariant, a tile) × a row of its tile × a chunk of columns."""
    row = tl.program_id(0) % BLOCK_M
    if not INVARIANT:
        join = joins + JOIN * (tl.program_id(0) // BLOCK_M)
        tile = tl.load(join)
        q_start = tl.load(join + 1)
        q_len = tl.load(join + 2)
        first_slot = tl.load(join + 3)
        slot = tl.load(join + 4)
        pieces = tl.load(join + 5)
        slot_step = 2
    else:
        tile = tl.program_id(0) // BLOCK_M
        blocks = tl.load(line + (tile + 1) * PIECES) - tl.load(line + tile * PIECES)
        pieces = tl.where(blocks > PIECE_BLOCKS, (blocks + PIECE_BLOCKS - 1) // PIECE_BLOCKS, 0)
        slot = tile * PIECES
        first_slot = slot
        slot_step = 1
        if SPARSE:
            q_start = tile % num_seqs
            q_len = 1
        else:
            q_start = tl.load(qo_indptr + tile % num_seqs)
            q_len = tl.load(qo_indptr + tile % num_seqs + 1) - q_start
    tile_row = tile // num_seqs * BLOCK_M + row
    token = tile_row // num_heads
    head = tile_row % num_heads
    if (pieces > 0) & (token < q_len):
        if OVERLAP:
            # Until here, nothing of the kernel before was needed; it may not have ended yet.
            gdc_wait()
        cols = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        top = float("-inf")
        total = 0.0
        acc = tl.zeros((WIDTH,), tl.float32)
        for first in range(0, pieces, BLOCK_P):
            piece = first + tl.arange(0, BLOCK_P)
            inside = piece < pieces
            places = tl.where(piece == 0, first_slot, slot + piece * slot_step).to(tl.int64) * BLOCK_M + row
            part = tl.load(part_lse + places, mask=inside, other=float("-inf"))
            values = tl.load(
                part_out + places[:, None] * L_PADDED + cols[None, :], mask=inside[:, None], other=0.0
            )
            new_top = tl.maximum(top, tl.max(part, 0))
            floor = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp(part - floor)
            decay = tl.exp(top - floor)
            total = total * decay + tl.sum(weights, 0)
            acc = acc * decay + tl.sum(weights[:, None] * values, 0)
            top = new_top
        empty = total == 0.0
        acc = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
        row_lse = tl.where(empty, float("-inf"), top + tl.log(total))
        if HAS_SINKS:
            acc = acc * sink_share(row_lse, tl.load(sinks + head))
        o_row = out + row_at(q_start + token, head, stride_ot, stride_oh)
        tl.store(o_row + cols * stride_od, acc.to(out.dtype.element_ty), mask=cols < L)
        if HAS_LSE:
            tl.store(lse + row_at(q_start + token, head, stride_lt, stride_lh), row_lse)
