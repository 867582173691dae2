"""Every row that moves values between lanes, and every fp8 or mixed row, from first principles."""

import math

import numpy as np
import pytest
import torch
from execute import execute, f16, f32

from anymla.verification.amdgcn.instructions import GROUPS

LANE = list(range(64))
IDS = [lane + 100 for lane in LANE]
DTYPES = {
    ("fp8", "gfx942"): torch.float8_e4m3fnuz,
    ("bf8", "gfx942"): torch.float8_e5m2fnuz,
    ("fp8", "gfx950"): torch.float8_e4m3fn,
    ("bf8", "gfx950"): torch.float8_e5m2,
}
COVERED = set()


def covers(*mnemonics):
    """Mark a test as that of some rows."""
    COVERED.update(mnemonics)
    return lambda test: test


def test_every_row_has_a_test():
    assert {row.mnemonic for name in ("lanes", "conversions") for row in GROUPS[name]} == COVERED


DPP = {
    "quad_perm:[1,0,3,2]": lambda i: i ^ 1,
    "row_shl:1": lambda i: i + 1 if i % 16 < 15 else None,
    "row_shr:4": lambda i: i - 4 if i % 16 >= 4 else None,
    "row_ror:2": lambda i: i // 16 * 16 + (i - 2) % 16,
    "row_mirror": lambda i: i // 16 * 16 + 15 - i % 16,
    "row_half_mirror": lambda i: i // 8 * 8 + 7 - i % 8,
    "row_bcast:15": lambda i: i // 16 * 16 - 1 if i >= 16 else None,
    "row_bcast:31": lambda i: 31 if i >= 32 else None,
    "row_newbcast:3": lambda i: i // 16 * 16 + 3,
    "row_share:3": lambda i: i // 16 * 16 + 3,
    "row_xmask:5": lambda i: i ^ 5,
    "wave_shr:1": lambda i: i - 1 if i else None,
    "wave_ror:1": lambda i: (i - 1) % 64,
    "wave_shl:1": lambda i: i + 1 if i < 63 else None,
    "wave_rol:1": lambda i: (i + 1) % 64,
}


@pytest.mark.parametrize("move", DPP)
def test_dpp_takes_its_first_source_from_another_lane(move):
    after = execute(f"  v_mov_b32_dpp v2, v3 {move} row_mask:0xf bank_mask:0xf", v={2: 7, 3: IDS})
    assert after.v(2) == [7 if DPP[move](i) is None else DPP[move](i) + 100 for i in LANE]


def test_dpp_without_a_source_gives_zero_where_the_bound_is_controlled():
    after = execute(
        "  v_add_u32_dpp v2, v3, v4 row_shr:8 row_mask:0xf bank_mask:0xf bound_ctrl:1", v={2: 7, 3: IDS, 4: 1}
    )
    assert after.v(2) == [i - 8 + 100 + 1 if i % 16 >= 8 else 1 for i in LANE]


