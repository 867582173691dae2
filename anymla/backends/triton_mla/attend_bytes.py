"""The attention kernel for few rows over fp8 keys, which stay bytes until they are multiplied.

The same line, stretches and workspace as `attend`. A warpgroup copies rows as they are stored; two others
have every second block each, and join their sums at the end of an item. Whole blocks of one page come in
boxes. Two neighbouring bytes travel as one 16-bit element, which is what the chip transposes, and become two
operands in registers: so the products of even and of odd columns are apart, and each byte passes on-chip
memory once a use.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from anymla.backends.triton_mla import attend, warpgroups
from anymla.backends.triton_mla.warpgroup_parts import (
    LN_2,
    announce,
    key_span,
    load_box,
    page_of,
    placed_item,
    row_at,
    rows_of,
    sink_share,
    write_free_rows,
)

# Registers of a thread; the first warpgroup has what is left of 504.
COMPUTE_REGS = gl.constexpr(216)
COPY_REGS = gl.constexpr(64)

PAIRS = gl.constexpr(warpgroups.PAIRS)


@gluon.jit(do_not_specialize=attend.OF_A_BATCH)
def attend_bytes_kernel(
    ql_nope,
    q_pe,
    cache,
    k_scale,
    block_table,
    seq_lens,
    qo_indptr,
    indices,
    counts,
    sinks,
    out,
    lse,
    part_out,
    part_lse,
    line,
    stretches,
    sm_scale_log2e,
    num_tokens,
    num_seqs,
    num_heads,
    num_keys,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_pt,
    stride_ph,
    stride_pd,
    stride_page,
    stride_token,
    stride_table,
    stride_table_col,
    stride_indices,
    stride_indices_col,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lt,
    stride_lh,
    q_scale,
    latents,
    ropes,
    L: gl.constexpr,
    R: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    INVARIANT: gl.constexpr,
    PIECES: gl.constexpr,
    PIECE_BLOCKS: gl.constexpr,
    FORMAT: gl.constexpr,
    CAUSAL: gl.constexpr,
    SPARSE: gl.constexpr,
    HAS_COUNTS: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    OVERLAP: gl.constexpr,
    ROOMS: gl.constexpr,
    BOXES: gl.constexpr,
):
    """One stretch of the line a program; the grid is the number of stretches.

    Queries in fp8 have a q_scale. With BOXES whole blocks are boxes of `latents` and of `ropes`.
    """
    gl.static_assert(gl.num_warps() == 4)
    # So the blocks of an item that come to one room are one warpgroup's, which waits for each of them.
    gl.static_assert(ROOMS % 2 == 0)
    if OVERLAP:
        gdc_launch_dependents()
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    R_PAIRS: gl.constexpr = max(R // 2, 16)
    TILES: gl.constexpr = L // (2 * PAIRS)
    l_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, PAIRS], gl.float16)
    r_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, R_PAIRS], gl.float16)
    q_l = gl.allocate_shared_memory(gl.float16, [L // PAIRS, BLOCK_M, PAIRS], swizzled)
    q_r = gl.allocate_shared_memory(gl.float16, [2, BLOCK_M, R_PAIRS], swizzled)
    powers = gl.allocate_shared_memory(gl.float32, [1, BLOCK_M], flat)
    k_l = gl.allocate_shared_memory(gl.float16, [ROOMS * TILES, BLOCK_N, PAIRS], l_at)
    k_r = gl.allocate_shared_memory(gl.float16, [ROOMS, BLOCK_N, R_PAIRS], r_at)
    weights = gl.allocate_shared_memory(gl.float16, [2, BLOCK_M, BLOCK_N], swizzled)
    sums = gl.allocate_shared_memory(gl.float32, [L // PAIRS, BLOCK_M, PAIRS], swizzled)
    totals = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], flat)
    full = gl.allocate_shared_memory(gl.int64, [ROOMS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [ROOMS, 1], mbarrier.MBarrierLayout())
    # Queries are there; the second's sums are there, have been read.
    turns = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ROOMS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(3):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, q_l, q_r, powers, k_l, k_r, weights, sums, totals, full, free, turns,
                    ql_nope, q_pe, q_scale, k_scale, seq_lens, qo_indptr, indices, counts, sinks,
                    out, lse, part_out, part_lse,
                    line, stretches, sm_scale_log2e, num_seqs, num_heads, num_keys,
                    stride_qt, stride_qh, stride_qd, stride_pt, stride_ph, stride_pd,
                    stride_indices, stride_indices_col, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
                    L, R, BLOCK_M, BLOCK_N, INVARIANT, PIECES, PIECE_BLOCKS, CAUSAL, SPARSE,
                    HAS_COUNTS, HAS_SCALE, HAS_SINKS, HAS_LSE, ROOMS,
                ),
            ),
            (
                _attend,
                (
                    1, q_l, q_r, powers, k_l, k_r, weights, sums, totals, full, free, turns,
                    ql_nope, q_pe, q_scale, k_scale, seq_lens, qo_indptr, indices, counts, sinks,
                    out, lse, part_out, part_lse,
                    line, stretches, sm_scale_log2e, num_seqs, num_heads, num_keys,
                    stride_qt, stride_qh, stride_qd, stride_pt, stride_ph, stride_pd,
                    stride_indices, stride_indices_col, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
                    L, R, BLOCK_M, BLOCK_N, INVARIANT, PIECES, PIECE_BLOCKS, CAUSAL, SPARSE,
                    HAS_COUNTS, HAS_SCALE, HAS_SINKS, HAS_LSE, ROOMS,
                ),
            ),
            (
                _copy,
                (
                    k_l, k_r, full, free, latents, ropes,
                    cache, block_table, seq_lens, qo_indptr, indices, counts,
                    line, stretches, num_seqs, num_heads, num_keys, stride_page, stride_token,
                    stride_table, stride_table_col, stride_indices, stride_indices_col,
                    L, R, BLOCK_M, BLOCK_N, BLOCK_SIZE, INVARIANT, PIECES, PIECE_BLOCKS, CAUSAL, SPARSE,
                    HAS_COUNTS, ROOMS, BOXES,
                ),
            ),
        ],
        [4, 4],
        [COMPUTE_REGS, COPY_REGS],
    )  # fmt: skip
    # Last: before the others it would hold up their first copies.
    if not SPARSE:
        write_free_rows(
            qo_indptr, out, lse, num_tokens, num_seqs, num_heads,
            stride_ot, stride_oh, stride_od, stride_lt, stride_lh, L, HAS_LSE,
        )  # fmt: skip


@gluon.jit
def _copy(
    k_l, k_r, full, free, latents, ropes, cache, block_table, seq_lens, qo_indptr, indices, counts,
    line, stretches, num_seqs, num_heads, num_keys, stride_page, stride_token,
    stride_table, stride_table_col, stride_indices, stride_indices_col,
    L: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    INVARIANT: gl.constexpr, PIECES: gl.constexpr, PIECE_BLOCKS: gl.constexpr,
    CAUSAL: gl.constexpr, SPARSE: gl.constexpr, HAS_COUNTS: gl.constexpr,
    ROOMS: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """The warpgroup that copies keys as they are stored."""
    copies_at: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    keys_at: gl.constexpr = gl.SliceLayout(1, copies_at)
    program = gl.program_id(0)
    first_item = gl.load(stretches + 3 * program)
    end_item = gl.load(stretches + 3 * program + 1)
    start = gl.load(stretches + 3 * program + 2)
    end = gl.load(stretches + 3 * program + 5)
    TILES: gl.constexpr = L // (2 * PAIRS)
    used = 0
    for item in range(first_item, end_item):
        seq, first_row, _q_start, q_len, seq_len, lo, hi, _whole, _slot = placed_item(
            item, first_item, start, end, program, line, seq_lens, qo_indptr, counts, num_seqs, num_keys,
            BLOCK_M, INVARIANT, PIECES, PIECE_BLOCKS, SPARSE, HAS_COUNTS,
        )  # fmt: skip
        if lo < hi:
            start_key, end_key = key_span(
                lo, hi, seq_len, q_len, first_row, num_heads, BLOCK_M, BLOCK_N, CAUSAL, SPARSE
            )
            if SPARSE:
                table = indices + seq.to(gl.int64) * stride_indices
                table_stride = stride_indices_col
            else:
                table = block_table + seq.to(gl.int64) * stride_table
                table_stride = stride_table_col
            blocks = gl.maximum((end_key - start_key + BLOCK_N - 1) // BLOCK_N, 0)
            page = page_of(
                table, table_stride, start_key, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, keys_at
            )
            for block in range(blocks):
                key = start_key + block * BLOCK_N
                here = page
                page = page_of(
                    table, table_stride, key + BLOCK_N, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, keys_at
                )
                place = (used + block) % ROOMS
                mbarrier.wait(free.index(place), (((used + block) // ROOMS) & 1) ^ 1)
                bar = full.index(place)
                if BOXES and key + BLOCK_N <= end_key:
                    # Rows may have been copied here before.
                    fence_async_shared()
                    row = here * BLOCK_SIZE + key % BLOCK_SIZE
                    mbarrier.expect(bar, BLOCK_N * (L + R))
                    for tile in gl.static_range(TILES):
                        load_box(latents, [row, tile * PAIRS], bar, k_l.index(place * TILES + tile))
                    if R > 0:
                        load_box(ropes, [row, L // 2], bar, k_r.index(place))
                else:
                    rows, valid = rows_of(
                        cache, here, key, end_key, stride_page, stride_token,
                        BLOCK_N, BLOCK_SIZE, SPARSE, keys_at,
                    )  # fmt: skip
                    pairs = rows.to(gl.pointer_type(gl.float16))
                    for tile in gl.static_range(TILES):
                        cols = tile * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(0, copies_at))
                        async_copy.async_copy_global_to_shared(
                            k_l.index(place * TILES + tile), pairs + cols[None, :], mask=valid
                        )
                    if R > 0:
                        cols_r = L // 2 + gl.arange(0, R // 2, gl.SliceLayout(0, copies_at))
                        async_copy.async_copy_global_to_shared(
                            k_r.index(place), pairs + cols_r[None, :], mask=valid
                        )
                    announce(bar, True)
            used += blocks


@gluon.jit
def _bring_queries(
    q_l, q_r, powers, ql_nope, q_pe, first_row, q_start, q_len, num_heads,
    stride_qt, stride_qh, stride_qd, stride_pt, stride_ph, stride_pd,
    L: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Queries in fp16, each row divided by a power of two that the scale of its scores makes up for."""
    # A warp a row, so that its largest value is found among its threads.
    queries_at: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    rows = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, queries_at))
    live = (rows // num_heads < q_len)[:, None]
    row_tokens = q_start + rows // num_heads
    l_rows = (ql_nope + row_at(row_tokens, rows % num_heads, stride_qt, stride_qh))[:, None]
    r_rows = (q_pe + row_at(row_tokens, rows % num_heads, stride_pt, stride_ph))[:, None]
    parts = ()
    most = gl.full([BLOCK_M], 1.1754943508222875e-38, gl.float32, gl.SliceLayout(1, queries_at))
    for part in gl.static_range(L // PAIRS):
        cols = part // 2 * 2 * PAIRS + _columns(part % 2, PAIRS, queries_at)
        values = gl.load(l_rows + cols[None, :] * stride_qd, mask=live, other=0.0).to(gl.float32)
        most = gl.maximum(most, gl.max(gl.abs(values), 1))
        parts = parts + (values,)
    if R > 0:
        for part in gl.static_range(2):
            cols = _columns(part, R // 2, queries_at)
            values = gl.load(r_rows + cols[None, :] * stride_pd, mask=live, other=0.0).to(gl.float32)
            most = gl.maximum(most, gl.max(gl.abs(values), 1))
            parts = parts + (values,)
    # The exponent alone; 2^-126 for a row of zeros.
    power = (most.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    powers.index(0).store(power)
    for part in gl.static_range(L // PAIRS):
        q_l.index(part).store((parts[part] / power[:, None]).to(gl.float16))
    if R > 0:
        for part in gl.static_range(2):
            q_r.index(part).store((parts[L // PAIRS + part] / power[:, None]).to(gl.float16))


@gluon.jit
def _columns(odd: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns of the first operand that pairs of bytes make, or of the second: every second pair."""
    step = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return step // 2 * 4 + step % 2 + 2 * odd


@gluon.jit
def _attend(
    SIDE: gl.constexpr, q_l, q_r, powers, k_l, k_r, weights, sums, totals, full, free, turns,
    ql_nope, q_pe, q_scale, k_scale, seq_lens, qo_indptr, indices, counts, sinks,
    out, lse, part_out, part_lse,
    line, stretches, sm_scale_log2e, num_seqs, num_heads, num_keys,
    stride_qt, stride_qh, stride_qd, stride_pt, stride_ph, stride_pd,
    stride_indices, stride_indices_col, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
    L: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    INVARIANT: gl.constexpr, PIECES: gl.constexpr, PIECE_BLOCKS: gl.constexpr,
    CAUSAL: gl.constexpr, SPARSE: gl.constexpr,
    HAS_COUNTS: gl.constexpr, HAS_SCALE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    ROOMS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: blocks SIDE, SIDE + 2, ... of each item; the first writes out."""
    sums_at: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    rows_at: gl.constexpr = gl.SliceLayout(1, sums_at)
    left_at: gl.constexpr = gl.DotOperandLayout(0, sums_at, 2)
    TILES: gl.constexpr = L // (2 * PAIRS)
    program = gl.program_id(0)
    first_item = gl.load(stretches + 3 * program)
    end_item = gl.load(stretches + 3 * program + 1)
    start = gl.load(stretches + 3 * program + 2)
    end = gl.load(stretches + 3 * program + 5)
    key_scale = gl.load(k_scale) if HAS_SCALE else 1.0
    score_scale = sm_scale_log2e * key_scale
    if q_scale is not None:
        score_scale *= gl.load(q_scale)
    used = 0
    done = 0
    for item in range(first_item, end_item):
        seq, first_row, q_start, q_len, seq_len, lo, hi, whole, slot = placed_item(
            item, first_item, start, end, program, line, seq_lens, qo_indptr, counts, num_seqs, num_keys,
            BLOCK_M, INVARIANT, PIECES, PIECE_BLOCKS, SPARSE, HAS_COUNTS,
        )  # fmt: skip
        if lo < hi:
            start_key, end_key = key_span(
                lo, hi, seq_len, q_len, first_row, num_heads, BLOCK_M, BLOCK_N, CAUSAL, SPARSE
            )
            blocks = gl.maximum((end_key - start_key + BLOCK_N - 1) // BLOCK_N, 0)
            tokens = (first_row + gl.arange(0, BLOCK_M, rows_at)) // num_heads
            if CAUSAL and not SPARSE:
                visible = gl.minimum(gl.maximum(seq_len - q_len + 1 + tokens, 0), end_key)
            else:
                visible = gl.full([BLOCK_M], 0, gl.int32, rows_at) + end_key
            table = indices + seq.to(gl.int64) * stride_indices if SPARSE else indices
            top = gl.full([BLOCK_M], float("-inf"), gl.float32, rows_at)
            total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, sums_at)
            acc = ()
            for _ in gl.static_range(2 * TILES):
                acc = acc + (gl.zeros([BLOCK_M, PAIRS], gl.float32, sums_at),)
            if SIDE == 0:
                # The other has read those before: its sums of the item before are here.
                _bring_queries(
                    q_l, q_r, powers, ql_nope, q_pe, first_row, q_start, q_len, num_heads,
                    stride_qt, stride_qh, stride_qd, stride_pt, stride_ph, stride_pd, L, R, BLOCK_M,
                )  # fmt: skip
                gl.thread_barrier()
                mbarrier.arrive(turns.index(0))
            else:
                mbarrier.wait(turns.index(0), done & 1)
            # There are registers for these; the others come anew with each block.
            ropes = ()
            for part in gl.static_range(2 if R > 0 else 0):
                ropes = ropes + (q_r.index(part).load(left_at),)
            row_scale = powers.index(0).load(rows_at) * score_scale
            for block in range(SIDE, blocks, 2):
                place = (used + block) % ROOMS
                keys_now = start_key + block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, sums_at))
                if SPARSE:
                    slots = gl.load(table + keys_now * stride_indices_col, mask=keys_now < end_key, other=-1)
                    seen = (slots >= 0)[None, :]
                else:
                    seen = keys_now[None, :] < visible[:, None]
                mbarrier.wait(full.index(place), ((used + block) // ROOMS) & 1)
                top, total, acc = _absorb(
                    q_l, ropes, k_l, place * TILES, k_r.index(place), weights.index(SIDE), seen,
                    row_scale, top, total, acc,
                    R, BLOCK_M, BLOCK_N, TILES, sums_at,
                )  # fmt: skip
                gl.thread_barrier()
                mbarrier.arrive(free.index(place))
            used += blocks
            row_total = gl.sum(total, 1)
            if SIDE == 1:
                mbarrier.wait(turns.index(2), (done & 1) ^ 1)
                totals.index(0).store(top)
                totals.index(1).store(row_total)
                for part in gl.static_range(2 * TILES):
                    sums.index(part).store(acc[part])
                gl.thread_barrier()
                mbarrier.arrive(turns.index(1))
            else:
                mbarrier.wait(turns.index(1), done & 1)
                other_top = totals.index(0).load(rows_at)
                new_top = gl.maximum(top, other_top)
                floor = gl.where(new_top == float("-inf"), 0.0, new_top)
                own_share = gl.exp2(top - floor)
                other_share = gl.exp2(other_top - floor)
                row_total = row_total * own_share + totals.index(1).load(rows_at) * other_share
                joined = ()
                for part in gl.static_range(2 * TILES):
                    other = sums.index(part).load(sums_at)
                    joined = joined + (acc[part] * own_share[:, None] + other * other_share[:, None],)
                gl.thread_barrier()
                mbarrier.arrive(turns.index(2))
                _write(
                    joined, new_top, row_total, key_scale, first_row, q_start, q_len, num_heads, whole, slot,
                    sinks, out, lse, part_out, part_lse,
                    stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
                    L, BLOCK_M, TILES, HAS_SINKS, HAS_LSE, rows_at,
                )  # fmt: skip
            done += 1


@gluon.jit
def _absorb(
    q_l, ropes, k_l, first_tile, k_r, weights_of, seen, row_scale, top, total, acc,
    R: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, TILES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A block of keys."""
    left_at: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    right_at: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    # Four sums apart, because a product waits for the one that it is added to.
    parts = ()
    for _ in gl.static_range(4):
        parts = parts + (gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT),)
    for tile in gl.static_range(TILES):
        pairs = k_l.index(first_tile + tile).permute((1, 0)).load(right_at)
        first, second = _split(pairs, False)
        parts = (
            parts[2],
            parts[3],
            mma_v2(q_l.index(2 * tile).load(left_at), first, parts[0]),
            mma_v2(q_l.index(2 * tile + 1).load(left_at), second, parts[1]),
        )
    if R > 0:
        first, second = _split(k_r.permute((1, 0)).load(right_at), False)
        parts = (
            mma_v2(ropes[0], first, parts[0]),
            mma_v2(ropes[1], second, parts[1]),
            parts[2],
            parts[3],
        )
    scores = (parts[0] + parts[1]) + (parts[2] + parts[3])
    scores = gl.where(seen, scores * row_scale[:, None], float("-inf"))
    new_top = gl.maximum(top, _most(scores, BLOCK_M, BLOCK_N, LAYOUT))
    # A row that has seen nothing yet would subtract -inf from -inf.
    floor = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores - floor[:, None])
    decay = gl.exp2(top - floor)[:, None]
    total = total * decay + weights
    weights_of.store(weights.to(gl.float16))
    left = weights_of.load(left_at)
    new_acc = ()
    for tile in gl.static_range(TILES):
        pairs = k_l.index(first_tile + tile).load(right_at)
        even, odd = _split(pairs, True)
        new_acc = new_acc + (
            mma_v2(left, even, acc[2 * tile] * decay),
            mma_v2(left, odd, acc[2 * tile + 1] * decay),
        )
    return new_top, total, new_acc


@gluon.jit
def _most(scores, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """The largest of each row: each warp's own first, so that what warps exchange waits for them once."""
    gl.static_assert(BLOCK_M == 16)
    # A thread has two rows, and of each what the four warps found.
    found_at: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[0, 0], [0, 0]], [], [BLOCK_M, 4]
    )
    by_warp = gl.max(gl.max(scores.reshape([BLOCK_M, BLOCK_N // 32, 4, 8]), 1), 2)
    return gl.convert_layout(gl.max(gl.convert_layout(by_warp, found_at), 1), gl.SliceLayout(1, LAYOUT))


@gluon.jit
def _split(pairs, TURNED: gl.constexpr):
    """Two pairs of bytes in a register as two fp16 operands: a pair each, or first and second bytes."""
    if TURNED:
        return gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .b32 t; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def _write(
    acc, top, total, key_scale, first_row, q_start, q_len, num_heads, whole, slot,
    sinks, out, lse, part_out, part_lse, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
    L: gl.constexpr, BLOCK_M: gl.constexpr, TILES: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The rows of an item: to out and lse, or as a piece."""
    values_at: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    empty = total == 0.0
    row_lse = gl.where(empty, float("-inf"), (top + gl.log2(total)) * LN_2)
    share = gl.where(empty, 0.0, key_scale / gl.where(empty, 1.0, total))
    in_tile = gl.arange(0, BLOCK_M, ROWS)
    rows = first_row + in_tile
    live = rows // num_heads < q_len
    left = gl.full([BLOCK_M], 1.0, gl.float32, ROWS)
    if whole:
        if HAS_SINKS:
            left = sink_share(row_lse, gl.load(sinks + rows % num_heads, mask=live, other=0.0))
        if HAS_LSE:
            lse_rows = row_at(q_start + rows // num_heads, rows % num_heads, stride_lt, stride_lh)
            gl.store(lse + lse_rows, row_lse, mask=live)
    else:
        gl.store(part_lse + slot.to(gl.int64) * BLOCK_M + in_tile, row_lse)
    out_tile = gl.arange(0, BLOCK_M, gl.SliceLayout(1, values_at))
    out_rows = first_row + out_tile
    out_live = (out_rows // num_heads < q_len)[:, None]
    o_rows = row_at(q_start + out_rows // num_heads, out_rows % num_heads, stride_ot, stride_oh)
    p_rows = (slot.to(gl.int64) * BLOCK_M + out_tile) * L
    for tile in gl.static_range(TILES):
        even = gl.where(empty[:, None], 0.0, acc[2 * tile] * share[:, None])
        odd = gl.where(empty[:, None], 0.0, acc[2 * tile + 1] * share[:, None])
        if HAS_SINKS:
            # After the division, as `combine` does: bits depend on no other row of the tile.
            even = even * left[:, None]
            odd = odd * left[:, None]
        values = gl.convert_layout(gl.join(even, odd).reshape([BLOCK_M, 2 * PAIRS]), values_at)
        cols = (2 * PAIRS * tile + gl.arange(0, 2 * PAIRS, gl.SliceLayout(0, values_at)))[None, :]
        if whole:
            gl.store(
                out + (o_rows[:, None] + cols * stride_od), values.to(out.dtype.element_ty), mask=out_live
            )
        else:
            gl.store(part_out + (p_rows[:, None] + cols), values)
