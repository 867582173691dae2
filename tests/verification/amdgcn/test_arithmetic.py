"""Every row of the scalar, integer and float tables, at values worked out by hand or by Python itself."""

import math
import operator

import pytest
from execute import bits, execute

from anymla.verification.amdgcn.instructions import GROUPS
from anymla.verification.amdgcn.instructions.rows import WIDE, Operands, plain
from anymla.verification.amdgcn.instructions.scalar import Scalar
from anymla.verification.amdgcn.instructions.vector import Vector

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
INF, NAN = math.inf, math.nan
ALL, NONE = True, False

SCALAR = {
    "s_mov_b32": [((0xDEADBEEF,), 0xDEADBEEF)],
    "s_mov_b64": [((0x0123456789ABCDEF,), 0x0123456789ABCDEF)],
    "s_movk_i32": [((0xFF80,), -128), ((7,), 7)],
    "s_cmov_b32": [((5, 9, True), 5), ((5, 9, False), 9)],
    "s_cselect_b32": [((5, 9, True), 5), ((5, 9, False), 9)],
    "s_cselect_b64": [((5 << 40, 9, True), 5 << 40), ((5, 9 << 40, False), 9 << 40)],
    "s_add_u32": [((M32, 1), (0, True)), ((2, 3), (5, False))],
    "s_sub_u32": [((1, 2), (M32, True)), ((5, 3), (2, False))],
    "s_addc_u32": [((M32, 0, True), (0, True)), ((1, 1, True), (3, False))],
    "s_subb_u32": [((0, 0, True), (M32, True)), ((5, 2, True), (2, False))],
    "s_add_i32": [((2**31 - 1, 1), (-(2**31), True)), ((-5, 3), (-2, False))],
    "s_sub_i32": [((-(2**31), 1), (2**31 - 1, True)), ((3, 5), (-2, False))],
    "s_addk_i32": [((10, 0xFF80), (-118, False)), ((2**31 - 1, 1), (-(2**31), True))],
    "s_mulk_i32": [((-3, 7), -21), ((5, 0xFFFF), -5)],
    "s_mul_i32": [((-3, 7), -21), ((1 << 20, 1 << 20), 0)],
    "s_mul_hi_u32": [((M32, M32), M32 - 1), ((1 << 31, 2), 1)],
    "s_mul_hi_i32": [((-1, 1), -1), ((1 << 30, 4), 1)],
    "s_min_i32": [((-1, 1), (-1, True)), ((1, -1), (-1, False))],
    "s_max_i32": [((-1, 1), (1, False)), ((1, -1), (1, True))],
    "s_min_u32": [((M32, 1), (1, False)), ((1, M32), (1, True))],
    "s_max_u32": [((M32, 1), (M32, True)), ((1, M32), (M32, False))],
    "s_lshl_b32": [((1, 31), (1 << 31, True)), ((1, 33), (2, True)), ((1 << 31, 1), (0, False))],
    "s_lshr_b32": [((1 << 31, 31), (1, True)), ((1, 1), (0, False))],
    "s_ashr_i32": [((-8, 2), (-2, True)), ((1, 1), (0, False))],
    "s_lshl_b64": [((1, 63), (1 << 63, True)), ((1 << 63, 1), (0, False))],
    "s_lshr_b64": [((1 << 63, 63), (1, True)), ((1, 1), (0, False))],
    "s_ashr_i64": [((-8, 2), (-2, True)), ((1, 1), (0, False))],
    "s_lshl1_add_u32": [((3, 4), (10, False)), ((1 << 31, 1), (1, True))],
    "s_lshl2_add_u32": [((3, 4), (16, False))],
    "s_lshl3_add_u32": [((3, 4), (28, False))],
    "s_lshl4_add_u32": [((3, 4), (52, False))],
    "s_bfm_b32": [((4, 8), 0xF00)],
    "s_bfe_u32": [((0xABCD1234, 16 | 8 << 16), (0xCD, True)), ((0xFF, 8 | 8 << 16), (0, False))],
    "s_bfe_i32": [((0xABCD1234, 16 | 8 << 16), (0xCD - 256, True)), ((5, 0), (0, False))],
    "s_bfe_u64": [((0xAB << 40, 40 | 8 << 16), (0xAB, True))],
    "s_bfe_i64": [((0x80 << 40, 40 | 8 << 16), (-128, True)), ((0xFFFFFFF0, 0 | 32 << 16), (-16, True))],
    "s_bitset0_b32": [((3, 0xFF), 0xF7)],
    "s_bitset1_b32": [((8, 0xFF), 0x1FF)],
    "s_bitcmp0_b32": [((0b100, 2), False), ((0b100, 1), True)],
    "s_bitcmp1_b32": [((0b100, 2), True), ((0b100, 1), False)],
    "s_not_b32": [((0,), (M32, True)), ((M32,), (0, False))],
    "s_not_b64": [((0,), (M64, True)), ((M64,), (0, False))],
    "s_brev_b32": [((1,), 1 << 31), ((0xF0,), 0x0F000000)],
    "s_abs_i32": [((-7,), (7, True)), ((0,), (0, False))],
    "s_sext_i32_i8": [((0x80,), -128), ((0x17F,), 127)],
    "s_sext_i32_i16": [((0x8000,), -32768)],
    "s_ff1_i32_b32": [((0b101000,), 3), ((0,), -1)],
    "s_ff1_i32_b64": [((1 << 40,), 40), ((0,), -1)],
    "s_flbit_i32_b32": [((1,), 31), ((0,), -1), ((1 << 31,), 0)],
    "s_flbit_i32_b64": [((1,), 63), ((1 << 40,), 23)],
    "s_bcnt1_i32_b32": [((0xF0F0,), (8, True)), ((0,), (0, False))],
    "s_bcnt1_i32_b64": [((M64,), (64, True))],
    "s_pack_ll_b32_b16": [((0x11112222, 0x33334444), 0x44442222)],
    "s_pack_lh_b32_b16": [((0x11112222, 0x33334444), 0x33332222)],
    "s_pack_hh_b32_b16": [((0x11112222, 0x33334444), 0x33331111)],
    "s_add_nc_u64": [((1 << 40, M64), (1 << 40) - 1)],
    "s_sub_nc_u64": [((0, 1), M64)],
    "s_mul_u64": [((1 << 33, 3), 3 << 33)],
    "s_add_f32": [((1.5, 2.25), 3.75)],
    "s_sub_f32": [((1.5, 2.25), -0.75)],
    "s_mul_f32": [((1.5, 2.5), 3.75)],
    "s_max_num_f32": [((NAN, 2.0), 2.0)],
    "s_min_num_f32": [((1.0, 2.0), 1.0)],
    "s_fmac_f32": [((2.0, 3.0, 4.0), 10.0)],
    "s_fmaak_f32": [((2.0, 3.0, 4.0), 10.0)],
    "s_cvt_f32_u32": [((M32,), 2.0**32)],
    "s_cvt_f32_i32": [((-3,), -3.0)],
    "s_cvt_u32_f32": [((1.9,), 1), ((-1.0,), 0)],
    "s_cvt_i32_f32": [((-1.9,), -1)],
    "v_s_exp_f32": [((3.0,), 8.0)],
    "v_s_log_f32": [((8.0,), 3.0)],
    "v_s_rcp_f32": [((4.0,), 0.25)],
    "s_cmp_eq_u64": [((1 << 40, 1 << 40), True), ((1 << 40, 0), False)],
    "s_cmp_lg_u64": [((1 << 40, 1 << 40), False), ((1 << 40, 0), True)],
}
LOGIC = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
COMPARE = {
    "eq": operator.eq,
    "lg": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
for _name, _do in LOGIC.items():
    for _width in (32, 64):
        _a, _b, _m = 0xF0F0F0F0F0F0F0F0 >> 64 - _width, 0xFF00FF00FF00FF00 >> 64 - _width, (1 << _width) - 1
        SCALAR[f"s_{_name}_b{_width}"] = [((_a, _b), (_do(_a, _b) & _m, True))]
        _new = _do(_a, M64 >> 64 - _width) & _m
        SCALAR[f"s_{_name}_saveexec_b{_width}"] = [
            ((_a, M64 >> 64 - _width), (M64 >> 64 - _width, _new, _new != 0))
        ]
for _name, _do in COMPARE.items():
    for _kind, _low in (("i32", -1), ("u32", 3)):
        _pairs = [(_low, 5), (5, _low), (5, 5)]
        SCALAR[f"s_cmp_{_name}_{_kind}"] = [((a, b), _do(a, b)) for a, b in _pairs]
        SCALAR[f"s_cmpk_{_name}_{_kind}"] = [((a, b & 0xFFFF), _do(a, b)) for a, b in _pairs]

INTEGERS = {
    "v_mov_b32": [((0xDEADBEEF,), 0xDEADBEEF)],
    "v_mov_b64": [((1 << 40 | 5,), 1 << 40 | 5)],
    "v_cndmask_b32": [((1.0, 2.0, NONE), 0x3F800000), ((1.0, 2.0, ALL), 0x40000000)],
    "v_not_b32": [((0xF0,), M32 ^ 0xF0)],
    "v_and_b32": [((0xF0F0, 0xFF00), 0xF000)],
    "v_or_b32": [((0xF0F0, 0xFF00), 0xFFF0)],
    "v_xor_b32": [((0xF0F0, 0xFF00), 0x0FF0)],
    "v_xnor_b32": [((0xF0F0, 0xFF00), M32 ^ 0x0FF0)],
    "v_add_u32": [((M32, 2), 1)],
    "v_sub_u32": [((1, 2), M32)],
    "v_subrev_u32": [((2, 1), M32)],
    "v_add_i32": [((-5, 3), -2)],
    "v_sub_i32": [((-5, 3), -8)],
    "v_add_co_u32": [((M32, 1), (0, ALL)), ((1, 1), (2, NONE))],
    "v_sub_co_u32": [((0, 1), (M32, ALL)), ((3, 1), (2, NONE))],
    "v_subrev_co_u32": [((1, 0), (M32, ALL)), ((1, 3), (2, NONE))],
    "v_addc_co_u32": [((M32, 0, ALL), (0, ALL)), ((1, 1, NONE), (2, NONE))],
    "v_subb_co_u32": [((0, 0, ALL), (M32, ALL)), ((5, 2, ALL), (2, NONE))],
    "v_subbrev_co_u32": [((0, 0, ALL), (M32, ALL)), ((2, 5, ALL), (2, NONE))],
    "v_mul_lo_u32": [((0x10001, 0x10001), 0x20001)],
    "v_mul_hi_u32": [((M32, M32), M32 - 1)],
    "v_mul_hi_i32": [((-1, 1), -1), ((1 << 30, 8), 2)],
    "v_mul_u32_u24": [((0x1000003, 5), 15)],
    "v_mul_i32_i24": [((0xFFFFFD, 5), -15), ((-3, -5), 15)],
    "v_mad_u32_u24": [((0x1000003, 5, 1), 16)],
    "v_mad_i32_i24": [((0xFFFFFD, 5, 1), -14)],
    "v_mad_u64_u32": [((M32, M32, 1), (M32 * M32 + 1, NONE))],
    "v_mad_i64_i32": [((-3, 5, 1), (-14, NONE))],
    "v_lshlrev_b32": [((4, 0x0F), 0xF0), ((33, 1), 2)],
    "v_lshrrev_b32": [((4, 0xF0), 0x0F)],
    "v_ashrrev_i32": [((2, -8), -2)],
    "v_lshlrev_b64": [((63, 1), 1 << 63)],
    "v_lshrrev_b64": [((63, 1 << 63), 1)],
    "v_ashrrev_i64": [((2, -8), -2)],
    "v_lshlrev_b16": [((8, 0x01FF), 0xFF00)],
    "v_lshrrev_b16": [((8, 0xFF00), 0xFF)],
    "v_ashrrev_i16": [((8, -32768), -128)],
    "v_add_u16": [((0xFFFF, 2), 1)],
    "v_sub_u16": [((1, 2), 0xFFFF)],
    "v_mul_lo_u16": [((0x101, 0x101), 0x0201)],
    "v_max_u16": [((0xFFFF, 1), 0xFFFF)],
    "v_min_u16": [((0xFFFF, 1), 1)],
    "v_max_i16": [((-1, 1), 1)],
    "v_min_i16": [((-1, 1), -1)],
    "v_mad_u16": [((3, 5, 7), 22)],
    "v_min_u32": [((M32, 1), 1)],
    "v_max_u32": [((M32, 1), M32)],
    "v_min_i32": [((-1, 1), -1)],
    "v_max_i32": [((-1, 1), 1)],
    "v_min3_u32": [((5, M32, 3), 3)],
    "v_max3_u32": [((5, M32, 3), M32)],
    "v_min3_i32": [((5, -1, 3), -1)],
    "v_max3_i32": [((5, -1, 3), 5)],
    "v_maxmin_i32": [((-5, 2, 1), 1), ((-5, -2, 1), -2)],
    "v_minmax_i32": [((-5, 2, 1), 1), ((3, 2, 1), 2)],
    "v_maxmin_u32": [((5, M32, 7), 7)],
    "v_minmax_u32": [((5, M32, 7), 7), ((9, M32, 7), 9)],
    "v_med3_u32": [((5, M32, 3), 5)],
    "v_med3_i32": [((5, -1, 3), 3)],
    "v_add3_u32": [((M32, 2, 3), 4)],
    "v_lshl_add_u32": [((3, 4, 5), 53)],
    "v_add_lshl_u32": [((3, 4, 5), 224)],
    "v_lshl_or_b32": [((3, 4, 5), 0x35)],
    "v_and_or_b32": [((0xF0, 0x30, 5), 0x35)],
    "v_or3_b32": [((1, 2, 4), 7)],
    "v_xor3_b32": [((7, 2, 4), 1)],
    "v_xad_u32": [((7, 2, 4), 9)],
    "v_lshl_add_u64": [((1 << 40, 3, 5), (1 << 43) + 5)],
    "v_bfi_b32": [((0xFF00, 0x1234, 0x5678), 0x1278)],
    "v_bfe_u32": [((0xABCD1234, 16, 8), 0xCD)],
    "v_bfe_i32": [((0xABCD1234, 16, 8), 0xCD - 256), ((0xFF, 0, 0), 0)],
    "v_bfm_b32": [((4, 8), 0xF00)],
    "v_alignbit_b32": [((0x11223344, 0x55667788, 16), 0x33445566)],
    "v_alignbyte_b32": [((0x11223344, 0x55667788, 1), 0x44556677)],
    "v_perm_b32": [
        ((0x77665544, 0x33221100, 0x07040300), 0x77443300),
        ((0x77668544, 0x33221100, 0x0D0C0A08), 0xFF00FF00),
    ],
    "v_bfrev_b32": [((1,), 1 << 31)],
    "v_ffbh_u32": [((1,), 31), ((0,), -1)],
    "v_ffbl_b32": [((0b1000,), 3), ((0,), -1)],
    "v_bcnt_u32_b32": [((0xFF, 10), 18)],
    "v_dot4_i32_i8": [((0x01FF0203, 0x01020304, 100), 100 + 1 - 2 + 6 + 12)],
    "v_pk_lshlrev_b16": [(((1, 4), (0x00FF, 0x0FFF)), (0x01FE, 0xFFF0))],
    "v_pk_lshrrev_b16": [(((1, 4), (0x00FF, 0x0FFF)), (0x007F, 0x00FF))],
    "v_pk_ashrrev_i16": [(((1, 4), (-2, 0x0FF0)), (-1, 0x00FF))],
    "v_pk_add_u16": [(((0xFFFF, 2), (1, 3)), (0, 5))],
    "v_pk_sub_u16": [(((0, 5), (1, 3)), (0xFFFF, 2))],
    "v_pk_mul_lo_u16": [(((3, 0x101), (5, 0x101)), (15, 0x201))],
    "v_pk_mad_u16": [(((3, 2), (5, 4), (1, 1)), (16, 9))],
    "v_pk_max_u16": [(((3, 0xFFFF), (5, 1)), (5, 0xFFFF))],
    "v_pk_min_u16": [(((3, 0xFFFF), (5, 1)), (3, 1))],
    "v_pk_max_i16": [(((3, -1), (5, 1)), (5, 1))],
    "v_pk_min_i16": [(((3, -1), (5, 1)), (3, -1))],
}

TINY = 2.0**-24
FLOATS = {
    "v_sub_f16": [((1.5, 0.25), 1.25)],
    "v_subrev_f16": [((0.25, 1.5), 1.25)],
    "v_sub_f32": [((1.5, 0.25), 1.25)],
    "v_subrev_f32": [((0.25, 1.5), 1.25)],
    "v_max_f16": [((NAN, 2.0), 2.0)],
    "v_min_f16": [((1.0, 2.0), 1.0)],
    "v_max_f32": [((NAN, 2.0), 2.0), ((-INF, -3.0), -3.0)],
    "v_min_f32": [((1.0, NAN), 1.0)],
    "v_pk_max_f16": [(((1.0, 5.0), (2.0, 3.0)), (2.0, 5.0))],
    "v_pk_min_f16": [(((1.0, 5.0), (2.0, 3.0)), (1.0, 3.0))],
    "v_max3_f32": [((1.0, 3.0, 2.0), 3.0)],
    "v_min3_f32": [((1.0, 3.0, 2.0), 1.0)],
    "v_max3_f16": [((1.0, 3.0, 2.0), 3.0), ((1.0, NAN, 2.0), 2.0)],
    "v_min3_f16": [((1.0, 3.0, 2.0), 1.0)],
    "v_med3_f16": [((1.0, 3.0, 2.0), 2.0)],
    "v_pk_maximum3_f16": [(((1.0, 4.0), (3.0, 6.0), (2.0, 5.0)), (3.0, 6.0))],
    "v_pk_minimum3_f16": [(((1.0, 4.0), (3.0, 6.0), (2.0, 5.0)), (1.0, 4.0))],
    "v_maximum3_f32": [((1.0, 3.0, 2.0), 3.0), ((1.0, NAN, 2.0), NAN)],
    "v_minimum3_f32": [((1.0, 3.0, 2.0), 1.0), ((1.0, NAN, 2.0), NAN)],
    "v_med3_f32": [((1.0, 3.0, 2.0), 2.0)],
    # Half a unit above 1, and a little more or less, which only one rounding sees.
    "v_fma_f32": [
        ((2.0, 3.0, 4.0), 10.0),
        ((1.0, TINY, 1.0), 1.0),
        ((1 + 2.0**-23, 1 + 2.0**-23, -1.0), 2.0**-22 + 2.0**-46),
    ],
    "v_fmac_f32": [((2.0, 3.0, 4.0), 10.0)],
    "v_pk_fma_f32": [(((2.0, 1.0), (3.0, 5.0), (4.0, 6.0)), (10.0, 11.0))],
    "v_fma_f16": [((2.0, 3.0, 4.0), 10.0), ((1 + 2.0**-10, 1 + 2.0**-10, -1.0), 2.0**-9 + 2.0**-20)],
    "v_pk_fma_f16": [(((2.0, 1.0), (3.0, 5.0), (4.0, 6.0)), (10.0, 11.0))],
    "v_exp_f32": [((3.0,), 8.0), ((-INF,), 0.0), ((0.5,), 2.0**0.5)],
    "v_log_f32": [((8.0,), 3.0), ((0.0,), -INF), ((-1.0,), NAN)],
    "v_rcp_f32": [((4.0,), 0.25), ((0.0,), INF)],
    "v_rsq_f32": [((4.0,), 0.5)],
    "v_sqrt_f32": [((9.0,), 3.0)],
    "v_floor_f32": [((-1.5,), -2.0)],
    "v_ceil_f32": [((-1.5,), -1.0)],
    "v_trunc_f32": [((-1.5,), -1.0)],
    "v_rndne_f32": [((2.5,), 2.0), ((3.5,), 4.0)],
    "v_fract_f32": [((-1.25,), 0.75), ((-(2.0**-30),), 1 - 2.0**-24)],
    "v_ldexp_f32": [((1.5, 4), 24.0), ((1.0, -200), 0.0)],
    "v_frexp_mant_f32": [((24.0,), 0.75), ((INF,), INF)],
    "v_frexp_exp_i32_f32": [((24.0,), 5), ((INF,), 0)],
    "v_div_scale_f32": [((3.0, 2.0, 3.0), (3.0, NONE))],
    "v_div_fmas_f32": [((2.0, 3.0, 4.0), 10.0)],
    "v_div_fixup_f32": [((1.5, 2.0, 3.0), 1.5), ((NAN, 0.0, 1.0), INF), ((1.0, 2.0, 3.0), 1.0)],
    "v_cmp_class_f32": [
        ((NAN, 2), ALL),
        ((-INF, 4), ALL),
        ((-1.0, 8), ALL),
        ((-1e-40, 16), ALL),
        ((-0.0, 32), ALL),
        ((0.0, 64), ALL),
        ((1e-40, 128), ALL),
        ((1.0, 256), ALL),
        ((INF, 512), ALL),
        ((INF, 511), NONE),
    ],
    "v_cvt_f32_i32": [((-3,), -3.0), ((2**24 + 1,), 2.0**24)],
    "v_cvt_f32_u32": [((M32,), 2.0**32)],
    "v_cvt_i32_f32": [((-1.9,), -1), ((1e20,), 2**31 - 1), ((NAN,), 0), ((-INF,), -(2**31))],
    "v_cvt_u32_f32": [((1.9,), 1), ((-1.0,), 0), ((1e20,), M32)],
    "v_cvt_f32_ubyte0": [((0x44332211,), 17.0)],
    "v_cvt_f32_ubyte1": [((0x44332211,), 34.0)],
    "v_cvt_f32_ubyte2": [((0x44332211,), 51.0)],
    "v_cvt_f32_ubyte3": [((0x44332211,), 68.0)],
    "v_cvt_f16_f32": [((1.0 + 2.0**-11,), 1.0), ((1e6,), INF)],
    "v_cvt_f32_f16": [((1.5,), 1.5)],
    "v_cvt_pkrtz_f16_f32": [((1.0 + 2.0**-10 - 2.0**-20, -1e6), 0xFBFF3C00)],
    "v_cvt_pk_f16_f32": [((1.0 + 2.0**-10 - 2.0**-20, -2.0), 0xC0003C01)],
    "v_cvt_pk_bf16_f32": [((1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8), 0x3F823F80)],
    "v_pack_b32_f16": [((1.0, -2.0), 0xC0003C00)],
}
for _kind in ("f16", "f32", "f64"):
    FLOATS[f"v_add_{_kind}"] = [((1.5, 2.25), 3.75), ((INF, -INF), NAN)]
    FLOATS[f"v_mul_{_kind}"] = [((1.5, 2.5), 3.75), ((INF, 0.0), NAN)]
for _kind in ("f16", "f32"):
    FLOATS[f"v_pk_add_{_kind}"] = [(((1.5, 4.0), (2.25, -1.0)), (3.75, 3.0))]
    FLOATS[f"v_pk_mul_{_kind}"] = [(((1.5, 4.0), (2.5, -1.0)), (3.75, -4.0))]
for _kind in ("f16", "f32"):
    for _suffix in ("", "_num"):
        FLOATS[f"v_maxmin{_suffix}_{_kind}"] = [((-5.0, 2.0, 1.0), 1.0), ((NAN, -2.0, 1.0), -2.0)]
        FLOATS[f"v_minmax{_suffix}_{_kind}"] = [((3.0, 2.0, 1.0), 2.0), ((3.0, -2.0, 1.0), 1.0)]
_ORDERED = {**COMPARE, "f": lambda a, b: False}
_NEGATED = {"nge": "ge", "nlg": "lg", "ngt": "gt", "nle": "le", "neq": "eq", "nlt": "lt"}
for _kind in ("f16", "f32", "f64"):
    for _name in ("f", "lt", "eq", "le", "gt", "lg", "ge", "o", "u", *_NEGATED):
        _cases = []
        for _a, _b in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (NAN, 1.0)):
            _unordered = _a != _a
            if _name in ("o", "u"):
                _says = _unordered == (_name == "u")
            else:
                _says = not _unordered and _ORDERED[_NEGATED.get(_name, _name)](_a, _b)
                _says = not _says if _name in _NEGATED else _says
            _cases.append(((_a, _b), _says))
        FLOATS[f"v_cmp_{_name}_{_kind}"] = _cases
        if _kind == "f32" and _name != "f":
            SCALAR[f"s_cmp_{_name}_f32"] = _cases
