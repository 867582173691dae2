"""The warpgroups that bring queries and keys to the two that multiply (`attend_wgmma`).

One brings keys as they are stored, in boxes of one page where a block is one, else row by row; two bring
bytes, half of the rows each, through registers, where they are converted. Keys that are not there become
zeros and are not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from anymla.backends.triton_mla import keys
from anymla.backends.triton_mla.warpgroup_parts import (
    announce,
    bring,
    key_span,
    load_box,
    page_of,
    placed_item,
    row_at,
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


def _from_bytes(pair: str, scaled: bool) -> gl.constexpr:
    """The four bytes of a word as two pairs of bf16 or fp16, times a scale if there is one."""
    by_scale = " mul.f32 f, f, $3; mul.f32 g, g, $3;" if scaled else ""
    return gl.constexpr(
        "{ .reg .b16 a, b, x, y; .reg .b32 h; .reg .f32 f, g; mov.b32 {a, b}, $2;"
        + "".join(
            f" cvt.rn.f16x2.e4m3x2 h, {two}; mov.b32 {{x, y}}, h; cvt.f32.f16 f, x; cvt.f32.f16 g, y;"
            f"{by_scale} cvt.rn.{pair}.f32 {to}, g, f;"
            for two, to in (("a", "$0"), ("b", "$1"))
        )
        + " }"
    )


BF16 = _from_bytes("bf16x2", scaled=False)
BF16_SCALED = _from_bytes("bf16x2", scaled=True)
FP16 = gl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
FP16_SCALED = _from_bytes("f16x2", scaled=True)


@gluon.jit
def copy_keys(
    COPIER: gl.constexpr, COPIERS: gl.constexpr, q_l, q_r, k_l, k_r, bars,
    ql_nope, q_pe, cache, latents, ropes, block_table, seq_lens, qo_indptr, indices, counts,
    line, stretches, num_seqs, num_heads, num_keys,
    stride_qt, stride_qh, stride_qd, stride_pt, stride_ph, stride_pd, stride_page, stride_token,
    stride_table, stride_table_col, stride_indices, stride_indices_col,
    L: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    INVARIANT: gl.constexpr, PIECES: gl.constexpr, PIECE_BLOCKS: gl.constexpr,
    CAUSAL: gl.constexpr, SPARSE: gl.constexpr, HAS_COUNTS: gl.constexpr,
    FORMAT: gl.constexpr, BOXES: gl.constexpr, Q_COPIED: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its share of the queries' columns and of the rows of keys."""
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
            row_tokens = q_start + rows // num_heads
            q_rows = (ql_nope + row_at(row_tokens, rows % num_heads, stride_qt, stride_qh))[:, None]
            for half in gl.static_range(COPIER, 2, COPIERS):
                bring(q_l.index(half), q_rows, half * HALF, stride_qd, live, HALF, Q_COPIED, copies_at)
            if R > 0 and COPIER == 0:
                q_rows = (q_pe + row_at(row_tokens, rows % num_heads, stride_pt, stride_ph))[:, None]
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
                    stride_page, stride_token, COPIER * (BLOCK_N // COPIERS), BLOCK_N // COPIERS,
                    L, R, FORMAT, BLOCK_N, BLOCK_SIZE, SPARSE,
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
    stride_page, stride_token, FIRST: gl.constexpr, ROWS: gl.constexpr,
    L: gl.constexpr, R: gl.constexpr, FORMAT: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """Some rows of each block of bytes, converted on their way through registers, half a block behind."""
    # Four bytes a word; eight threads that store together have two rows, and so meet no bank twice.
    words_at: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    keys_at: gl.constexpr = gl.SliceLayout(1, words_at)
    AS_STORED: gl.constexpr = R > 0 and FORMAT == TILED_FN and k_r.dtype == gl.bfloat16
    ropes_at: gl.constexpr = gl.BlockedLayout([1, 8 if AS_STORED else 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    # Converted through registers, of which few are left beside the words.
    RUN: gl.constexpr = R if AS_STORED else 16
    key = start_key + FIRST
    page = page_of(table, table_stride, key, end_key, ROWS, BLOCK_SIZE, SPARSE, False, keys_at)
    rows, valid = rows_of(
        cache, page, key, end_key, stride_page, stride_token, ROWS, BLOCK_SIZE, SPARSE, keys_at
    )
    words, scales = _load_half(rows, valid, 0, L, FORMAT, words_at)
    for block in range(blocks):
        side = block & 1
        phase = ((gl.where(side == 0, used_0, used_1) + block // 2) & 1) ^ 1
        key = start_key + (block + 1) * BLOCK_N + FIRST
        page = page_of(table, table_stride, key, end_key, ROWS, BLOCK_SIZE, SPARSE, False, keys_at)
        mbarrier.wait(bars.index(FREE + 3 * side), phase)
        _store_words(k_l.index(3 * side), words, scales, FIRST, L // 2, words_at)
        words, scales = _load_half(rows, valid, 1 - side, L, FORMAT, words_at)
        _announce_words(bars.index(FULL + 3 * side), False)
        if R > 0 and FORMAT != TILED_FN:
            rope = _load_words(rows, valid, L // 4, R, words_at)
        mbarrier.wait(bars.index(FREE + 1 + side), phase)
        if R > 0 and FORMAT == TILED_FN:
            ropes = (rows + (L + 4 * (L // TILE))).to(gl.pointer_type(gl.bfloat16))
            ropes = gl.convert_layout(ropes, ropes_at, assert_trivial=True)
            there = gl.convert_layout(valid, ropes_at, assert_trivial=True)
            to = k_r.index(side).slice(FIRST, ROWS, 0)
            for at in gl.static_range(0, R, RUN):
                bring(to.slice(at, RUN, 1), ropes, at, 1, there, RUN, AS_STORED, ropes_at)
        elif R > 0:
            _store_words(k_r.index(side), rope, (), FIRST, R, words_at)
        rows, valid = rows_of(
            cache, page, key, end_key, stride_page, stride_token, ROWS, BLOCK_SIZE, SPARSE, keys_at
        )
        _store_words(k_l.index(1 + side), words, scales, FIRST, L // 2, words_at)
        words, scales = _load_half(rows, valid, 1 - side, L, FORMAT, words_at)
        _announce_words(bars.index(FULL + 1 + side), AS_STORED)


@gluon.jit
def _announce_words(bar, COPIED: gl.constexpr):
    """Let the readers go on, who fence the words themselves: a fence here would wait for the words ahead."""
    if COPIED:
        async_copy.mbarrier_arrive(bar, increment_count=True)
    gl.thread_barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _load_half(rows, valid, half, L: gl.constexpr, FORMAT: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of half a latent, and the scales of the tiles that it is of."""
    words = _load_words(rows, valid, half * (L // 8), L // 2, LAYOUT)
    scales = ()
    if FORMAT == TILED_FN:
        places = rows.to(gl.pointer_type(gl.float32)) + (L // 4 + half * (L // 2 // TILE))
        for tile in gl.static_range(L // 2 // TILE):
            scales = scales + (gl.load(places + tile, mask=valid, other=0.0),)
    return words, scales


@gluon.jit
def _load_words(rows, valid, first, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """So many columns from a word on, four a word."""
    words = first + gl.arange(0, WIDTH // 4, gl.SliceLayout(0, LAYOUT))
    return gl.load(rows.to(gl.pointer_type(gl.int32)) + words[None, :], mask=valid, other=0)


@gluon.jit
def _store_words(to, words, scales, FIRST: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Four bytes a word into as many columns of the rows from the first on: one store for the whole width."""
    IS_BF16: gl.constexpr = to.dtype == gl.bfloat16
    if len(scales) > 0:
        scale = scales[0]
        if len(scales) == 2:
            in_first = gl.arange(0, WIDTH // 4, gl.SliceLayout(0, LAYOUT)) < TILE // 4
            scale = gl.where(in_first[None, :], scales[0], scales[1])
        low, high = gl.inline_asm_elementwise(
            BF16_SCALED if IS_BF16 else FP16_SCALED, "=r,=r,r,f", [words, scale],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            BF16 if IS_BF16 else FP16, "=r,=r,r", [words],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    ALL: gl.constexpr = to.shape[0]
    ROWS: gl.constexpr = words.shape[0]
    pairs_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ALL, WIDTH // 2], gl.int32)
    pairs = to._reinterpret(gl.int32, [ALL, WIDTH // 2], pairs_at).slice(FIRST, ROWS, 0)
    pairs.store(gl.join(low, high).reshape([ROWS, WIDTH // 2]))


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
