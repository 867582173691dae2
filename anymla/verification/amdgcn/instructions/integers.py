"""Integer and bit arithmetic of the vector unit."""

from collections.abc import Callable
from typing import Any

import numpy as np

from anymla.verification.amdgcn.instructions.rows import I32, I64, U32, U64, Array, Row
from anymla.verification.amdgcn.instructions.scalar import bits_of, first_one, leading_zeros, reversed_bits
from anymla.verification.amdgcn.instructions.vector import Vector


def _choose(a: Any, b: Any, mask: Any) -> Array:
    found: Array = np.where(mask, b, a)
    return found.view(U32)


def _low_bits(count: int) -> Any:
    return U32((1 << count) - 1)


def _carry(total: Any) -> Any:
    """The lower 32 bits of an exact sum or difference, and in which lanes there are more."""
    return (total & 0xFFFFFFFF).astype(U32), (total < 0) | (total > 0xFFFFFFFF)


def _exactly(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: _carry(operation(*(np.asarray(value).astype(I64) for value in values)))


def _high(dtype: Any) -> Callable[..., Any]:
    return lambda a, b: (a.astype(dtype) * b.astype(dtype)) >> dtype(32)


def _wide_multiply_add(dtype: Any) -> Callable[..., Any]:
    """a * b + c in 64 bits, and the carry, which nobody has been seen to use."""
    return lambda a, b, c: (a.astype(dtype) * b.astype(dtype) + c, False)


def _align(unit: int) -> Callable[..., Any]:
    """32 of the 64 bits of two registers, from bit `unit` * c on."""

    def align(a: Any, b: Any, c: Any) -> Any:
        both = a.astype(U64) << U64(32) | b.astype(U64)
        return both >> ((c & U32(31 if unit == 1 else 3)) * U32(unit)).astype(U64) & U64(0xFFFFFFFF)

    return align


def _permute_bytes(a: Any, b: Any, selector: Any) -> Array:
    """Four bytes by selector: 0-3 of b, 4-7 of a, 8-11 a sign, 12 zero, 13 and more ones."""
    a, b, selector = (np.asarray(value) for value in np.broadcast_arrays(a, b, selector))
    both = b.astype(U64) | a.astype(U64) << U64(32)
    result = np.zeros(a.shape, U32)
    for place in range(4):
        code = selector >> U32(8 * place) & U32(0xFF)
        byte = (both >> (np.minimum(code, U32(7)) * U32(8)).astype(U64)).astype(U32) & U32(0xFF)
        if (code > 7).any():
            sign_at = (np.clip(code, U32(8), U32(11)) - U32(8)) * U32(16) + U32(15)
            sign = (both >> sign_at.astype(U64) & U64(1)).astype(U32) * U32(0xFF)
            byte = np.where(
                code < 8, byte, np.where(code < 12, sign, np.where(code == 12, U32(0), U32(0xFF)))
            )
        result |= byte << U32(8 * place)
    return result


def _median(a: Any, b: Any, c: Any) -> Any:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _three(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, c: operation(operation(a, b), c)


def _shift_left(a: Any, b: Any) -> Any:
    return b << (a & a.dtype.type(b.dtype.itemsize * 8 - 1)).astype(b.dtype)


def _shift_right(a: Any, b: Any) -> Any:
    return b >> (a & a.dtype.type(b.dtype.itemsize * 8 - 1)).astype(b.dtype)


def _dot4(a: Any, b: Any, c: Any) -> Any:
    a, b = (np.ascontiguousarray(x).view(np.int8).reshape(*np.shape(x), 4).astype(I32) for x in (a, b))
    return (a * b).sum(-1, dtype=I32) + c


ROWS: tuple[Row, ...] = (
    Vector(
        "v_mov_b32",
        "b32 <- b32",
        lambda a: a,
        also=("v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"),
    ),
    Vector("v_mov_b64", "u64 <- u64", lambda a: a, "upward"),
    Vector("v_cndmask_b32", "b32 <- f32 f32 mask", _choose, "choice"),
    Vector("v_not_b32", "u32 <- u32", lambda a: ~a),
    Vector("v_and_b32", "u32 <- u32 u32", lambda a, b: a & b),
    Vector("v_or_b32", "u32 <- u32 u32", lambda a, b: a | b),
    Vector("v_xor_b32", "u32 <- u32 u32", lambda a, b: a ^ b),
    Vector("v_xnor_b32", "u32 <- u32 u32", lambda a, b: ~(a ^ b)),
    Vector("v_add_u32", "u32 <- u32 u32", lambda a, b: a + b, also=("v_add_nc_u32",)),
    Vector("v_sub_u32", "u32 <- u32 u32", lambda a, b: a - b, also=("v_sub_nc_u32",)),
    Vector("v_subrev_u32", "u32 <- u32 u32", lambda a, b: b - a, also=("v_subrev_nc_u32",)),
    Vector("v_add_i32", "i32 <- i32 i32", lambda a, b: a + b, also=("v_add_nc_i32",)),
    Vector("v_sub_i32", "i32 <- i32 i32", lambda a, b: a - b, also=("v_sub_nc_i32",)),
    Vector("v_add_co_u32", "u32 mask <- u32 u32", _exactly(lambda a, b: a + b)),
    Vector("v_sub_co_u32", "u32 mask <- u32 u32", _exactly(lambda a, b: a - b)),
    Vector("v_subrev_co_u32", "u32 mask <- u32 u32", _exactly(lambda a, b: b - a)),
    Vector(
        "v_addc_co_u32",
        "u32 mask <- u32 u32 mask",
        _exactly(lambda a, b, c: a + b + c),
        also=("v_add_co_ci_u32",),
    ),
    Vector(
        "v_subb_co_u32",
        "u32 mask <- u32 u32 mask",
        _exactly(lambda a, b, c: a - b - c),
        also=("v_sub_co_ci_u32",),
    ),
    Vector(
        "v_subbrev_co_u32",
        "u32 mask <- u32 u32 mask",
        _exactly(lambda a, b, c: b - a - c),
        also=("v_subrev_co_ci_u32",),
    ),
    Vector("v_mul_lo_u32", "u32 <- u32 u32", lambda a, b: a * b),
    Vector("v_mul_hi_u32", "u32 <- u32 u32", _high(U64)),
    Vector("v_mul_hi_i32", "i32 <- i32 i32", _high(I64)),
    Vector("v_mul_u32_u24", "u32 <- u24 u24", lambda a, b: a * b),
    Vector("v_mul_i32_i24", "i32 <- i24 i24", lambda a, b: a * b),
    Vector("v_mad_u32_u24", "u32 <- u24 u24 u32", lambda a, b, c: a * b + c),
    Vector("v_mad_i32_i24", "i32 <- i24 i24 i32", lambda a, b, c: a * b + c),
    Vector(
        "v_mad_u64_u32", "u64 mask <- u32 u32 u64", _wide_multiply_add(U64), "upward", ("v_mad_co_u64_u32",)
    ),
    Vector(
        "v_mad_i64_i32", "i64 mask <- i32 i32 i64", _wide_multiply_add(I64), "upward", ("v_mad_co_i64_i32",)
    ),
    Vector("v_lshlrev_b32", "u32 <- u32 u32", _shift_left),
    Vector("v_lshrrev_b32", "u32 <- u32 u32", _shift_right),
    Vector("v_ashrrev_i32", "i32 <- u32 i32", _shift_right),
    Vector("v_lshlrev_b64", "u64 <- u32 u64", _shift_left, "upward"),
    Vector("v_lshrrev_b64", "u64 <- u32 u64", _shift_right),
    Vector("v_ashrrev_i64", "i64 <- u32 i64", _shift_right),
    Vector("v_lshlrev_b16", "u16 <- u16 u16", _shift_left),
    Vector("v_lshrrev_b16", "u16 <- u16 u16", _shift_right),
    Vector("v_ashrrev_i16", "i16 <- u16 i16", _shift_right),
    Vector("v_add_u16", "u16 <- u16 u16", lambda a, b: a + b, also=("v_add_nc_u16",)),
    Vector("v_sub_u16", "u16 <- u16 u16", lambda a, b: a - b, also=("v_sub_nc_u16",)),
    Vector("v_mul_lo_u16", "u16 <- u16 u16", lambda a, b: a * b),
    Vector("v_max_u16", "u16 <- u16 u16", np.maximum),
    Vector("v_min_u16", "u16 <- u16 u16", np.minimum),
    Vector("v_max_i16", "i16 <- i16 i16", np.maximum),
    Vector("v_min_i16", "i16 <- i16 i16", np.minimum),
    Vector("v_mad_u16", "u16 <- u16 u16 u16", lambda a, b, c: a * b + c),
    Vector("v_min_u32", "u32 <- u32 u32", np.minimum),
    Vector("v_max_u32", "u32 <- u32 u32", np.maximum),
    Vector("v_min_i32", "i32 <- i32 i32", np.minimum),
    Vector("v_max_i32", "i32 <- i32 i32", np.maximum),
    Vector("v_min3_u32", "u32 <- u32 u32 u32", _three(np.minimum)),
    Vector("v_max3_u32", "u32 <- u32 u32 u32", _three(np.maximum)),
    Vector("v_min3_i32", "i32 <- i32 i32 i32", _three(np.minimum)),
    Vector("v_max3_i32", "i32 <- i32 i32 i32", _three(np.maximum)),
    Vector("v_maxmin_i32", "i32 <- i32 i32 i32", lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    Vector("v_minmax_i32", "i32 <- i32 i32 i32", lambda a, b, c: np.maximum(np.minimum(a, b), c)),
    Vector("v_maxmin_u32", "u32 <- u32 u32 u32", lambda a, b, c: np.minimum(np.maximum(a, b), c)),
    Vector("v_minmax_u32", "u32 <- u32 u32 u32", lambda a, b, c: np.maximum(np.minimum(a, b), c)),
    Vector("v_med3_u32", "u32 <- u32 u32 u32", _median),
    Vector("v_med3_i32", "i32 <- i32 i32 i32", _median),
    Vector("v_add3_u32", "u32 <- u32 u32 u32", lambda a, b, c: a + b + c),
    Vector("v_lshl_add_u32", "u32 <- u32 u32 u32", lambda a, b, c: (a << (b & _low_bits(5))) + c),
    Vector("v_add_lshl_u32", "u32 <- u32 u32 u32", lambda a, b, c: (a + b) << (c & _low_bits(5))),
    Vector("v_lshl_or_b32", "u32 <- u32 u32 u32", lambda a, b, c: a << (b & _low_bits(5)) | c),
    Vector("v_and_or_b32", "u32 <- u32 u32 u32", lambda a, b, c: a & b | c),
    Vector("v_or3_b32", "u32 <- u32 u32 u32", lambda a, b, c: a | b | c),
    Vector("v_xor3_b32", "u32 <- u32 u32 u32", lambda a, b, c: a ^ b ^ c),
    Vector("v_xad_u32", "u32 <- u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    Vector(
        "v_lshl_add_u64",
        "u64 <- u64 u32 u64",
        lambda a, b, c: (a << (b & _low_bits(3)).astype(U64)) + c,
        "upward",
    ),
    Vector("v_bfi_b32", "u32 <- u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    Vector(
        "v_bfe_u32",
        "u32 <- u32 u32 u32",
        lambda a, b, c: bits_of(a, b & _low_bits(5), c & _low_bits(5), False),
    ),
    Vector(
        "v_bfe_i32",
        "i32 <- u32 u32 u32",
        lambda a, b, c: bits_of(a, b & _low_bits(5), c & _low_bits(5), True),
    ),
    Vector(
        "v_bfm_b32",
        "u32 <- u32 u32",
        lambda a, b: ((U32(1) << (a & _low_bits(5))) - U32(1)) << (b & _low_bits(5)),
    ),
    Vector("v_alignbit_b32", "u32 <- u32 u32 u32", _align(1)),
    Vector("v_alignbyte_b32", "u32 <- u32 u32 u32", _align(8)),
    Vector("v_perm_b32", "u32 <- u32 u32 u32", _permute_bytes),
    Vector("v_bfrev_b32", "u32 <- u32", reversed_bits),
    Vector("v_ffbh_u32", "i32 <- u32", leading_zeros, also=("v_clz_i32_u32",)),
    Vector("v_ffbl_b32", "i32 <- u32", first_one, also=("v_ctz_i32_b32",)),
    Vector("v_bcnt_u32_b32", "u32 <- u32 u32", lambda a, b: np.bitwise_count(a) + b),
    Vector("v_dot4_i32_i8", "i32 <- u32 u32 i32", _dot4),
    Vector("v_pk_lshlrev_b16", "pu16 <- pu16 pu16", _shift_left),
    Vector("v_pk_lshrrev_b16", "pu16 <- pu16 pu16", _shift_right),
    Vector("v_pk_ashrrev_i16", "pi16 <- pu16 pi16", _shift_right),
    Vector("v_pk_add_u16", "pu16 <- pu16 pu16", lambda a, b: a + b),
    Vector("v_pk_sub_u16", "pu16 <- pu16 pu16", lambda a, b: a - b, also=("v_pk_sub_i16",)),
    Vector("v_pk_mul_lo_u16", "pu16 <- pu16 pu16", lambda a, b: a * b),
    Vector("v_pk_mad_u16", "pu16 <- pu16 pu16 pu16", lambda a, b, c: a * b + c),
    Vector("v_pk_max_u16", "pu16 <- pu16 pu16", np.maximum),
    Vector("v_pk_min_u16", "pu16 <- pu16 pu16", np.minimum),
    Vector("v_pk_max_i16", "pi16 <- pi16 pi16", np.maximum),
    Vector("v_pk_min_i16", "pi16 <- pi16 pi16", np.minimum),
)
