"""VOP1, VOP2, VOP3, VOPC and packed VOP3P: arithmetic on one value a lane, with SDWA and DPP operands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anymla.verification.amdgcn.instructions import lanes
from anymla.verification.amdgcn.instructions.rows import (
    DTYPES,
    FLOATS,
    HALF,
    I64,
    U32,
    WIDE,
    Commit,
    Context,
    Fetch,
    Operands,
    Row,
    as_bits,
    destination,
    dword,
    executor,
    numbers_of,
    plain,
    source,
    step,
)
from anymla.verification.amdgcn.machine import EXEC, SCALARS, Machine, Step
from anymla.verification.amdgcn.parse import Operand, Unknown


@dataclass(frozen=True)
class Vector(Row):
    """Semantics of one value a lane.

    Attributes:
        spread: See Step.spread.
        also: Other mnemonics of the same.
    """

    operands: str
    semantics: Callable[..., Any]
    spread: str = "lanes"
    also: tuple[str, ...] = ()

    def forms(self) -> Sequence[str]:
        plain_names = (self.mnemonic, *self.also)
        return [name + form for name in plain_names for form in ("", "_sdwa", "_dpp")]

    def decode(self, context: Context) -> Step:
        spec, semantics = Operands.read(self.operands), self.semantics
        if spec.destinations[-1] == "@exec" and len(context.instruction.operands) == len(spec.sources) - 1:
            # RDNA writes the execution mask alone.
            spec, semantics = Operands(("@exec",), spec.sources), lambda *values: self.semantics(*values)[1]
        destinations, sources = spec.assign(context)
        reads, writes = numbers_of(context, sources), numbers_of(context, destinations)
        mnemonic = context.instruction.mnemonic
        packed = any(kind.startswith("p") for kind in spec.destinations)
        semantics = semantics if packed else _finished(semantics, spec.destinations, context)
        if packed:
            return _packed(self, spec, destinations, sources, context)
        raws: list[Fetch | None] = [None] * len(sources)
        if mnemonic.endswith("_sdwa"):
            raws = [
                _selected(o, k, n, context)
                for n, (o, k) in enumerate(zip(sources, spec.sources, strict=True))
            ]
        elif mnemonic.endswith("_dpp"):
            raws[0] = lanes.moved(dword(sources[0], context), context)
        highs = [False] * (len(sources) + 1)
        if any(kind.lstrip("~") in HALF for kind in (*spec.sources, *spec.destinations)):
            highs = [bool(bit) for bit in context.numbers("op_sel", [0] * (len(sources) + 1))]
        fetches = [
            source(o, k, context, vector=True, high=high, raw=raw)
            for o, k, high, raw in zip(sources, spec.sources, highs, raws, strict=False)
        ]
        commits = [
            destination(o, k, context, vector=True)
            for o, k in zip(destinations, spec.destinations, strict=True)
        ]
        if mnemonic.endswith("_sdwa"):
            commits[0] = _placed(commits[0], destinations[0], spec.destinations[0], context)
        elif highs[len(sources)]:
            commits[0] = _upper(destinations[0], spec.destinations[0], context)
        run = executor(fetches, semantics, commits)
        if self.spread == "choice":
            # Positions count: a number is no register.
            reads = [
                *((*context.registers(operand), -1)[0] for operand in sources[:2]),
                *reads[-context.lanes // 32 :],
            ]
        if mnemonic.endswith("_dpp"):
            keeps = lanes.keeps(context)
            run = lanes.enabled(run, context)
            reads = [*reads, *writes] if keeps else reads
        lower = [
            register
            for operand, kind in zip(sources, spec.sources, strict=True)
            for register in context.registers(operand)[: 1 if kind in WIDE else None]
        ]
        trusts = reads if EXEC in writes else ()
        return step(run, context, reads, writes, spread=self.spread, trusts=trusts, lower=tuple(lower))


def _finished(semantics: Callable[..., Any], kinds: Sequence[str], context: Context) -> Callable[..., Any]:
    """Semantics with the output modifiers of the instruction."""
    clamp = context.flag("clamp")
    scale = context.number("mul", 1) / context.number("div", 1)
    if not clamp and scale == 1:
        return semantics
    kind = plain(kinds[0])
    if kind in FLOATS or kind == "f16lo":

        def finish(*values: Any) -> Any:
            result = np.asarray(semantics(*values))
            result = result * result.dtype.type(scale)
            return np.where(result > 0, np.minimum(result, 1), 0).astype(result.dtype) if clamp else result

        return finish
    if scale != 1 or len(kinds) > 1 or kind not in ("u32", "i32", "u16", "i16"):
        raise Unknown(f"clamp of `{context.instruction.text}` got no meaning here")
    bounds = np.iinfo(DTYPES[kind])
    return lambda *values: np.clip(
        semantics(*(np.asarray(v).astype(I64) for v in values)), bounds.min, bounds.max
    )


def _packed(
    row: Vector, spec: Operands, destinations: Sequence[Operand], sources: Sequence[Operand], context: Context
) -> Step:
    """Low and high halves, each by itself and of the halves that it names."""
    count = len(sources)
    low, high = context.numbers("op_sel", [0] * count), context.numbers("op_sel_hi", [1] * count)
    neg = context.numbers("neg_lo", [0] * count), context.numbers("neg_hi", [0] * count)
    clamp = context.flag("clamp")
    kind = plain(spec.destinations[0])[1:]

    def fetches(which: Sequence[int], negated: Sequence[int]) -> list[Fetch]:
        return [
            source(replace(o, neg=bool(minus)), k, context, vector=True, high=bool(half))
            for o, k, half, minus in zip(sources, spec.sources, which, negated, strict=True)
        ]

    first, second = fetches(low, neg[0]), fetches(high, neg[1])
    number = context.register(destinations[0]) - SCALARS

    def run(m: Machine) -> None:
        halves = [as_bits(row.semantics(*[f(m) for f in fs]), kind) for fs in (first, second)]
        if kind == "f32":
            m.put(number, halves[0])
            m.put(number + 1, halves[1])
        else:
            m.put(number, halves[0] | halves[1] << U32(16))

    if clamp:
        raise Unknown(f"clamp of `{context.instruction.text}` got no meaning here")
    reads, writes = numbers_of(context, sources), numbers_of(context, destinations)
    if kind != "f32":
        return step(run, context, reads, writes, spread=row.spread)
    pairs = [context.registers(operand) for operand in sources]
    lower, upper = (
        tuple(pair[min(half, len(pair) - 1)] for pair, half in zip(pairs, which, strict=True) if pair)
        for which in (low, high)
    )
    # Compilers wait for both halves of a pair that is loaded, so both must have landed.
    touches = frozenset((*reads, *writes))
    return replace(
        step(run, context, (*lower, *upper), writes, spread="upward", lower=lower), touches=touches
    )


_PARTS = {
    "DWORD": (0, 32),
    **{f"BYTE_{n}": (8 * n, 8) for n in range(4)},
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}
"""What SDWA selects of a register: first bit and bits."""


def _selected(operand: Operand, kind: str, number: int, context: Context) -> Fetch | None:
    """An SDWA source: a part of a register, extended to all of it."""
    part = (
        context.taken(f"src{number}_sel", "DWORD")
        if number < 2 and not kind.startswith(("~", "@"))
        else "DWORD"
    )
    shift, bits = _PARTS[str(part)]
    if bits == 32:
        return None
    raw, mask = dword(operand, context, 0, plain(kind)), U32((1 << bits) - 1)
    if operand.sext:
        up = np.int32(32 - bits)
        return lambda m: ((raw(m) >> U32(shift) & mask).view(np.int32) << up >> up).view(U32)
    return lambda m: raw(m) >> U32(shift) & mask


def _placed(commit: Commit, operand: Operand, kind: str, context: Context) -> Commit:
    """An SDWA destination: a part of the register, and what becomes of the rest."""
    shift, bits = _PARTS[str(context.taken("dst_sel", "DWORD"))]
    unused = context.taken("dst_unused", "UNUSED_PAD")
    if bits == 32 or plain(kind) == "mask":
        return commit
    number, mask = context.register(operand) - SCALARS, U32((1 << bits) - 1)
    if unused == "UNUSED_SEXT":
        raise Unknown(f"dst_unused:{unused} of `{context.instruction.text}` got no meaning here")
    rest = U32(0xFFFFFFFF ^ (int(mask) << shift)) if unused == "UNUSED_PRESERVE" else U32(0)

    def place(m: Machine, values: Any) -> None:
        m.put(number, (as_bits(values, kind) & mask) << U32(shift) | m.v[number] & rest)

    return place


def _upper(operand: Operand, kind: str, context: Context) -> Commit:
    """The upper half of a register; the lower stays."""
    number = context.register(operand) - SCALARS
    return lambda m, values: m.put(number, as_bits(values, kind) << U32(16) | m.v[number] & U32(0xFFFF))
