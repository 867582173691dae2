"""The warpgroup that brings queries and keys to the two that multiply (`attend_wgmma`).

Keys come as they are stored, in boxes of one page where a block is one, else row by row; or through
registers, where they are converted. Keys that are not there become zeros and are not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from anymla.backends.triton_mla import keys
from anymla.backends.triton_mla.warpgroup_parts import (
    announce,
    bring,
    key_span,
    load_box,
    page_of,
    placed_item,
    rows_of,
)

# Barriers. A part is half the columns of one of two blocks, block * 2 + half; a block's RoPE part goes with
# the half that the other warpgroup multiplies.
FULL = gl.constexpr(0)
FREE = gl.constexpr(4)
READY = gl.constexpr(8)
TOTALS = gl.constexpr(10)
QUERIES = gl.constexpr(12)
QUERIES_READ = gl.constexpr(13)
BARRIERS = gl.constexpr(14)
TILED_FN = gl.constexpr(keys.TILED_FN.value)
TILE = gl.constexpr(128)
"""Columns that share a scale in a tiled row."""
PIECE = gl.constexpr(64)
"""Columns that are converted at a time."""


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
                bring(q_l.index(half), q_rows, half * HALF, stride_qd, live, HALF, Q_COPIED, copies_at)
            if R > 0:
                q_rows = (q_pe + row_tokens * stride_pt + rows % num_heads * stride_ph)[:, None]
                bring(q_r.index(0), q_rows, 0, stride_pd, live, R, Q_COPIED, copies_at)
            announce(bars.index(QUERIES), Q_COPIED)
            done += 1

            if SPARSE:
                table = indices + seq.to(gl.int64) * stride_indices
                table_stride = stride_indices_col
            else:
                table = block_table + seq.to(gl.int64) * stride_table
                table_stride = stride_table_col
            blocks = gl.maximum((end_key - start_key + BLOCK_N - 1) // BLOCK_N, 0)
            if cache.dtype.element_ty.primitive_bitwidth == 8:
                _convert_keys(
                    k_l, k_r, bars, cache, table, table_stride, start_key, end_key, blocks, used_0, used_1,
                    stride_page, stride_token, L, R, FORMAT, BLOCK_N, BLOCK_SIZE, SPARSE,
                )  # fmt: skip
            else:
                _copy_keys(
                    k_l, k_r, bars, cache, latents, ropes, table, table_stride, start_key, end_key, blocks,
                    used_0, used_1, stride_page, stride_token,
                    L, R, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, COPIED, copies_at,
                )  # fmt: skip
            used_0 += (blocks + 1) // 2
            used_1 += blocks // 2


@gluon.jit
def _convert_keys(
    k_l, k_r, bars, cache, table, table_stride, start_key, end_key, blocks, used_0, used_1,
    stride_page, stride_token, L: gl.constexpr, R: gl.constexpr, FORMAT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """The keys of an item that are bytes, converted on their way through registers, half a block behind."""
    # Four bytes a word; eight threads that store together have two rows, and so meet no bank twice.
    words_at: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    keys_at: gl.constexpr = gl.SliceLayout(1, words_at)
    ropes_at: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    AS_STORED: gl.constexpr = R > 0 and FORMAT == TILED_FN and k_r.dtype == gl.bfloat16
    page = page_of(table, table_stride, start_key, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, False, keys_at)
    rows, valid = rows_of(
        cache, page, start_key, end_key, stride_page, stride_token, BLOCK_N, BLOCK_SIZE, SPARSE, keys_at
    )
    words = ()
    scales = ()
    for piece in gl.static_range(L // 2 // PIECE):
        loaded, scale = _load_piece(rows, valid, 0, piece, L, FORMAT, words_at)
        words = words + (loaded,)
        scales = scales + (scale,)
    for block in range(blocks):
        side = block & 1
        phase = ((gl.where(side == 0, used_0, used_1) + block // 2) & 1) ^ 1
        key = start_key + (block + 1) * BLOCK_N
        page = page_of(table, table_stride, key, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, False, keys_at)
        mbarrier.wait(bars.index(FREE + 3 * side), phase)
        words, scales = _store_half(
            k_l.index(3 * side), words, scales, rows, valid, 1 - side, L, FORMAT, BLOCK_N, words_at
        )
        announce(bars.index(FULL + 3 * side), False)
        next_rows, next_valid = rows_of(
            cache, page, key, end_key, stride_page, stride_token, BLOCK_N, BLOCK_SIZE, SPARSE, keys_at
        )
        if R > 0 and not AS_STORED:
            rope = _load_rope(rows, valid, L, R, FORMAT, words_at)
        mbarrier.wait(bars.index(FREE + 1 + side), phase)
        if AS_STORED:
            ropes = (rows + (L + 4 * (L // TILE))).to(gl.pointer_type(k_r.dtype))
            ropes = gl.convert_layout(ropes, ropes_at, assert_trivial=True)
            there = gl.convert_layout(valid, ropes_at, assert_trivial=True)
            bring(k_r.index(side), ropes, 0, 1, there, R, True, ropes_at)
        elif R > 0 and FORMAT == TILED_FN:
            k_r.index(side).store(rope.to(k_r.dtype))
        elif R > 0:
            _store_words(k_r.index(side), rope, 1.0, BLOCK_N, R)
        words, scales = _store_half(
            k_l.index(1 + side), words, scales, next_rows, next_valid, 1 - side, L, FORMAT, BLOCK_N, words_at
        )
        fence_async_shared()
        announce(bars.index(FULL + 1 + side), AS_STORED)
        rows = next_rows
        valid = next_valid


@gluon.jit
def _store_half(
    to, words, scales, next_rows, next_valid, next_half,
    L: gl.constexpr, FORMAT: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Words of half a latent to where they are multiplied; those of the next half take their registers."""
    next_words = ()
    next_scales = ()
    for piece in gl.static_range(L // 2 // PIECE):
        loaded, scale = _load_piece(next_rows, next_valid, next_half, piece, L, FORMAT, LAYOUT)
        next_words = next_words + (loaded,)
        next_scales = next_scales + (scale,)
        _store_words(to.slice(piece * PIECE, PIECE, 1), words[piece], scales[piece], BLOCK_N, PIECE)
    return next_words, next_scales


@gluon.jit
def _load_piece(
    rows, valid, half, piece: gl.constexpr, L: gl.constexpr, FORMAT: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Words of a piece of half a latent, and the scale of the tile that it is of."""
    number = half * (L // 2 // PIECE) + piece
    cols = number * (PIECE // 4) + gl.arange(0, PIECE // 4, gl.SliceLayout(0, LAYOUT))
    words = gl.load(rows.to(gl.pointer_type(gl.int32)) + cols[None, :], mask=valid, other=0)
    scale = 1.0
    if FORMAT == TILED_FN:
        place = rows.to(gl.pointer_type(gl.float32)) + (L // 4 + number // (TILE // PIECE))
        scale = gl.load(place, mask=valid, other=0.0)
    return words, scale


@gluon.jit
def _load_rope(rows, valid, L: gl.constexpr, R: gl.constexpr, FORMAT: gl.constexpr, LAYOUT: gl.constexpr):
    """The RoPE part: words of bytes, or bf16."""
    if FORMAT == TILED_FN:
        cols = L // 2 + 2 * (L // TILE) + gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
        return gl.load(rows.to(gl.pointer_type(gl.bfloat16)) + cols[None, :], mask=valid, other=0.0)
    else:
        cols = L // 4 + gl.arange(0, R // 4, gl.SliceLayout(0, LAYOUT))
        return gl.load(rows.to(gl.pointer_type(gl.int32)) + cols[None, :], mask=valid, other=0)


@gluon.jit
def _store_words(to, words, scale, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """Four bytes a word into as many columns."""
    if to.dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b, x, y; .reg .b32 h; .reg .f32 f, g; mov.b32 {a, b}, $2;"
            " cvt.rn.f16x2.e4m3x2 h, a; mov.b32 {x, y}, h; cvt.f32.f16 f, x; cvt.f32.f16 g, y;"
            " mul.f32 f, f, $3; mul.f32 g, g, $3; cvt.rn.bf16x2.f32 $0, g, f;"
            " cvt.rn.f16x2.e4m3x2 h, b; mov.b32 {x, y}, h; cvt.f32.f16 f, x; cvt.f32.f16 g, y;"
            " mul.f32 f, f, $3; mul.f32 g, g, $3; cvt.rn.bf16x2.f32 $1, g, f; }",
            "=r,=r,r,f", [words, scale], dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b, x, y; .reg .b32 h; .reg .f32 f, g; mov.b32 {a, b}, $2;"
            " cvt.rn.f16x2.e4m3x2 h, a; mov.b32 {x, y}, h; cvt.f32.f16 f, x; cvt.f32.f16 g, y;"
            " mul.f32 f, f, $3; mul.f32 g, g, $3; cvt.rn.f16x2.f32 $0, g, f;"
            " cvt.rn.f16x2.e4m3x2 h, b; mov.b32 {x, y}, h; cvt.f32.f16 f, x; cvt.f32.f16 g, y;"
            " mul.f32 f, f, $3; mul.f32 g, g, $3; cvt.rn.f16x2.f32 $1, g, f; }",
            "=r,=r,r,f", [words, scale], dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    pairs_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH // 2], gl.int32)
    to._reinterpret(gl.int32, [BLOCK_N, WIDTH // 2], pairs_at).store(
        gl.join(low, high).reshape([BLOCK_N, WIDTH // 2])
    )


@gluon.jit
def _copy_keys(
    k_l, k_r, bars, cache, latents, ropes, table, table_stride, start_key, end_key, blocks,
    used_0, used_1, stride_page, stride_token,
    L: gl.constexpr, R: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr,
    BOXES: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The keys of an item that are multiplied as they are stored."""
    keys_at: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    page = page_of(table, table_stride, start_key, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, keys_at)
    for block in range(blocks):
        key = start_key + block * BLOCK_N
        this_page = page
        page = page_of(
            table, table_stride, key + BLOCK_N, end_key, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, keys_at
        )
        side = block & 1
        used = gl.where(side == 0, used_0, used_1) + block // 2
        _fill(
            k_l, k_r, bars, cache, latents, ropes, this_page, key, end_key, stride_page, stride_token,
            3 * side, used, False, L, R, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, COPIED, LAYOUT,
        )  # fmt: skip
        _fill(
            k_l, k_r, bars, cache, latents, ropes, this_page, key, end_key, stride_page, stride_token,
            1 + side, used, True, L, R, BLOCK_N, BLOCK_SIZE, SPARSE, BOXES, COPIED, LAYOUT,
        )  # fmt: skip


@gluon.jit
def _fill(
    k_l, k_r, bars, cache, latents, ropes, page, key, end_key, stride_page, stride_token,
    part, used, ROPE: gl.constexpr, L: gl.constexpr, R: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr,
    BOXES: gl.constexpr, COPIED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the copy of a part once its reader has let go what was there."""
    HALF: gl.constexpr = L // 2
    first = part % 2 * HALF
    bar = bars.index(FULL + part)
    mbarrier.wait(bars.index(FREE + part), (used & 1) ^ 1)
    if BOXES and key + BLOCK_N <= end_key:
        row = page * BLOCK_SIZE + key % BLOCK_SIZE
        mbarrier.expect(bar, BLOCK_N * (HALF + (R if ROPE else 0)) * 2)
        load_box(latents, [row, first], bar, k_l.index(part))
        if ROPE and R > 0:
            load_box(ropes, [row, L], bar, k_r.index(part // 2))
    else:
        rows, valid = rows_of(
            cache, page, key, end_key, stride_page, stride_token,
            BLOCK_N, BLOCK_SIZE, SPARSE, gl.SliceLayout(1, LAYOUT),
        )  # fmt: skip
        bring(k_l.index(part), rows, first, 1, valid, HALF, COPIED, LAYOUT)
        if ROPE and R > 0:
            bring(k_r.index(part // 2), rows, L, 1, valid, R, COPIED, LAYOUT)
        announce(bar, COPIED)
