"""Device code that finds rows of views, and reads cached tokens of any KV format as keys of a product."""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
"""Elements that the chip converts by itself."""
FP8_FN_BYTES = tl.constexpr(1)
"""e4m3fn bytes on a chip that cannot convert them."""
FP8_FNUZ_BYTES = tl.constexpr(2)
"""e4m3fnuz bytes on a chip that cannot convert them."""
TILED_FN = tl.constexpr(3)
"""The row of fp8_ds_mla: L bytes, L / 128 fp32 scales, R bf16; e4m3fn that the chip converts."""
TILED_FNUZ = tl.constexpr(4)
TILED_FN_BYTES = tl.constexpr(5)
TILED_FNUZ_BYTES = tl.constexpr(6)

FN_RATIO = tl.constexpr(256.0)
"""How many times too small an e4m3fn byte is in its fp16 places."""
FNUZ_RATIO = tl.constexpr(128.0)


@triton.jit
def row_at(token, head, stride_token, stride_head):
    """Where a row begins: of views, heads may lie as far apart as tokens."""
    return tl.cast(token, tl.int64) * stride_token + tl.cast(head, tl.int64) * stride_head


@triton.jit
def load_block(
    cache,
    offsets,
    valid,
    L: tl.constexpr,
    R: tl.constexpr,
    L_PADDED: tl.constexpr,
    R_PADDED: tl.constexpr,
    CHUNKS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The tokens at `cache + offsets` as they are stored: CHUNKS chunks of the latent, RoPE part, scales.

    Tokens that are not `valid` are not read and come back as zeros.
    """
    WIDTH: tl.constexpr = L_PADDED // CHUNKS
    block = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * WIDTH + tl.arange(0, WIDTH)
        block = block + (_load(cache, offsets, cols, valid, L, L_PADDED),)
    if R > 0:
        cols_r = tl.arange(0, R_PADDED)
        if FORMAT < TILED_FN:
            block = block + (_load(cache + L, offsets, cols_r, valid, R, R_PADDED),)
        else:
            rope = (cache + L + 4 * CHUNKS).to(tl.pointer_type(tl.bfloat16))
            block = block + (_load(rope, offsets // 2, cols_r, valid, R, R_PADDED),)
    if FORMAT >= TILED_FN:
        # One scale a chunk: a tile of the row is as wide as a chunk.
        scales = (cache + L).to(tl.pointer_type(tl.float32)) + offsets // 4
        for chunk in tl.static_range(CHUNKS):
            block = block + (tl.load(scales + chunk, mask=valid, other=0.0),)
    return block


@triton.jit
def latent_of(
    block,
    chunk: tl.constexpr,
    dtype: tl.constexpr,
    R: tl.constexpr,
    CHUNKS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """A chunk of the latent of a loaded block, [N, WIDTH]; one scale of the whole cache is not applied."""
    raw = block[chunk]
    if FORMAT < TILED_FN:
        return converted(raw, dtype, FORMAT)
    else:
        if FORMAT == TILED_FN:
            values = raw.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif FORMAT == TILED_FNUZ:
            values = raw.to(tl.float8e4b8, bitcast=True).to(tl.float32)
        elif FORMAT == TILED_FN_BYTES:
            values = converted(raw, tl.float32, FP8_FN_BYTES) * FN_RATIO
        else:
            values = converted(raw, tl.float32, FP8_FNUZ_BYTES) * FNUZ_RATIO
        SCALE: tl.constexpr = CHUNKS + (R > 0) + chunk
        return (values * block[SCALE][:, None]).to(dtype)


@triton.jit
def rope_of(block, dtype: tl.constexpr, CHUNKS: tl.constexpr, FORMAT: tl.constexpr):
    """The RoPE part of a loaded block, [N, R_PADDED]."""
    if FORMAT < TILED_FN:
        return converted(block[CHUNKS], dtype, FORMAT)
    else:
        return block[CHUNKS].to(dtype)


@triton.jit
def _load(pointer, offsets, cols, valid, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    places = pointer + (offsets[:, None] + cols[None, :])
    if WIDTH < PADDED:
        return tl.load(places, mask=valid[:, None] & (cols < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(places, mask=valid[:, None], other=0.0)


@triton.jit
def converted(raw, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Elements as `dtype`; bytes by moving their bits into fp16, which is a power of two too small."""
    if FORMAT == PLAIN:
        return raw.to(dtype)
    else:
        bits = raw.to(tl.int16)
        half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
        if FORMAT == FP8_FN_BYTES:
            return tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(dtype)
        else:
            return tl.where(bits == 0x80, float("nan"), half).to(dtype)
