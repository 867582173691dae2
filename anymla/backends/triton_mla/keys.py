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

TILE = tl.constexpr(128)
"""Latent values that share a scale in a tiled row."""


@triton.jit
def load_keys(
    cache,
    base,
    offsets,
    valid,
    dtype: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    L_POW2: tl.constexpr,
    R_POW2: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tokens at `base + offsets` elements: latent [N, L_POW2] and RoPE part [N, R_POW2], without any one scale.

    Tokens that are not `valid` are not read and come back as zeros.
    """
    if FORMAT >= TILED_FN:
        latent = _load_tiled(cache + base, offsets, valid, dtype, L, L_POW2, FORMAT, MASKED)
        rope_start = L + 4 * (L // TILE)
        rope = (cache + base + rope_start).to(tl.pointer_type(tl.bfloat16))
        rope_offsets = offsets // 2
    else:
        cols = tl.arange(0, L_POW2)
        latent = _load_plain(cache + base, offsets, cols, valid, dtype, L, L_POW2, FORMAT, MASKED)
        rope = cache + base + L
        rope_offsets = offsets
    if R == 0:
        return latent, latent
    else:
        ROPE_FORMAT: tl.constexpr = PLAIN if FORMAT >= TILED_FN else FORMAT
        cols_r = tl.arange(0, R_POW2)
        return latent, _load_plain(rope, rope_offsets, cols_r, valid, dtype, R, R_POW2, ROPE_FORMAT, MASKED)


@triton.jit
def _load_plain(
    pointer,
    offsets,
    cols,
    valid,
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
):
    places = pointer + (offsets[:, None] + cols[None, :])
    if MASKED and WIDTH < WIDTH_POW2:
        raw = tl.load(places, mask=valid[:, None] & (cols < WIDTH)[None, :], other=0)
    elif MASKED:
        raw = tl.load(places, mask=valid[:, None], other=0)
    elif WIDTH < WIDTH_POW2:
        raw = tl.load(places, mask=(cols < WIDTH)[None, :], other=0)
    else:
        raw = tl.load(places)
    return _converted(raw, FORMAT).to(dtype)


@triton.jit
def _load_tiled(
    pointer,
    offsets,
    valid,
    dtype: tl.constexpr,
    L: tl.constexpr,
    L_POW2: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
):
    TILES: tl.constexpr = L_POW2 // TILE
    tiles = tl.arange(0, TILES)
    cols = tl.arange(0, TILE)
    real = (tiles < L // TILE)[None, :]
    places = pointer + (offsets[:, None, None] + tiles[None, :, None] * TILE + cols[None, None, :])
    scales = (pointer + L).to(tl.pointer_type(tl.float32)) + (offsets // 4)[:, None] + tiles[None, :]
    if MASKED:
        real = real & valid[:, None]
    if MASKED or L < L_POW2:
        raw = tl.load(places, mask=real[:, :, None], other=0)
        scale = tl.load(scales, mask=real, other=0.0)
    else:
        raw = tl.load(places)
        scale = tl.load(scales)
    if FORMAT == TILED_FN:
        values = raw.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif FORMAT == TILED_FNUZ:
        values = raw.to(tl.float8e4b8, bitcast=True).to(tl.float32)
    elif FORMAT == TILED_FN_BYTES:
        values = _converted(raw, FP8_FN_BYTES).to(tl.float32)
    else:
        values = _converted(raw, FP8_FNUZ_BYTES).to(tl.float32)
    values = (values * scale[:, :, None]).to(dtype)
    return tl.reshape(values, (values.shape[0], L_POW2))


@triton.jit
def _converted(raw, FORMAT: tl.constexpr):
    """e4m3 bytes as values; with sign and exponent in their fp16 places they are a power of two too small."""
    if FORMAT == PLAIN:
        return raw
    else:
        bits = raw.to(tl.int16)
        half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
        if FORMAT == FP8_FN_BYTES:
            return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
        else:
            return tl.where(bits == 0x80, float("nan"), half.to(tl.float32) * 128.0)