for _kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
    for _name in ("lt", "eq", "le", "gt", "ge", "ne"):
        _do = COMPARE["lg" if _name == "ne" else _name]
        _low = -1 if _kind[0] == "i" else 1
        _cases = [((a, b), _do(a, b)) for a, b in ((_low, 5), (5, _low), (5, 5))]
        FLOATS[f"v_cmp_{_name}_{_kind}"] = _cases
        if _kind in ("i32", "u32"):
            FLOATS[f"v_cmpx_{_name}_{_kind}"] = [
                ((*given, M64), (says, M64 if says else 0)) for given, says in _cases
            ]

EXAMPLES = {**SCALAR, **INTEGERS, **FLOATS}
ROWS = {row.mnemonic: row for name in ("scalar", "integers", "floats") for row in GROUPS[name]}


def test_every_row_has_an_example():
    assert set(EXAMPLES) == set(ROWS)


def registers(kind: str, value, number: int, vector: bool):
    """An operand as text, and what stands in its registers."""
    kind = plain(kind)
    if kind in ("simm", "uimm"):
        return f"{value:#x}", {}, {}
    if kind == "mask":
        return f"s[{number}:{number + 1}]", {}, {number: M32 if value else 0, number + 1: M32 if value else 0}
    letter = "v" if vector else "s"
    if kind.startswith("p"):
        low, high = (bits(kind[1:], part) for part in value)
        found = {number: low, number + 1: high} if kind == "pf32" else {number: low | high << 16}
    elif kind in WIDE:
        whole = bits(kind, value)
        found = {number: whole & M32, number + 1: whole >> 32}
    else:
        found = {number: bits(kind, value)}
    text = f"{letter}{number}" if len(found) == 1 else f"{letter}[{number}:{number + 1}]"
    return text, *((found, {}) if vector else ({}, found))


