"""SOP1, SOP2, SOPK, SOPC: arithmetic on one value a wave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anymla.verification.amdgcn.instructions.rows import (
    F32,
    F64,
    I32,
    I64,
    U32,
    U64,
    Array,
    Context,
    Operands,
    Row,
    destination,
    executor,
    numbers_of,
    source,
    step,
)
from anymla.verification.amdgcn.machine import EXEC, Step


@dataclass(frozen=True)
class Scalar(Row):
    """Semantics of one value a wave."""

    operands: str
    semantics: Callable[..., Any]
    also: tuple[str, ...] = ()

    def forms(self) -> Sequence[str]:
        return (self.mnemonic, *self.also)

    def decode(self, context: Context) -> Step:
        spec = Operands.read(self.operands)
        destinations, sources = spec.assign(context)
        fetches = [source(o, k, context, vector=False) for o, k in zip(sources, spec.sources, strict=True)]
        commits = [
            destination(o, k, context, vector=False)
            for o, k in zip(destinations, spec.destinations, strict=True)
        ]
        reads, writes = numbers_of(context, sources), numbers_of(context, destinations)
        run = executor(fetches, self.semantics, commits)
        return step(run, context, reads, writes, trusts=reads if EXEC in writes else ())


def nonzero(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that sets SCC where its result is not zero."""

    def both(*operands: Any) -> Any:
        result = operation(*operands)
        return result, result != 0

    return both


def _carried(total: Any) -> Any:
    """The lower 32 bits of an exact sum or difference, and whether there are more."""
    return (total & 0xFFFFFFFF).astype(U32), (total < 0) | (total > 0xFFFFFFFF)


def _overflowed(total: Any) -> Any:
    """The lower 32 bits of an exact signed sum, and whether they are not all of it."""
    low = (total & 0xFFFFFFFF).astype(U32).view(I32)
    return low, low != total


def _exact(*values: Any) -> Any:
    return (value.astype(I64) for value in values)


def _add(a: Any, b: Any) -> Any:
    return _carried(a.astype(I64) + b.astype(I64))


def _sub(a: Any, b: Any) -> Any:
    return _carried(a.astype(I64) - b.astype(I64))


def _add_signed(a: Any, b: Any) -> Any:
    return _overflowed(a.astype(I64) + b.astype(I64))


def _sub_signed(a: Any, b: Any) -> Any:
    return _overflowed(a.astype(I64) - b.astype(I64))


def bits_of(a: Any, offset: Any, width: Any, is_signed: bool) -> Array:
    """`width` bits of 64-bit `a` from `offset` on."""
    dtype = I64 if is_signed else U64
    raw = np.asarray(a).astype(U64) >> np.asarray(offset).astype(U64)
    width = np.minimum(np.asarray(width), 64).astype(U64)
    up = U64(64) - np.maximum(width, U64(1))
    found = np.where(width == 0, U64(0), raw << up).view(dtype) >> up.astype(dtype)
    return np.asarray(found)


def _bfe(bits: int, is_signed: bool) -> Callable[..., Any]:
    def extract(a: Any, where: Any) -> Any:
        offset, width = where & U32(bits - 1), where >> U32(16) & U32(0x7F)
        return bits_of(a, offset, width, is_signed)

    return nonzero(extract)


def first_one(a: Any) -> Array:
    """The place of the lowest bit that is set, -1 for none."""
    lowest = a & (~a + a.dtype.type(1))
    return np.where(a == 0, I32(-1), np.bitwise_count(lowest - a.dtype.type(1)).astype(I32))


def leading_zeros(a: Any) -> Array:
    """Zeros before the highest bit that is set, -1 for none."""
    bits = a.dtype.itemsize * 8
    filled = a.copy() if isinstance(a, np.ndarray) else np.array(a)
    for shift in (1, 2, 4, 8, 16, 32)[: bits.bit_length() - 1]:
        filled = filled | filled >> a.dtype.type(shift)
    return np.where(a == 0, I32(-1), bits - np.bitwise_count(filled).astype(I32))


