"""e4m3 bytes in both flavours, held against the definition of the format."""

import math
from itertools import pairwise

import pytest
import torch

from anymla import fp8

FLAVOURS = pytest.mark.parametrize("dtype", fp8.FLAVOURS, ids=["fn", "fnuz"])


def value_of(code: int, dtype: torch.dtype) -> float:
    """What an e4m3 byte means, by the definition of the format."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if (code == 0x80 and dtype == fp8.FNUZ) or (code & 0x7F == 0x7F and dtype == fp8.FN):
        return math.nan
    bias = 8 if dtype == fp8.FNUZ else 7
    magnitude = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
    return -magnitude if sign else magnitude


def values_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value_of(code, dtype) for code in range(256)], dtype=torch.float64)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN in the same places."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


@FLAVOURS
def test_every_byte_reads_as_the_value_that_the_format_defines(dtype: torch.dtype) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=torch.float64)
    bits = torch.empty(256, dtype=torch.int16)
    fp8.write_values(raw, dtype, torch.ones(1), out, bits)
    assert same(out, values_of(dtype))
    assert same(out, raw.view(dtype).to(torch.float64))


@FLAVOURS
def test_a_nan_byte_is_seen_wherever_it_stands(dtype: torch.dtype) -> None:
    codes = [code for code in range(256) if math.isnan(value_of(code, dtype))]
    for code in codes:
        raw = torch.full((64,), 0x3C, dtype=torch.uint8)
        raw[17] = code
        out = torch.empty(64)
        fp8.write_values(raw, dtype, torch.ones(1), out, torch.empty(64, dtype=torch.int16))
        assert out.isnan().nonzero().tolist() == [[17]]
    for code in set(range(256)) - set(codes):
        raw = torch.full((64,), code, dtype=torch.uint8)
        assert not fp8.has_nan(raw, dtype)


@FLAVOURS
def test_a_value_is_rounded_to_the_nearest_and_ties_go_to_the_even_byte(dtype: torch.dtype) -> None:
    grid = sorted((value, code) for code in range(128) if not math.isnan(value := value_of(code, dtype)))
    for (low, low_code), (high, high_code) in pairwise(grid):
        middle = torch.tensor((low + high) / 2)
        even = low_code if low_code % 2 == 0 else high_code
        below = torch.nextafter(middle, torch.tensor(0.0))
        above = torch.nextafter(middle, torch.tensor(1e9))
        values = torch.stack([torch.tensor(low), below, middle, above])
        codes = fp8.to_bytes(values.clone(), dtype).tolist()
        assert codes == [low_code, low_code, even, high_code]
        if low_code:
            assert fp8.to_bytes(-values, dtype).tolist() == [c + 0x80 if c else c for c in codes]


@FLAVOURS
def test_what_is_too_large_saturates_and_nan_stays_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest, largest * 1.1, 1e30, math.inf, -1e30, -math.inf, math.nan])
    stored = fp8.to_bytes(values, dtype).view(dtype).float()
    assert same(stored, torch.tensor([largest] * 4 + [-largest] * 2 + [math.nan]))


def test_minus_zero_is_a_byte_in_fn_and_plain_zero_in_fnuz() -> None:
    values = torch.tensor([-0.0, -1e-12, -(2.0**-11), 0.0])
    assert fp8.to_bytes(values.clone(), fp8.FN).tolist() == [0x80, 0x80, 0x80, 0]
    assert fp8.to_bytes(values.clone(), fp8.FNUZ).tolist() == [0, 0, 0, 0]


@FLAVOURS
def test_a_tile_of_zeros_or_of_infinities_has_a_scale_that_keeps_values_finite(dtype: torch.dtype) -> None:
    tiles = torch.tensor(
        [[0.0, 0.0], [math.inf, 1.0], [torch.finfo(torch.float32).max, 1.0], [math.nan, 2.0]]
    )
    scales = fp8.tile_scales(tiles, dtype)
    largest = torch.finfo(dtype).max
    assert (scales >= torch.finfo(torch.float32).smallest_normal).all()
    assert (scales * largest).isfinite().all()
    assert scales[3].item() == torch.tensor(2.0 / largest).item()
