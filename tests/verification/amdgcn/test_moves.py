"""Every row that loads, stores, multiplies matrices or directs the program."""

import numpy as np
import pytest
import torch
from execute import execute, f32, prepared

from anymla.verification.amdgcn.checks import Fault
from anymla.verification.amdgcn.instructions import GROUPS
from anymla.verification.amdgcn.instructions.control import IGNORED, Ignored
from anymla.verification.amdgcn.instructions.matrix import Mfma, Wmma
from anymla.verification.amdgcn.instructions.moves import Load, LoadToShared, ScalarLoad, Store
from anymla.verification.amdgcn.instructions.shared import SharedLoad, SharedStore
from anymla.verification.amdgcn.memory import Memory
from anymla.verification.amdgcn.parse import Unknown, parse

LANE = np.arange(64)
BYTES = (np.arange(4096) * 37 % 251).astype(np.uint8)
ROWS = {row.mnemonic: row for name in ("moves", "shared", "matrix", "control") for row in GROUPS[name]}
M32 = (1 << 32) - 1

# What a load makes of the bytes that it finds, by the end of its name, on registers full of 0xEE.
EXTENDED = {
    "ubyte": lambda b: [b[0]],
    "u8": lambda b: [b[0]],
    "sbyte": lambda b: [b[0] - (b[0] >> 7 << 8) & M32],
    "i8": lambda b: [b[0] - (b[0] >> 7 << 8) & M32],
    "ushort": lambda b: [b[0] | b[1] << 8],
    "u16": lambda b: [b[0] | b[1] << 8],
    "sshort": lambda b: [(b[0] | b[1] << 8) - (b[1] >> 7 << 16) & M32],
    "i16": lambda b: [(b[0] | b[1] << 8) - (b[1] >> 7 << 16) & M32],
    "short_d16": lambda b: [0xEEEE0000 | b[0] | b[1] << 8],
    "d16_b16": lambda b: [0xEEEE0000 | b[0] | b[1] << 8],
    "u16_d16": lambda b: [0xEEEE0000 | b[0] | b[1] << 8],
    "short_d16_hi": lambda b: [(b[0] | b[1] << 8) << 16 | 0xEEEE],
    "d16_hi_b16": lambda b: [(b[0] | b[1] << 8) << 16 | 0xEEEE],
    "u16_d16_hi": lambda b: [(b[0] | b[1] << 8) << 16 | 0xEEEE],
    "ubyte_d16": lambda b: [0xEEEE0000 | b[0]],
    "d16_u8": lambda b: [0xEEEE0000 | b[0]],
    "u8_d16": lambda b: [0xEEEE0000 | b[0]],
    "ubyte_d16_hi": lambda b: [b[0] << 16 | 0xEEEE],
    "d16_hi_u8": lambda b: [b[0] << 16 | 0xEEEE],
    "u8_d16_hi": lambda b: [b[0] << 16 | 0xEEEE],
    "sbyte_d16": lambda b: [0xEEEE0000 | b[0] - (b[0] >> 7 << 8) & 0xFFFF],
    "d16_i8": lambda b: [0xEEEE0000 | b[0] - (b[0] >> 7 << 8) & 0xFFFF],
    "i8_d16": lambda b: [0xEEEE0000 | b[0] - (b[0] >> 7 << 8) & 0xFFFF],
    "sbyte_d16_hi": lambda b: [(b[0] - (b[0] >> 7 << 8) & 0xFFFF) << 16 | 0xEEEE],
    "d16_hi_i8": lambda b: [(b[0] - (b[0] >> 7 << 8) & 0xFFFF) << 16 | 0xEEEE],
    "i8_d16_hi": lambda b: [(b[0] - (b[0] >> 7 << 8) & 0xFFFF) << 16 | 0xEEEE],
}
DWORDS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4, "b32": 1, "b64": 2, "b96": 3, "b128": 4}
PARTS = {"byte": 1, "b8": 1, "short": 2, "b16": 2}


def expected_words(form: str, raw) -> list[int]:
    raw = [int(b) for b in raw]
    if form in DWORDS:
        return [int.from_bytes(bytes(raw[4 * n : 4 * n + 4]), "little") for n in range(DWORDS[form])]
    return EXTENDED[form](raw)


def form_of(mnemonic: str) -> str:
    return mnemonic.split("_", 2)[2]


