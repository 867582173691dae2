"""The warpgroup that brings queries and keys to the two that multiply (`attend_wgmma`).

Keys come as they are stored, in boxes of one page where a block is one, else row by row; or through
registers, where they are converted. Keys that are not there become zeros and are not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from anymla.backends.triton_mla import attend, keys

placed_item = gluon.jit(attend.placed_item.fn)
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

# Barriers. A part is half the columns of one of two blocks, block * 2 + half; a block's RoPE part goes with
# the half that the other warpgroup multiplies.
FULL = gl.constexpr(0)
FREE = gl.constexpr(4)
READY = gl.constexpr(8)
TOTALS = gl.constexpr(10)
QUERIES = gl.constexpr(12)
QUERIES_READ = gl.constexpr(13)
BARRIERS = gl.constexpr(14)
converted = gluon.jit(keys.converted.fn)
FP8_FNUZ_BYTES = gl.constexpr(keys.FP8_FNUZ_BYTES.value)
FNUZ_RATIO = gl.constexpr(keys.FNUZ_RATIO.value)
TILED_FN = gl.constexpr(keys.TILED_FN.value)
TILED_FNUZ_BYTES = gl.constexpr(keys.TILED_FNUZ_BYTES.value)
TILE = gl.constexpr(128)
"""Columns that share a scale in a tiled row."""


@gluon.jit
def copy_keys(
    q_l, q_r, k_l, k_r, bars,
    ql_nope, q_pe, cache, latents, ropes, block_table, seq_lens, qo_indptr, indices, counts,
    line, stretches, num_seqs, num_heads, num_keys,
    stride_qt, stride_qh, stride_qd, stride_pt, stride_ph, stride_pd, stride_page, stride_token,
    stride_table, stride_table_col, stride_indices, stride_indices_col,
    L: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    INVARIANT: gl.constexpr, PIECES: gl.constexpr, PIECE_BLOCKS: gl.constexpr,
    CAUSAL: gl.constexpr, SPARSE: gl.constexpr, HAS_COUNTS: gl.constexpr,
    FORMAT: gl.constexpr, BOXES: gl.constexpr, Q_COPIED: gl.constexpr, COPIED: gl.constexpr,
    CONVERT: gl.constexpr,
):  # fmt: skip
    """The warpgroup that copies queries and keys."""
    HALF: gl.constexpr = L // 2
    # Eight threads read 128 bytes of a row.
    copies_at: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows_at: gl.constexpr = gl.SliceLayout(1, copies_at)
    program = gl.program_id(0)
    first_item = gl.load(stretches + 3 * program)
    end_item = gl.load(stretches + 3 * program + 1)
    start = gl.load(stretches + 3 * program + 2)
    end = gl.load(stretches + 3 * program + 5)
    used_0 = 0
    used_1 = 0
    done = 0
    for item in range(first_item, end_item):
        seq, first_row, q_start, q_len, seq_len, lo, hi, _whole, _slot = placed_item(
            item, first_item, start, end, program, line, seq_lens, qo_indptr, counts, num_seqs, num_keys,
            BLOCK_M, INVARIANT, PIECES, PIECE_BLOCKS, SPARSE, HAS_COUNTS,
        )  # fmt: skip
        if lo < hi:
            start_key, end_key = key_span(
                lo, hi, seq_len, q_len, first_row, num_heads, BLOCK_M, BLOCK_N, CAUSAL, SPARSE
            )
            mbarrier.wait(bars.index(QUERIES_READ), (done & 1) ^ 1)
            rows = first_row + gl.arange(0, BLOCK_M, rows_at)
            live = (rows // num_heads < q_len)[:, None]
            row_tokens = (q_start + rows // num_heads).to(gl.int64)
            q_rows = (ql_nope + row_tokens * stride_qt + rows % num_heads * stride_qh)[:, None]
            for half in gl.static_range(2):
                _bring(q_l.index(half), q_rows, half * HALF, stride_qd, live, HALF, Q_COPIED, copies_at)
            if R > 0:
                q_rows = (q_pe + row_tokens * stride_pt + rows % num_heads * stride_ph)[:, None]
                _bring(q_r.index(0), q_rows, 0, stride_pd, live, R, Q_COPIED, copies_at)
            _announce(bars.index(QUERIES), Q_COPIED)
            done += 1

            if SPARSE:
                table = indices + seq.to(gl.int64) * stride_indices
                table_stride = stride_indices_col
            else:
                table = block_table + seq.to(gl.int64) * stride_table
                table_stride = stride_table_col
            blocks = gl.maximum((end_key - start_key + BLOCK_N - 1) // BLOCK_N, 0)
            page = _page(table, table_stride, start_key, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, rows_at)
            for block in range(blocks):
                key = start_key + block * BLOCK_N
                this_page = page
                page = _page(
                    table, table_stride, key + BLOCK_N, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, rows_at
                )
                side = block & 1
                used = gl.where(side == 0, used_0, used_1) + block // 2
                _fill(
                    k_l, k_r, bars, cache, latents, ropes, this_page, key, end_key, stride_page, stride_token,
                    3 * side, used, False,
                    L, R, FORMAT, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, COPIED, CONVERT, copies_at,
                )  # fmt: skip
                _fill(
                    k_l, k_r, bars, cache, latents, ropes, this_page, key, end_key, stride_page, stride_token,
                    1 + side, used, True,
                    L, R, FORMAT, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, COPIED, CONVERT, copies_at,
                )  # fmt: skip
            used_0 += (blocks + 1) // 2
            used_1 += blocks // 2


@gluon.jit
def _fill(
    k_l, k_r, bars, cache, latents, ropes, page, key, end_key, stride_page, stride_token,
    part, used, ROPE: gl.constexpr, L: gl.constexpr, R: gl.constexpr, FORMAT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr,
    BOXES: gl.constexpr, COPIED: gl.constexpr, CONVERT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the copy of a part once its reader has let go what was there."""
    HALF: gl.constexpr = L // 2
    bar = bars.index(FULL + part)
    first = part % 2 * HALF
    if CONVERT:
        # Eight bytes a thread, so that what is stored after meets no bank twice.
        bytes_at: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
        keys_at: gl.constexpr = gl.SliceLayout(1, bytes_at)
        rows, valid = _rows(
            cache, gl.convert_layout(page, keys_at), key, end_key, stride_page, stride_token,
            BLOCK_N, BLOCK_SIZE, SPARSE, keys_at,
        )  # fmt: skip
        cols = first + gl.arange(0, TILE, gl.SliceLayout(0, bytes_at))[None, :]
        raw = ()
        scales = ()
        for tile in gl.static_range(HALF // TILE):
            raw = raw + (gl.load(rows + (tile * TILE + cols), mask=valid, other=0.0),)
            if FORMAT >= TILED_FN:
                place = (rows + L).to(gl.pointer_type(gl.float32)) + (first // TILE + tile)
                scales = scales + (gl.load(place, mask=valid, other=0.0),)
        if ROPE and R > 0:
            cols_r = gl.arange(0, R, gl.SliceLayout(0, bytes_at))[None, :]
            if FORMAT >= TILED_FN:
                ropes_of = (rows + (L + 4 * (L // TILE))).to(gl.pointer_type(gl.bfloat16))
                rope = gl.load(ropes_of + cols_r, mask=valid, other=0.0)
            else:
                rope = gl.load(rows + (L + cols_r), mask=valid, other=0.0)
        mbarrier.wait(bars.index(FREE + part), (used & 1) ^ 1)
        to = k_l.index(part)
        dtype: gl.constexpr = k_l.dtype
        for tile in gl.static_range(HALF // TILE):
            if FORMAT == TILED_FN:
                values = raw[tile].to(gl.float8e4nv, bitcast=True).to(gl.float32) * scales[tile]
            elif FORMAT == TILED_FNUZ_BYTES:
                values = converted(raw[tile], gl.float32, FP8_FNUZ_BYTES) * (FNUZ_RATIO * scales[tile])
            else:
                values = converted(raw[tile], dtype, FORMAT)
            to.slice(tile * TILE, TILE, 1).store(values.to(dtype))
        if ROPE and R > 0:
            rope = rope.to(dtype) if FORMAT >= TILED_FN else converted(rope, dtype, FORMAT)
            k_r.index(part // 2).store(rope)
        _announce(bar, False)
    else:
        _fill_as_stored(
            k_l, k_r, bars, cache, latents, ropes, page, key, end_key, stride_page, stride_token,
            part, used, first, ROPE, L, R, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, COPIED, LAYOUT,
        )  # fmt: skip


@gluon.jit
def _fill_as_stored(
    k_l, k_r, bars, cache, latents, ropes, page, key, end_key, stride_page, stride_token,
    part, used, first, ROPE: gl.constexpr, L: gl.constexpr, R: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr,
    BOXES: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A part whose elements are multiplied as they are stored."""
    HALF: gl.constexpr = L // 2
    bar = bars.index(FULL + part)
    mbarrier.wait(bars.index(FREE + part), (used & 1) ^ 1)
    if BOXES and key + BLOCK_N <= end_key:
        row = page * BLOCK_SIZE + key % BLOCK_SIZE
        mbarrier.expect(bar, BLOCK_N * (HALF + (R if ROPE else 0)) * 2)
        load_box(latents, [row, first], bar, k_l.index(part))
        if ROPE and R > 0:
            load_box(ropes, [row, L], bar, k_r.index(part // 2))
    else:
        rows, valid = _rows(
            cache, page, key, end_key, stride_page, stride_token,
            BLOCK_N, BLOCK_SIZE, SPARSE, gl.SliceLayout(1, LAYOUT),
        )  # fmt: skip
        _bring(k_l.index(part), rows, first, 1, valid, HALF, COPIED, LAYOUT)
        if ROPE and R > 0:
            _bring(k_r.index(part // 2), rows, L, 1, valid, R, COPIED, LAYOUT)
        _announce(bar, COPIED)


@gluon.jit
def _bring(
    to, rows, first, stride, valid,
    WIDTH: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Columns of some rows; those of rows that are not there become zeros, not read."""
    cols_at: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    if COPIED:
        cols = first + gl.arange(0, WIDTH, cols_at)
        async_copy.async_copy_global_to_shared(to, rows + cols[None, :], mask=valid)
    else:
        # Views whose rows lie anyhow pass through registers, a few columns at a time.
        STEP: gl.constexpr = min(WIDTH, 32)
        for at in gl.static_range(0, WIDTH, STEP):
            cols = first + at + gl.arange(0, STEP, cols_at)
            values = gl.load(rows + cols[None, :] * stride, mask=valid, other=0.0)
            to.slice(at, STEP, 1).store(values.to(to.dtype))


@gluon.jit
def _announce(bar, COPIED: gl.constexpr):
    """Let the readers go on, once all that was brought is there."""
    if COPIED:
        # Every copying thread adds itself to those that the barrier waits for.
        async_copy.mbarrier_arrive(bar, increment_count=True)
    else:
        fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _page(
    table, stride, key, end_key,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr, BOXES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The page of a block of keys, or of each key; a sparse block's slots."""
    if BOXES:
        return gl.load(table + (key // BLOCK_SIZE) * stride, mask=key < end_key, other=0)
    else:
        keys_now = key + gl.arange(0, BLOCK_N, LAYOUT)
        if SPARSE:
            return gl.load(table + keys_now * stride, mask=keys_now < end_key, other=-1)
        else:
            return gl.load(table + keys_now // BLOCK_SIZE * stride, mask=keys_now < end_key, other=0)


@gluon.jit
def _rows(
    cache, page, key, end_key, stride_page, stride_token,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the rows of a block of keys begin, and which there are: the others become zeros, not read."""
    if SPARSE:
        valid = page >= 0
        slots = gl.where(valid, page, 0)
        offsets = (slots // BLOCK_SIZE).to(gl.int64) * stride_page + (slots % BLOCK_SIZE) * stride_token
    else:
        keys_now = key + gl.arange(0, BLOCK_N, LAYOUT)
        valid = keys_now < end_key
        offsets = page.to(gl.int64) * stride_page + (keys_now % BLOCK_SIZE) * stride_token
    return (cache + offsets)[:, None], valid[:, None]


@gluon.jit
def key_span(
    lo, hi, seq_len, q_len, first_row, num_heads, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """The keys of an item, from and to, as far as any of its rows sees."""
    seen_by_any = seq_len
    if CAUSAL and not SPARSE:
        last_token = gl.minimum((first_row + BLOCK_M - 1) // num_heads, q_len - 1)
        seen_by_any = gl.maximum(seq_len - q_len + 1 + last_token, 0)
    return lo * BLOCK_N, gl.minimum(hi * BLOCK_N, seen_by_any)