def test_dpp_leaves_masked_rows_and_banks_alone():
    after = execute("  v_mov_b32_dpp v2, v3 row_ror:0 row_mask:0xa bank_mask:0x3", v={2: 7, 3: IDS})
    assert after.v(2) == [i + 100 if i // 16 in (1, 3) and i % 16 < 8 else 7 for i in LANE]


def test_dpp_takes_nothing_from_a_lane_that_does_not_execute():
    after = execute(
        "  v_mov_b32_dpp v2, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", v={2: 7, 3: IDS}, mask=0b1101
    )
    assert after.v(2)[:4] == [7, 7, 103, 102]


@covers("v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32")
def test_the_first_lane_that_executes_is_read():
    assert execute("  v_readfirstlane_b32 s4, v3", v={3: IDS}, mask=0b11000).s(4) == 103
    assert execute("  v_readlane_b32 s4, v3, 9", v={3: IDS}, mask=1).s(4) == 109


def test_one_lane_is_written_whatever_executes():
    after = execute("  v_writelane_b32 v3, s4, 9", v={3: IDS}, s={4: 5}, mask=1)
    assert after.v(3) == [5 if i == 9 else i + 100 for i in LANE]


@covers("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def test_lanes_below_are_counted():
    after = execute("  v_mbcnt_lo_u32_b32 v2, -1, 5\n  v_mbcnt_hi_u32_b32 v3, -1, v2")
    assert after.v(3) == [i + 5 for i in LANE]
    assert execute("  v_mbcnt_lo_u32_b32 v2, 10, 0").v(2)[:5] == [0, 0, 1, 1, 2]


@covers("v_permlane32_swap_b32", "v_permlane16_swap_b32", "v_swap_b32")
def test_rows_change_places():
    after = execute("  v_permlane32_swap_b32_e32 v2, v3", v={2: LANE, 3: IDS}, chip="gfx950")
    assert after.v(2) == LANE[:32] + IDS[:32] and after.v(3) == LANE[32:] + IDS[32:]
    after = execute("  v_permlane16_swap_b32_e32 v2, v3", v={2: LANE, 3: IDS}, chip="gfx950")
    assert after.v(2) == LANE[:16] + IDS[:16] + LANE[32:48] + IDS[32:48]
    assert after.v(3) == LANE[16:32] + IDS[16:32] + LANE[48:] + IDS[48:]
    after = execute("  v_swap_b32 v2, v3", v={2: LANE, 3: IDS})
    assert after.v(2) == IDS and after.v(3) == LANE


@covers("v_permlane16_b32", "v_permlanex16_b32")
def test_lanes_of_a_row_are_selected_four_bits_each():
    reverse = {4: 0x89ABCDEF, 5: 0x01234567}
    after = execute("  v_permlane16_b32 v2, v3, s4, s5", v={3: IDS[:32]}, s=reverse, chip="gfx1100")
    assert after.v(2) == [i // 16 * 16 + 15 - i % 16 + 100 for i in range(32)]
    after = execute("  v_permlanex16_b32 v2, v3, s4, s5", v={3: IDS[:32]}, s=reverse, chip="gfx1100")
    assert after.v(2) == [16 - i // 16 * 16 + 15 - i % 16 + 100 for i in range(32)]


@covers("ds_bpermute_b32", "ds_permute_b32")
def test_lanes_fetch_from_and_send_to_any_lane():
    reverse = [4 * (63 - i) for i in LANE]
    assert execute("  ds_bpermute_b32 v2, v3, v4", v={3: reverse, 4: IDS}).v(2) == IDS[::-1]
    shifted = [4 * ((i + 1) % 64) for i in LANE]
    assert execute("  ds_permute_b32 v2, v3, v4", v={3: shifted, 4: IDS}).v(2) == [IDS[-1], *IDS[:-1]]
    assert execute("  ds_bpermute_b32 v2, v3, v4 offset:4", v={3: 0, 4: IDS}).v(2) == [101] * 64


SWIZZLES = {
    "swizzle(SWAP,16)": lambda i: i ^ 16,
    "swizzle(REVERSE,8)": lambda i: i // 8 * 8 + 7 - i % 8,
    "swizzle(BROADCAST,4,2)": lambda i: i // 4 * 4 + 2,
    "swizzle(QUAD_PERM,3,2,1,0)": lambda i: i // 4 * 4 + 3 - i % 4,
    'swizzle(BITMASK_PERM,"01pip")': lambda i: i & 32 | 8 | i & 4 | ~i & 2 | i & 1,
    "0x8039": lambda i: i // 4 * 4 + (1, 2, 3, 0)[i % 4],
    f"{0x1F | 1 << 10}": lambda i: i ^ 1,
}


@covers("ds_swizzle_b32")
@pytest.mark.parametrize("pattern", SWIZZLES)
def test_a_swizzle_is_a_pattern(pattern):
    after = execute(f"  ds_swizzle_b32 v2, v3 offset:{pattern}", v={3: IDS})
    assert after.v(2) == [SWIZZLES[pattern](i) + 100 for i in LANE]


def code_of(value: float, kind: str, chip: str) -> int:
    """The code of an exact value."""
    return int(torch.tensor(value).to(DTYPES[kind, chip]).view(torch.uint8))


KINDS = pytest.mark.parametrize(("kind", "chip"), DTYPES)


@covers("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")
@KINDS
def test_two_values_become_fp8_in_one_half(kind, chip):
    for half, word in (("", "word 0"), (" op_sel:[0,0,1]", "word 1")):
        after = execute(
            f"  v_cvt_pk_{kind}_f32 v2, v3, v4{half}", v={2: 0x12345678, 3: f32(1.5), 4: f32(-2.0)}, chip=chip
        )
        pair = code_of(1.5, kind, chip) | code_of(-2.0, kind, chip) << 8
        assert after.v(2)[0] == (0x12340000 | pair if word == "word 0" else pair << 16 | 0x5678)


@pytest.mark.parametrize(("chip", "largest", "nan"), [("gfx942", 240.0, 0x80), ("gfx950", 448.0, 0x7F)])
def test_too_large_a_value_becomes_nan_or_the_largest_as_the_mode_says(chip, largest, nan):
    convert = "  v_cvt_pk_fp8_f32 v2, v3, v4"
    given = {2: 0, 3: f32(1e6), 4: f32(math.nan)}
    assert execute(convert, v=given, chip=chip).v(2)[0] == nan | nan << 8
    saturating = "  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n" + convert
    assert execute(saturating, v=given, chip=chip).v(2)[0] == code_of(largest, "fp8", chip) | nan << 8


@covers("v_cvt_scalef32_pk_fp8_f32", "v_cvt_scalef32_pk_bf8_f32")
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_values_are_divided_by_the_exponent_of_a_scale(kind):
    after = execute(
        f"  v_cvt_scalef32_pk_{kind}_f32 v2, v3, v4, v5",
        v={2: 0, 3: f32(6.0), 4: f32(-8.0), 5: f32(4.0)},
        chip="gfx950",
    )
    assert after.v(2)[0] == code_of(1.5, kind, "gfx950") | code_of(-2.0, kind, "gfx950") << 8


@covers("v_cvt_f32_fp8", "v_cvt_f32_bf8", "v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
@KINDS
def test_fp8_becomes_fp32(kind, chip):
    codes = [code_of(value, kind, chip) for value in (1.5, -2.0, 0.25, 4.0)]
    given = {3: sum(code << 8 * n for n, code in enumerate(codes))}
    after = execute(f"  v_cvt_f32_{kind}_sdwa v2, v3 src0_sel:BYTE_2", v=given, chip=chip)
    assert after.v(2)[0] == f32(0.25)
    after = execute(f"  v_cvt_f32_{kind}_e32 v2, v3", v=given, chip=chip)
    assert after.v(2)[0] == f32(1.5)
    after = execute(f"  v_cvt_pk_f32_{kind}_e32 v[4:5], v3", v=given, chip=chip)
    assert (after.v(4)[0], after.v(5)[0]) == (f32(1.5), f32(-2.0))
    after = execute(f"  v_cvt_pk_f32_{kind}_sdwa v[4:5], v3 src0_sel:WORD_1", v=given, chip=chip)
    assert (after.v(4)[0], after.v(5)[0]) == (f32(0.25), f32(4.0))


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
def test_every_code_has_its_value(kind, chip):
    codes = np.arange(64)
    for first in range(0, 256, 64):
        after = execute(f"  v_cvt_f32_{kind}_e32 v2, v3", v={3: codes + first}, chip=chip)
        expected = torch.arange(first, first + 64, dtype=torch.uint8).view(DTYPES[kind, chip]).float()
        got = torch.tensor(np.array(after.v(2), np.uint32).view(np.float32))
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


SCALED = [f"v_cvt_scalef32_pk_{to}_{kind}" for to in ("f32", "f16", "bf16") for kind in ("fp8", "bf8")]


@covers(*SCALED)
@pytest.mark.parametrize("mnemonic", SCALED)
def test_fp8_is_multiplied_by_the_exponent_of_a_scale(mnemonic):
    to, kind = mnemonic.split("_")[4:]
    codes = code_of(1.5, kind, "gfx950") << 16 | code_of(-2.0, kind, "gfx950") << 24
    target = "v[4:5]" if to == "f32" else "v4"
    after = execute(f"  {mnemonic} {target}, v3, v6 op_sel:[1,0,0]", v={3: codes, 6: f32(4.0)}, chip="gfx950")
    if to == "f32":
        assert (after.v(4)[0], after.v(5)[0]) == (f32(6.0), f32(-8.0))
    else:
        half = f16 if to == "f16" else lambda value: f32(value) >> 16
        assert after.v(4)[0] == half(6.0) | half(-8.0) << 16


@covers("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def test_halves_and_words_are_mixed():
    given = {2: 0x11112222, 3: f16(2.0) | f16(3.0) << 16, 4: f32(5.0), 5: f16(0.5) << 16}
    modifiers = "op_sel:[1,0,1] op_sel_hi:[1,0,1]"
    assert execute(f"  v_fma_mix_f32 v2, v3, -v4, v5 {modifiers}", v=given).v(2)[0] == f32(-14.5)
    assert execute(f"  v_fma_mixlo_f16 v2, v3, v4, v5 {modifiers}", v=given).v(2)[0] == 0x11110000 | f16(15.5)
    assert (
        execute(f"  v_fma_mixhi_f16 v2, v3, v4, v5 {modifiers}", v=given).v(2)[0] == f16(15.5) << 16 | 0x2222
    )
    assert execute("  v_fma_mixlo_f16 v2, v3, v4, 0", v={**given, 3: f32(2.0)}).v(2)[0] == 0x11110000 | f16(
        10.0
    )


@covers("v_bitop3_b32", "v_bitop3_b16")
@pytest.mark.parametrize("table", [0x00, 0x80, 0xFE, 0x96, 0xEC, 0x78])
def test_a_truth_table_of_three(table):
    a, b, c = 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA
    row = [table >> n & 1 for n in range(8)]
    expected = sum(row[(a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1] << i for i in range(32))
    assert (
        execute(f"  v_bitop3_b32 v2, v3, v4, v5 bitop3:{table:#x}", v={3: a, 4: b, 5: c}).v(2)[0] == expected
    )
    assert (
        execute(f"  v_bitop3_b16 v2, v3, v4, v5 bitop3:{table:#x}", v={3: a, 4: b, 5: c}).v(2)[0]
        == expected & 0xFFFF
    )


@covers("v_pk_mov_b32")
def test_one_register_of_each_pair_is_moved():
    given = {2: 1, 3: 2, 4: 3, 5: 4}
    after = execute("  v_pk_mov_b32 v[6:7], v[2:3], v[4:5] op_sel:[1,0]", v=given)
    assert (after.v(6)[0], after.v(7)[0]) == (2, 3)


@covers("v_dot2_f32_f16", "v_dot2_f32_bf16", "v_dot2c_f32_f16", "v_dot2c_f32_bf16")
def test_two_products_are_summed():
    given = {3: f16(2.0) | f16(3.0) << 16, 4: f16(5.0) | f16(-7.0) << 16, 5: f32(0.5)}
    assert execute("  v_dot2_f32_f16 v2, v3, v4, v5", v=given).v(2)[0] == f32(-10.5)
    given = {3: f32(2.0) >> 16 | f32(3.0), 4: f32(5.0) >> 16 | f32(-7.0), 5: f32(0.5)}
    assert execute("  v_dot2_f32_bf16 v2, v3, v4, v5", v=given).v(2)[0] == f32(-10.5)
    sums = {**given, 2: f32(0.5)}
    assert execute("  v_dot2c_f32_bf16 v2, v3, v4", v=sums).v(2)[0] == f32(-10.5)
    halves = {2: f32(0.5), 3: f16(2.0) | f16(3.0) << 16, 4: f16(5.0) | f16(-7.0) << 16}
    assert execute("  v_dot2c_f32_f16 v2, v3, v4", v=halves).v(2)[0] == f32(-10.5)
