"""Device code that reads cached tokens in any KV format and decompresses latents to keys and values."""

import triton
import triton.language as tl

from anymla.backends.triton_mla.keys import (
    FN_RATIO,
    FNUZ_RATIO,
    FP8_FN_BYTES,
    FP8_FNUZ_BYTES,
    latent_of,
    load_block,
    rope_of,
)


@triton.jit(do_not_specialize=["origin", "end", "num_seqs", "search_steps"])
def gather_kernel(
    cache,
    k_scale,
    block_table,
    starts,
    latents,
    rope,
    origin,
    end,
    num_seqs,
    search_steps,
    stride_page,
    stride_token,
    stride_table,
    stride_table_col,
    L: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    R_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Grid: blocks of places `origin` to `end` of the contexts, one after another; `starts` has B + 1.

    Their values go to latents [n, L] and rope [n, R]; rows past the last context are left as they are.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    places = origin + rows.to(tl.int64)
    valid = places < tl.minimum(end, tl.load(starts + num_seqs))
    seq = tl.zeros((BLOCK_M,), tl.int32)
    bound = seq + num_seqs
    for _step in range(search_steps):
        middle = (seq + bound) // 2
        is_right = (tl.load(starts + middle) <= places) & (bound - seq > 1)
        seq = tl.where(is_right, middle, seq)
        bound = tl.where(is_right, bound, middle)
    token = (places - tl.load(starts + seq)).to(tl.int32)
    token = tl.where(valid, token, 0)
    table = block_table + seq.to(tl.int64) * stride_table
    page = tl.load(table + (token // BLOCK_SIZE) * stride_table_col, mask=valid, other=0)
    offsets = page.to(tl.int64) * stride_page + (token % BLOCK_SIZE) * stride_token
    scale = tl.load(k_scale) if HAS_SCALE else 1.0
    if FORMAT == FP8_FN_BYTES:
        scale = scale * FN_RATIO
    elif FORMAT == FP8_FNUZ_BYTES:
        scale = scale * FNUZ_RATIO
    block = load_block(cache, offsets, valid, L, R, WIDTH * CHUNKS, R_PADDED, CHUNKS, FORMAT)
    for chunk in tl.static_range(CHUNKS):
        values = latent_of(block, chunk, tl.float32, R, CHUNKS, FORMAT)
        _put(latents, rows, valid, chunk * WIDTH + tl.arange(0, WIDTH), values * scale, L)
    if R > 0:
        values = rope_of(block, tl.float32, CHUNKS, FORMAT)
        _put(rope, rows, valid, tl.arange(0, R_PADDED), values * scale, R)


@triton.jit
def _put(target, rows, valid, cols, values, WIDTH: tl.constexpr):
    places = target + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(places, values.to(target.dtype.element_ty), mask=valid[:, None] & (cols < WIDTH)[None, :])


@triton.jit(do_not_specialize=["origin", "num_rows", "num_seqs", "row_blocks"])
def expand_kernel(
    latents,
    weights,
    expanded,
    starts,
    origin,
    num_rows,
    num_seqs,
    row_blocks,
    stride_mt,
    stride_ml,
    stride_wh,
    stride_wl,
    stride_wn,
    stride_eh,
    L: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """expanded [H, n, N] = latents [n, L] @ weights [H, L, N]. Grid: heads × column blocks × row blocks.

    A row depends on that row alone, whatever the number of rows, which no library promises. BOUNDED: rows
    past the last of `starts` are left out.
    """
    row_block = tl.program_id(0) % row_blocks
    column_block = tl.program_id(0) // row_blocks % tl.cdiv(N, BLOCK_N)
    head = (tl.program_id(0) // row_blocks // tl.cdiv(N, BLOCK_N)).to(tl.int64)
    count = num_rows
    if BOUNDED:
        count = tl.minimum(tl.load(starts + num_seqs) - origin, num_rows).to(tl.int32)
    if row_block * BLOCK_M < count:
        rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        live = (rows < count)[:, None]
        wanted = (cols < N)[None, :]
        a_rows = latents + rows.to(tl.int64)[:, None] * stride_mt
        w_cols = weights + head * stride_wh + cols[None, :] * stride_wn
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, L, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            inside = inner < L
            a = tl.load(a_rows + inner[None, :] * stride_ml, mask=live & inside[None, :], other=0.0)
            w = tl.load(w_cols + inner[:, None] * stride_wl, mask=wanted & inside[:, None], other=0.0)
            acc = tl.dot(a, w, acc, input_precision="ieee")
        places = expanded + head * stride_eh + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(places, acc.to(expanded.dtype.element_ty), mask=live & wanted)
