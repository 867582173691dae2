"""What hardware does not tell: each wrong program is found, with its place."""

import numpy as np
import pytest
from execute import execute, prepared

from anymla.verification.amdgcn.checks import Fault
from anymla.verification.amdgcn.machine import ORDERS
from anymla.verification.amdgcn.memory import Memory

LANE = np.arange(64)
M32 = (1 << 32) - 1
STORE_AND_LOAD = """
  v_lshlrev_b32 v1, 2, v0
  ds_write_b32 v1, v0
  s_waitcnt lgkmcnt(0)
  s_barrier
  v_xor_b32 v2, {flip}, v1
  ds_read_b32 v3, v2
  s_waitcnt lgkmcnt(0)"""
"""Each thread writes its number into LDS and reads that of another: of its wave with 4, the next with 256."""


def pointing(offset, size: int = 256, writable: bool = True):
    """Registers v[2:3] at an offset into a buffer of so many bytes."""
    memory = Memory()
    address = memory.map(np.zeros(size, np.uint8), writable=writable)
    return {"v": {2: (address & M32) + offset, 3: address >> 32, 4: 1}, "memory": memory}


@pytest.mark.parametrize(
    ("text", "given", "what"),
    [
        ("global_load_dword v4, v[2:3], off", pointing(LANE * 4 + 4), "outside of a buffer of 256"),
        ("global_load_dword v4, v[2:3], off offset:-4", pointing(LANE * 4), "outside of a buffer of 256"),
        ("global_store_dword v[2:3], v4, off", pointing(LANE * 4 + 4), "outside of a buffer of 256"),
        ("global_load_dword v4, v[2:3], off", {"v": {2: 0, 3: 0}}, "an address in no buffer"),
        ("global_load_dword v4, v[2:3], off", pointing(LANE * 2), "not aligned to 4"),
        (
            "global_store_dword v[2:3], v4, off",
            pointing(LANE * 4, writable=False),
            "memory that is only read",
        ),
        ("ds_read_b32 v4, v2", {"v": {2: LANE * 4}, "shared": 252}, "outside of the 252 bytes of LDS"),
        ("ds_write_b64 v2, v[4:5]", {"v": {2: LANE * 4, 4: 1, 5: 1}, "shared": 512}, "not aligned to 8"),
        ("ds_read_b32 v4, v2", {"v": {2: -4 & M32}, "shared": 512}, "outside of the 512 bytes of LDS"),
    ],
)
def test_an_access_out_of_place_is_a_fault(text, given, what):
    with pytest.raises(Fault, match=what):
        execute(f"  {text}", **given)


def test_lanes_that_do_not_execute_access_nothing():
    execute("  global_load_dword v4, v[2:3], off", mask=1, **pointing(LANE * 1000))


def test_a_buffer_does_not_access_what_is_outside():
    memory, target = Memory(), np.full(256, 7, np.uint8)
    address = memory.map(target)
    given = {
        "v": {2: LANE * 8, 4: 1},
        "s": {4: address & M32, 5: address >> 32, 6: 256, 7: 0},
        "memory": memory,
    }
    execute("  buffer_store_dword v4, v2, s[4:7], 0 offen", **given)
    after = execute("  buffer_load_dword v5, v2, s[4:7], 0 offen\n  s_waitcnt vmcnt(0)", **given)
    assert after.v(5)[30:34] == [1, 1, 0, 0]


def test_a_fault_names_its_place():
    text = "  .globl dance\n  v_lshlrev_b32 v2, 3, v0\n  ds_read_b32 v4, v2"
    with pytest.raises(Fault) as caught:
        execute(text, waves=2, workgroups=3, shared=1000)
    fault = caught.value
    assert (fault.kernel, fault.instruction.line, fault.workgroup) == ("dance", 3, (0, 0, 0))
    assert (fault.wave, fault.lane, fault.address) == (1, 61, 1000)
    assert str(fault).startswith(
        "dance, line 3 `ds_read_b32 v4, v2`, workgroup (0, 0, 0), wave 1, lane 61, address 0x3e8"
    )


@pytest.mark.parametrize(
    ("text", "register"),
    [
        ("ds_read_b32 v1, v2", "vector register 2"),
        ("v_add_u32 v3, v2, 1\n  ds_read_b32 v1, v3", "vector register 3"),
        ("s_add_u32 s5, s4, 1\n  s_cbranch_scc0 .L\n.L:", "s253"),
        ("v_cmp_lt_u32 vcc, v2, 1\n  s_and_saveexec_b64 s[6:7], vcc", "s106, s107"),
        ("s_load_dword s4, s[6:7], 0x0", "s6, s7"),
    ],
)
def test_what_was_never_written_may_not_decide(text, register):
    with pytest.raises(Fault, match=f"{register} decides something but was never written"):
        execute(f"  {text}", shared=64)


