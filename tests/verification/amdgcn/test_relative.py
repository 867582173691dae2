"""Registers whose number M0 is added to."""

import pytest
from execute import execute

from anymla.verification.amdgcn.checks import Fault
from anymla.verification.amdgcn.parse import Unknown

SHIFTED = """
  s_set_gpr_idx_on s4, gpr_idx({places})
  v_add_u32_e32 v1, v2, v5
  s_set_gpr_idx_off
  v_add_u32_e32 v7, v2, v5
"""
FULL = {n: 10**n for n in range(8)}


@pytest.mark.parametrize(
    ("places", "written", "value"),
    [("SRC0", 1, 10**4 + 10**5), ("SRC1", 1, 10**2 + 10**7), ("DST", 3, 10**2 + 10**5)],
)
def test_the_index_is_added_in_the_places_that_the_text_names(places: str, written: int, value: int) -> None:
    after = execute(SHIFTED.format(places=places), v=FULL, s={4: 2})
    assert after.v(written) == [value] * 64
    assert after.v(7) == [10**2 + 10**5] * 64


def test_several_places_take_the_same_index() -> None:
    assert execute(SHIFTED.format(places="SRC0,DST"), v=FULL, s={4: 2}).v(3) == [10**4 + 10**5] * 64


def test_only_the_lowest_byte_is_an_index_and_m0_says_what_it_is_for() -> None:
    after = execute("s_mov_b32 m0, 0x12345678" + SHIFTED.format(places="SRC0"), v=FULL, s={4: 0x302})
    assert after.v(1) == [10**4 + 10**5] * 64
    assert after.s(124) == 0x12341602


def test_lanes_that_do_not_execute_keep_their_registers() -> None:
    after = execute(SHIFTED.format(places="SRC0"), v=FULL, s={4: 2}, mask=1)
    assert after.v(1) == [10**4 + 10**5] + [10] * 63


def test_a_register_that_is_not_there_or_a_branch_is_refused() -> None:
    with pytest.raises(Unknown, match=r"got v9 by M0; needs one of 8 registers"):
        execute(SHIFTED.format(places="SRC0"), v=FULL, s={4: 7})
    with pytest.raises(Unknown, match="got relative registers and a branch"):
        execute("  s_set_gpr_idx_on s4, gpr_idx(SRC0)\nloop:\n  s_branch loop", s={4: 0})


def test_a_register_that_was_never_written_still_shows() -> None:
    stored = (
        SHIFTED.format(places="SRC0")
        + "  v_readfirstlane_b32 s5, v1\n  s_add_u32 s6, s5, s5\n  s_mov_b32 exec_lo, s6"
    )
    with pytest.raises(Fault, match="never written"):
        execute(stored, v={n: 1 for n in range(8) if n != 4}, s={4: 2})