def at(address: int, register: int) -> dict[int, int]:
    return {register: address & M32, register + 1: address >> 32}


def of(kind, prefix):
    return [name for name, row in ROWS.items() if type(row) is kind and name.startswith(prefix)]


def test_every_row_is_tested_here():
    tested = {Load, Store, LoadToShared, ScalarLoad, SharedLoad, SharedStore, Mfma, Wmma, Ignored}
    flow = {
        "s_branch", "s_cbranch_scc0", "s_cbranch_scc1", "s_cbranch_vccz", "s_cbranch_vccnz",
        "s_cbranch_execz", "s_cbranch_execnz", "s_endpgm", "s_barrier", "s_barrier_signal", "s_barrier_wait",
        "s_waitcnt", "s_waitcnt_vscnt", "s_wait_loadcnt",
        "s_wait_storecnt", "s_wait_dscnt", "s_wait_kmcnt", "s_wait_loadcnt_dscnt", "s_wait_storecnt_dscnt",
        "s_setreg_imm32_b32",
    }  # fmt: skip
    assert {name for name, row in ROWS.items() if type(row) not in tested} == flow
    assert of(Load, "") == [*of(Load, "buffer"), *of(Load, "global"), *of(Load, "flat"), *of(Load, "scratch")]


WAIT = "\n  s_waitcnt vmcnt(0) lgkmcnt(0)"


@pytest.mark.parametrize("mnemonic", [*of(Load, "buffer"), *of(Load, "global"), *of(Load, "flat")])
def test_a_load_extends_what_it_finds(mnemonic):
    memory, form = Memory(), form_of(mnemonic)
    address = memory.map(BYTES.copy())
    count = DWORDS.get(form, 1)
    target = f"v[10:{9 + count}]" if count > 1 else "v10"
    old = dict.fromkeys(range(10, 10 + count), 0xEEEEEEEE)
    if mnemonic.startswith("buffer"):
        text = f"  {mnemonic} {target}, v2, s[4:7], s8 offen offset:16"
        given = {"v": {2: LANE * 16, **old}, "s": {**at(address, 4), 6: 4096, 7: 0x27000, 8: 32}}
    else:
        text = f"  {mnemonic} {target}, v[2:3]{', off' if mnemonic[0] == 'g' else ''} offset:48"
        given = {"v": {2: (address & M32) + LANE * 16, 3: address >> 32, **old}}
    after = execute(text + WAIT, memory=memory, **given)
    for lane in (0, 5, 63):
        raw = BYTES[48 + lane * 16 :][:16]
        assert [after.v(10 + n)[lane] for n in range(count)] == expected_words(form, raw)


@pytest.mark.parametrize("mnemonic", [*of(Store, "buffer"), *of(Store, "global"), *of(Store, "flat")])
def test_a_store_writes_its_bytes_and_no_others(mnemonic):
    memory, form, target = Memory(), form_of(mnemonic), np.zeros(2048, np.uint8)
    address = memory.map(target)
    count = DWORDS.get(form, 1)
    data = f"v[10:{9 + count}]" if count > 1 else "v10"
    values = {10 + n: 0x11223344 + n + LANE * 0x01010101 for n in range(count)}
    if mnemonic.startswith("buffer"):
        text = f"  {mnemonic} {data}, v2, s[4:7], 0 offen"
        given = {"v": {2: LANE * 16, **values}, "s": {**at(address, 4), 6: 2048, 7: 0x27000}}
    else:
        text = f"  {mnemonic} v[2:3], {data}{', off' if mnemonic[0] == 'g' else ''}"
        given = {"v": {2: (address & M32) + LANE * 16, 3: address >> 32, **values}}
    execute(text, memory=memory, mask=0b101, **given)
    for lane in (0, 2):
        words = b"".join(int(values[10 + n][lane]).to_bytes(4, "little") for n in range(count))
        size = 4 * count if form in DWORDS else 1 if "8" in form or "byte" in form else 2
        wanted = words[2:] if "hi" in form else words
        assert bytes(target[lane * 16 :][:size]) == wanted[:size]
        assert not target[lane * 16 + size : lane * 16 + 16].any()
    assert not target[16:32].any() and not target[48:].any()


