"""SOP1, SOP2, SOPK, SOPC: arithmetic on one value a wave."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anymla.verification.amdgcn.instructions.rows import (
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


ROWS: tuple[Row, ...] = (
    Scalar("s_mov_b32", "u32 <- u32", lambda a: a),
    Scalar("s_mov_b64", "u64 <- u64", lambda a: a),
    Scalar("s_movk_i32", "i32 <- simm", lambda a: a),
    Scalar("s_cmov_b32", "u32 <- u32 ~u32 @scc", lambda a, old, scc: np.where(scc, a, old)),
    Scalar("s_cselect_b32", "u32 <- u32 u32 @scc", lambda a, b, scc: np.where(scc, a, b)),
    Scalar("s_cselect_b64", "u64 <- u64 u64 @scc", lambda a, b, scc: np.where(scc, a, b)),
    Scalar("s_add_u32", "u32 @scc <- u32 u32", _add),
    Scalar("s_sub_u32", "u32 @scc <- u32 u32", _sub),
    Scalar("s_addc_u32", "u32 @scc <- u32 u32 @scc", lambda a, b, c: _carried(sum(_exact(a, b, c)))),
    Scalar(
        "s_subb_u32", "u32 @scc <- u32 u32 @scc", lambda a, b, c: _carried(a.astype(I64) - sum(_exact(b, c)))
    ),
    Scalar("s_add_i32", "i32 @scc <- i32 i32", _add_signed),
    Scalar("s_sub_i32", "i32 @scc <- i32 i32", _sub_signed),
    Scalar("s_addk_i32", "i32 @scc <- ~i32 simm", _add_signed),
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
        Scalar(f"s_{name}_b{bits}", f"u{bits} @scc <- u{bits} u{bits}", nonzero(operation))
        for name, operation in _LOGIC.items()
        for bits in (32, 64)
    ),
    *(
        Scalar(f"s_{name}_saveexec_b{bits}", f"u{bits} @exec @scc <- u{bits} @exec", _saveexec(operation))
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
