"""Padding of heads: whatever is padded, the real heads come back."""

import math

import pytest
import torch
from torch import Tensor

from anymla.errors import InvalidInput
from anymla.heads import RULES, HeadPadding
from anymla.merging import apply_sinks


def targets(num_heads: int, rule: str) -> list[int]:
    """Head counts of kernels that this rule can reach."""
    if rule == "identity":
        return [num_heads]
    if rule == "interleave":
        return [num_heads * k for k in (1, 2, 3, 16)]
    sixteens = -(-num_heads // 16) * 16
    power = 1 << (num_heads - 1).bit_length()
    return sorted(
        {num_heads, num_heads + 1, sixteens, sixteens + 16, power, 2 * num_heads, 2 * num_heads + 1, 131}
    )


def attend(q: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel in which every head is on its own and follows its queries and its sink."""
    lse = q.sum(-1)
    return apply_sinks(torch.stack((lse, q[..., 0]), -1), lse, sinks), lse


@pytest.mark.parametrize("rule", RULES)
def test_every_count_from_1_to_130_and_every_target_gives_the_real_heads_back(rule):
    for num_heads in range(1, 131):
        q = torch.arange(2.0 * num_heads * 3).reshape(2, num_heads, 3) % 7
        sinks = torch.arange(float(num_heads)) % 5
        out, lse = attend(q, sinks)
        for padded in targets(num_heads, rule):
            padding = HeadPadding(num_heads, padded, rule)
            wide_q, wide_sinks = padding.pad_q(q), padding.pad_sinks(sinks)
            assert wide_q.shape == (2, padded, 3) and wide_sinks.shape == (padded,)
            wide_out, wide_lse = attend(wide_q, wide_sinks)
            assert torch.equal(padding.unpad_out(wide_out), out), padding
            assert torch.equal(padding.unpad_lse(wide_lse), lse), padding


@pytest.mark.parametrize("rule", RULES)
def test_lanes_say_what_the_padding_does(rule):
    for num_heads in (1, 3, 8, 12):
        for padded in targets(num_heads, rule):
            padding = HeadPadding(num_heads, padded, rule)
            q, sinks = torch.arange(1.0, num_heads + 1)[None, :, None], torch.arange(1.0, num_heads + 1)
            got_q, got_sinks = padding.pad_q(q)[0, :, 0].tolist(), padding.pad_sinks(sinks).tolist()
            assert got_q == [0.0 if lane is None else lane + 1.0 for lane in padding.lanes]
            assert got_sinks == [-math.inf if lane is None else lane + 1.0 for lane in padding.lanes]


@pytest.mark.parametrize(
    ("padding", "lanes"),
    [
        (HeadPadding(3, 3, "identity"), (0, 1, 2)),
        (HeadPadding(2, 6, "interleave"), (0, 0, 0, 1, 1, 1)),
        (HeadPadding(3, 8, "tile"), (0, 1, 2, 0, 1, 2, 0, 1)),
        (HeadPadding(3, 5, "zero"), (0, 1, 2, None, None)),
    ],
    ids=RULES,
)
def test_where_each_head_goes(padding, lanes):
    assert padding.lanes == lanes


@pytest.mark.parametrize(
    ("heads", "padded", "rule"),
    [(16, 16, "identity"), (8, 16, "interleave"), (4, 16, "interleave"), (12, 16, "tile"), (20, 32, "tile")],
)
def test_the_usual_padding(heads, padded, rule):
    assert HeadPadding.between(heads, padded).rule == rule


def test_undoing_with_the_other_rules_inverse_would_give_wrong_heads():
    q = torch.arange(8.0)[None, :, None]
    wide = HeadPadding.between(8, 16).pad_q(q)
    assert not torch.equal(HeadPadding(8, 16, "tile").unpad_out(wide), q)


def test_identity_copies_nothing():
    q, sinks = torch.ones(2, 4, 3), torch.ones(4)
    padding = HeadPadding.between(4, 4)
    assert padding.pad_q(q) is q and padding.unpad_out(q).data_ptr() == q.data_ptr()
    assert torch.equal(padding.pad_sinks(sinks), sinks)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_given_buffer_is_filled_whatever_it_held_and_however_it_lies(rule, dtype):
    padded = 4 if rule == "identity" else 8
    padding = HeadPadding(4, padded, rule)
    q = torch.randn(3, 4, 5).to(dtype)
    buffer = torch.full((3, 5, padded), math.nan, dtype=dtype).transpose(1, 2)
    assert padding.pad_q(q, buffer) is buffer
    assert torch.equal(buffer, padding.pad_q(q))


@pytest.mark.parametrize("rule", RULES)
def test_no_tokens_pad_to_no_tokens(rule):
    padded = 4 if rule == "identity" else 8
    assert HeadPadding(4, padded, rule).pad_q(torch.ones(0, 4, 5)).shape == (0, padded, 5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((0, 16, "tile"), "num_heads got 0; needs at least 1"),
        ((-1, 16, "tile"), "num_heads got -1; needs at least 1"),
        ((8, 4, "zero"), "padded got 4; needs at least 8, num_heads"),
        ((8, 16, "identity"), "padded got 16; needs 8 for identity"),
        ((6, 16, "interleave"), "padded got 16; needs a multiple of 6 for interleave"),
        ((6, 16, "mirror"), "rule got 'mirror'; needs identity or interleave or tile or zero"),
    ],
    ids=lambda value: str(value),
)
def test_a_padding_that_cannot_be_is_refused(arguments, reason):
    with pytest.raises(InvalidInput, match=reason):
        HeadPadding(*arguments)


@pytest.mark.parametrize("heads", [0, -4])
def test_no_heads_are_refused(heads):
    with pytest.raises(InvalidInput, match=f"num_heads got {heads}; needs at least 1"):
        HeadPadding.between(heads, 16)


def test_tensors_with_other_heads_are_refused():
    padding = HeadPadding(8, 16, "interleave")
    with pytest.raises(
        InvalidInput, match=r"q got shape \(2, 16, 4\); needs \(any, 8, any\), from 8 heads padded to 16"
    ):
        padding.pad_q(torch.ones(2, 16, 4))
    with pytest.raises(InvalidInput, match=r"out got shape \(2, 8, 4\); needs \(any, 16, any\)"):
        padding.unpad_out(torch.ones(2, 8, 4))
    with pytest.raises(InvalidInput, match=r"lse got shape \(16, 2\); needs \(any, 16\)"):
        padding.unpad_lse(torch.ones(16, 2))
    with pytest.raises(InvalidInput, match=r"sinks got shape \(16,\); needs \(8,\)"):
        padding.pad_sinks(torch.ones(16))
    with pytest.raises(InvalidInput, match=r"padded_q got shape \(2, 8, 4\).*needs \(2, 16, 4\)"):
        padding.pad_q(torch.ones(2, 8, 4), torch.ones(2, 8, 4))