@pytest.mark.parametrize("form", DWORDS)
def test_scratch_is_a_lanes_own(form):
    if f"scratch_load_{form}" not in ROWS:
        pytest.skip("not a form of scratch")
    count = DWORDS[form]
    registers = [f"v[{n}:{n + count - 1}]" if count > 1 else f"v{n}" for n in (10, 20)]
    text = f"""
  .amdhsa_private_segment_fixed_size 64
  scratch_store_{form} off, {registers[0]}, off offset:16
  scratch_load_{form} {registers[1]}, off, off offset:16{WAIT}"""
    after = execute(text, v={10 + n: LANE + 100 * n for n in range(count)})
    assert [after.v(20 + n)[7] for n in range(count)] == [7 + 100 * n for n in range(count)]


@pytest.mark.parametrize("mnemonic", of(ScalarLoad, ""))
def test_scalars_are_loaded(mnemonic):
    memory, count = Memory(), ROWS[mnemonic].words
    address = memory.map(BYTES.copy())
    target = f"s[16:{15 + count}]" if count > 1 else "s16"
    after = execute(f"  {mnemonic} {target}, s[4:5], 0x20{WAIT}", memory=memory, s=at(address, 4))
    words = BYTES[32:].view(np.uint32)
    assert [after.s(16 + n) for n in range(count)] == [int(word) for word in words[:count]]


