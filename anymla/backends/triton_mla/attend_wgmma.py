"""The attention kernel for tiles of 64 rows where warpgroups multiply straight from on-chip memory.

The same line, stretches and workspace as `attend`. Two warpgroups take turns: each has every second block of
keys for scores and softmax, so that one multiplies while the other exponentiates; of the sums each holds half
of the latent's columns, and so it multiplies the other's weights too. A third (`wgmma_copies`) fills a part
of a block's room again as soon as its last reader has let it go; bytes are converted by a third and a fourth.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from anymla.backends.triton_mla import attend
from anymla.backends.triton_mla.warpgroup_parts import (
    LN_2,
    key_span,
    placed_item,
    row_at,
    sink_share,
    write_free_rows,
)
from anymla.backends.triton_mla.wgmma_copies import (
    BARRIERS,
    FREE,
    FULL,
    QUERIES,
    QUERIES_READ,
    READY,
    TOTALS,
    copy_keys,
)

# Registers of a thread; the first warpgroup has what is left of 504, or of 512 where two convert.
COMPUTE_REGS = gl.constexpr(200)
COPY_REGS = gl.constexpr(104)
CONVERT_REGS = gl.constexpr(56)


@gluon.jit(do_not_specialize=attend.OF_A_BATCH)
def attend_wgmma_kernel(
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
    latents,
    ropes,
    q_scale,
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
    BOXES: gl.constexpr,
    Q_COPIED: gl.constexpr,
    COPIED: gl.constexpr,
):
    """One stretch of the line a program; the grid is the number of stretches."""
    gl.static_assert(gl.num_warps() == 4)
    if OVERLAP:
        gdc_launch_dependents()
    HALF: gl.constexpr = L // 2
    R_ROOM: gl.constexpr = max(R, 16)
    # Queries in fp8 meet keys like them in fp16, which holds both exactly and takes one conversion a pair.
    dtype: gl.constexpr = gl.float16 if q_scale is not None else ql_nope.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, R_ROOM], dtype)
    weights_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_l = gl.allocate_shared_memory(dtype, [2, BLOCK_M, HALF], wide)
    q_r = gl.allocate_shared_memory(dtype, [1, BLOCK_M, R_ROOM], narrow)
    k_l = gl.allocate_shared_memory(dtype, [4, BLOCK_N, HALF], wide)
    k_r = gl.allocate_shared_memory(dtype, [2, BLOCK_N, R_ROOM], narrow)
    # A block's RoPE part has been read when its weights are there, and is as large.
    weights = k_r if R == BLOCK_N else gl.allocate_shared_memory(dtype, [2, BLOCK_M, BLOCK_N], weights_at)
    tops = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], flat)
    totals = gl.allocate_shared_memory(gl.float32, [4, BLOCK_M], flat)
    # One warpgroup converts too slowly for two that multiply.
    COPIERS: gl.constexpr = 2 if cache.dtype.element_ty.primitive_bitwidth == 8 else 1
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        if i < FREE or i == QUERIES:
            mbarrier.init(bars.index(i), count=COPIERS)
        else:
            mbarrier.init(bars.index(i), count=2 if i == QUERIES_READ else 1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, COPIERS, q_l, q_r, k_l, k_r, weights, tops, totals, bars, q_scale,
                    k_scale, seq_lens, qo_indptr, indices, counts, sinks, out, lse, part_out, part_lse,
                    line, stretches, sm_scale_log2e, num_seqs, num_heads, num_keys,
                    stride_indices, stride_indices_col, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
                    L, R, BLOCK_M, BLOCK_N, INVARIANT, PIECES, PIECE_BLOCKS, CAUSAL, SPARSE,
                    HAS_COUNTS, HAS_SCALE, HAS_SINKS, HAS_LSE,
                ),
            ),
            (
                _attend,
                (
                    1, COPIERS, q_l, q_r, k_l, k_r, weights, tops, totals, bars, q_scale,
                    k_scale, seq_lens, qo_indptr, indices, counts, sinks, out, lse, part_out, part_lse,
                    line, stretches, sm_scale_log2e, num_seqs, num_heads, num_keys,
                    stride_indices, stride_indices_col, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
                    L, R, BLOCK_M, BLOCK_N, INVARIANT, PIECES, PIECE_BLOCKS, CAUSAL, SPARSE,
                    HAS_COUNTS, HAS_SCALE, HAS_SINKS, HAS_LSE,
                ),
            ),
            (
                copy_keys,
                (
                    0, COPIERS, q_l, q_r, k_l, k_r, bars,
                    ql_nope, q_pe, cache, latents, ropes, block_table, seq_lens, qo_indptr, indices, counts,
                    line, stretches, num_seqs, num_heads, num_keys,
                    stride_qt, stride_qh, stride_qd, stride_pt, stride_ph, stride_pd,
                    stride_page, stride_token,
                    stride_table, stride_table_col, stride_indices, stride_indices_col,
                    L, R, BLOCK_M, BLOCK_N, BLOCK_SIZE, INVARIANT, PIECES, PIECE_BLOCKS, CAUSAL, SPARSE,
                    HAS_COUNTS, FORMAT, BOXES, Q_COPIED, COPIED,
                ),
            ),
            (
                copy_keys,
                (
                    1, COPIERS, q_l, q_r, k_l, k_r, bars,
                    ql_nope, q_pe, cache, latents, ropes, block_table, seq_lens, qo_indptr, indices, counts,
                    line, stretches, num_seqs, num_heads, num_keys,
                    stride_qt, stride_qh, stride_qd, stride_pt, stride_ph, stride_pd,
                    stride_page, stride_token,
                    stride_table, stride_table_col, stride_indices, stride_indices_col,
                    L, R, BLOCK_M, BLOCK_N, BLOCK_SIZE, INVARIANT, PIECES, PIECE_BLOCKS, CAUSAL, SPARSE,
                    HAS_COUNTS, FORMAT, BOXES, Q_COPIED, COPIED,
                ),
            ),
        ][: 2 + COPIERS],
        [4, 4, 4] if COPIERS == 2 else [4, 4],
        [COMPUTE_REGS, CONVERT_REGS, CONVERT_REGS] if COPIERS == 2 else [COMPUTE_REGS, COPY_REGS],
    )  # fmt: skip
    # Last: before the others it would hold up their first copies.
    if not SPARSE:
        write_free_rows(
            qo_indptr, out, lse, num_tokens, num_seqs, num_heads,
            stride_ot, stride_oh, stride_od, stride_lt, stride_lh, L, HAS_LSE,
        )  # fmt: skip


@gluon.jit
def _attend(
    SIDE: gl.constexpr, COPIERS: gl.constexpr, q_l, q_r, k_l, k_r, weights, tops, totals, bars, q_scale,
    k_scale, seq_lens, qo_indptr, indices, counts, sinks, out, lse, part_out, part_lse,
    line, stretches, sm_scale_log2e, num_seqs, num_heads, num_keys,
    stride_indices, stride_indices_col, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
    L: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    INVARIANT: gl.constexpr, PIECES: gl.constexpr, PIECE_BLOCKS: gl.constexpr,
    CAUSAL: gl.constexpr, SPARSE: gl.constexpr,
    HAS_COUNTS: gl.constexpr, HAS_SCALE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: blocks SIDE, SIDE + 2, ... of each item, and columns of half SIDE."""
    HALF: gl.constexpr = L // 2
    OTHER: gl.constexpr = 1 - SIDE
    scores_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    # The registers of 512 threads are 128 each at first: too few for products of 256 columns, says ptxas.
    acc_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // COPIERS, 16])
    rows_at: gl.constexpr = gl.SliceLayout(1, scores_at)
    out_rows_at: gl.constexpr = gl.SliceLayout(1, acc_at)

    program = gl.program_id(0)
    first_item = gl.load(stretches + 3 * program)
    end_item = gl.load(stretches + 3 * program + 1)
    start = gl.load(stretches + 3 * program + 2)
    end = gl.load(stretches + 3 * program + 5)
    key_scale = gl.load(k_scale) if HAS_SCALE else 1.0
    score_scale = sm_scale_log2e * key_scale
    if q_scale is not None:
        score_scale = score_scale * gl.load(q_scale)
    used_0 = 0
    used_1 = 0
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
            total = gl.zeros([BLOCK_M], gl.float32, rows_at)
            acc = gl.zeros([BLOCK_M, HALF], gl.float32, acc_at)
            mbarrier.wait(bars.index(QUERIES), done & 1)
            fence_async_shared()
            if SIDE == 0 and blocks > 0:
                top, total, acc = _turn(
                    q_l, q_r, k_l, k_r, weights, tops, bars, table, stride_indices_col, 0, used_0, used_1,
                    start_key, end_key, visible, score_scale, top, total, acc,
                    SIDE, False, L, R, BLOCK_M, BLOCK_N, SPARSE, scores_at, acc_at,
                )  # fmt: skip
            for block in range(2 - SIDE, blocks, 2):
                top, total, acc = _turn(
                    q_l, q_r, k_l, k_r, weights, tops, bars, table, stride_indices_col, block, used_0, used_1,
                    start_key, end_key, visible, score_scale, top, total, acc,
                    SIDE, True, L, R, BLOCK_M, BLOCK_N, SPARSE, scores_at, acc_at,
                )  # fmt: skip
            if blocks > 0 and (blocks - 1) % 2 == OTHER:
                # The last block was the other's.
                used = (used_1 if SIDE == 0 else used_0) + (blocks - 1) // 2
                top, total, acc = _help(
                    k_l, weights, tops, bars, used, top, total, acc, SIDE, L, rows_at, out_rows_at
                )
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(bars.index(FREE + 2 - SIDE))
            used_0 += (blocks + 1) // 2
            used_1 += blocks // 2
            mbarrier.arrive(bars.index(QUERIES_READ))

            totals.index(2 * (done & 1) + SIDE).store(total)
            mbarrier.arrive(bars.index(TOTALS + SIDE))
            mbarrier.wait(bars.index(TOTALS + OTHER), done & 1)
            total = gl.convert_layout(total + totals.index(2 * (done & 1) + OTHER).load(rows_at), out_rows_at)
            done += 1
            top_rows = gl.convert_layout(top, out_rows_at)
            empty = total == 0.0
            row_lse = gl.where(empty, float("-inf"), (top_rows + gl.log2(total)) * LN_2)
            share = gl.where(empty, 0.0, key_scale / gl.where(empty, 1.0, total))
            rows = first_row + gl.arange(0, BLOCK_M, out_rows_at)
            cols = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(0, acc_at))
            values = gl.where(empty[:, None], 0.0, acc * share[:, None])
            if whole:
                live = rows // num_heads < q_len
                row_tokens = q_start + rows // num_heads
                heads = rows % num_heads
                if HAS_SINKS:
                    # After the division, as `combine` does: bits depend on no other row of the tile.
                    values = (
                        values * sink_share(row_lse, gl.load(sinks + heads, mask=live, other=0.0))[:, None]
                    )
                o_rows = out + row_at(row_tokens, heads, stride_ot, stride_oh)
                gl.store(
                    o_rows[:, None] + cols[None, :] * stride_od,
                    values.to(out.dtype.element_ty),
                    mask=live[:, None],
                )
                if HAS_LSE and SIDE == 0:
                    gl.store(lse + row_at(row_tokens, heads, stride_lt, stride_lh), row_lse, mask=live)
            else:
                piece = slot.to(gl.int64) * BLOCK_M
                in_tile = gl.arange(0, BLOCK_M, out_rows_at)
                gl.store(part_out + piece * L + (in_tile[:, None] * L + cols[None, :]), values)
                if SIDE == 0:
                    gl.store(part_lse + piece + in_tile, row_lse)


