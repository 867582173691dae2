"""DS: loads and stores of LDS, in pairs and transposed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anymla.verification.amdgcn.checks import Access
from anymla.verification.amdgcn.instructions.moves import LOADS, STORES, WORDS, Kind, put_words, words_of
from anymla.verification.amdgcn.instructions.rows import (
    I64,
    U8,
    U16,
    U32,
    Array,
    Context,
    Fetch,
    Row,
    dword,
    numbers_of,
    step,
)
from anymla.verification.amdgcn.machine import SCALARS, Machine, Run, Step

FAR = 64
"""What an offset of a "st64" pair counts in, beside the size of an element."""


def _align(size: int) -> int:
    """What addresses of so many bytes are a multiple of: 96 bits need 128, pairs their element."""
    return 16 if size == 12 else size


def _read(m: Machine, addresses: Array, size: int, writes: Sequence[int]) -> tuple[Array, Access]:
    """Words [waves, lanes, words] and their access; what was never written is noted for `writes`."""
    mask = m.executing
    places = m.shared.places(m.workgroup_of[m.waves], addresses, mask, size, _align(size))
    access = m.note_shared(places, size, m.owners(mask))
    found, unwritten = m.shared.load(places, size)
    if mask is None:
        words = found.reshape(*addresses.shape, found.shape[1])
    else:
        words = np.zeros((*addresses.shape, found.shape[1]), U32)
        words[mask] = found
    if unwritten is not None:
        lanes = np.zeros(addresses.shape, bool)
        lanes[np.ones_like(lanes) if mask is None else mask] = unwritten
        for register in writes:
            m.defined.write(register, m.at, m.exec, m.pack(lanes))
    return words, access


def _write(m: Machine, addresses: Array, words: Array, size: int, reads: Sequence[int]) -> Access:
    mask = m.executing
    places = m.shared.places(m.workgroup_of[m.waves], addresses, mask, size, _align(size))
    flat = words.reshape(-1, words.shape[-1]) if mask is None else words[mask]
    access = m.note_shared(places, size, m.owners(mask), flat)
    unknown = m.defined.undefined(reads, m.at)
    undefined = None
    if unknown is not None:
        lanes = m.unpack(unknown)
        undefined = lanes.ravel() if mask is None else lanes[mask]
    m.shared.store(places, flat, size, undefined)
    return access


def _addresses(fetch: Fetch, offset: int) -> Fetch:
    def where(m: Machine) -> Array:
        return np.broadcast_to(fetch(m), m.mask.shape).astype(I64) + offset

    return where


@dataclass(frozen=True)
class SharedLoad(Row):
    """One element for each lane, or two.

    Attributes:
        kind: Of an element.
        unit: Bytes that the offsets of a pair count in; 0 for one element.
        transposed: Bytes of an element of which 16 lanes read a block and get it transposed; 0 for none.
    """

    kind: Kind
    unit: int = 0
    transposed: int = 0
    also: tuple[str, ...] = ()

    def forms(self) -> Sequence[str]:
        return (self.mnemonic, *self.also)

    def decode(self, context: Context) -> Step:
        target, address = context.instruction.operands
        fetch, kind = dword(address, context), self.kind
        writes = numbers_of(context, [target])
        half = len(writes) // 2
        if self.unit:
            wheres = [_addresses(fetch, context.number(name) * self.unit) for name in ("offset0", "offset1")]
            halves = [(wheres[0], writes[:half]), (wheres[1], writes[half:])]
        else:
            halves = [(_addresses(fetch, context.number("offset")), writes)]

        def run(m: Machine) -> None:
            # Both addresses before a register that one of them is in may change.
            found = [(*_read(m, where(m), kind.size, registers), registers) for where, registers in halves]
            for words, _, registers in found:
                if self.transposed:
                    words = _transposed(words, self.transposed)
                put_words(m, registers[0] - SCALARS, kind, words)
            m.fly("lgkmcnt", writes, accesses=[access for _, access, _ in found])

        return step(
            run, context, (), writes, trusts=numbers_of(context, [address]), spread="", counter="lgkmcnt"
        )


def _transposed(words: Array, size: int) -> Array:
    """Of 16 lanes with 8 bytes each: element k of lane i is what lane i saw in row k of the block."""
    dtype, count = (U16, 4) if size == 2 else (U8, 8)
    waves, lanes, _ = words.shape
    block = np.ascontiguousarray(words).view(dtype).reshape(waves, lanes // 16, 16, count)
    # Row k of the block is in the lanes 16 / count * k and the next ones.
    turned = block.reshape(waves, lanes // 16, count, 16).swapaxes(-1, -2)
    return np.ascontiguousarray(turned).reshape(waves, lanes, count).view(U32)


@dataclass(frozen=True)
class SharedStore(Row):
    """One element for each lane, or two."""

    kind: Kind
    unit: int = 0
    also: tuple[str, ...] = ()

    def forms(self) -> Sequence[str]:
        return (self.mnemonic, *self.also)

    def decode(self, context: Context) -> Step:
        address, *data = context.instruction.operands
        fetch, kind = dword(address, context), self.kind
        names = ("offset0", "offset1") if self.unit else ("offset",)
        parts = [
            (_addresses(fetch, context.number(name) * (self.unit or 1)), numbers_of(context, [operand]))
            for name, operand in zip(names, data, strict=True)
        ]
        return step(
            _storing(parts, kind),
            context,
            [r for _, rs in parts for r in rs],
            trusts=numbers_of(context, [address]),
            spread="",
        )


def _storing(parts: Sequence[tuple[Fetch, Sequence[int]]], kind: Kind) -> Run:
    def run(m: Machine) -> None:
        accesses = [
            _write(m, where(m), words_of(m, registers[0] - SCALARS, kind), kind.size, registers)
            for where, registers in parts
        ]
        m.fly("lgkmcnt", accesses=accesses)

    return run


def _pairs(stem: str, row: type, newer: str) -> list[Row]:
    found: list[Row] = []
    for name in ("b32", "b64"):
        size = WORDS[name].size
        for far, unit in (("", size), ("st64", size * FAR)):
            newer_far = f"_stride64_{name}" if far else f"_{name}"
            found.append(
                row(f"ds_{stem}2{far}_{name}", WORDS[name], unit, also=(f"ds_{newer}_2addr{newer_far}",))
            )
    return found


_READ = (
    "b32",
    "b64",
    "b96",
    "b128",
    "u8",
    "i8",
    "u16",
    "i16",
    "u8_d16",
    "u8_d16_hi",
    "i8_d16",
    "i8_d16_hi",
    "u16_d16",
    "u16_d16_hi",
)
_WRITE = ("b8", "b16", "b32", "b64", "b96", "b128", "b8_d16_hi", "b16_d16_hi")

ROWS: tuple[Row, ...] = (
    *(SharedLoad(f"ds_read_{name}", LOADS[name], also=(f"ds_load_{name}",)) for name in _READ),
    *(SharedStore(f"ds_write_{name}", STORES[name], also=(f"ds_store_{name}",)) for name in _WRITE),
    *_pairs("read", SharedLoad, "load"),
    *_pairs("write", SharedStore, "store"),
    SharedLoad("ds_read_b64_tr_b16", Kind(8), transposed=2),
    SharedLoad("ds_read_b64_tr_b8", Kind(8), transposed=1),
)