def read(kind: str, after, number: int, vector: bool):
    """The bits of a result, of lane 5 of a vector."""
    kind = plain(kind)
    if kind == "scc":
        return after.scc
    if kind == "exec":
        return after.s64(126)
    if kind == "mask":
        return after.s64(number)
    one = (lambda n: after.v(n)[5]) if vector else after.s
    if kind in (*WIDE, "pf32"):
        return one(number) | one(number + 1) << 32
    return one(number)


def wanted(kind: str, value) -> int:
    """The bits of an expected value."""
    kind = plain(kind)
    if kind == "scc":
        return bool(value)
    if kind == "exec":
        return value
    if kind == "mask":
        return M64 if value else 0
    if kind.startswith("p"):
        low, high = (bits(kind[1:], part) for part in value)
        return low | high << (32 if kind == "pf32" else 16)
    return bits(kind, value)


def same(kind: str, got: int, expected) -> bool:
    if isinstance(expected, float) and math.isnan(expected):
        infinite = {"f16": 0x7C00, "f32": 0x7F800000, "f64": 0x7FF << 52}[plain(kind)]
        width = {"f16": 16, "f32": 32, "f64": 64}[plain(kind)]
        return got & (1 << width - 1) - 1 > infinite
    return got == wanted(kind, expected)


