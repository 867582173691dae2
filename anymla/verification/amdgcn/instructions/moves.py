"""Loads and stores: scalar memory, buffers, global memory, scratch; and copies from there into LDS."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from anymla.verification.amdgcn.instructions.rows import (
    I16,
    I32,
    I64,
    U16,
    U32,
    U64,
    Array,
    Context,
    Fetch,
    Row,
    dword,
    numbers_of,
    step,
)
from anymla.verification.amdgcn.machine import M0, SCALARS, Machine, Run, Step
from anymla.verification.amdgcn.memory import GARBAGE
from anymla.verification.amdgcn.parse import Operand, Unknown

HINTS = ("glc", "slc", "dlc", "nt", "sc0", "sc1", "scc", "th", "scope")
"""Modifiers that concern caches, which are not modelled."""


@dataclass(frozen=True)
class Kind:
    """What is moved for one lane.

    Attributes:
        size: Bytes.
        extend: Makes uint32 of the zero-extended bytes.
        half: "low" or "high" for a load that leaves, or a store that takes, one half of a register.
    """

    size: int
    extend: Callable[[Array], Array] | None = None
    half: str = ""


def _sign8(words: Array) -> Array:
    return words.astype(np.int8).astype(I32).view(U32)


def _sign16(words: Array) -> Array:
    return words.astype(I16).astype(I32).view(U32)


def _sign8_to_16(words: Array) -> Array:
    found: Array = words.astype(np.int8).astype(I16).view(U16).astype(U32)
    return found


WORDS = {
    "dword": Kind(4),
    "dwordx2": Kind(8),
    "dwordx3": Kind(12),
    "dwordx4": Kind(16),
    "b32": Kind(4),
    "b64": Kind(8),
    "b96": Kind(12),
    "b128": Kind(16),
}
LOADS = {
    **WORDS,
    **dict.fromkeys(("ubyte", "u8"), Kind(1)),
    **dict.fromkeys(("sbyte", "i8"), Kind(1, _sign8)),
    **dict.fromkeys(("ushort", "u16"), Kind(2)),
    **dict.fromkeys(("sshort", "i16"), Kind(2, _sign16)),
    **dict.fromkeys(("short_d16", "d16_b16", "u16_d16"), Kind(2, half="low")),
    **dict.fromkeys(("short_d16_hi", "d16_hi_b16", "u16_d16_hi"), Kind(2, half="high")),
    **dict.fromkeys(("ubyte_d16", "d16_u8", "u8_d16"), Kind(1, half="low")),
    **dict.fromkeys(("ubyte_d16_hi", "d16_hi_u8", "u8_d16_hi"), Kind(1, half="high")),
    **dict.fromkeys(("sbyte_d16", "d16_i8", "i8_d16"), Kind(1, _sign8_to_16, "low")),
    **dict.fromkeys(("sbyte_d16_hi", "d16_hi_i8", "i8_d16_hi"), Kind(1, _sign8_to_16, "high")),
}
STORES = {
    **WORDS,
    **dict.fromkeys(("byte", "b8"), Kind(1)),
    **dict.fromkeys(("short", "b16"), Kind(2)),
    **dict.fromkeys(("byte_d16_hi", "d16_hi_b8", "b8_d16_hi"), Kind(1, half="high")),
    **dict.fromkeys(("short_d16_hi", "d16_hi_b16", "b16_d16_hi"), Kind(2, half="high")),
}


def put_words(m: Machine, number: int, kind: Kind, words: Array) -> None:
    """Write what was loaded, [waves, lanes, words], into registers from `number` on."""
    if kind.half:
        value = words[..., 0] if kind.extend is None else kind.extend(words[..., 0])
        old = m.v[number]
        low = kind.half == "low"
        m.put(number, value | old & U32(0xFFFF0000) if low else value << U32(16) | old & U32(0xFFFF))
    elif kind.extend is not None:
        m.put(number, kind.extend(words[..., 0]))
    else:
        for word in range(words.shape[-1]):
            m.put(number + word, words[..., word])


def words_of(m: Machine, number: int, kind: Kind) -> Array:
    """What is stored, [waves, lanes, words], from registers from `number` on."""
    if kind.half:
        upper: Array = m.v[number] >> U32(16)
        return upper[..., None]
    return np.stack([m.v[number + word] for word in range(max(kind.size // 4, 1))], -1)


Place = Callable[[Machine], tuple[Array, Array | None]]
"""Addresses [waves, lanes] uint64, and the lanes that take part."""


@dataclass(frozen=True)
class Space:
    """How instructions of one family say where.

    Attributes:
        name: What mnemonics begin with.
        operands: Of a place, behind the data.
        place: Makes it of those operands.
    """

    name: str
    operands: int
    place: Callable[[Context, Sequence[Operand], int], Place]


def _buffer(context: Context, operands: Sequence[Operand], size: int) -> Place:
    """A raw buffer: base, bytes and flags in four scalar registers; what is outside is not accessed."""
    vector, resource, scalar = operands
    if context.flag("idxen"):
        raise Unknown(f"modifier idxen of `{context.instruction.text}` got no meaning here")
    by_lane = dword(vector, context) if context.flag("offen") else None
    offset, register = context.number("offset"), context.register(resource)
    by_wave = dword(scalar, context)

    def place(m: Machine) -> tuple[Array, Array | None]:
        high = m.s[register + 1]
        # Without an index a stride multiplies nothing, unless it permutes addresses too or lanes are counted.
        if ((high >> U32(31)) | (m.s[register + 3] >> U32(23) & U32(context.generation == 9))).any():
            raise m.fault("the descriptor swizzles addresses; needs a raw buffer", int(m.waves[0]))
        base = m.s[register].astype(U64) | (high & U32(0xFFFF)).astype(U64) << U64(32)
        within = np.full(m.mask.shape, offset, U64)
        if by_lane is not None:
            within += by_lane(m)
        inside = within + U64(size) <= m.s[register + 2][:, None]
        mask = None if m.full and inside.all() else m.mask & inside
        return base[:, None] + within + by_wave(m), mask

    return place


def _global(context: Context, operands: Sequence[Operand], size: int) -> Place:
    """64 bits in vector registers, or 32 bits beside a base in scalar ones."""
    offset = np.array(context.number("offset"), I64).view(U64)
    vector, *scalar = operands
    low = dword(vector, context)
    if not scalar or scalar[0].kind == "off":
        if vector.count != 2:
            raise Unknown(
                f"operand {vector.text!r} of `{context.instruction.text}` got one register; needs two"
            )
        high = dword(vector, context, 1)
        return lambda m: (low(m) + (high(m).astype(U64) << U64(32)) + offset, m.executing)
    base = context.register(scalar[0])

    def place(m: Machine) -> tuple[Array, Array | None]:
        start = m.s[base].astype(U64) | m.s[base + 1].astype(U64) << U64(32)
        return start[:, None] + low(m).astype(U64) + offset, m.executing

    return place


def _scratch(context: Context, operands: Sequence[Operand], size: int) -> Place:
    """Bytes of a lane's own memory."""
    offset = context.number("offset")
    parts = [dword(operand, context) for operand in operands if operand.kind != "off"]

    def place(m: Machine) -> tuple[Array, Array | None]:
        where = np.full(m.mask.shape, offset, I64)
        for part in parts:
            where = where + np.asarray(part(m)).view(I32)
        return where.view(U64), m.executing

    return place


