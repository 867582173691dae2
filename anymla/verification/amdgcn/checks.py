"""What hardware does not tell: faults with their place, undefined registers, races in LDS."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anymla.errors import AnyMLAError
from anymla.verification.amdgcn.parse import Instruction

Array = NDArray[Any]
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


class Fault(AnyMLAError, RuntimeError):
    """A kernel did what it must not do.

    Attributes:
        kernel: Its name.
        instruction: Where.
        workgroup: x, y, z of the workgroup.
        wave: Of the workgroup.
        lane: Of the wave, -1 for all.
        address: In bytes: of global memory from the start of its buffer, or of LDS; -1 for none.
        what: What is wrong.
    """

    def __init__(
        self,
        kernel: str,
        instruction: Instruction,
        workgroup: Sequence[int],
        wave: int,
        lane: int,
        address: int,
        what: str,
    ) -> None:
        self.kernel, self.instruction, self.workgroup = kernel, instruction, tuple(workgroup)
        self.wave, self.lane, self.address, self.what = wave, lane, address, what
        place = f"{kernel}, {instruction.source}, " if instruction.source else f"{kernel}, "
        lane_words = "" if lane < 0 else f", lane {lane}"
        address_words = "" if address < 0 else f", address {address:#x}"
        super().__init__(
            f"{place}line {instruction.line} `{instruction.text}`, workgroup {self.workgroup}, wave {wave}"
            f"{lane_words}{address_words}: {what}"
        )


class BadAccess(Exception):
    """Found by memory, which knows neither kernel nor wave: the machine makes a Fault of it.

    Attributes:
        place: Wave of the group that executes, and lane.
    """

    def __init__(self, what: str, place: tuple[int, int], address: int) -> None:
        super().__init__(what)
        self.what, self.place, self.address = what, place, address


class Definedness:
    """Which lanes of which registers were written; values made from others that were not are not either.

    Reading such a register is no fault, since compilers copy and combine what they never use. Deciding by it
    is: an address, a stored value, a branch, the execution mask.

    Attributes:
        defined: [registers, waves] uint64, a bit a lane.
        partial: Registers of which a lane of some wave is not defined. All others need no look.
        follows: Whether anything is; else all counts as written.
    """

    def __init__(self, registers: int, waves: int, lanes: int, follows: bool = True) -> None:
        self.all, self.follows = np.uint64((1 << lanes) - 1), follows
        self.defined = np.zeros((registers, waves), np.uint64)
        self.partial = set(range(registers)) if follows else set()

    def write(self, register: int, at: Any, lanes: Array, undefined: Array | None = None) -> None:
        """Note that `lanes` (uint64 masks, one a wave of `at`) were written, some with undefined values."""
        if not self.follows:
            return
        row = self.defined[register]
        known = row[at] | lanes
        row[at] = known if undefined is None else known & ~(undefined & lanes)
        if (row == self.all).all():
            self.partial.discard(register)
        else:
            self.partial.add(register)

    def undefined(self, registers: Iterable[int], at: Any) -> Array | None:
        """Lanes in which one of these is not defined, None if there are none."""
        found = None
        for register in registers:
            if register in self.partial:
                lanes = ~self.defined[register][at] & self.all
                found = lanes if found is None else found | lanes
        return found if found is not None and found.any() else None


@dataclass(frozen=True, slots=True)
class Access:
    """One access of a group of waves to LDS, flat.

    Attributes:
        waves: Of the batch, one a lane that took part.
        places: Byte in the LDS of all workgroups laid end to end.
        size: Bytes a lane.
        instruction: Which.
        clock: When, by the crude clock.
        words: What it writes, [n, words] uint32.
    """

    waves: Array
    places: Array
    size: int
    instruction: Instruction
    clock: int
    words: Array | None = None

    @property
    def writes(self) -> bool:
        """Whether it writes."""
        return self.words is not None

    def spread(self, unit: int) -> Array:
        """Places in units, [n, units]."""
        found: Array = self.places[:, None] // unit + np.arange(self.size // unit)
        return found

    def values(self, unit: int) -> Array:
        """What it writes in units, [n, units]."""
        assert self.words is not None
        raw = np.ascontiguousarray(self.words).view(np.uint8)[:, : self.size]
        return np.ascontiguousarray(raw).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[unit])


class Journal:
    """All accesses to LDS between two barriers; two waves at one byte, one of them writing, are a race."""

    def __init__(self, num_bytes: int, wave_of: Array) -> None:
        self.num_bytes, self.wave_of = num_bytes, wave_of
        self.entries: list[Access] = []

    def conflicts(self) -> tuple[Access, Access, int, int] | None:
        """The first race since the last barrier: earlier and later access, byte, wave of the later.

        Forgets all accesses.
        """
        entries, self.entries = self.entries, []
        if not any(entry.writes for entry in entries):
            return None
        unit = min(4, *(entry.size for entry in entries))
        users = np.zeros((2, -(-self.num_bytes // unit)), np.uint32)
        for entry in entries:
            place, user = entry.spread(unit), np.uint32(1) << self.wave_of[entry.waves].astype(np.uint32)
            for bit in np.unique(user):
                users[int(entry.writes), place[user == bit]] |= bit
        readers, writers = users
        anyone = readers | writers
        racing = (writers != 0) & ((anyone & (anyone - np.uint32(1))) != 0)
        if racing.any():
            racing &= _differs(entries, unit, len(racing)) | ((readers & ~writers) != 0)
        if not racing.any():
            return None
        return _pair(entries, int(racing.argmax()), unit, self.wave_of)


def _differs(entries: Sequence[Access], unit: int, places: int) -> Array:
    """Where writes differ: waves that hold copies of one value may all write it, as long as none reads."""
    last, differs = np.zeros(places, np.uint32), np.zeros(places, bool)
    writes = [(entry.spread(unit), entry.values(unit)) for entry in entries if entry.writes]
    for place, value in writes:
        last[place] = value
    for place, value in writes:
        differs[place[last[place] != value]] = True
    return differs


def _pair(
    entries: Sequence[Access], place: int, unit: int, wave_of: Array
) -> tuple[Access, Access, int, int]:
    """The two accesses of a place that are a race, one of which writes."""
    seen: list[tuple[Access, int]] = []
    for entry in entries:
        hit = (entry.spread(unit) == place).any(1)
        for wave in np.unique(entry.waves[hit]):
            for other, other_wave in seen:
                if wave_of[other_wave] != wave_of[wave] and (entry.writes or other.writes):
                    return other, entry, place * unit, int(wave)
            seen.append((entry, int(wave)))
    raise AssertionError("a race has two accesses")
