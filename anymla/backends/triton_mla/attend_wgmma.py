"""The attention kernel for tiles of 64 rows where a warpgroup multiplies straight from on-chip memory.

The same line, stretches and workspace as `attend`; what differs is that copies and products are placed by
hand. Two buffers of keys: the copy of the next block starts once the last product of the block before has
read its buffer, and runs while this block's scores, softmax and product do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from anymla.backends.triton_mla import attend, keys

sink_share = gluon.jit(attend.sink_share.fn)
placed_item = gluon.jit(attend.placed_item.fn)

LN_2 = gl.constexpr(0.6931471805599453)
TILED_FN = gl.constexpr(keys.TILED_FN.value)


@gluon.jit
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
    CONVERT: gl.constexpr,
    OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One stretch of the line a program; the grid is the number of stretches."""
    gl.static_assert(num_warps == 8)
    if OVERLAP:
        gdc_launch_dependents()
    scores_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    acc_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, min(L // 2, 256), 16])
    # Eight threads read 128 bytes of a row.
    copies_at: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    rows_at: gl.constexpr = gl.SliceLayout(1, scores_at)
    out_rows_at: gl.constexpr = gl.SliceLayout(1, acc_at)
    q_rows_at: gl.constexpr = gl.SliceLayout(1, copies_at)
    cols_at: gl.constexpr = gl.SliceLayout(0, copies_at)
    keys_at: gl.constexpr = gl.SliceLayout(0, scores_at)
    dtype: gl.constexpr = ql_nope.dtype.element_ty

    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, L], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, max(R, 16)], dtype)
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], dtype)
    q_l = gl.allocate_shared_memory(dtype, [BLOCK_M, L], wide)
    k_l = gl.allocate_shared_memory(dtype, [2, BLOCK_N, L], wide)
    q_r = gl.allocate_shared_memory(dtype, [BLOCK_M, max(R, 16)], narrow)
    k_r = gl.allocate_shared_memory(dtype, [2, BLOCK_N, max(R, 16)], narrow)
    p = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], flat)

    program = gl.program_id(0)
    first_item = gl.load(stretches + 3 * program)
    end_item = gl.load(stretches + 3 * program + 1)
    start = gl.load(stretches + 3 * program + 2)
    end = gl.load(stretches + 3 * program + 5)
    key_scale = gl.load(k_scale) if HAS_SCALE else 1.0
    score_scale = sm_scale_log2e * key_scale

    for item in range(first_item, end_item):
        seq, first_row, q_start, q_len, seq_len, lo, hi, whole, slot = placed_item(
            item, first_item, start, end, program, line, seq_lens, qo_indptr, counts, num_seqs, num_keys,
            BLOCK_M, INVARIANT, PIECES, PIECE_BLOCKS, SPARSE, HAS_COUNTS,
        )  # fmt: skip
        if lo < hi:
            q_rows = first_row + gl.arange(0, BLOCK_M, q_rows_at)
            live = (q_rows // num_heads < q_len)[:, None]
            row_tokens = (q_start + q_rows // num_heads).to(gl.int64)
            cols = gl.arange(0, L, cols_at)[None, :]
            places = (row_tokens * stride_qt + q_rows % num_heads * stride_qh)[:, None] + cols * stride_qd
            q_l.store(gl.load(ql_nope + places, mask=live, other=0.0))
            if R > 0:
                cols = gl.arange(0, R, cols_at)[None, :]
                places = (row_tokens * stride_pt + q_rows % num_heads * stride_ph)[:, None] + cols * stride_pd
                q_r.store(gl.load(q_pe + places, mask=live, other=0.0))

            tokens = (first_row + gl.arange(0, BLOCK_M, rows_at)) // num_heads
            if CAUSAL and not SPARSE:
                visible = gl.maximum(seq_len - q_len + 1 + tokens, 0)
                last_token = gl.minimum((first_row + BLOCK_M - 1) // num_heads, q_len - 1)
                seen_by_any = gl.maximum(seq_len - q_len + 1 + last_token, 0)
            else:
                visible = gl.full([BLOCK_M], 0, gl.int32, rows_at) + seq_len
                seen_by_any = seq_len
            start_key = lo * BLOCK_N
            end_key = gl.minimum(hi * BLOCK_N, seen_by_any)
            visible = gl.minimum(visible, end_key)
            if SPARSE:
                table = indices + seq.to(gl.int64) * stride_indices
                table_stride = stride_indices_col
            else:
                table = block_table + seq.to(gl.int64) * stride_table
                table_stride = stride_table_col

            top = gl.full([BLOCK_M], float("-inf"), gl.float32, rows_at)
            # Columns are summed once, at the end.
            sums = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_at)
            acc = gl.zeros([BLOCK_M, L], gl.float32, acc_at)
            page = _page(table, table_stride, start_key, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, q_rows_at)
            _copy(
                k_l.index(0), k_r.index(0), cache, page, start_key, end_key, stride_page, stride_token,
                L, R, BLOCK_N, BLOCK_SIZE, SPARSE, copies_at,
            )  # fmt: skip
            page = _page(
                table, table_stride, start_key + BLOCK_N, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, q_rows_at
            )
            if SPARSE:
                seen_slot = gl.load(
                    table + (start_key + gl.arange(0, BLOCK_N, keys_at)) * table_stride,
                    mask=start_key + gl.arange(0, BLOCK_N, keys_at) < end_key,
                    other=-1,
                )
            buffer = 0
            for key in range(start_key, end_key, BLOCK_N):
                async_copy.wait_group(0)
                fence_async_shared()
                gl.thread_barrier()
                now_l = k_l.index(buffer)
                scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_at)
                scores = warpgroup_mma(q_l, now_l.permute((1, 0)), scores, use_acc=False, is_async=True)
                if R > 0:
                    scores = warpgroup_mma(q_r, k_r.index(buffer).permute((1, 0)), scores, is_async=True)
                _copy(
                    k_l.index(1 - buffer), k_r.index(1 - buffer), cache, page, key + BLOCK_N, end_key,
                    stride_page, stride_token, L, R, BLOCK_N, BLOCK_SIZE, SPARSE, copies_at,
                )  # fmt: skip
                page = _page(
                    table, table_stride, key + 2 * BLOCK_N, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, q_rows_at
                )
                keys_now = key + gl.arange(0, BLOCK_N, keys_at)
                if SPARSE:
                    seen = (seen_slot >= 0)[None, :]
                    seen_slot = gl.load(
                        table + (keys_now + BLOCK_N) * table_stride, mask=keys_now + BLOCK_N < end_key, other=-1
                    )
                else:
                    seen = keys_now[None, :] < visible[:, None]
                scores = warpgroup_mma_wait(0, deps=[scores])
                scores = gl.where(seen, scores * score_scale, float("-inf"))
                new_top = gl.maximum(top, gl.max(scores, 1))
                # A row that has seen nothing yet would subtract -inf from -inf.
                floor = gl.where(new_top == float("-inf"), 0.0, new_top)
                weights = gl.exp2(scores - floor[:, None])
                decay = gl.exp2(top - floor)
                sums = sums * decay[:, None] + weights
                p.store(weights.to(dtype))
                fence_async_shared()
                gl.thread_barrier()
                acc = acc * gl.convert_layout(decay, out_rows_at)[:, None]
                acc = warpgroup_mma(p, now_l, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                top = new_top
                buffer = 1 - buffer
            async_copy.wait_group(0)

            total = gl.convert_layout(gl.sum(sums, 1), out_rows_at)
            top_rows = gl.convert_layout(top, out_rows_at)
            empty = total == 0.0
            row_lse = gl.where(empty, float("-inf"), (top_rows + gl.log2(total)) * LN_2)
            share = gl.where(empty, 0.0, key_scale / gl.where(empty, 1.0, total))
            rows = first_row + gl.arange(0, BLOCK_M, out_rows_at)
            o_cols = gl.arange(0, L, gl.SliceLayout(0, acc_at))
            if whole:
                heads = rows % num_heads
                live_rows = rows // num_heads < q_len
                out_tokens = (q_start + rows // num_heads).to(gl.int64)
                if HAS_SINKS:
                    share = share * sink_share(row_lse, gl.load(sinks + heads, mask=live_rows, other=0.0))
                values = gl.where(empty[:, None], 0.0, acc * share[:, None])
                o_rows = out + out_tokens * stride_ot + heads * stride_oh
                gl.store(
                    o_rows[:, None] + o_cols[None, :] * stride_od,
                    values.to(out.dtype.element_ty),
                    mask=live_rows[:, None],
                )
                if HAS_LSE:
                    gl.store(lse + out_tokens * stride_lt + heads * stride_lh, row_lse, mask=live_rows)
            else:
                values = gl.where(empty[:, None], 0.0, acc * share[:, None])
                piece = slot.to(gl.int64) * BLOCK_M
                in_tile = gl.arange(0, BLOCK_M, out_rows_at)
                gl.store(part_out + piece * L + (in_tile[:, None] * L + o_cols[None, :]), values)
                gl.store(part_lse + piece + in_tile, row_lse)
            # The next item's queries and first keys overwrite what this one's products read.
            gl.thread_barrier()

    if not SPARSE:
        # Rows that belong to no sequence.
        free = gl.load(qo_indptr + num_seqs)
        for step in range(program, num_tokens - free, gl.num_programs(0)):
            row = (free + step).to(gl.int64)
            for head in range(num_heads):
                o_row = out + row * stride_ot + head * stride_oh
                every = gl.arange(0, L, cols_at)
                gl.store(o_row + every * stride_od, gl.zeros([L], out.dtype.element_ty, cols_at))
                if HAS_LSE:
                    gl.store(lse + row * stride_lt + head * stride_lh, float("-inf"))


@gluon.jit
def _page(
    table, stride, key, end_key,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The page of a block of keys, or of each key; a sparse block's slots."""
    if BLOCK_SIZE % BLOCK_N == 0 and not SPARSE:
        return gl.load(table + (key // BLOCK_SIZE) * stride, mask=key < end_key, other=0)
    else:
        keys_now = key + gl.arange(0, BLOCK_N, LAYOUT)
        if SPARSE:
            return gl.load(table + keys_now * stride, mask=keys_now < end_key, other=-1)
        else:
            return gl.load(table + keys_now // BLOCK_SIZE * stride, mask=keys_now < end_key, other=0)


@gluon.jit
def _copy(
    to_l, to_r, cache, page, key, end_key, stride_page, stride_token,
    L: gl.constexpr, R: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the copy of a block of keys; keys that are not there become zeros and are not read."""
    keys_now = key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    if SPARSE:
        valid = page >= 0
        slots = gl.where(valid, page, 0)
        offsets = (slots // BLOCK_SIZE).to(gl.int64) * stride_page + (slots % BLOCK_SIZE) * stride_token
    else:
        valid = keys_now < end_key
        offsets = page.to(gl.int64) * stride_page + (keys_now % BLOCK_SIZE) * stride_token
    rows = cache + offsets
    cols = gl.arange(0, L, gl.SliceLayout(0, LAYOUT))
    async_copy.async_copy_global_to_shared(to_l, rows[:, None] + cols[None, :], mask=valid[:, None])
    if R > 0:
        cols = L + gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
        async_copy.async_copy_global_to_shared(to_r, rows[:, None] + cols[None, :], mask=valid[:, None])
    async_copy.commit_group()
