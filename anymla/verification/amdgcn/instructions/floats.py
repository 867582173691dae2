"""Floating point arithmetic, comparisons and conversions of the vector unit."""

from collections.abc import Callable
from typing import Any

import numpy as np

from anymla.verification.amdgcn.formats import f32_to_bf16, f32_to_f16_toward_zero
from anymla.verification.amdgcn.instructions.rows import F16, F32, F64, U16, U32, Row
from anymla.verification.amdgcn.instructions.scalar import UNORDERED, fma, to_integer
from anymla.verification.amdgcn.instructions.vector import Vector


def _exact(operation: Callable[..., Any]) -> Callable[..., Any]:
    """In fp64, rounded to fp32: at most a unit in the last place better than the chip."""
    return lambda a: operation(a.astype(F64)).astype(F32)


def _median(a: Any, b: Any, c: Any) -> Any:
    return np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))


def _three(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, c: operation(operation(a, b), c)


def exponent(values: Any) -> Any:
    """The biased exponent of fp32 values."""
    return np.asarray(values, F32).view(U32) >> U32(23) & U32(0xFF)


def _mantissa(a: Any) -> Any:
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def _exponent(a: Any) -> Any:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0)


def _fixed_quotient(quotient: Any, denominator: Any, numerator: Any) -> Any:
    """The last of the three steps of a division, which sees the true operands.

    The emulator scales nothing in the first step, so a quotient that is out of range is divided anew; one
    that is in range must be within a unit in the last place.
    """
    exact = (numerator.astype(F64) / denominator.astype(F64)).astype(F32)
    usual = np.isfinite(exact) & (np.abs(exact) > 1e-30) & (np.abs(exact) < 1e30)
    close = np.abs(quotient.astype(F64) - exact) <= np.abs(exact) * 2.0**-22
    return np.where(usual & ~close, quotient, exact)


def _class(a: Any, classes: Any) -> Any:
    """Whether a value is of one of the classes that a mask names, from bit 0: signalling and quiet NaN, then
    from -inf to +inf."""
    negative, bits = np.signbit(a), a.view(U32)
    size = bits & U32(0x7FFFFFFF)
    nan, infinite, zero, normal = size > 0x7F800000, size == 0x7F800000, size == 0, size >= 0x00800000
    quiet = bits >> U32(22) & U32(1) == 1
    kind = np.where(infinite, 0, np.where(zero, 3, np.where(normal, 1, 2)))
    number = np.where(nan, np.where(quiet, 1, 0), np.where(negative, 2 + kind, 9 - kind))
    return (classes >> number.astype(U32) & U32(1)).astype(bool)


def _two_halves(convert: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda a, b: convert(a).astype(U32) | convert(b).astype(U32) << U32(16)


def _f16_bits(a: Any) -> Any:
    return np.asarray(a, F32).astype(F16).view(U16)


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    **UNORDERED,
}
"""What a comparison of floats is called."""

COMPARE_INTEGERS = {
    **{name: COMPARE[name] for name in ("lt", "eq", "le", "gt", "ge")},
    "ne": lambda a, b: a != b,
}


def _twice(operation: Callable[..., Any]) -> Callable[..., Any]:
    """For a comparison that also writes the execution mask."""

    def both(a: Any, b: Any, mask: Any) -> Any:
        found = operation(a, b)
        return found, found

    return both


def _arithmetic(kind: str) -> list[Row]:
    """What there is for every float, alone or packed."""
    two = f"{kind} <- {kind} {kind}"
    name = kind.replace("pf", "f")
    prefix = "v_pk" if kind.startswith("p") else "v"
    return [
        Vector(f"{prefix}_add_{name}", two, lambda a, b: a + b),
        Vector(f"{prefix}_mul_{name}", two, lambda a, b: a * b),
    ]