def reversed_bits(a: Any) -> Array:
    """The bits of a uint32 in reversed order."""
    a = np.asarray(a)
    for shift, pattern in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        a = (a >> U32(shift) & U32(pattern)) | (a & U32(pattern)) << U32(shift)
    found: Array = a >> U32(16) | a << U32(16)
    return found


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded to fp32 once.

    The product is exact in fp64; where the sum is not, rounding it to odd keeps the second rounding right.
    """
    product, c = np.multiply(a, b, dtype=F64), np.asarray(c, F64)
    total = product + c
    # What the sum lost, by Knuth's two-sum.
    back = total - product
    lost = np.atleast_1d((product - (total - back)) + (c - back))
    whole = np.atleast_1d(total)
    bits = whole.view(I64)
    even_and_inexact = (lost != 0) & (bits & 1 == 0) & np.isfinite(whole)
    if even_and_inexact.any():
        # One unit towards what was lost.
        away = np.where((lost > 0) == (whole > 0), 1, -1)
        total = np.where(even_and_inexact, bits + away, bits).view(F64).reshape(np.shape(total))
    return total.astype(F32)


def to_integer(low: int, high: int) -> Callable[..., Any]:
    """Cut off and saturated; NaN becomes 0."""

    def convert(a: Any) -> Any:
        whole = np.nan_to_num(np.trunc(a.astype(F64)), nan=0.0, posinf=high, neginf=low)
        return np.clip(whole, low, high).astype(I64)

    return convert


UNORDERED: dict[str, Callable[[Any, Any], Any]] = {
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
}
"""Comparisons of floats that are told apart by a NaN."""

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}

_LOGIC: dict[str, Callable[..., Any]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


def _saveexec(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The mask before, the new one, and whether any lane is left."""

    def save(a: Any, mask: Any) -> Any:
        new = np.broadcast_to(operation(a, mask), mask.shape)
        return mask, new, new != 0

    return save


_NEWER = {"andn2": ("and_not1",), "orn2": ("or_not1",)}
"""What RDNA calls an operation."""