BUFFER, GLOBAL, FLAT = Space("buffer", 3, _buffer), Space("global", 2, _global), Space("flat", 1, _global)
SCRATCH = Space("scratch", 2, _scratch)


def hinted(context: Context) -> None:
    """Take the modifiers that concern caches."""
    for name in HINTS:
        context.taken(name)


@dataclass(frozen=True)
class Load(Row):
    """From memory into registers, or with the modifier `lds` into LDS."""

    space: Space
    kind: Kind

    def decode(self, context: Context) -> Step:
        hinted(context)
        operands = context.instruction.operands
        if context.flag("lds"):
            return copy_to_shared(context, operands, self.space, self.kind)
        target, *where = operands
        place = self.space.place(context, where, self.kind.size)
        number, kind = context.register(target) - SCALARS, self.kind
        writes = numbers_of(context, [target])
        reads = numbers_of(context, where)
        if self.space is SCRATCH:
            run_scratch = _from_scratch(place, number, kind, writes)
            return step(run_scratch, context, (), writes, trusts=reads, spread="", counter="vmcnt")

        def run(m: Machine) -> None:
            addresses, mask = place(m)
            words = m.memory.load(addresses, mask, kind.size, _align(m, kind.size))
            put_words(m, number, kind, words)
            m.fly("vmcnt", writes)

        return step(run, context, (), writes, trusts=reads, spread="", counter="vmcnt")