ROWS: tuple[Row, ...] = (
    *(row for kind in ("f16", "f32", "f64", "pf16", "pf32") for row in _arithmetic(kind)),
    Vector("v_sub_f16", "f16 <- f16 f16", lambda a, b: a - b),
    Vector("v_subrev_f16", "f16 <- f16 f16", lambda a, b: b - a),
    Vector("v_sub_f32", "f32 <- f32 f32", lambda a, b: a - b),
    Vector("v_subrev_f32", "f32 <- f32 f32", lambda a, b: b - a),
    Vector("v_max_f16", "f16 <- f16 f16", np.fmax, also=("v_max_num_f16",)),
    Vector("v_min_f16", "f16 <- f16 f16", np.fmin, also=("v_min_num_f16",)),
    Vector("v_max_f32", "f32 <- f32 f32", np.fmax, also=("v_max_num_f32",)),
    Vector("v_min_f32", "f32 <- f32 f32", np.fmin, also=("v_min_num_f32",)),
    Vector("v_pk_max_f16", "pf16 <- pf16 pf16", np.fmax),
    Vector("v_pk_min_f16", "pf16 <- pf16 pf16", np.fmin),
    Vector("v_max3_f32", "f32 <- f32 f32 f32", _three(np.fmax), also=("v_max3_num_f32",)),
    Vector("v_min3_f32", "f32 <- f32 f32 f32", _three(np.fmin), also=("v_min3_num_f32",)),
    Vector("v_max3_f16", "f16 <- f16 f16 f16", _three(np.fmax), also=("v_max3_num_f16",)),
    Vector("v_min3_f16", "f16 <- f16 f16 f16", _three(np.fmin), also=("v_min3_num_f16",)),
    Vector("v_med3_f16", "f16 <- f16 f16 f16", _median, also=("v_med3_num_f16",)),
    Vector("v_pk_maximum3_f16", "pf16 <- pf16 pf16 pf16", _three(np.maximum)),
    Vector("v_pk_minimum3_f16", "pf16 <- pf16 pf16 pf16", _three(np.minimum)),
    Vector("v_maximum3_f32", "f32 <- f32 f32 f32", _three(np.maximum)),
    Vector("v_minimum3_f32", "f32 <- f32 f32 f32", _three(np.minimum)),
    *(
        Vector(f"v_{name}{suffix}_{kind}", f"{kind} <- {kind} {kind} {kind}", operation)
        for kind in ("f16", "f32")
        for suffix in ("", "_num")
        for name, operation in (
            ("maxmin", lambda a, b, c: np.fmin(np.fmax(a, b), c)),
            ("minmax", lambda a, b, c: np.fmax(np.fmin(a, b), c)),
        )
    ),
    Vector("v_med3_f32", "f32 <- f32 f32 f32", _median, also=("v_med3_num_f32",)),
    Vector("v_fma_f32", "f32 <- f32 f32 f32", fma, also=("v_fmaak_f32", "v_fmamk_f32", "v_mad_f32")),
    Vector("v_fmac_f32", "f32 <- f32 f32 ~f32", fma, also=("v_mac_f32",)),
    Vector("v_pk_fma_f32", "pf32 <- pf32 pf32 pf32", fma),
    Vector("v_fma_f16", "f16 <- f16 f16 f16", lambda a, b, c: a.astype(F64) * b + c),
    Vector("v_pk_fma_f16", "pf16 <- pf16 pf16 pf16", lambda a, b, c: a.astype(F64) * b + c),
    Vector("v_exp_f32", "f32 <- f32", _exact(np.exp2)),
    Vector("v_log_f32", "f32 <- f32", _exact(np.log2)),
    Vector("v_rcp_f32", "f32 <- f32", _exact(np.reciprocal), also=("v_rcp_iflag_f32",)),
    Vector("v_rsq_f32", "f32 <- f32", _exact(lambda a: 1 / np.sqrt(a))),
    Vector("v_sqrt_f32", "f32 <- f32", np.sqrt),
    Vector("v_floor_f32", "f32 <- f32", np.floor),
    Vector("v_ceil_f32", "f32 <- f32", np.ceil),
    Vector("v_trunc_f32", "f32 <- f32", np.trunc),
    Vector("v_rndne_f32", "f32 <- f32", np.rint),
    Vector("v_fract_f32", "f32 <- f32", lambda a: np.minimum(a - np.floor(a), F32(1 - 2.0**-24))),
    Vector(
        "v_ldexp_f32",
        "f32 <- f32 i32",
        lambda a, b: np.ldexp(a.astype(F64), np.clip(b, -400, 400)).astype(F32),
    ),
    Vector("v_frexp_mant_f32", "f32 <- f32", _mantissa),
    Vector("v_frexp_exp_i32_f32", "i32 <- f32", _exponent),
    # The first step scales an operand and says so, for the second; nothing is scaled here.
    Vector("v_div_scale_f32", "f32 mask <- f32 f32 f32", lambda a, b, c: (a, False)),
    Vector("v_div_fmas_f32", "f32 <- f32 f32 f32", fma),
    Vector("v_div_fixup_f32", "f32 <- f32 f32 f32", _fixed_quotient),
    Vector("v_cmp_class_f32", "mask <- f32 u32", _class),
    *(
        Vector(f"v_cmp_{n}_{k}", f"mask <- {k} {k}", c)
        for n, c in COMPARE.items()
        for k in ("f16", "f32", "f64")
    ),
    *(
        Vector(f"v_cmp_{n}_{k}", f"mask <- {k} {k}", c)
        for n, c in COMPARE_INTEGERS.items()
        for k in ("i16", "u16", "i32", "u32", "i64", "u64")
    ),
    *(
        Vector(f"v_cmpx_{n}_{k}", f"mask @exec <- {k} {k} @exec", _twice(c))
        for n, c in COMPARE_INTEGERS.items()
        for k in ("i32", "u32")
    ),
    Vector("v_cvt_f32_i32", "f32 <- i32", lambda a: a.astype(F32)),
    Vector("v_cvt_f32_u32", "f32 <- u32", lambda a: a.astype(F32)),
    Vector("v_cvt_i32_f32", "i32 <- f32", to_integer(-(2**31), 2**31 - 1)),
    Vector("v_cvt_u32_f32", "u32 <- f32", to_integer(0, 2**32 - 1)),
    *(
        Vector(f"v_cvt_f32_ubyte{n}", "f32 <- u32", lambda a, n=n: (a >> U32(8 * n) & U32(0xFF)).astype(F32))
        for n in range(4)
    ),
    Vector("v_cvt_f16_f32", "f16 <- f32", lambda a: a.astype(F16)),
    Vector("v_cvt_f32_f16", "f32 <- f16", lambda a: a.astype(F32)),
    Vector(
        "v_cvt_pkrtz_f16_f32",
        "u32 <- f32 f32",
        _two_halves(f32_to_f16_toward_zero),
        also=("v_cvt_pk_rtz_f16_f32",),
    ),
    Vector("v_cvt_pk_f16_f32", "u32 <- f32 f32", _two_halves(_f16_bits)),
    Vector("v_cvt_pk_bf16_f32", "u32 <- f32 f32", _two_halves(f32_to_bf16)),
    Vector("v_pack_b32_f16", "u32 <- f16 f16", _two_halves(lambda a: a.view(U16))),
)
