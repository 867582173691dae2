"""The attention kernel for tiles of 16 or 32 rows over pages of whole blocks, with products transposed.

The same line, stretches and workspace as `attend`. A warpgroup multiplies 64 rows at a time, so keys and then
columns of the latent are rows of a product, and the tile's rows are its columns. What can be multiplied
from on-chip memory never passes through registers. Two blocks of keys have room, and one is asked for as soon
as that two before it has been multiplied; queries are asked for first, for all wait for them.
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
    announce,
    bring,
    key_span,
    load_box,
    placed_item,
    row_at,
    rows_of,
    sink_share,
    write_free_rows,
)

# Barriers: of each block that has room, then of the queries.
QUERIES = gl.constexpr(2)


@gluon.jit(do_not_specialize=attend.OF_A_BATCH)
def attend_swapped_kernel(
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
    gl.static_assert(gl.num_warps() == 4 and not SPARSE and not HAS_SCALE)
    if OVERLAP:
        gdc_launch_dependents()
    program = gl.program_id(0)
    first_item = gl.load(stretches + 3 * program)
    end_item = gl.load(stretches + 3 * program + 1)
    start = gl.load(stretches + 3 * program + 2)
    end = gl.load(stretches + 3 * program + 5)
    HALF: gl.constexpr = L // 2
    R_ROOM: gl.constexpr = max(R, 16)
    dtype: gl.constexpr = ql_nope.dtype.element_ty
    q_l = gl.allocate_shared_memory(
        dtype, [2, BLOCK_M, HALF], gl.NVMMASharedLayout.get_default_for([BLOCK_M, HALF], dtype)
    )
    q_r = gl.allocate_shared_memory(
        dtype, [1, BLOCK_M, R_ROOM], gl.NVMMASharedLayout.get_default_for([BLOCK_M, R_ROOM], dtype)
    )
    k_l = gl.allocate_shared_memory(
        dtype, [4, BLOCK_N, HALF], gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    )
    k_r = gl.allocate_shared_memory(
        dtype, [2, BLOCK_N, R_ROOM], gl.NVMMASharedLayout.get_default_for([BLOCK_N, R_ROOM], dtype)
    )
    weights = gl.allocate_shared_memory(
        dtype, [BLOCK_N, BLOCK_M], gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    )
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()

    # Scores are [keys, rows], sums [columns, rows].
    sums_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    rows_at: gl.constexpr = gl.SliceLayout(0, sums_at)
    down_at: gl.constexpr = gl.SliceLayout(1, sums_at)
    copies_at: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
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
            table = block_table + seq.to(gl.int64) * stride_table
            page = gl.load(table + start_key // BLOCK_SIZE * stride_table_col, mask=blocks > 0, other=0)
            next_page = gl.load(
                table + (start_key + BLOCK_N) // BLOCK_SIZE * stride_table_col, mask=blocks > 1, other=0
            )
            copied_rows = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, copies_at))
            copied = (copied_rows // num_heads < q_len)[:, None]
            copied_tokens = q_start + copied_rows // num_heads
            copied_heads = copied_rows % num_heads
            q_rows = (ql_nope + row_at(copied_tokens, copied_heads, stride_qt, stride_qh))[:, None]
            for half in gl.static_range(2):
                bring(q_l.index(half), q_rows, half * HALF, stride_qd, copied, HALF, Q_COPIED, copies_at)
            if R > 0:
                q_rows = (q_pe + row_at(copied_tokens, copied_heads, stride_pt, stride_ph))[:, None]
                bring(q_r.index(0), q_rows, 0, stride_pd, copied, R, Q_COPIED, copies_at)
            announce(bars.index(QUERIES), Q_COPIED)
            for block in range(gl.minimum(blocks, 2)):
                _fill(
                    k_l, k_r, bars, cache, latents, ropes, page, start_key + block * BLOCK_N, end_key,
                    stride_page, stride_token, (used + block) & 1,
                    L, R, BLOCK_N, BLOCK_SIZE, BOXES, COPIED, copies_at,
                )  # fmt: skip
                page = next_page
            rows = first_row + gl.arange(0, BLOCK_M, rows_at)
            tokens = rows // num_heads
            if CAUSAL:
                visible = gl.minimum(gl.maximum(seq_len - q_len + 1 + tokens, 0), end_key)
            else:
                visible = gl.full([BLOCK_M], 0, gl.int32, rows_at) + end_key
            top = gl.full([BLOCK_M], float("-inf"), gl.float32, rows_at)
            # Each thread's own keys, summed up at the end.
            total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, sums_at)
            acc_0 = gl.zeros([HALF, BLOCK_M], gl.float32, sums_at)
            acc_1 = gl.zeros([HALF, BLOCK_M], gl.float32, sums_at)
            mbarrier.wait(bars.index(QUERIES), done & 1)
            done += 1
            for block in range(blocks):
                key = start_key + block * BLOCK_N
                after = key + 2 * BLOCK_N
                page = gl.load(table + after // BLOCK_SIZE * stride_table_col, mask=after < end_key, other=0)
                room = (used + block) & 1
                mbarrier.wait(bars.index(room), ((used + block) >> 1) & 1)
                fence_async_shared()
                scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, sums_at)
                scores = warpgroup_mma(
                    k_l.index(2 * room), q_l.index(0).permute((1, 0)), scores, use_acc=False, is_async=True
                )
                scores = warpgroup_mma(
                    k_l.index(2 * room + 1), q_l.index(1).permute((1, 0)), scores, is_async=True
                )
                if R > 0:
                    scores = warpgroup_mma(
                        k_r.index(room), q_r.index(0).permute((1, 0)), scores, is_async=True
                    )
                scores = warpgroup_mma_wait(0, deps=[scores])
                seen = (key + gl.arange(0, BLOCK_N, down_at))[:, None] < visible[None, :]
                scores = gl.where(seen, scores * sm_scale_log2e, float("-inf"))
                new_top = gl.maximum(top, gl.max(scores, 0))
                # A row that has seen nothing yet would subtract -inf from -inf.
                floor = gl.where(new_top == float("-inf"), 0.0, new_top)
                now = gl.exp2(scores - floor[None, :])
                decay = gl.exp2(top - floor)[None, :]
                weights.store(now.to(dtype))
                fence_async_shared()
                gl.thread_barrier()
                total = total * decay + now
                top = new_top
                acc_0 = warpgroup_mma(
                    k_l.index(2 * room).permute((1, 0)), weights, acc_0 * decay, is_async=True
                )
                acc_1 = warpgroup_mma(
                    k_l.index(2 * room + 1).permute((1, 0)), weights, acc_1 * decay, is_async=True
                )
                acc_0, acc_1 = warpgroup_mma_wait(0, deps=[acc_0, acc_1])
                # Every warp has read it.
                gl.thread_barrier()
                if after < end_key:
                    _fill(
                        k_l, k_r, bars, cache, latents, ropes, page, after, end_key,
                        stride_page, stride_token, room,
                        L, R, BLOCK_N, BLOCK_SIZE, BOXES, COPIED, copies_at,
                    )  # fmt: skip
            used += blocks

            total_rows = gl.sum(total, 0)
            empty = total_rows == 0.0
            row_lse = gl.where(empty, float("-inf"), (top + gl.log2(total_rows)) * LN_2)
            share = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total_rows))
            live = tokens < q_len
            heads = rows % num_heads
            row_tokens = q_start + tokens
            left = gl.full([BLOCK_M], 1.0, gl.float32, rows_at)
            if HAS_SINKS:
                left = sink_share(row_lse, gl.load(sinks + heads, mask=live & whole, other=float("-inf")))
            piece = slot.to(gl.int64) * BLOCK_M
            in_tile = gl.arange(0, BLOCK_M, rows_at)
            element: gl.constexpr = out.dtype.element_ty
            for half in gl.static_range(2):
                acc = acc_0 if half == 0 else acc_1
                values = gl.where(empty[None, :], 0.0, acc * share[None, :] * left[None, :])
                cols = half * HALF + gl.arange(0, HALF, down_at)[:, None]
                if whole:
                    spots = row_at(row_tokens, heads, stride_ot, stride_oh)[None, :] + cols * stride_od
                    gl.store(out + spots, values.to(element), mask=live[None, :])
                else:
                    gl.store(part_out + piece * L + (in_tile[None, :] * L + cols), values)
            if whole:
                if HAS_LSE:
                    gl.store(lse + row_at(row_tokens, heads, stride_lt, stride_lh), row_lse, mask=live)
            else:
                gl.store(part_lse + piece + in_tile, row_lse)

    write_free_rows(
        qo_indptr, out, lse, num_tokens, num_seqs, num_heads,
        stride_ot, stride_oh, stride_od, stride_lt, stride_lh, L, HAS_LSE,
    )  # fmt: skip


@gluon.jit
def _fill(
    k_l, k_r, bars, cache, latents, ropes, page, key, end_key, stride_page, stride_token, room,
    L: gl.constexpr, R: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BOXES: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the copy of a block of keys; of a page's slots past the last key nothing is read."""
    HALF: gl.constexpr = L // 2
    bar = bars.index(room)
    if BOXES and key + BLOCK_N <= end_key:
        row = page * BLOCK_SIZE + key % BLOCK_SIZE
        mbarrier.expect(bar, BLOCK_N * (L + R) * 2)
        load_box(latents, [row, 0], bar, k_l.index(2 * room))
        load_box(latents, [row, HALF], bar, k_l.index(2 * room + 1))
        if R > 0:
            load_box(ropes, [row, L], bar, k_r.index(room))
    else:
        rows, valid = rows_of(
            cache, page, key, end_key, stride_page, stride_token,
            BLOCK_N, BLOCK_SIZE, False, gl.SliceLayout(1, LAYOUT),
        )  # fmt: skip
        for half in gl.static_range(2):
            bring(k_l.index(2 * room + half), rows, half * HALF, 1, valid, HALF, COPIED, LAYOUT)
        if R > 0:
            bring(k_r.index(room), rows, L, 1, valid, R, COPIED, LAYOUT)
        announce(bar, COPIED)