@dataclass(frozen=True)
class Store(Row):
    """From registers into memory."""

    space: Space
    kind: Kind

    def decode(self, context: Context) -> Step:
        hinted(context)
        operands = list(context.instruction.operands)
        # A buffer's data come first, behind an address elsewhere.
        data = operands.pop(0 if self.space is BUFFER else 1)
        place = self.space.place(context, operands, self.kind.size)
        number, kind = context.register(data) - SCALARS, self.kind
        reads = [*numbers_of(context, operands), *numbers_of(context, [data])]
        if self.space is SCRATCH:
            return step(_to_scratch(place, number, kind), context, trusts=reads[: -data.count], spread="")

        def run(m: Machine) -> None:
            addresses, mask = place(m)
            m.memory.store(addresses, mask, words_of(m, number, kind), kind.size, _align(m, kind.size))
            m.fly("vscnt" if context.chip.wave_size == 32 else "vmcnt")

        return step(run, context, trusts=reads, spread="")


def _align(m: Machine, size: int) -> int:
    """What addresses of a lane's access must be a multiple of."""
    return min(size, 4) if m.aligned else 1


def _scratch_places(m: Machine, place: Place, kind: Kind) -> tuple[Array, Array, Array]:
    if kind.size % 4:
        raise m.fault("a part of a dword in scratch is not modelled", int(m.waves[0]))
    where = place(m)[0].view(I64) // 4
    wave, lane = np.nonzero(m.mask)
    chosen = where[wave, lane]
    if chosen.size and not 0 <= chosen.min() <= chosen.max() + kind.size // 4 <= m.scratch.shape[2]:
        raise m.fault(f"{kind.size} bytes outside of {m.launch.scratch} of scratch", int(m.waves[0]))
    return wave, lane, chosen