@pytest.mark.parametrize("mnemonic", of(LoadToShared, ""))
def test_a_copy_lands_in_lds_at_its_wait(mnemonic):
    memory, size = Memory(), ROWS[mnemonic].kind.size
    address = memory.map(BYTES.copy())
    text = f"""
  s_mov_b32 m0, 128
  {mnemonic} v[2:3], off
  s_waitcnt vmcnt(0)
  ds_read_b32 v5, v4{WAIT}"""
    given = {"v": {2: (address & M32) + LANE * size, 3: address >> 32, 4: 128 + LANE * size}}
    after = execute(text, memory=memory, shared=2048, **given)
    assert after.v(5) == [int(word) for word in BYTES[: 64 * size].view(np.uint32)[:: size // 4]]


@pytest.mark.parametrize("mnemonic", [n for n in of(SharedLoad, "ds_read_") if "tr" not in n])
def test_lds_is_read(mnemonic):
    form = mnemonic.split("_", 2)[2]
    count = DWORDS.get(form, 1)
    target = f"v[10:{9 + count}]" if count > 1 else "v10"
    after = prepared(
        f"  {mnemonic} {target}, v2 offset:32{WAIT}",
        v={2: LANE * 16, **dict.fromkeys(range(10, 10 + count), 0xEEEEEEEE)},
        shared=4096,
    )
    after.machine.shared.store(np.arange(0, 4096, 4), BYTES.view(np.uint32)[:, None], 4)
    after.machine.run()
    assert [after.v(10 + n)[9] for n in range(count)] == expected_words(form, BYTES[32 + 9 * 16 :][:16])


@pytest.mark.parametrize("mnemonic", of(SharedStore, "ds_write_"))
def test_lds_is_written(mnemonic):
    form = mnemonic.split("_", 2)[2]
    count = DWORDS.get(form, 1)
    data = f"v[10:{9 + count}]" if count > 1 else "v10"
    values = {10 + n: 0x11223344 + n + LANE * 0x01010101 for n in range(count)}
    after = execute(f"  {mnemonic} v2, {data} offset:32", v={2: LANE * 16, **values}, shared=2048)
    words = b"".join(int(values[10 + n][9]).to_bytes(4, "little") for n in range(count))
    size = 4 * count if form in DWORDS else 1 if "b8" in form else 2
    found, unwritten = after.machine.shared.load(np.arange(32 + 9 * 16, 32 + 9 * 16 + size), 1)
    assert bytes(found.astype(np.uint8)) == (words[2:] if "hi" in form else words)[:size]
    assert unwritten is None


@pytest.mark.parametrize("far", ["", "st64"])
@pytest.mark.parametrize("form", ["b32", "b64"])
def test_pairs_are_written_and_read(form, far):
    count, unit = DWORDS[form], 4 * DWORDS[form] * (64 if far else 1)
    one, other, both = (
        f"v[{n}:{n + m - 1}]" if m > 1 else f"v{n}" for n, m in ((10, count), (20, count), (30, 2 * count))
    )
    text = f"""
  ds_write2{far}_{form} v2, {one}, {other} offset0:1 offset1:3
  s_waitcnt lgkmcnt(0)
  ds_read2{far}_{form} {both}, v3 offset0:2 offset1:0{WAIT}"""
    given = {10 + n: 100 + n for n in range(count)} | {20 + n: 200 + n for n in range(count)}
    after = execute(text, v={2: 8, 3: 8 + unit, **given}, mask=1, shared=16384)
    assert [after.v(30 + n)[0] for n in range(2 * count)] == [
        *range(200, 200 + count),
        *range(100, 100 + count),
    ]


@pytest.mark.parametrize(("size", "mnemonic"), [(2, "ds_read_b64_tr_b16"), (1, "ds_read_b64_tr_b8")])
def test_a_block_is_read_transposed(size, mnemonic):
    """Sixteen lanes read eight bytes each, row after row of sixteen elements; lane i gets column i."""
    dtype, rows = (np.uint16, 4) if size == 2 else (np.uint8, 8)
    block = np.arange(4 * rows * 16).astype(dtype).reshape(4, rows, 16)
    after = prepared(f"  {mnemonic} v[10:11], v2{WAIT}", v={2: LANE * 8}, shared=512, chip="gfx950")
    after.machine.shared.store(np.arange(0, 512, 4), block.ravel().view(np.uint32)[:, None], 4)
    after.machine.run()
    got = np.stack([np.array(after.v(10 + n), np.uint32) for n in (0, 1)], 1).view(dtype).reshape(4, 16, rows)
    assert (got == block.transpose(0, 2, 1)).all()


FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "bf8": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "xf32": torch.float32,
}


def in_registers(matrix, size: int, depth: int, kind: str) -> np.ndarray:
    """[words, 64]: what each lane holds of a [size, depth] operand, element by element."""
    groups, held = 64 // size, depth * size // 64
    lanes = [[matrix[lane % size, lane // size * held + n] for n in range(held)] for lane in range(64)]
    assert groups * held == depth
    raw = torch.tensor(lanes).to(FORMATS[kind]).view(torch.uint8).numpy()
    return np.ascontiguousarray(raw).view(np.uint32).T


@pytest.mark.parametrize("mnemonic", of(Mfma, ""))
def test_matrices_are_multiplied(mnemonic):
    row = ROWS[mnemonic]
    size, depth = row.size, row.depth
    kinds = row.kinds or ("fp8", "bf8")
    rng = np.random.default_rng(1)
    # Small whole numbers are exact in every format.
    a, b, c = (
        rng.integers(-3, 4, shape).astype(np.float32)
        for shape in ((size, depth), (size, depth), (size, size))
    )
    left, right = (in_registers(m, size, depth, k) for m, k in ((a, kinds[0]), (b, kinds[1])))
    count = size * size // 64
    where = {}
    for lane in range(64):
        for r in range(count):
            i = 4 * (lane // 16) + r if size == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            where[r, lane] = i, lane % size
    sums = {r: [f32(float(c[where[r, lane]])) for lane in range(64)] for r in range(count)}
    v = {10 + n: words for n, words in enumerate(left)} | {30 + n: words for n, words in enumerate(right)}
    spans = [
        f"v[{n}:{n + len(words) - 1}]" if len(words) > 1 else f"v{n}"
        for n, words in ((10, left), (30, right))
    ]
    modifiers = "" if row.kinds else " blgp:1"
    text = f"  {mnemonic} a[0:{count - 1}], {spans[0]}, {spans[1]}, a[0:{count - 1}]{modifiers}"
    after = execute(text, v=v, a=sums, chip="gfx950", mask=1)
    product = a @ b.T + c
    for r in range(count):
        assert after.a(r) == [f32(float(product[where[r, lane]])) for lane in range(64)]


@pytest.mark.parametrize("chip", ["gfx1100", "gfx1201"])
@pytest.mark.parametrize("mnemonic", of(Wmma, ""))
def test_matrices_are_multiplied_by_waves_of_32(mnemonic, chip):
    kinds, newer = ROWS[mnemonic].kinds, chip == "gfx1201"
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(-3, 4, (16, 16)).astype(np.float32) for _ in range(3))

    def held(matrix, kind: str) -> np.ndarray:
        lanes = [matrix[i % 16, i // 16 * 8 :][:8] if newer else matrix[i % 16] for i in range(32)]
        raw = torch.tensor(np.stack(lanes)).to(FORMATS[kind]).view(torch.uint8).numpy()
        return np.ascontiguousarray(raw).view(np.uint32).T

    left, right = held(a, kinds[0]), held(b, kinds[1])
    where = {
        (r, i): (r + 8 * (i // 16) if newer else 2 * r + i // 16, i % 16) for r in range(8) for i in range(32)
    }
    sums = {50 + r: [f32(float(c[where[r, i]])) for i in range(32)] for r in range(8)}
    v = (
        {10 + n: words for n, words in enumerate(left)}
        | {30 + n: words for n, words in enumerate(right)}
        | sums
    )
    spans = ", ".join(f"v[{n}:{n + len(words) - 1}]" for n, words in ((10, left), (30, right)))
    after = execute(f"  {mnemonic} v[50:57], {spans}, v[50:57]", v=v, chip=chip)
    product = a @ b.T + c
    for r in range(8):
        assert after.v(50 + r) == [f32(float(product[where[r, i]])) for i in range(32)]


def test_a_barrier_of_two_halves_is_one():
    text = """
  v_lshlrev_b32 v1, 2, v0
  ds_store_b32 v1, v0
  s_wait_dscnt 0x0
  s_barrier_signal -1
  s_barrier_wait -1
  v_xor_b32 v2, 128, v1
  ds_load_b32 v3, v2
  s_wait_dscnt 0x0"""
    after = execute(text, waves=2, shared=256, chip="gfx1201")
    assert after.v(3) == list(range(32, 64))


def test_the_fast_product_of_fp32_sees_ten_bits():
    v = {10: f32(1 + 2.0**-11 + 2.0**-12), 11: 0, 12: f32(1.0), 13: 0}
    text = "  v_mfma_f32_16x16x8_xf32 v[20:23], v[10:11], v[12:13], 0"
    assert execute(text, v=v).v(20)[0] == f32(4 * (1 + 2.0**-10))


BRANCHES = {
    "s_cbranch_scc0": ({"scc": False}, {"scc": True}),
    "s_cbranch_scc1": ({"scc": True}, {"scc": False}),
    "s_cbranch_vccz": ({"vcc": 0}, {"vcc": 1 << 40}),
    "s_cbranch_vccnz": ({"vcc": 1 << 40}, {"vcc": 0}),
    "s_cbranch_execz": ({"mask": 0}, {"mask": 1}),
    "s_cbranch_execnz": ({"mask": 1}, {"mask": 0}),
    "s_branch": ({}, None),
}


@pytest.mark.parametrize("mnemonic", BRANCHES)
def test_a_branch_is_taken_where_its_condition_holds(mnemonic):
    text = f"""
  s_mov_b32 s4, 1
  {mnemonic} .L
  s_mov_b32 s4, 2
.L:"""
    taken, straight = BRANCHES[mnemonic]
    assert execute(text, **taken).s(4) == 1
    if straight is not None:
        assert execute(text, **straight).s(4) == 2


def test_waves_part_and_meet_again():
    text = """
  v_readfirstlane_b32 s4, v0
  s_cmp_lt_u32 s4, 128
  s_cbranch_scc1 .Lsmall
  s_mov_b32 s5, 7
.Lsmall:
  s_add_u32 s6, s4, 1"""
    after = execute(text, waves=4, s={5: 1})
    assert after.machine.scalars[5].tolist() == [1, 1, 7, 7]
    assert after.machine.scalars[6].tolist() == [1, 65, 129, 193]
    assert after.machine.counts[-2:] == [4, 4]


@pytest.mark.parametrize("mnemonic", IGNORED)
def test_what_concerns_time_changes_nothing(mnemonic):
    after = execute(f"  {mnemonic}", s={4: 5})
    assert after.s(4) == 5


@pytest.mark.parametrize(
    ("text", "chip"),
    [
        ("s_waitcnt vmcnt(0)", "gfx942"),
        ("s_waitcnt 0", "gfx942"),
        ("s_wait_loadcnt 0x0", "gfx1201"),
        ("s_wait_loadcnt_dscnt 0x0", "gfx1201"),
    ],
)
def test_a_register_may_be_used_once_its_load_was_waited_for(text, chip):
    memory = Memory()
    address = memory.map(np.arange(1024, dtype=np.uint8))
    load, use = "  global_load_dword v4, v[2:3], off", "  v_mov_b32 v5, v4"
    given = {"v": {2: address & M32, 3: address >> 32}, "chip": chip, "memory": memory}
    assert execute(f"{load}\n  {text}\n{use}", **given).v(5)[0] == 0x03020100
    with pytest.raises(Fault, match="vector register 4 is used before its load was waited for"):
        execute(f"{load}\n{use}", **given)


@pytest.mark.parametrize(
    "text", ["s_wait_dscnt 0x0", "s_wait_storecnt_dscnt 0x0", "s_wait_loadcnt_dscnt 0x300"]
)
def test_lds_is_waited_for_by_its_own_counter(text):
    lines = "  ds_write_b32 v2, v3\n  ds_read_b32 v4, v2\n  {}\n  v_mov_b32 v5, v4"
    given = {"v": {2: np.arange(32) * 4, 3: 9}, "shared": 128, "chip": "gfx1201"}
    assert execute(lines.format(text), **given).v(5)[0] == 9
    for other in ("s_wait_storecnt 0x0", "s_waitcnt_vscnt null, 0x0", "s_wait_kmcnt 0x0"):
        with pytest.raises(Fault, match="before its load was waited for"):
            execute(lines.format(other), **given)


def test_an_older_load_has_landed_when_one_may_be_under_way():
    memory = Memory()
    address = memory.map(np.arange(1024, dtype=np.uint8))
    text = """
  global_load_dword v4, v[2:3], off
  global_load_dword v5, v[2:3], off offset:4
  s_waitcnt vmcnt(1)
  v_mov_b32 v6, {}"""
    given = {"v": {2: address & M32, 3: address >> 32}, "memory": memory}
    assert execute(text.format("v4"), **given).v(6)[0] == 0x03020100
    with pytest.raises(Fault, match="vector register 5"):
        execute(text.format("v5"), **given)


def test_a_load_may_follow_another_into_the_same_register():
    memory = Memory()
    address = memory.map(np.arange(1024, dtype=np.uint8))
    text = """
  global_load_dword v4, v[2:3], off
  global_load_dword v4, v[2:3], off offset:4
  s_waitcnt vmcnt({})
  v_mov_b32 v5, v4"""
    given = {"v": {2: address & M32, 3: address >> 32}, "memory": memory}
    assert execute(text.format(0), **given).v(5)[0] == 0x07060504
    with pytest.raises(Fault, match="vector register 4"):
        execute(text.format(1), **given)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("v_frobnicate_b32 v0, v1\n  s_dance s0", "s_dance, v_frobnicate_b32"),
        ("v_add_f32_e64 v0, v1, v2 frob:3", "frob:3"),
        ("buffer_load_dword v0, v1, s[4:7], 0 idxen", "idxen"),
        ("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0 cbsz:1", "cbsz:1"),
        ("s_branch .Lnowhere", ".Lnowhere"),
        ("v_add_u32 v0, v1", "2 operands"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1", "not modelled"),
        ("v_mov_b32_dpp v0, v1 row_dance:3", "no known move"),
    ],
)
def test_what_is_not_known_is_refused_by_name(text, name):
    with pytest.raises(Unknown, match=name.replace("(", r"\(")):
        execute(f"  {text}")


def test_a_disassembly_branches_by_distance():
    text = """
kernel:
	s_mov_b32 s4, 1                                            // 000000001000: BE840081
	s_branch 1                                                 // 000000001004: BF820001
	s_mov_b32 s4, 2                                            // 000000001008: BE840082
	s_nop 0                                                    // 00000000100C: BF800000
"""
    assert execute(text).s(4) == 1


def test_a_kernel_is_parsed_with_its_places():
    parsed = parse(
        """
	.globl	dance
dance:
	.file	1 "/x" "dance.py"
	.loc	1 17 5
	v_add_f32_e64 v1, |v2|, -v[3:3] clamp  ; a comment
	.amdhsa_kernarg_size 24
"""
    )
    (only,) = parsed.instructions
    assert (parsed.name, only.mnemonic, only.source, only.line) == ("dance", "v_add_f32", "dance.py:17", 6)
    assert only.operands[1].abs and only.operands[2].neg and dict(only.modifiers) == {"clamp": ""}
    assert parsed.descriptor["kernarg_size"] == 24