@pytest.mark.parametrize(
    ("mnemonic", "given", "expected"),
    [
        pytest.param(m, g, e, id=f"{m}-{n}")
        for m, examples in EXAMPLES.items()
        for n, (g, e) in enumerate(examples)
    ],
)
def test_a_row_does_what_its_name_says(mnemonic, given, expected):
    row = ROWS[mnemonic]
    assert isinstance(row, Scalar | Vector)
    vector, spec = isinstance(row, Vector), Operands.read(row.operands)
    number, texts, v, s, state = 10, [], {}, {}, {}
    # Where a destination is read as well, the value stands in it.
    for position, kind in enumerate(spec.destinations):
        if not kind.startswith("@"):
            text, *_ = registers(kind, (0, 0) if kind.startswith("p") else 0, 2 + 2 * position, vector)
            texts.append(text)
    for kind, value in zip(spec.sources, given, strict=True):
        if kind == "@scc":
            state["scc"] = value
        elif kind == "@exec":
            state["mask"] = value
        elif kind.startswith("~"):
            _, more_v, more_s = registers(kind, value, 2, vector)
            v, s = v | more_v, s | more_s
        else:
            text, more_v, more_s = registers(kind, value, number, vector)
            texts.append(text)
            v, s, number = v | more_v, s | more_s, number + 2
    chip = "gfx1100" if mnemonic.endswith("saveexec_b32") else "gfx942"
    after = execute(f"  {mnemonic} {', '.join(texts)}", v=v, s=s, chip=chip, **state)
    results = expected if isinstance(expected, tuple) and len(spec.destinations) > 1 else (expected,)
    for position, (kind, value) in enumerate(zip(spec.destinations, results, strict=True)):
        got = read(kind, after, 2 + 2 * position, vector)
        assert same(kind, got, value), f"{mnemonic} {given} gave {got:#x} for {kind} {value}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v_dual_mov_b32 v2, v3 :: v_dual_mov_b32 v3, v2", [0x40000000, 0x3F800000]),
        ("v_dual_add_f32 v2, v2, v3 :: v_dual_mul_f32 v3, 2.0, v2", [0x40400000, 0x40000000]),
        ("v_dual_cndmask_b32 v2, 0, v3 :: v_dual_add_nc_u32 v3, 1, v2", [0x40000000, 0x3F800001]),
        ("v_dual_fmac_f32 v2, v3, v3 :: v_dual_lshlrev_b32 v3, 1, v2", [0x40A00000, 0x7F000000]),
    ],
)
def test_two_instructions_at_once_read_before_either_writes(text, expected):
    after = execute(f"  {text}", v={2: bits("f32", 1.0), 3: bits("f32", 2.0)}, vcc=M32, chip="gfx1100")
    assert [after.v(2)[7], after.v(3)[7]] == expected


