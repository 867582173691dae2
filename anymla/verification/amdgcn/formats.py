"""Number formats of registers: bf16, fp16 and the four fp8 ones, to and from fp32, as a chip rounds them."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anymla import fp8

Array = NDArray[Any]
U8, U16, U32, F16, F32 = np.uint8, np.uint16, np.uint32, np.float16, np.float32

FLAVOURS = {
    ("fp8", "e4m3fn"): fp8.FN,
    ("bf8", "e4m3fn"): torch.float8_e5m2,
    ("fp8", "e4m3fnuz"): fp8.FNUZ,
    ("bf8", "e4m3fnuz"): torch.float8_e5m2fnuz,
}
"""What an instruction's "fp8" and "bf8" are, by the flavour of the chip's fp8."""


def bf16_to_f32(bits: Array) -> Array:
    """The values of uint16 bf16 bits."""
    return (bits.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(values: Array) -> Array:
    """The uint32 bits of the nearest bf16, ties to even; a NaN keeps its sign and becomes quiet."""
    bits = np.ascontiguousarray(values, F32).view(U32)
    rounded = (bits + U32(0x7FFF) + (bits >> U32(16) & U32(1))) >> U32(16)
    quiet = bits >> U32(16) | U32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(U32)


def f32_to_f16_toward_zero(values: Array) -> Array:
    """The uint16 bits of the fp16 next to a value on the side of zero; too large a value becomes 65504."""
    values = np.ascontiguousarray(values, F32)
    nearest = values.astype(F16)
    too_far = np.abs(nearest.astype(F32)) > np.abs(values)
    bits: Array = nearest.view(U16) - too_far.astype(U16)
    return bits


@lru_cache
def fp8_values(kind: str, flavour: str) -> Array:
    """The fp32 values of the 256 codes.

    Args:
        kind: "fp8" (e4m3) or "bf8" (e5m2).
        flavour: Of the chip: "e4m3fn" or "e4m3fnuz".
    """
    codes = torch.arange(256, dtype=torch.uint8).view(FLAVOURS[kind, flavour])
    found: Array = codes.float().numpy()
    return found


def f32_to_fp8(values: Array, kind: str, flavour: str, saturate: Array) -> Array:
    """The uint32 codes of the nearest values, ties to even.

    Args:
        values: fp32.
        kind: As for `fp8_values`.
        flavour: As for `fp8_values`.
        saturate: Where a value that is too large becomes the largest; elsewhere it becomes NaN, or infinite
            where there is an infinity. The mode bit FP16_OVFL.
    """
    dtype = FLAVOURS[kind, flavour]
    largest = F32(torch.finfo(dtype).max)
    values = np.asarray(values, F32)
    within = np.ascontiguousarray(np.clip(values, -largest, largest))
    codes: Array = torch.from_numpy(within).to(dtype).view(torch.uint8).numpy().astype(U32)
    # Half a step above the largest value, where a tie goes to the even code; each has one that is not finite.
    code = int(torch.tensor(float(largest)).to(dtype).view(torch.uint8))
    half = F32(2.0) ** np.floor(np.log2(largest)) / F32(16 if kind == "fp8" else 8)
    size = np.abs(values)
    beyond = size > largest + half if code % 2 == 0 else size >= largest + half
    sign = np.signbit(values).astype(U32) << U32(7)
    overflow = U32(0x80) if flavour == "e4m3fnuz" else U32(0x7F if kind == "fp8" else 0x7C) | sign
    return np.where(beyond & ~saturate, overflow, codes)
