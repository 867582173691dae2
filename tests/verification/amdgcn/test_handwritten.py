"""What hand-written code does and compilers do not: strides, loads not waited for, unread lanes."""

import numpy as np
import pytest
from execute import execute

from anymla.verification.amdgcn.checks import Fault
from anymla.verification.amdgcn.memory import Memory

BUFFER = "buffer_load_dword v1, v0, s[4:7], 0 offen"
LOADED = f"v_lshlrev_b32 v0, 2, v0\n  {BUFFER}\n"


def buffer(memory: Memory, word_1: int = 0, word_3: int = 0) -> dict[int, int]:
    """A descriptor of 64 dwords that count up, in s[4:7]."""
    address = memory.map(np.arange(64, dtype=np.uint32).view(np.uint8))
    return {4: address & 0xFFFFFFFF, 5: address >> 32 | word_1, 6: 256, 7: 0x20000 | word_3}


def test_without_an_index_a_stride_multiplies_nothing() -> None:
    memory = Memory()
    after = execute(LOADED + "s_waitcnt vmcnt(0)", memory=memory, s=buffer(memory, word_1=4 << 16))
    assert after.v(1) == list(range(64))


@pytest.mark.parametrize(("word_1", "word_3"), [(1 << 31, 0), (0, 1 << 23)], ids=["swizzle", "lane numbers"])
def test_a_buffer_that_permutes_or_counts_is_refused(word_1: int, word_3: int) -> None:
    memory = Memory()
    with pytest.raises(Fault, match="needs a raw buffer"):
        execute(LOADED, memory=memory, s=buffer(memory, word_1, word_3))


@pytest.mark.parametrize("order", ["lockstep", "clock"])
def test_a_load_that_is_used_too_early_is_a_fault_and_by_the_clock_undecided(order: str) -> None:
    memory = Memory()
    text = LOADED + "v_add_u32 v2, v1, v1"
    if order == "lockstep":
        with pytest.raises(Fault, match="used before its load was waited for"):
            execute(text, memory=memory, s=buffer(memory), order=order)
        return
    after = execute(text, memory=memory, s=buffer(memory), order=order)
    assert after.v(2) == [2 * lane for lane in range(64)]
    (note,) = after.machine.notes
    assert note.startswith("undecided: line 3 `v_add_u32 v2, v1, v1`")


@pytest.mark.parametrize("order", ["lockstep", "clock"])
def test_what_was_never_written_is_followed_but_by_the_clock(order: str) -> None:
    text = "v_readfirstlane_b32 s5, v3\n  s_mov_b32 exec_lo, s5"
    if order == "lockstep":
        with pytest.raises(Fault, match="never written"):
            execute(text, order=order)
        return
    assert execute(text, order=order).s(5) == 0xFFC9FFC9


def test_a_move_that_reaches_every_lane_does_not_read_what_was_there() -> None:
    text = "v_mov_b32_dpp v1, v0 row_newbcast:3 row_mask:0xf bank_mask:0xf\n  v_readfirstlane_b32 s5, v1\n"
    after = execute(text + "  s_mov_b32 s6, s5\n  s_mov_b32 exec_lo, s6")
    assert after.v(1) == [lane // 16 * 16 + 3 for lane in range(64)]
    masked = text.replace("row_mask:0xf", "row_mask:0x1") + "  s_mov_b32 s6, s5\n  s_mov_b32 exec_lo, s6"
    with pytest.raises(Fault, match="never written"):
        execute(masked)


@pytest.mark.parametrize("order", ["lockstep", "clock"])
def test_an_access_that_is_not_aligned_is_a_fault_but_by_the_clock(order: str) -> None:
    memory = Memory()
    text = f"v_lshlrev_b32 v0, 2, v0\n  v_add_u32 v0, 2, v0\n  {BUFFER}\n  s_waitcnt vmcnt(0)"
    if order == "lockstep":
        with pytest.raises(Fault, match="4 bytes not aligned to 4"):
            execute(text, memory=memory, s=buffer(memory), order=order)
        return
    assert execute(text, memory=memory, s=buffer(memory), order=order).v(1)[0] == 1 << 16