def test_rdna_compares_into_the_execution_mask_alone():
    after = execute("  v_cmpx_lt_u32_e32 v10, v12", v={10: list(range(32)), 12: 4}, chip="gfx1100")
    assert after.s(126) == 0b1111


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v_add_f32_e64 v2, |v10|, -v12", 1.5 - 0.25),
        ("v_mul_f32_e64 v2, v10, v12 mul:2", -0.75),
        ("v_mul_f32_e64 v2, -v10, v12 div:2", 0.1875),
        ("v_add_f32_e64 v2, v10, v10 clamp", 0.0),
        ("v_fma_f32 v2, v10, 2.0, 0x3f800000", -2.0),
        ("v_add_f32_dpp v2, v10, v12 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", -1.25),
    ],
)
def test_modifiers_change_sources_and_results(text, expected):
    after = execute(f"  {text}", v={10: bits("f32", -1.5), 12: bits("f32", 0.25)})
    assert after.v(2)[7] == bits("f32", expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "v_and_b32_sdwa v2, v10, v12 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD",
            0x1122,
        ),
        (
            "v_or_b32_sdwa v2, v10, v12 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_1",
            0xFF << 16,
        ),
        (
            "v_or_b32_sdwa v2, v10, v10 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 "
            "src1_sel:BYTE_3",
            0xAAAA11AA,
        ),
        (
            "v_add_u32_sdwa v2, sext(v10), v13 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 "
            "src1_sel:DWORD",
            0x44,
        ),
        ("v_sub_u32_e64 v2, v13, v10 clamp", 0),
        (
            "v_pk_add_u16 v2, v10, v12 op_sel:[1,0] op_sel_hi:[0,1]",
            (0x3344 + 0xFFFF & 0xFFFF) << 16 | (0x1122 + 0xFFFF & 0xFFFF),
        ),
    ],
)
def test_parts_of_registers_are_selected(text, expected):
    after = execute(f"  {text}", v={2: 0xAAAAAAAA, 10: 0x11223344, 12: 0xFFFFFFFF, 13: 0})
    assert after.v(2)[3] == expected
