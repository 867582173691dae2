"""A row is an instruction: mnemonic, operands, semantics. This file makes steps of rows.

Operands are written `destinations <- sources`, in the order of the text, each by its kind:

- f32 f16 bf16 f64 u32 i32 u16 i16 u24 i24 u64 i64 b32: how semantics see the bits; b32 has no modifiers
- mask: a lane mask in scalar registers, bool [waves, lanes] to semantics
- pf32 pf16 pu16 pi16: packed pairs; semantics are called for the low and for the high halves
- f16lo: a result that leaves the upper half of its register
- ~kind: the destination, which is read as well and has no operand of its own
- simm, uimm: a number of 16 bits, signed or not, to semantics int32 or uint32
- @scc @vcc @exec @m0: not in the text

Semantics take arrays of those kinds and return one, or a tuple, for the destinations. Vectors are
[waves, lanes], scalars [waves], or whatever broadcasts to them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anymla.hardware.arches import Arch
from anymla.verification.amdgcn.machine import EXEC, M0, SCALARS, SCC, VCC, Machine, Run, Step
from anymla.verification.amdgcn.parse import Instruction, Operand, Unknown

Array = NDArray[Any]
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I16, I32, I64 = np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64

Fetch = Callable[[Machine], Any]
Commit = Callable[[Machine, Any], None]

DTYPES: dict[str, Any] = {
    "b32": U32, "u32": U32, "i32": I32, "f32": F32, "u24": U32, "i24": I32,
    "u16": U16, "i16": I16, "f16": F16, "f16lo": F16, "bf16": U16,
    "u64": U64, "i64": I64, "f64": F64,
}  # fmt: skip
WIDE = ("u64", "i64", "f64")
HALF = ("u16", "i16", "f16", "f16lo", "bf16")
FLOATS = ("f16", "f32", "f64")
IMPLICIT = {"@scc": SCC, "@vcc": VCC, "@exec": EXEC, "@m0": M0}


@dataclass
class Context:
    """What decoding an instruction needs to know.

    Attributes:
        name: Of the chip.
        chip: Facts of it.
        lanes: Of a wave.
        accumulators: The register number of a0.
        instruction: Which.
        left: Modifiers that nothing has asked for yet; what is left in the end is refused.
    """

    name: str
    chip: Arch
    lanes: int
    accumulators: int
    instruction: Instruction
    labels: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """Of the instruction set: 9 for CDNA, 11 and 12 for RDNA."""
        return int(self.name.removeprefix("gfx")[:-2], 16 if self.name.endswith("a") else 10)

    def register(self, operand: Operand, step: int = 0) -> int:
        """The number of a register of an operand."""
        if operand.kind == "v":
            return SCALARS + operand.index + step
        if operand.kind == "s":
            return operand.index + step
        if operand.kind == "a":
            return self.accumulators + operand.index + step
        raise Unknown(f"operand {operand.text!r} of `{self.instruction.text}` got no register")

    def registers(self, operand: Operand) -> tuple[int, ...]:
        """All registers of an operand; none for a number."""
        if operand.kind not in "sva":
            return ()
        first = self.register(operand)
        return tuple(range(first, first + operand.count))

    def taken(self, name: str, default: str | None = None) -> str | None:
        """A modifier's value, which is understood from here on."""
        return self.left.pop(name, default)

    def number(self, name: str, default: int = 0) -> int:
        """A modifier that is a number."""
        value = self.left.pop(name, None)
        return default if value is None else int(value, 0)

    def flag(self, name: str) -> bool:
        """A modifier without a value, or one that is 1."""
        return self.left.pop(name, None) in ("", "1")

    def numbers(self, name: str, default: Sequence[int]) -> list[int]:
        """A modifier that is a list in brackets, filled up with the default."""
        value = self.left.pop(name, None)
        found = [] if value is None else [int(part, 0) for part in value.strip("[]").split(",")]
        return found + list(default)[len(found) :]

    def refuse_what_is_left(self) -> None:
        """Raise Unknown for a modifier that nobody asked for."""
        if self.left:
            names = ", ".join(f"{name}:{value}" if value else name for name, value in self.left.items())
            raise Unknown(f"modifier {names} of `{self.instruction.text}` got no meaning here")


@dataclass(frozen=True)
class Row(ABC):
    """An instruction; a subclass knows its encoding.

    Attributes:
        mnemonic: Without an encoding's suffix.
    """

    mnemonic: str

    @abstractmethod
    def decode(self, context: Context) -> Step:
        """A step of an instruction of this row."""

    def forms(self) -> Sequence[str]:
        """All mnemonics that are this row."""
        return (self.mnemonic,)