def test_what_was_never_written_may_be_copied_and_passed_over():
    text = """
  v_add_u32 v3, v2, 1
  v_cndmask_b32 v4, v3, 0, vcc
  v_mov_b64 v[8:9], v[6:7]
  v_lshl_add_u64 v[8:9], v[6:7], 2, 0
  ds_read_b32 v5, v4
  ds_read_b32 v10, v8"""
    execute(text, v={6: 0}, vcc=(1 << 64) - 1, shared=64)


def test_a_half_that_a_packed_instruction_does_not_name_decides_nothing():
    text = "  v_pk_add_f32 v[8:9], v[6:7], v[4:5] {}\n  ds_read_b32 v10, v9"
    given = {"v": {4: 0, 5: 0, 6: 0}, "shared": 64}
    execute(text.format("op_sel_hi:[0,1]"), **given)
    with pytest.raises(Fault, match="vector register 9 decides something"):
        execute(text.format(""), **given)
    # But it must have landed, if it is under way.
    with pytest.raises(Fault, match="vector register 7 is used before its load was waited for"):
        execute("  ds_read_b32 v7, v4\n" + text.format("op_sel_hi:[0,1]"), **given)
    # What is undefined in the upper half does not reach the lower one.
    execute(text.replace("v9", "v8").format(""), **given)


def test_lds_that_was_never_written_may_not_decide():
    text = "  ds_read_b32 v3, v1\n  s_waitcnt lgkmcnt(0)\n  ds_read_b32 v4, v3"
    with pytest.raises(Fault, match="vector register 3 decides something"):
        execute(text, v={1: LANE * 4}, shared=256)
    half = "  ds_write_b16 v1, v1\n" + text
    with pytest.raises(Fault, match="vector register 3 decides something"):
        execute(half, v={1: LANE * 4}, shared=256)
    whole = "  ds_write_b32 v1, v1\n" + text
    assert execute(whole, v={1: LANE * 4}, shared=256).v(4) == (LANE * 4).tolist()


def test_what_was_never_written_stays_so_in_lds():
    text = "  ds_write_b32 v1, v2\n  ds_read_b32 v3, v1\n  s_waitcnt lgkmcnt(0)\n  ds_read_b32 v4, v3"
    with pytest.raises(Fault, match="vector register 3 decides something"):
        execute(text, v={1: LANE * 4}, shared=256)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("flip", [4, 256])