@gluon.jit
def _again(index):
    """The same index, worked out anew each time: descriptors made from it are not kept in registers."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [gl.to_tensor(index)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _turn(
    q_l, q_r, k_l, k_r, weights, tops, bars, table, stride_col, block, used_0, used_1,
    start_key, end_key, visible, score_scale, top, total, acc,
    SIDE: gl.constexpr, HELP: gl.constexpr, L: gl.constexpr, R: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPARSE: gl.constexpr,
    scores_at: gl.constexpr, acc_at: gl.constexpr,
):  # fmt: skip
    """A block of one's own, after the other's weights of the block before."""
    OTHER: gl.constexpr = 1 - SIDE
    rows_at: gl.constexpr = gl.SliceLayout(1, scores_at)
    out_rows_at: gl.constexpr = gl.SliceLayout(1, acc_at)
    dtype: gl.constexpr = q_l.dtype
    used = (used_0 if SIDE == 0 else used_1) + block // 2
    own = _again(3 * SIDE)
    if HELP:
        helped = (used_1 if SIDE == 0 else used_0) + (block - 1) // 2
        top, total, acc = _help(
            k_l, weights, tops, bars, helped, top, total, acc, SIDE, L, rows_at, out_rows_at
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(bars.index(FREE + 2 - SIDE))
    scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_at)
    # First the half that its reader lets go first.
    mbarrier.wait(bars.index(FULL + 3 * SIDE), used & 1)
    fence_async_shared()
    scores = warpgroup_mma(
        q_l.index(_again(SIDE)), k_l.index(own).permute((1, 0)), scores, use_acc=False, is_async=True
    )
    keys_now = start_key + block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_at))
    if SPARSE:
        slots = gl.load(table + keys_now * stride_col, mask=keys_now < end_key, other=-1)
        seen = (slots >= 0)[None, :]
    else:
        seen = keys_now[None, :] < visible[:, None]
    mbarrier.wait(bars.index(FULL + 1 + SIDE), used & 1)
    fence_async_shared()
    scores = warpgroup_mma(
        q_l.index(_again(OTHER)), k_l.index(_again(1 + SIDE)).permute((1, 0)), scores, is_async=True
    )
    if R > 0:
        scores = warpgroup_mma(
            q_r.index(_again(0)), k_r.index(_again(SIDE)).permute((1, 0)), scores, is_async=True
        )
    scores = warpgroup_mma_wait(0, deps=[scores])
    scores = gl.where(seen, scores * score_scale, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    # A row that has seen nothing yet would subtract -inf from -inf.
    floor = gl.where(new_top == float("-inf"), 0.0, new_top)
    now = gl.exp2(scores - floor[:, None])
    decay = gl.exp2(top - floor)
    tops.index(SIDE).store(new_top)
    weights.index(SIDE).store(now.to(dtype))
    fence_async_shared()
    mbarrier.arrive(bars.index(READY + SIDE))
    total = total * decay + gl.sum(now, 1)
    acc = acc * gl.convert_layout(decay, out_rows_at)[:, None]
    acc = warpgroup_mma(weights.index(_again(SIDE)), k_l.index(own), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(bars.index(FREE + 3 * SIDE))
    return new_top, total, acc


@gluon.jit
def _help(
    k_l, weights, tops, bars, used, top, total, acc,
    SIDE: gl.constexpr, L: gl.constexpr, rows_at: gl.constexpr, out_rows_at: gl.constexpr,
):  # fmt: skip
    """Start one's half of the columns for a block that the other has the weights of."""
    OTHER: gl.constexpr = 1 - SIDE
    mbarrier.wait(bars.index(READY + OTHER), used & 1)
    new_top = tops.index(OTHER).load(rows_at)
    decay = gl.exp2(top - gl.where(new_top == float("-inf"), 0.0, new_top))
    acc = acc * gl.convert_layout(decay, out_rows_at)[:, None]
    acc = warpgroup_mma(weights.index(_again(OTHER)), k_l.index(_again(2 - SIDE)), acc, is_async=True)
    return new_top, total * decay, acc
