"""Rows whose operands are not of one kind each: fp8, mixed precision, three-operand logic, moved pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from anymla.verification.amdgcn.formats import f32_to_bf16, f32_to_fp8, fp8_values
from anymla.verification.amdgcn.instructions.floats import exponent
from anymla.verification.amdgcn.instructions.rows import (
    F16,
    F32,
    I32,
    U16,
    U32,
    Array,
    Context,
    Fetch,
    Row,
    as_bits,
    dword,
    numbers_of,
    source,
    step,
)
from anymla.verification.amdgcn.instructions.scalar import fma
from anymla.verification.amdgcn.machine import SCALARS, Machine, Run, Step
from anymla.verification.amdgcn.parse import Operand, Unknown

SATURATES = 23
"""The bit of the mode register, FP16_OVFL, with which conversions to fp8 saturate."""


@dataclass(frozen=True)
class Special(Row):
    """A row with its own way of reading operands; the first is the destination.

    Attributes:
        build: Makes what is executed.
        sums: Whether the destination is read as well.
        also: Other mnemonics of the same.
    """

    build: Callable[[Context], Run]
    sums: bool = False
    also: tuple[str, ...] = ()

    def forms(self) -> Sequence[str]:
        return (self.mnemonic, *self.also)

    def decode(self, context: Context) -> Step:
        target, *sources = context.instruction.operands
        run = self.build(context)
        writes = numbers_of(context, [target])
        reads = [*numbers_of(context, sources), *(writes if self.sums else [])]
        return step(run, context, reads, writes)


def _target(context: Context) -> int:
    return context.register(context.instruction.operands[0]) - SCALARS


def _f32(context: Context, position: int) -> Fetch:
    return source(context.instruction.operands[position], "f32", context, vector=True)


def _power(scale: Array) -> Array:
    """The power of two that the exponent of a scale is."""
    found: Array = np.ldexp(F32(1), exponent(scale).view(I32) - 127)
    return found


def _to_fp8(kind: str, scaled: bool) -> Callable[[Context], Run]:
    """Two fp32 to two fp8 in one half of the destination, whose other half stays."""

    def build(context: Context) -> Run:
        first, second, number = _f32(context, 1), _f32(context, 2), _target(context)
        scale = _f32(context, 3) if scaled else None
        shift = U32(16 * context.numbers("op_sel", [0, 0, 0, 0][: 3 + scaled])[-1])
        flavour = context.chip.fp8_flavour

        def run(m: Machine) -> None:
            saturate = (m.mode[m.at] >> U32(SATURATES) & U32(1)).astype(bool)[:, None]
            by = F32(1) if scale is None else _power(scale(m))
            codes = [f32_to_fp8(fetch(m) / by, kind, flavour, saturate) for fetch in (first, second)]
            kept = m.v[number] & ~(U32(0xFFFF) << shift)
            m.put(number, kept | (codes[0] | codes[1] << U32(8)) << shift)

        return run

    return build


def _selection(context: Context, unit: int) -> int:
    """The byte or word of a source that a conversion takes, however it is said: first bit."""
    part = context.taken("src0_sel")
    for name in ("dst_sel", "dst_unused"):
        context.taken(name)
    if part is not None:
        return 0 if part == "DWORD" else int(part[-1]) * unit
    if "byte_sel" in context.left:
        return 8 * context.number("byte_sel")
    chosen = context.numbers("op_sel", [0, 0, 0])
    return unit * (chosen[0] if unit == 16 else 2 * chosen[0] + chosen[1])


def _from_fp8(kind: str) -> Callable[[Context], Run]:
    """One fp8 to fp32."""

    def build(context: Context) -> Run:
        raw, number = dword(context.instruction.operands[1], context), _target(context)
        shift, values = U32(_selection(context, 8)), fp8_values(kind, context.chip.fp8_flavour)
        return lambda m: m.put(number, values[raw(m) >> shift & U32(0xFF)].view(U32))

    return build


def _pair_from_fp8(kind: str, to: str, scaled: bool) -> Callable[[Context], Run]:
    """Two fp8 to two fp32 in two registers, or to two halves of one."""

    def build(context: Context) -> Run:
        raw, number = dword(context.instruction.operands[1], context), _target(context)
        scale = _f32(context, 2) if scaled else None
        shift, values = U32(_selection(context, 16)), fp8_values(kind, context.chip.fp8_flavour)

        def run(m: Machine) -> None:
            codes = raw(m) >> shift
            by = F32(1) if scale is None else _power(scale(m))
            low, high = values[codes & U32(0xFF)] * by, values[codes >> U32(8) & U32(0xFF)] * by
            if to == "f32":
                m.put(number, low.view(U32))
                m.put(number + 1, high.view(U32))
            else:
                half = f32_to_bf16 if to == "bf16" else _f16_bits
                m.put(number, half(low).astype(U32) | half(high).astype(U32) << U32(16))

        return run

    return build


def _f16_bits(values: Array) -> Array:
    return values.astype(F16).view(U16)


def _mixed(half: str) -> Callable[[Context], Run]:
    """a * b + c with each source fp32, or fp16 in one half of a register; the result in `half` or in fp32."""

    def build(context: Context) -> Run:
        number, operands = _target(context), context.instruction.operands[1:]
        is_half = context.numbers("op_sel_hi", [0, 0, 0])
        upper = context.numbers("op_sel", [0, 0, 0])
        fetches = [
            _mixed_source(o, context, *chosen) for o, *chosen in zip(operands, is_half, upper, strict=True)
        ]
        clamp = context.flag("clamp")

        def run(m: Machine) -> None:
            result = fma(*[fetch(m) for fetch in fetches])
            if clamp:
                result = np.where(result > 0, np.minimum(result, F32(1)), F32(0))
            if not half:
                m.put(number, as_bits(result, "f32"))
                return
            bits, old = as_bits(result, "f16"), m.v[number]
            m.put(
                number, bits | old & U32(0xFFFF0000) if half == "low" else bits << U32(16) | old & U32(0xFFFF)
            )

        return run

    return build


def _mixed_source(operand: Operand, context: Context, is_half: int, upper: int) -> Fetch:
    fetch = source(operand, "f16" if is_half else "f32", context, vector=True, high=bool(is_half and upper))
    return (lambda m: fetch(m).astype(F32)) if is_half else fetch


def _logic_of_three(bits: int) -> Callable[[Context], Run]:
    """Each bit by a truth table of 8 bits, indexed by the bits of the three sources, the first highest."""

    def build(context: Context) -> Run:
        table, number = context.number("bitop3"), _target(context)
        if context.numbers("op_sel", [0, 0, 0, 0]) != [0, 0, 0, 0]:
            raise Unknown(f"op_sel of `{context.instruction.text}` got no meaning here")
        fetches = [dword(operand, context) for operand in context.instruction.operands[1:]]
        mask = U32(0xFFFFFFFF if bits == 32 else 0xFFFF)

        def run(m: Machine) -> None:
            a, b, c = (fetch(m) for fetch in fetches)
            result = np.zeros(m.mask.shape, U32)
            for row in range(8):
                if table >> row & 1:
                    result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            m.put(number, result & mask)

        return run

    return build


def _moved_pair(context: Context) -> Run:
    """One register of each of two pairs, as op_sel says."""
    number, operands = _target(context), context.instruction.operands[1:]
    chosen, _ = context.numbers("op_sel", [0, 0]), context.taken("op_sel_hi")
    fetches = [
        dword(o, context, step if o.count == 2 else 0) for o, step in zip(operands, chosen, strict=True)
    ]

    def run(m: Machine) -> None:
        low, high = (np.array(fetch(m)) for fetch in fetches)
        m.put(number, low)
        m.put(number + 1, high)

    return run


def _dot2(to_f32: Callable[[Array], Array]) -> Callable[[Context], Run]:
    """c + the products of two halves, summed in fp32."""

    def build(context: Context) -> Run:
        number, (a, b, *c) = _target(context), context.instruction.operands[1:]
        first, second = dword(a, context), dword(b, context)
        third = source(c[0] if c else context.instruction.operands[0], "f32", context, vector=True)

        def run(m: Machine) -> None:
            x, y = (np.ascontiguousarray(np.broadcast_to(f(m), m.mask.shape)) for f in (first, second))
            x, y = (to_f32(v.view(U16)).reshape(*v.shape, 2).astype(np.float64) for v in (x, y))
            m.put(number, as_bits((x * y).sum(-1) + third(m), "f32"))

        return run

    return build


def _f16(halves: Array) -> Array:
    return halves.view(F16).astype(F32)


def _bf16(halves: Array) -> Array:
    return (halves.astype(U32) << U32(16)).view(F32)


ROWS: tuple[Row, ...] = (
    *(Special(f"v_cvt_pk_{kind}_f32", _to_fp8(kind, False)) for kind in ("fp8", "bf8")),
    *(Special(f"v_cvt_scalef32_pk_{kind}_f32", _to_fp8(kind, True)) for kind in ("fp8", "bf8")),
    *(
        Special(f"v_cvt_f32_{kind}", _from_fp8(kind), also=(f"v_cvt_f32_{kind}_sdwa",))
        for kind in ("fp8", "bf8")
    ),
    *(
        Special(
            f"v_cvt_pk_f32_{kind}", _pair_from_fp8(kind, "f32", False), also=(f"v_cvt_pk_f32_{kind}_sdwa",)
        )
        for kind in ("fp8", "bf8")
    ),
    *(
        Special(f"v_cvt_scalef32_pk_{to}_{kind}", _pair_from_fp8(kind, to, True))
        for to in ("f32", "f16", "bf16")
        for kind in ("fp8", "bf8")
    ),
    Special("v_fma_mix_f32", _mixed("")),
    Special("v_fma_mixlo_f16", _mixed("low")),
    Special("v_fma_mixhi_f16", _mixed("high")),
    Special("v_bitop3_b32", _logic_of_three(32)),
    Special("v_bitop3_b16", _logic_of_three(16)),
    Special("v_pk_mov_b32", _moved_pair),
    Special("v_dot2_f32_f16", _dot2(_f16)),
    Special("v_dot2_f32_bf16", _dot2(_bf16)),
    Special("v_dot2c_f32_f16", _dot2(_f16), sums=True, also=("v_dot2acc_f32_f16",)),
    Special("v_dot2c_f32_bf16", _dot2(_bf16), sums=True, also=("v_dot2acc_f32_bf16",)),
)
