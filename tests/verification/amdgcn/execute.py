"""Runs a few lines of assembly on one wave, with registers and memory as a test says."""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from anymla.hardware.arches import ARCHES
from anymla.verification.amdgcn.machine import EXEC, SCALARS, VCC, Machine
from anymla.verification.amdgcn.memory import Memory
from anymla.verification.amdgcn.program import Program

FORMS = {"f16": "<e", "f32": "<f", "f64": "<d", "u64": "<Q", "i64": "<q", "i32": "<i", "u32": "<I"}


def bits(kind: str, value: Any) -> int:
    """The bits of a value, by Python's own packing."""
    if kind in FORMS:
        raw = struct.pack(FORMS[kind], value)
        return int.from_bytes(raw, "little")
    width = {"i16": 16, "u16": 16, "i24": 24, "u24": 24, "bf16": 16}.get(kind, 32)
    return int(value) & (1 << width) - 1


def f32(value: float) -> int:
    """The bits of an fp32 value."""
    return bits("f32", value)


def f16(value: float) -> int:
    """The bits of an fp16 value."""
    return bits("f16", value)


@dataclass
class After:
    """A machine after its end."""

    machine: Machine
    first_accumulator: int

    def s(self, register: int) -> int:
        """A scalar register of the first wave."""
        return int(self.machine.scalars[register, 0])

    def s64(self, register: int) -> int:
        """A pair of scalar registers."""
        return self.s(register) | self.s(register + 1) << 32

    def v(self, register: int) -> list[int]:
        """A vector register of the first wave, lane by lane."""
        return [int(value) for value in self.machine.vectors[register, 0]]

    def a(self, register: int) -> list[int]:
        """An accumulation register of the first wave."""
        return self.v(register + self.first_accumulator)

    @property
    def scc(self) -> bool:
        """The condition code."""
        return bool(self.machine.scc_of[0])


def prepared(
    text: str,
    *,
    chip: str = "gfx942",
    v: dict[int, Any] | None = None,
    s: dict[int, Any] | None = None,
    a: dict[int, Any] | None = None,
    scc: bool | None = None,
    mask: int | None = None,
    vcc: int | None = None,
    memory: Memory | None = None,
    shared: int = 0,
    waves: int = 1,
    workgroups: int = 1,
    order: str = "lockstep",
) -> After:
    """A machine before the first instruction; values are numbers, or a list of one for each lane."""
    program = Program.of(text + "\n  s_endpgm", chip)
    groups = np.stack([np.arange(workgroups), np.zeros(workgroups), np.zeros(workgroups)], 1).astype(int)
    machine = Machine(program.launch, memory or Memory(), groups, waves, shared, order)
    used = [o.index + o.count for i in program.text.instructions for o in i.operands if o.kind == "v"]
    vectors = max(used, default=1)
    for registers, base in ((v or {}, 0), (a or {}, vectors)):
        for register, value in registers.items():
            if base + register >= len(machine.vectors):
                continue
            machine.set_vector(
                base + register,
                np.broadcast_to(np.asarray(value, np.uint32), (machine.num_waves, machine.lanes)),
            )
    if not v or 0 not in v:
        threads = machine.wave_of[:, None] * machine.lanes + np.arange(machine.lanes)
        machine.set_vector(0, threads.astype(np.uint32))
    for register, value in (s or {}).items():
        machine.set_scalar(register, np.uint32(value & 0xFFFFFFFF))
        if value >> 32:
            machine.set_scalar(register + 1, np.uint32(value >> 32))
    for register, value in ((EXEC, mask), (VCC, vcc)):
        if value is not None:
            machine.set_scalar(register, np.uint32(value & 0xFFFFFFFF))
            machine.set_scalar(register + 1, np.uint32(value >> 32))
    if scc is not None:
        machine.scc_of[:] = scc
        machine.defined.write(253, slice(None), machine.defined.all)
    return After(machine, vectors)


def execute(text: str, **given: Any) -> After:
    """Run a few lines; see `prepared`."""
    after = prepared(text, **given)
    after.machine.run()
    return after


def lanes(chip: str) -> int:
    """Lanes of a wave."""
    return ARCHES[chip].wave_size


__all__ = ["SCALARS", "After", "bits", "execute", "f16", "f32", "lanes", "prepared"]
