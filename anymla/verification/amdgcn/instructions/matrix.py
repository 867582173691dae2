"""MFMA and WMMA: products of small matrices that the lanes of a wave hold together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anymla.verification.amdgcn.formats import bf16_to_f32, fp8_values
from anymla.verification.amdgcn.instructions.rows import (
    F16,
    F32,
    F64,
    U8,
    U16,
    U32,
    Array,
    Context,
    Row,
    constant,
    numbers_of,
    step,
)
from anymla.verification.amdgcn.machine import SCALARS, Machine, Step
from anymla.verification.amdgcn.parse import Operand, Unknown


def _xf32(values: Array) -> Array:
    """fp32 rounded to the ten bits behind the point that the fast product of fp32 sees."""
    bits = np.ascontiguousarray(values).view(U32)
    rounded: Array = ((bits + U32(0xFFF) + (bits >> U32(13) & U32(1))) & U32(0xFFFFE000)).view(F32)
    return rounded


ELEMENTS: dict[str, Callable[[Array, str], Array]] = {
    "f32": lambda words, _: words.view(F32),
    "xf32": lambda words, _: _xf32(words.view(F32)),
    "bf16": lambda words, _: bf16_to_f32(words.view(U16)),
    "f16": lambda words, _: words.view(F16).astype(F32),
    "fp8": lambda words, flavour: fp8_values("fp8", flavour)[words.view(U8)],
    "bf8": lambda words, flavour: fp8_values("bf8", flavour)[words.view(U8)],
}
"""Registers [waves, lanes, words] as fp32 values, by what an instruction calls them."""


def _registers(m: Machine, number: int, count: int) -> Array:
    """[waves, lanes, count] uint32."""
    if isinstance(m.at, slice):
        return np.ascontiguousarray(m.v[number : number + count].transpose(1, 2, 0))
    return np.stack([m.v[number + word] for word in range(count)], -1)


def _sums(m: Machine, operand: Operand, number: int, count: int) -> Any:
    """What is added to: [count, waves, lanes] fp32, or a number."""
    if operand.kind in ("int", "float"):
        return constant(operand, "f32").view(F32)
    return np.stack([m.v[number + word] for word in range(count)]).view(F32)


@dataclass(frozen=True)
class Mfma(Row):
    """D = A B + C on a wave of 64 lanes, in fp32, whatever lanes execute.

    Lane l holds column l % size of A (row of B) and the elements of K that follow its group l / size; of D it
    holds column l % size, in registers r the rows 8 (r / 4) + 4 (l / 32) + r % 4 of 32, 4 (l / 16) + r of 16.

    Attributes:
        size: Rows and columns.
        depth: K.
        kinds: Of A and of B, keys of ELEMENTS; None where the modifiers cbsz and blgp say it.
    """

    size: int
    depth: int
    kinds: tuple[str, str] | None
    also: tuple[str, ...] = ()

    def forms(self) -> Sequence[str]:
        return (self.mnemonic, *self.also)

    def decode(self, context: Context) -> Step:
        target, left, right, added = context.instruction.operands
        kinds = self.kinds
        if kinds is None:
            formats = ("fp8", "bf8")
            a, b = context.number("cbsz"), context.number("blgp")
            if max(a, b) > 1:
                raise Unknown(
                    f"`{context.instruction.text}` got formats {a} and {b}; needs 8 bits an element"
                )
            kinds = formats[a], formats[b]
        size, depth, flavour = self.size, self.depth, context.chip.fp8_flavour
        groups = 64 // size
        count = size * size // 64
        first, second = (context.register(o) - SCALARS for o in (left, right))
        result = context.register(target) - SCALARS
        third = context.register(added) - SCALARS if added.kind in "va" else -1

        def matrix(m: Machine, number: int, words: int, kind: str) -> Array:
            """[waves, size, depth]."""
            values = ELEMENTS[kind](_registers(m, number, words), flavour)
            parts = values.reshape(len(m.waves), groups, size, depth // groups)
            return parts.transpose(0, 2, 1, 3).reshape(len(m.waves), size, depth)

        def run(m: Machine) -> None:
            a = matrix(m, first, left.count, kinds[0])
            b = matrix(m, second, right.count, kinds[1])
            if kinds[0] == "f32":
                a, b = a.astype(F64), b.astype(F64)
            product = np.matmul(a, b.swapaxes(1, 2)).astype(F32)
            waves = len(m.waves)
            if size == 16:
                rows = product.reshape(waves, 4, 4, 16).transpose(2, 0, 1, 3)
            else:
                rows = product.reshape(waves, 4, 2, 4, 32).transpose(1, 3, 0, 2, 4)
            sums = rows.reshape(count, waves, 64) + _sums(m, added, third, count)
            m.put_all(result, sums.astype(F32).view(U32))

        reads = numbers_of(context, [left, right, added])
        ticks = 64 if depth >= 64 and size == 32 else 32 if size == 32 or depth >= 128 else 16
        return step(run, context, reads, numbers_of(context, [target]), spread="all", ticks=ticks)


@dataclass(frozen=True)
class Wmma(Row):
    """D = A B + C of 16 x 16 x 16 on a wave of 32 lanes, in fp32.

    Generation 11: lane l holds all of row l % 16 of A (column of B), twice; of D column l % 16, in register r
    the row 2 r + l / 16. Generation 12: lane l holds half l / 16 of K; of D, in register r the row
    r + 8 (l / 16).

    Attributes:
        kinds: Of A and of B, keys of ELEMENTS.
    """

    kinds: tuple[str, str]

    def decode(self, context: Context) -> Step:
        target, left, right, added = context.instruction.operands
        newer, flavour = context.generation >= 12, context.chip.fp8_flavour
        first, second = (context.register(o) - SCALARS for o in (left, right))
        result = context.register(target) - SCALARS
        third = context.register(added) - SCALARS if added.kind == "v" else -1

        def matrix(m: Machine, number: int, words: int, kind: str) -> Array:
            """[waves, 16, 16], rows and K."""
            values = ELEMENTS[kind](_registers(m, number, words), flavour)
            if newer:
                parts = values.reshape(len(m.waves), 2, 16, 8)
                return parts.transpose(0, 2, 1, 3).reshape(len(m.waves), 16, 16)
            return values[:, :16]

        def run(m: Machine) -> None:
            a = matrix(m, first, left.count, self.kinds[0])
            b = matrix(m, second, right.count, self.kinds[1])
            product = np.matmul(a, b.swapaxes(1, 2)).astype(F32)
            waves = len(m.waves)
            if newer:
                rows = product.reshape(waves, 2, 8, 16).transpose(2, 0, 1, 3)
            else:
                rows = product.reshape(waves, 8, 2, 16).transpose(1, 0, 2, 3)
            sums = rows.reshape(8, waves, 32) + _sums(m, added, third, 8)
            m.put_all(result, sums.astype(F32).view(U32))

        reads = numbers_of(context, [left, right, added])
        return step(run, context, reads, numbers_of(context, [target]), spread="all", ticks=32)


_EIGHT_BITS = [(a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")]

ROWS: tuple[Row, ...] = (
    Mfma("v_mfma_f32_16x16x4_f32", 16, 4, ("f32", "f32"), ("v_mfma_f32_16x16x4f32",)),
    Mfma("v_mfma_f32_32x32x2_f32", 32, 2, ("f32", "f32"), ("v_mfma_f32_32x32x2f32",)),
    Mfma("v_mfma_f32_16x16x8_xf32", 16, 8, ("xf32", "xf32")),
    Mfma("v_mfma_f32_32x32x4_xf32", 32, 4, ("xf32", "xf32")),
    Mfma("v_mfma_f32_16x16x16_bf16", 16, 16, ("bf16", "bf16"), ("v_mfma_f32_16x16x16bf16_1k",)),
    Mfma("v_mfma_f32_32x32x8_bf16", 32, 8, ("bf16", "bf16"), ("v_mfma_f32_32x32x8bf16_1k",)),
    Mfma("v_mfma_f32_16x16x16_f16", 16, 16, ("f16", "f16"), ("v_mfma_f32_16x16x16f16",)),
    Mfma("v_mfma_f32_32x32x8_f16", 32, 8, ("f16", "f16"), ("v_mfma_f32_32x32x8f16",)),
    Mfma("v_mfma_f32_16x16x32_bf16", 16, 32, ("bf16", "bf16")),
    Mfma("v_mfma_f32_32x32x16_bf16", 32, 16, ("bf16", "bf16")),
    Mfma("v_mfma_f32_16x16x32_f16", 16, 32, ("f16", "f16")),
    Mfma("v_mfma_f32_32x32x16_f16", 32, 16, ("f16", "f16")),
    *(Mfma(f"v_mfma_f32_16x16x32_{a}_{b}", 16, 32, (a, b)) for a, b in _EIGHT_BITS),
    *(Mfma(f"v_mfma_f32_32x32x16_{a}_{b}", 32, 16, (a, b)) for a, b in _EIGHT_BITS),
    Mfma("v_mfma_f32_16x16x128_f8f6f4", 16, 128, None),
    Mfma("v_mfma_f32_32x32x64_f8f6f4", 32, 64, None),
    *(Wmma(f"v_wmma_f32_16x16x16_{kind}", (kind, kind)) for kind in ("bf16", "f16")),
    *(Wmma(f"v_wmma_f32_16x16x16_{a}_{b}", (a, b)) for a, b in _EIGHT_BITS),
)
