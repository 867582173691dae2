"""Device code that writes new tokens into a cache of any KV format, rounded as `kv_cache` and `fp8` do it.

Quotients are IEEE divisions and fp8 codes are made with integers, so that every chip stores the same bytes.
"""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
"""IEEE elements."""
SCALED = tl.constexpr(1)
"""fp8 bytes with one scale for the whole cache."""
TILED = tl.constexpr(2)
"""fp8 bytes, their scales, and R bf16 values, in one row."""
FLAT = tl.constexpr(3)
"""fp8 bytes of all tokens of a page, then their scales."""


@triton.jit(do_not_specialize=["num_slots"])
def store_kernel(
    kv_c,
    k_pe,
    slot_mapping,
    cache,
    k_scale,
    num_slots,
    stride_slot,
    stride_ct,
    stride_cd,
    stride_pt,
    stride_pd,
    stride_page,
    stride_token,
    L: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    TILE_PADDED: tl.constexpr,
    R_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    FNUZ: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Grid: tokens. One whose slot is not in the cache, such as -1, is not written."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * stride_slot)
    if (slot >= 0) & (slot < num_slots):
        page = cache + slot // BLOCK_SIZE * stride_page
        position = slot % BLOCK_SIZE
        row = page + position * (L if FORMAT == FLAT else stride_token)

        TILE: tl.constexpr = L // TILES
        tile = tl.arange(0, TILES_PADDED)[:, None]
        inner = tl.arange(0, TILE_PADDED)[None, :]
        cols = tile * TILE + inner
        mask = (tile < TILES) & (inner < TILE)
        values = tl.load(kv_c + token * stride_ct + cols * stride_cd, mask=mask, other=0.0)
        if FORMAT == PLAIN:
            tl.store(row + cols, values.to(cache.dtype.element_ty), mask=mask)
        elif FORMAT == SCALED:
            scale = tl.load(k_scale)
            tl.store(row + cols, e4m3_code(tl.div_rn(values.to(tl.float32), scale), FNUZ), mask=mask)
        else:
            values = values.to(tl.float32)
            scale = tile_scale(values, FNUZ, POWER_OF_TWO)
            tl.store(row + cols, e4m3_code(tl.div_rn(values, scale[:, None]), FNUZ), mask=mask)
            scale_bytes = page + BLOCK_SIZE * L + position * 4 if FORMAT == FLAT else row + L
            scales = scale_bytes.to(tl.pointer_type(tl.float32)) + tl.arange(0, TILES_PADDED)
            tl.store(scales, scale, mask=tl.arange(0, TILES_PADDED) < TILES)

        if R > 0:
            cols_r = tl.arange(0, R_PADDED)
            mask_r = cols_r < R
            rope = tl.load(k_pe + token * stride_pt + cols_r * stride_pd, mask=mask_r, other=0.0)
            if FORMAT == PLAIN:
                tl.store(row + L + cols_r, rope.to(cache.dtype.element_ty), mask=mask_r)
            elif FORMAT == SCALED:
                code = e4m3_code(tl.div_rn(rope.to(tl.float32), tl.load(k_scale)), FNUZ)
                tl.store(row + L + cols_r, code, mask=mask_r)
            else:
                target = (row + L + 4 * TILES).to(tl.pointer_type(tl.bfloat16))
                tl.store(target + cols_r, rope.to(tl.bfloat16), mask=mask_r)


@triton.jit
def tile_scale(values, FNUZ: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Of each tile the largest magnitude over the largest code, NaN left out; as fp8.tile_scales."""
    largest = 240.0 if FNUZ else 448.0
    most = 1329227995784915872903807060280344576.0 if FNUZ else 664613997892457936451903530140172288.0
    amax = tl.max(tl.where(values == values, tl.abs(values), 0.0), 1)
    scale = tl.div_rn(amax, tl.full(amax.shape, largest, tl.float32))
    scale = tl.minimum(tl.maximum(scale, 1.1754943508222875e-38), most)
    if POWER_OF_TWO:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def e4m3_code(values, FNUZ: tl.constexpr):
    """The uint8 codes of the nearest e4m3 values of fp32 ones, ties to even, saturating; NaN stays NaN."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    # 240 and 448, the smallest normal value, and its exponent's distance to that of fp32.
    size = tl.minimum(size, 0x43700000 if FNUZ else 0x43E00000)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (952 if FNUZ else 960)
    # Below that, codes are equally far apart: fp32 addition rounds to a unit of that size.
    unit = 8192.0 if FNUZ else 16384.0
    shifted = size.to(tl.float32, bitcast=True) + unit
    small = shifted.to(tl.int32, bitcast=True) - (0x46000000 if FNUZ else 0x46800000)
    code = tl.where(size < (0x3C000000 if FNUZ else 0x3C800000), small, normal)
    sign = (bits >> 24) & 0x80
    if FNUZ:
        code = tl.where(is_nan, 0x80, tl.where(code == 0, 0, code | sign))
    else:
        code = tl.where(is_nan, 0x7F, code) | sign
    return code.to(tl.uint8)
