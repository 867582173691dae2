"""e4m3 bytes and their values, in both flavours: fn (OCP, up to 448) and fnuz (AMD CDNA 3, up to 240)."""

import math

import torch
from torch import Tensor

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FLAVOURS = (FN, FNUZ)

_FP32 = torch.finfo(torch.float32)

# A byte, sign-extended to int16, times 128, without bit 14, is an fp16 this many times too small.
_FP16_RATIO = {FN: 256.0, FNUZ: 128.0}


def to_bytes(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The uint8 codes of the nearest fp8 values, ties to even; ±inf saturates, NaN stays NaN.

    Args:
        values: fp32 of any shape; overwritten.
        dtype: FN or FNUZ.
    """
    largest = torch.finfo(dtype).max
    return values.clamp_(-largest, largest).to(dtype).view(torch.uint8)


def tile_scales(tiles: Tensor, dtype: torch.dtype, *, power_of_two: bool = False) -> Tensor:
    """The scale of each tile: its largest magnitude over the largest fp8 value, NaN left out.

    Args:
        tiles: [..., n] fp32.
        dtype: FN or FNUZ.
        power_of_two: Take the next power of two from there on, by which values divide exactly.

    Returns:
        [..., 1] fp32, normal, and such that scaled values are finite, also for a tile of zeros or of ±inf.
    """
    largest = torch.finfo(dtype).max
    most = 2.0 ** (127 - math.floor(math.log2(largest)))
    amax = tiles.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)
    # By a tensor: CUDA divides by a number as a product with its rounded reciprocal.
    scales = amax.div_(torch.full_like(amax, largest)).clamp_(_FP32.smallest_normal, most)
    if power_of_two:
        # A mantissa that is not zero carries into the exponent.
        scales.view(torch.int32).add_(0x7FFFFF).bitwise_and_(0x7F800000)
    return scales


def write_values(
    raw: Tensor, dtype: torch.dtype, scale: Tensor, out: Tensor, bits: Tensor, scales: Tensor | None = None
) -> None:
    """Write what fp8 bytes stand for, times a scale, into `out`.

    Args:
        raw: uint8 of any shape.
        dtype: FN or FNUZ.
        scale: fp32 that broadcasts against `raw`, such that `scale * largest` is finite.
        out: fp32, or fp64 for exact products, of the shape of `raw`.
        bits: int16 scratch, contiguous, as many values as `raw`; unused off the CPU.
        scales: fp32 scratch, as many values as `scale`, or None to allocate.
    """
    if raw.device.type != "cpu":
        torch.mul(raw.view(dtype).to(out.dtype), scale.to(out.dtype), out=out)
        return
    # torch's own cast of float8 takes one value at a time on a CPU without AVX-512: ten times slower.
    bits = bits.view(raw.shape)
    nan = has_nan(raw, dtype)
    bits.copy_(raw.view(torch.int8))
    bits.mul_(128).bitwise_and_(-0x4001)
    if nan and dtype == FN:
        # Only the two NaN codes, of magnitude 0x3F80, carry into bit 14; with it they are NaN in fp16.
        bits.bitwise_or_((bits + 0x80).bitwise_and_(0x4000))
    elif nan:
        bits.masked_fill_(bits == -0x8000, 0x7E00)
    out.copy_(bits.view(torch.float16))
    if scales is not None and out.dtype == scale.dtype:
        out.mul_(torch.mul(scale, _FP16_RATIO[dtype], out=scales.view(scale.shape)))
    else:
        out.mul_(scale.to(out.dtype) * _FP16_RATIO[dtype])


def has_nan(raw: Tensor, dtype: torch.dtype) -> bool:
    """Whether one of these uint8 codes is a NaN."""
    if not raw.numel():
        return False
    if dtype == FNUZ:
        return int(raw.view(torch.int8).min()) == -0x80
    # 0x7F is the largest as int8, 0xFF as uint8; two reductions are faster than one mask.
    return int(raw.view(torch.int8).max()) == 0x7F or int(raw.max()) == 0xFF