def test_waves_that_meet_at_a_barrier_read_what_others_wrote(order, flip):
    after = execute(STORE_AND_LOAD.format(flip=flip), waves=4, workgroups=3, shared=1024, order=order)
    threads = np.arange(256)
    expected = np.repeat((threads ^ flip // 4).reshape(4, 1, 64), 3, 1).reshape(12, 64)
    assert (after.machine.vectors[3] == expected).all()
    assert not after.machine.notes


@pytest.mark.parametrize("order", ["lockstep", "forward", "reverse"])
def test_without_the_barrier_it_is_a_race(order):
    racing = STORE_AND_LOAD.replace("  s_barrier\n", "")
    with pytest.raises(Fault, match=r"LDS race: it (reads|writes) what line \d `ds_"):
        execute(racing.format(flip=256), waves=4, shared=1024, order=order)
    # Lanes of one wave need none.
    execute(racing.format(flip=4), waves=4, shared=1024, order=order)


def test_without_the_wait_before_a_barrier_it_is_a_race():
    unwaited = STORE_AND_LOAD.replace("  s_waitcnt lgkmcnt(0)\n  s_barrier", "  s_barrier")
    with pytest.raises(Fault, match="LDS race"):
        execute(unwaited.format(flip=256), waves=4, shared=1024)


SPLIT = """
  v_lshlrev_b32_e32 v1, 2, v0
  v_xor_b32_e32 v2, 128, v1
  {before}
  s_wait_dscnt 0x0
  s_barrier_signal -1
  {between}
  s_barrier_wait -1
  {behind}
  s_wait_dscnt 0x0"""
"""The halves of a barrier; v1 and v2 are places of a wave of 32 lanes and of the next."""
WRITE, READ = "ds_store_b32 v1, v0", "ds_load_b32 v3, v2"


@pytest.mark.parametrize("order", ["lockstep", "forward", "reverse"])
def test_a_barrier_of_two_halves_keeps_apart_what_is_before_and_behind(order):
    given = {"chip": "gfx1201", "waves": 2, "shared": 256, "order": order}
    after = execute(SPLIT.format(before=WRITE, between="s_nop 0", behind=READ), **given)
    assert (after.machine.vectors[3] == np.arange(64).reshape(2, 32)[::-1]).all()


@pytest.mark.parametrize("order", ["lockstep", "forward", "reverse"])
@pytest.mark.parametrize(
    "places",
    [{"before": WRITE, "between": READ}, {"between": WRITE, "behind": READ}],
    ids=["before", "behind"],
)
def test_what_lies_between_the_halves_of_a_barrier_is_kept_apart_from_neither_side(places, order):
    text = SPLIT.format(**{"before": "s_nop 0", "between": "s_nop 0", "behind": "s_nop 0"} | places)
    with pytest.raises(Fault, match="LDS race"):
        execute(text, chip="gfx1201", waves=2, shared=256, order=order)


@pytest.mark.parametrize(
    ("half", "what"),
    [
        ("s_barrier_wait -1", "waits for a barrier that it has not signalled"),
        ("s_barrier_signal -1\n  s_barrier_signal -1", "signals a barrier that it has not waited for"),
    ],
)
def test_half_a_barrier_is_a_fault(half, what):
    with pytest.raises(Fault, match=what):
        execute(f"  {half}", chip="gfx1201", waves=2)


def test_a_barrier_that_is_not_the_workgroups_is_refused():
    with pytest.raises(NotImplementedError, match="another barrier"):
        execute("  s_barrier_signal 3", chip="gfx1201")


def test_what_depends_on_the_clock_is_undecided():
    racing = STORE_AND_LOAD.replace("  s_barrier\n", "").format(flip=256)
    after = execute(racing, waves=4, shared=1024, order="clock")
    (note,) = after.machine.notes
    assert note.startswith("undecided after") and "LDS race" in note


def test_a_value_that_several_waves_hold_may_be_written_by_all():
    text = "  v_and_b32 v1, 63, v0\n  v_lshlrev_b32 v1, 2, v1\n  ds_write_b32 v1, {}"
    execute(text.format("v1"), waves=2, shared=256)
    with pytest.raises(Fault, match="LDS race: it writes what line 3"):
        execute(text.format("v0"), waves=2, shared=256)


def test_the_clock_lets_short_paths_run_ahead():
    text = """
  v_readfirstlane_b32 s4, v0
  s_cmp_eq_u32 s4, 0
  s_cbranch_scc1 .Llate
  v_mov_b32 v1, 0
  ds_read_b32 v2, v1
  s_endpgm
.Llate:
  s_nop 7
  v_mov_b32 v1, 0
  ds_write_b32 v1, v0"""
    after = execute(text, waves=2, shared=64, order="clock")
    (note,) = after.machine.notes
    assert "it writes what line 6 `ds_read_b32" in note


@pytest.mark.parametrize("wait", ["s_waitcnt vmcnt(0)", "s_nop 0"])
def test_a_copy_lands_only_at_its_wait(wait):
    memory = Memory()
    address = memory.map(np.arange(256).astype(np.uint8))
    text = f"""
  s_mov_b32 m0, 0
  global_load_lds_dword v[2:3], off
  {wait}
  ds_read_b32 v5, v4
  s_waitcnt lgkmcnt(0)
  ds_read_b32 v6, v5"""
    given = {"v": {2: (address & M32) + LANE * 0, 3: address >> 32, 4: LANE * 4}, "memory": memory}
    if wait == "s_nop 0":
        with pytest.raises(Fault, match="vector register 5 decides something"):
            execute(text, shared=256, **given)
    else:
        with pytest.raises(Fault, match="outside of the 256 bytes"):
            execute(text, shared=256, **given)


def test_a_copy_that_lands_behind_a_barrier_is_a_race():
    memory = Memory()
    address = memory.map(np.zeros(4096, np.uint8))
    text = """
  s_mov_b32 m0, s8
  global_load_lds_dword v[2:3], off
  {}
  s_barrier
  v_xor_b32 v1, 256, v1
  ds_read_b32 v5, v1
  s_waitcnt vmcnt(0) lgkmcnt(0)"""

    def run(wait: str) -> None:
        v = {1: 0, 2: (address & M32) + LANE * 4, 3: address >> 32}
        after = prepared(text.format(wait), v=v, s={8: 0}, memory=memory, waves=2, shared=512)
        after.machine.set_scalar(8, np.array([0, 256]))
        after.machine.set_vector(1, np.arange(128).reshape(2, 64) * 4)
        after.machine.run()

    run("s_waitcnt vmcnt(0)")
    with pytest.raises(Fault, match="LDS race"):
        run("s_nop 0")


def test_a_program_that_does_not_end_is_a_fault():
    after = prepared("  s_nop 0\n.L:\n  s_branch .L")
    with pytest.raises(Fault, match="does not end"):
        after.machine.run(most=1000)