@dataclass(frozen=True)
class Operands:
    """The operands column of a row, taken apart."""

    destinations: tuple[str, ...]
    sources: tuple[str, ...]

    @staticmethod
    @lru_cache(maxsize=1024)
    def read(text: str) -> "Operands":
        """From "f32 <- f32 f32"."""
        left, _, right = text.partition("<-")
        return Operands(tuple(left.split()), tuple(right.split()))

    def assign(self, context: Context) -> tuple[list[Operand], list[Operand]]:
        """The operand of each destination and source."""
        given = list(context.instruction.operands)
        named = sum(not kind.startswith(("@", "~")) for kind in (*self.destinations, *self.sources))
        if len(given) != named:
            text = context.instruction.text
            raise Unknown(f"`{text}` got {len(given)} operands; needs {named}")
        destinations = [self._operand(kind, given, None, context.lanes) for kind in self.destinations]
        first = destinations[0] if destinations else None
        return destinations, [self._operand(kind, given, first, context.lanes) for kind in self.sources]

    @staticmethod
    def _operand(kind: str, given: list[Operand], first: Operand | None, lanes: int) -> Operand:
        if kind.startswith("~"):
            assert first is not None
            return first
        if kind.startswith("@"):
            single = kind in ("@scc", "@m0") or lanes == 32
            return Operand("s", IMPLICIT[kind], 1 if single else 2, text=kind)
        return given.pop(0)


@lru_cache(maxsize=1024)
def plain(kind: str) -> str:
    """A kind without its marks; @scc, @vcc and @exec are masks of waves or lanes."""
    return {"@scc": "scc", "@vcc": "mask", "@exec": "exec", "@m0": "u32"}.get(kind, kind.lstrip("~"))


def signed(value: int, bits: int) -> int:
    """The lowest bits of a number, the uppermost of which is a sign."""
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


def constant(operand: Operand, kind: str) -> Array:
    """The bits of a number for a kind, uint32 or, for a wide kind, uint64; 0-dimensional."""
    kind = plain(kind).lstrip("p")
    if operand.kind == "float":
        dtype = {"f16": F16, "f16lo": F16, "f64": F64}.get(kind, F32)
        raw = np.array(operand.value, dtype)
        if dtype is F64:
            return raw.view(U64)
        return raw.view(U16).astype(U32) if dtype is F16 else raw.view(U32)
    value = int(operand.value)
    if kind == "f64" and abs(value) > 64:
        # A literal is the upper half.
        value <<= 32
    return np.array(value & (1 << 64) - 1, U64) if kind in WIDE else np.array(value & 0xFFFFFFFF, U32)


def dword(operand: Operand, context: Context, step: int = 0, kind: str = "b32", vector: bool = True) -> Fetch:
    """Fetches uint32 of a 32-bit register of an operand; null is 0."""
    if operand.kind in ("int", "float") or operand.text == "null":
        value = constant(operand, kind)
        return lambda m: value
    register = context.register(operand, step)
    if register == SCC:
        return (lambda m: m.scc.astype(U32)[:, None]) if vector else (lambda m: m.scc.astype(U32))
    if register < SCALARS:
        return (lambda m: m.s[register][:, None]) if vector else (lambda m: m.s[register])
    number = register - SCALARS
    return lambda m: m.v[number]


def source(
    operand: Operand,
    kind: str,
    context: Context,
    *,
    vector: bool,
    high: bool = False,
    raw: Fetch | None = None,
) -> Fetch:
    """Fetches an operand as semantics want it.

    Args:
        operand: Which.
        kind: See the head of this file.
        context: Of the instruction.
        vector: Whether for a vector instruction.
        high: Take the upper half of a register, or the second register of a pair.
        raw: Fetches the bits in another way.
    """
    kind = plain(kind)
    if kind == "scc":
        return lambda m: m.scc
    if kind == "mask":
        if operand.kind == "int":
            lanes = np.array([bool(int(operand.value) >> lane & 1) for lane in range(context.lanes)])
            return lambda m: lanes[None, :]
        register = context.register(operand)
        return lambda m: m.unpack(m.bits(register))
    if kind == "exec":
        return lambda m: m.exec if context.lanes == 64 else m.exec.astype(U32)
    if kind in ("simm", "uimm"):
        value = int(operand.value) & 0xFFFF
        immediate = np.array(signed(value, 16), I32) if kind == "simm" else np.array(value, U32)
        return lambda m: immediate
    if kind in WIDE:
        return _signs(_wide(operand, kind, context, vector), kind, operand)
    if kind.startswith("p") and kind != "pf32":
        return _signs(
            _halved(raw or dword(operand, context, 0, kind, vector), kind[1:], high), kind[1:], operand
        )
    if kind == "pf32":
        kind, step = "f32", int(high and operand.count == 2)
        raw = dword(operand, context, step, kind, vector)
    raw = raw or dword(operand, context, 0, kind, vector)
    if kind in HALF:
        return _signs(_halved(raw, kind, high), kind, operand)
    if kind == "u24":
        return lambda m: raw(m) & U32(0xFFFFFF)
    if kind == "i24":
        return lambda m: (raw(m) << U32(8)).view(I32) >> I32(8)
    if kind in ("b32", "u32"):
        return raw
    dtype = DTYPES[kind]
    return _signs(lambda m: raw(m).view(dtype), kind, operand)


