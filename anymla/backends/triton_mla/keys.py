"""Device code that reads cached tokens of any KV format as keys in the dtype of the queries."""

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


@triton.jit
def load_latent(
    cache,
    offsets,
    valid,
    dtype: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """WIDTH columns from CHUNK * WIDTH on of the tokens at `cache + offsets`: [N, WIDTH], unscaled.

    Tokens that are not `valid` are not read and come back as zeros.
    """
    cols = CHUNK * WIDTH + tl.arange(0, WIDTH)
    raw = _load(cache, offsets, cols, valid, L, L_PADDED)
    if FORMAT < TILED_FN:
        return _converted(raw, FORMAT).to(dtype)
    else:
        # One scale a chunk: a tile of the row is as wide as a chunk.
        scales = (cache + L + 4 * CHUNK).to(tl.pointer_type(tl.float32)) + offsets // 4
        scale = tl.load(scales, mask=valid, other=0.0)
        if FORMAT == TILED_FN:
            values = raw.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif FORMAT == TILED_FNUZ:
            values = raw.to(tl.float8e4b8, bitcast=True).to(tl.float32)
        elif FORMAT == TILED_FN_BYTES:
            values = _converted(raw, FP8_FN_BYTES)
        else:
            values = _converted(raw, FP8_FNUZ_BYTES)
        return (values * scale[:, None]).to(dtype)


@triton.jit
def load_rope(
    cache,
    offsets,
    valid,
    dtype: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The RoPE part of the same tokens: [N, R_PADDED]."""
    cols = tl.arange(0, R_PADDED)
    if FORMAT < TILED_FN:
        return _converted(_load(cache + L, offsets, cols, valid, R, R_PADDED), FORMAT).to(dtype)
    else:
        rope = (cache + L + 4 * (L // 128)).to(tl.pointer_type(tl.bfloat16))
        return _load(rope, offsets // 2, cols, valid, R, R_PADDED).to(dtype)


@triton.jit
def _load(pointer, offsets, cols, valid, WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr):
    places = pointer + (offsets[:, None] + cols[None, :])
    if WIDTH < WIDTH_POW2:
        return tl.load(places, mask=valid[:, None] & (cols < WIDTH)[None, :], other=0)
    else:
        return tl.load(places, mask=valid[:, None], other=0)


@triton.jit
def _converted(raw, FORMAT: tl.constexpr):
    """e4m3 bytes as fp32; with sign and exponent in their fp16 places they are a power of two too small."""
    if FORMAT == PLAIN:
        return raw
    else:
        bits = raw.to(tl.int16)
        half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
        if FORMAT == FP8_FN_BYTES:
            return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
        else:
            return tl.where(bits == 0x80, float("nan"), half.to(tl.float32) * 128.0)