ROWS: tuple[Row, ...] = (
    Scalar("s_add_nc_u64", "u64 <- u64 u64", lambda a, b: a + b),
    Scalar("s_sub_nc_u64", "u64 <- u64 u64", lambda a, b: a - b),
    Scalar("s_mul_u64", "u64 <- u64 u64", lambda a, b: a * b),
    Scalar("s_add_f32", "f32 <- f32 f32", lambda a, b: a + b),
    Scalar("s_sub_f32", "f32 <- f32 f32", lambda a, b: a - b),
    Scalar("s_mul_f32", "f32 <- f32 f32", lambda a, b: a * b),
    Scalar("s_max_num_f32", "f32 <- f32 f32", np.fmax, ("s_max_f32",)),
    Scalar("s_min_num_f32", "f32 <- f32 f32", np.fmin, ("s_min_f32",)),
    Scalar("s_fmac_f32", "f32 <- f32 f32 ~f32", fma),
    Scalar("s_fmaak_f32", "f32 <- f32 f32 f32", fma, ("s_fmamk_f32",)),
    Scalar("s_cvt_f32_u32", "f32 <- u32", lambda a: a.astype(F32)),
    Scalar("s_cvt_f32_i32", "f32 <- i32", lambda a: a.astype(F32)),
    Scalar("s_cvt_u32_f32", "u32 <- f32", to_integer(0, 2**32 - 1)),
    Scalar("s_cvt_i32_f32", "i32 <- f32", to_integer(-(2**31), 2**31 - 1)),
    Scalar("v_s_exp_f32", "f32 <- f32", lambda a: np.exp2(a.astype(F64))),
    Scalar("v_s_log_f32", "f32 <- f32", lambda a: np.log2(a.astype(F64))),
    Scalar("v_s_rcp_f32", "f32 <- f32", lambda a: 1 / a.astype(F64)),
    *(
        Scalar(f"s_cmp_{name}_f32", "@scc <- f32 f32", compare)
        for name, compare in {**COMPARISONS, **UNORDERED, "lg": lambda a, b: (a < b) | (a > b)}.items()
    ),
    Scalar("s_mov_b32", "u32 <- u32", lambda a: a),
    Scalar("s_mov_b64", "u64 <- u64", lambda a: a),
    Scalar("s_movk_i32", "i32 <- simm", lambda a: a),
    Scalar("s_cmov_b32", "u32 <- u32 ~u32 @scc", lambda a, old, scc: np.where(scc, a, old)),
    Scalar("s_cselect_b32", "u32 <- u32 u32 @scc", lambda a, b, scc: np.where(scc, a, b)),
    Scalar("s_cselect_b64", "u64 <- u64 u64 @scc", lambda a, b, scc: np.where(scc, a, b)),
    Scalar("s_add_u32", "u32 @scc <- u32 u32", _add, ("s_add_co_u32",)),
    Scalar("s_sub_u32", "u32 @scc <- u32 u32", _sub, ("s_sub_co_u32",)),
    Scalar(
        "s_addc_u32",
        "u32 @scc <- u32 u32 @scc",
        lambda a, b, c: _carried(sum(_exact(a, b, c))),
        ("s_add_co_ci_u32",),
    ),
    Scalar(
        "s_subb_u32", "u32 @scc <- u32 u32 @scc", lambda a, b, c: _carried(a.astype(I64) - sum(_exact(b, c)))
    ),
    Scalar("s_add_i32", "i32 @scc <- i32 i32", _add_signed, ("s_add_co_i32",)),
    Scalar("s_sub_i32", "i32 @scc <- i32 i32", _sub_signed, ("s_sub_co_i32",)),
    Scalar("s_addk_i32", "i32 @scc <- ~i32 simm", _add_signed, ("s_addk_co_i32",)),
    Scalar("s_mulk_i32", "i32 <- ~i32 simm", lambda a, b: a * b),
    Scalar("s_mul_i32", "i32 <- i32 i32", lambda a, b: a * b),
    Scalar("s_mul_hi_u32", "u32 <- u32 u32", lambda a, b: (a.astype(U64) * b.astype(U64)) >> U64(32)),
    Scalar("s_mul_hi_i32", "i32 <- i32 i32", lambda a, b: (a.astype(I64) * b.astype(I64)) >> I64(32)),
    Scalar("s_min_i32", "i32 @scc <- i32 i32", lambda a, b: (np.minimum(a, b), a < b)),
    Scalar("s_max_i32", "i32 @scc <- i32 i32", lambda a, b: (np.maximum(a, b), a > b)),
    Scalar("s_min_u32", "u32 @scc <- u32 u32", lambda a, b: (np.minimum(a, b), a < b)),
    Scalar("s_max_u32", "u32 @scc <- u32 u32", lambda a, b: (np.maximum(a, b), a > b)),
    Scalar("s_lshl_b32", "u32 @scc <- u32 u32", nonzero(lambda a, b: a << (b & U32(31)))),
    Scalar("s_lshr_b32", "u32 @scc <- u32 u32", nonzero(lambda a, b: a >> (b & U32(31)))),
    Scalar("s_ashr_i32", "i32 @scc <- i32 u32", nonzero(lambda a, b: a >> (b & U32(31)).view(I32))),
    Scalar("s_lshl_b64", "u64 @scc <- u64 u32", nonzero(lambda a, b: a << (b & U32(63)).astype(U64))),
    Scalar("s_lshr_b64", "u64 @scc <- u64 u32", nonzero(lambda a, b: a >> (b & U32(63)).astype(U64))),
    Scalar("s_ashr_i64", "i64 @scc <- i64 u32", nonzero(lambda a, b: a >> (b & U32(63)).astype(I64))),
    *(
        Scalar(f"s_lshl{n}_add_u32", "u32 @scc <- u32 u32", lambda a, b, n=n: _add(a.astype(I64) << n, b))
        for n in (1, 2, 3, 4)
    ),
    Scalar("s_bfm_b32", "u32 <- u32 u32", lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31))),
    Scalar("s_bfe_u32", "u32 @scc <- u32 u32", _bfe(32, False)),
    Scalar("s_bfe_i32", "i32 @scc <- u32 u32", _bfe(32, True)),
    Scalar("s_bfe_u64", "u64 @scc <- u64 u32", _bfe(64, False)),
    Scalar("s_bfe_i64", "i64 @scc <- u64 u32", _bfe(64, True)),
    Scalar("s_bitset0_b32", "u32 <- u32 ~u32", lambda a, old: old & ~(U32(1) << (a & U32(31)))),
    Scalar("s_bitset1_b32", "u32 <- u32 ~u32", lambda a, old: old | U32(1) << (a & U32(31))),
    Scalar("s_bitcmp0_b32", "@scc <- u32 u32", lambda a, b: (a >> (b & U32(31)) & U32(1)) == 0),
    Scalar("s_bitcmp1_b32", "@scc <- u32 u32", lambda a, b: (a >> (b & U32(31)) & U32(1)) == 1),
    Scalar("s_not_b32", "u32 @scc <- u32", nonzero(lambda a: ~a)),
    Scalar("s_not_b64", "u64 @scc <- u64", nonzero(lambda a: ~a)),
    Scalar("s_brev_b32", "u32 <- u32", reversed_bits),
    Scalar("s_abs_i32", "i32 @scc <- i32", nonzero(np.abs)),
    Scalar("s_sext_i32_i8", "i32 <- u32", lambda a: a.astype(np.uint8).view(np.int8)),
    Scalar("s_sext_i32_i16", "i32 <- u32", lambda a: a.astype(np.uint16).view(np.int16)),
    Scalar("s_ff1_i32_b32", "i32 <- u32", first_one),
    Scalar("s_ff1_i32_b64", "i32 <- u64", first_one),
    Scalar("s_flbit_i32_b32", "i32 <- u32", leading_zeros),
    Scalar("s_flbit_i32_b64", "i32 <- u64", leading_zeros),
    Scalar("s_bcnt1_i32_b32", "i32 @scc <- u32", nonzero(np.bitwise_count)),
    Scalar("s_bcnt1_i32_b64", "i32 @scc <- u64", nonzero(np.bitwise_count)),
    Scalar("s_pack_ll_b32_b16", "u32 <- u32 u32", lambda a, b: a & U32(0xFFFF) | b << U32(16)),
    Scalar("s_pack_lh_b32_b16", "u32 <- u32 u32", lambda a, b: a & U32(0xFFFF) | b & U32(0xFFFF0000)),
    Scalar("s_pack_hh_b32_b16", "u32 <- u32 u32", lambda a, b: a >> U32(16) | b & U32(0xFFFF0000)),
    *(
        Scalar(
            f"s_{name}_b{bits}",
            f"u{bits} @scc <- u{bits} u{bits}",
            nonzero(operation),
            tuple(f"s_{newer}_b{bits}" for newer in _NEWER.get(name, ())),
        )
        for name, operation in _LOGIC.items()
        for bits in (32, 64)
    ),
    *(
        Scalar(
            f"s_{name}_saveexec_b{bits}",
            f"u{bits} @exec @scc <- u{bits} @exec",
            _saveexec(operation),
            tuple(f"s_{newer}_saveexec_b{bits}" for newer in _NEWER.get(name, ())),
        )
        for name, operation in _LOGIC.items()
        for bits in (32, 64)
    ),
    *(
        Scalar(f"s_cmp_{name}_{kind}", f"@scc <- {kind} {kind}", compare)
        for name, compare in COMPARISONS.items()
        for kind in ("i32", "u32")
    ),
    *(
        Scalar(f"s_cmpk_{name}_{kind}", f"@scc <- {kind} {immediate}", compare)
        for name, compare in COMPARISONS.items()
        for kind, immediate in (("i32", "simm"), ("u32", "uimm"))
    ),
    Scalar("s_cmp_eq_u64", "@scc <- u64 u64", lambda a, b: a == b),
    Scalar("s_cmp_lg_u64", "@scc <- u64 u64", lambda a, b: a != b),
)