def _halved(raw: Fetch, kind: str, high: bool) -> Fetch:
    dtype = DTYPES[kind]
    if high:
        return lambda m: (raw(m) >> U32(16)).astype(U16).view(dtype)
    return lambda m: raw(m).astype(U16).view(dtype)


def _wide(operand: Operand, kind: str, context: Context, vector: bool) -> Fetch:
    dtype = DTYPES[kind]
    if operand.kind in ("int", "float"):
        value = constant(operand, kind).view(dtype)
        return lambda m: value
    if operand.count == 1:
        raise Unknown(f"operand {operand.text!r} of `{context.instruction.text}` got one register; needs two")
    low, high = dword(operand, context, 0, vector=vector), dword(operand, context, 1, vector=vector)
    return lambda m: (low(m).astype(U64) | high(m).astype(U64) << U64(32)).view(dtype)


def _signs(fetch: Fetch, kind: str, operand: Operand) -> Fetch:
    """The fetch with the operand's |x| and -x."""
    if not (operand.abs or operand.neg):
        return fetch
    if kind not in FLOATS:
        raise Unknown(f"operand {operand.text!r} got a sign modifier; needs a float")
    if operand.abs and operand.neg:
        return lambda m: -np.abs(fetch(m))
    return (lambda m: np.abs(fetch(m))) if operand.abs else (lambda m: -fetch(m))


def as_bits(values: Any, kind: str) -> Array:
    """What semantics returned as uint32 bits, or uint64 of a wide kind; halves in the lower bits."""
    array = np.asarray(values)
    dtype = DTYPES[kind]
    if array.dtype != dtype:
        array = array.astype(dtype)
    if kind in WIDE:
        return array.view(U64)
    return array.view(U16).astype(U32) if kind in HALF else array.view(U32)


def destination(operand: Operand, kind: str, context: Context, *, vector: bool) -> Commit:
    """Commits what semantics returned."""
    kind = plain(kind)
    if kind == "scc":
        return lambda m, values: setattr(m, "scc", values)
    if kind == "exec" and vector:
        return lambda m, values: m.put_bits(EXEC, m.pack(values) & m.exec)
    if kind == "exec":
        return lambda m, values: m.put_bits(EXEC, np.broadcast_to(values, m.exec.shape).astype(U64))
    if operand.kind == "off":
        return lambda m, values: None
    register = context.register(operand)
    if kind == "mask":
        return lambda m, values: m.put_bits(register, m.pack(values) & m.exec)
    if register < SCALARS:
        if kind in WIDE:
            return lambda m, values: _put_scalar_pair(m, register, as_bits(values, kind))
        return lambda m, values: m.put_scalar(register, as_bits(values, kind))
    number = register - SCALARS
    if kind in WIDE:
        return lambda m, values: _put_pair(m, number, as_bits(values, kind))
    if kind == "f16lo":
        return lambda m, values: m.put(number, as_bits(values, kind) | m.v[number] & U32(0xFFFF0000))
    return lambda m, values: m.put(number, as_bits(values, kind))


def _put_pair(m: Machine, number: int, bits: Array) -> None:
    m.put(number, (bits & U64(0xFFFFFFFF)).astype(U32))
    m.put(number + 1, (bits >> U64(32)).astype(U32))


def _put_scalar_pair(m: Machine, register: int, bits: Array) -> None:
    m.put_scalar(register, (bits & U64(0xFFFFFFFF)).astype(U32))
    m.put_scalar(register + 1, (bits >> U64(32)).astype(U32))


def step(
    run: Run,
    context: Context,
    reads: Sequence[int] = (),
    writes: Sequence[int] = (),
    **facts: Any,
) -> Step:
    """A step with the registers that it touches."""
    trusts = tuple(facts.pop("trusts", ()))
    touches = frozenset((*reads, *writes, *trusts))
    return Step(run, context.instruction, tuple(reads), tuple(writes), trusts, touches=touches, **facts)


def executor(fetches: Sequence[Fetch], semantics: Callable[..., Any], commits: Sequence[Commit]) -> Run:
    """Fetch, compute, commit."""
    if len(commits) == 1:
        (commit,) = commits
        if len(fetches) == 1:
            (only,) = fetches
            return lambda m: commit(m, semantics(only(m)))
        if len(fetches) == 2:
            first, second = fetches
            return lambda m: commit(m, semantics(first(m), second(m)))
        return lambda m: commit(m, semantics(*[fetch(m) for fetch in fetches]))

    def run(m: Machine) -> None:
        values = semantics(*[fetch(m) for fetch in fetches])
        for commit, value in zip(commits, values, strict=True):
            commit(m, value)

    return run


def numbers_of(context: Context, operands: Sequence[Operand]) -> list[int]:
    """The registers of some operands."""
    return [register for operand in operands for register in context.registers(operand)]