def _from_scratch(place: Place, number: int, kind: Kind, writes: Sequence[int]) -> Run:
    def run(m: Machine) -> None:
        wave, lane, where = _scratch_places(m, place, kind)
        words = np.zeros((*m.mask.shape, kind.size // 4), U32)
        words[wave, lane] = m.scratch[
            m.waves[wave][:, None], lane[:, None], where[:, None] + np.arange(kind.size // 4)
        ]
        put_words(m, number, kind, words)
        m.fly("vmcnt", writes)

    return run


def _to_scratch(place: Place, number: int, kind: Kind) -> Run:
    def run(m: Machine) -> None:
        wave, lane, where = _scratch_places(m, place, kind)
        words = words_of(m, number, kind)[wave, lane]
        m.scratch[m.waves[wave][:, None], lane[:, None], where[:, None] + np.arange(kind.size // 4)] = words
        m.fly("vmcnt")

    return run


@dataclass(frozen=True)
class LoadToShared(Row):
    """A copy from global memory into LDS."""

    kind: Kind

    def decode(self, context: Context) -> Step:
        hinted(context)
        return copy_to_shared(context, context.instruction.operands, GLOBAL, self.kind)


def copy_to_shared(context: Context, operands: Sequence[Operand], space: Space, kind: Kind) -> Step:
    """A copy past the registers: lane i lands at M0 + offset + i * size, when the wave waits for it.

    Until then what is there is nobody's: neither the old bytes nor the new.
    """
    if kind.size < 4:
        raise Unknown(f"`{context.instruction.text}` got {kind.size} bytes; needs a dword or more")
    offset = int(context.instruction.modifiers.get("offset", "0"), 0)
    place, size = space.place(context, operands, kind.size), kind.size

    def run(m: Machine) -> None:
        addresses, mask = place(m)
        words = m.memory.load(addresses, mask, size, _align(m, size))
        start = (m.s[M0] & U32(0x3FFFF)).astype(I64) + offset
        where = start[:, None] + np.arange(m.lanes) * size
        executing, waves = m.executing, m.waves
        places = m.shared.places(m.workgroup_of[waves], where, executing, size, 4)
        data = words.reshape(-1, size // 4) if executing is None else words[executing]
        owners, issued = m.owners(executing), m.step
        m.shared.store(places, np.full_like(data, GARBAGE), size, np.ones(len(places), bool))
        m.note_shared(places, size, owners, data)

        def land(machine: Machine, landing: Array) -> None:
            now = np.isin(owners, landing)
            machine.shared.store(places[now], data[now], size)
            waiting, machine.step = machine.step, issued
            machine.note_shared(places[now], size, owners[now], data[now])
            machine.step = waiting

        m.fly("vmcnt", land=land)

    reads = [*numbers_of(context, operands), M0]
    return step(run, context, trusts=reads, spread="")


@dataclass(frozen=True)
class ScalarLoad(Row):
    """s_load: dwords at a scalar address."""

    words: int

    def decode(self, context: Context) -> Step:
        hinted(context)
        target, base, offset = context.instruction.operands
        first, start = context.register(target), context.register(base)
        by: Fetch = dword(offset, context, vector=False) if offset.kind != "off" else (lambda m: U32(0))
        plus, words = context.number("offset"), self.words
        writes = [first + word for word in range(words)]

        def run(m: Machine) -> None:
            where = m.s[start].astype(U64) | m.s[start + 1].astype(U64) << U64(32)
            where = (where.astype(I64) + np.asarray(by(m)).astype(I64) + plus).view(U64)
            found = m.memory.load(where[:, None], None, 4 * words, 4)[:, 0]
            for word in range(words):
                m.put_scalar(first + word, found[:, word])
            m.fly("kmcnt" if context.generation >= 12 else "lgkmcnt", writes)

        return step(run, context, (), writes, trusts=numbers_of(context, [base, offset]), spread="")


_COUNTED = {"": 1, "x2": 2, "x3": 3, "x4": 4, "x8": 8, "x16": 16}
_OF_RDNA = {"b32": 1, "b64": 2, "b96": 3, "b128": 4, "b256": 8, "b512": 16}

ROWS: tuple[Row, ...] = (
    *(ScalarLoad(f"s_load_dword{suffix}", words) for suffix, words in _COUNTED.items()),
    *(ScalarLoad(f"s_load_{suffix}", words) for suffix, words in _OF_RDNA.items()),
    *(
        Load(f"{space.name}_load_{name}", space, kind)
        for space in (BUFFER, GLOBAL, FLAT, SCRATCH)
        for name, kind in LOADS.items()
    ),
    *(
        Store(f"{space.name}_store_{name}", space, kind)
        for space in (BUFFER, GLOBAL, FLAT, SCRATCH)
        for name, kind in STORES.items()
    ),
    *(LoadToShared(f"global_load_lds_{name}", WORDS[name]) for name in ("dword", "dwordx3", "dwordx4")),
)
