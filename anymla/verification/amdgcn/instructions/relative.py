"""Relative registers: between `s_set_gpr_idx_on` and `..._off`, M0 is added to numbers of vector registers.

Which operands it is added to stands in the text, so the instructions in between are decoded for each value of
M0 when it is first met.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from anymla.verification.amdgcn.instructions.rows import U32, Context, Row, dword, numbers_of, step
from anymla.verification.amdgcn.machine import M0, Machine, Step
from anymla.verification.amdgcn.parse import Instruction, Operand, Text, Unknown

ON, OFF = "s_set_gpr_idx_on", "s_set_gpr_idx_off"
PLACES = ("SRC0", "SRC1", "SRC2", "DST")
"""What can be relative, in the order of the bits of the immediate."""


@dataclass(frozen=True)
class IndexOn(Row):
    """M0[7:0] becomes the index, M0[15:12] what it is for."""

    def decode(self, context: Context) -> Step:
        index, _ = context.instruction.operands
        bits = sum(1 << PLACES.index(place) for place in _named(context.instruction))
        fetch = dword(index, context, vector=False)

        def run(m: Machine) -> None:
            kept = m.s[M0] & U32(0xFFFF0F00)
            m.put_scalar(M0, kept | fetch(m) & U32(0xFF) | U32(bits << 12))

        return step(run, context, numbers_of(context, [index]), [M0], spread="all")


@dataclass(frozen=True)
class IndexOff(Row):
    """Numbers of registers are what they say again."""

    def decode(self, context: Context) -> Step:
        return step(lambda m: None, context, spread="")


def relative(text: Text) -> dict[int, frozenset[str]]:
    """Which instructions have relative operands, and in which places.

    Raises:
        Unknown: a branch leads into or out of such a stretch, so that the text does not say.
    """
    found: dict[int, frozenset[str]] = {}
    entries, places = set(text.labels.values()), frozenset[str]()
    for index, instruction in enumerate(text.instructions):
        if instruction.mnemonic in (ON, OFF):
            places = frozenset(_named(instruction)) if instruction.mnemonic == ON else frozenset()
        elif places:
            if index in entries or instruction.mnemonic.startswith(("s_branch", "s_cbranch")):
                raise Unknown(f"`{instruction.text}` got relative registers and a branch; needs one of them")
            if instruction.mnemonic.startswith("v_"):
                found[index] = places
    return found


def moved(
    instruction: Instruction, places: frozenset[str], most: int, decode: Callable[[Instruction], Step]
) -> Step:
    """A step of an instruction whose registers in some places have M0[7:0] added.

    Args:
        instruction: As written.
        places: Of PLACES.
        most: Vector registers that there are.
        decode: Makes a step of an instruction.
    """

    @lru_cache(maxsize=256)
    def at(offset: int) -> Step:
        operands = tuple(_moved(instruction, places, offset))
        last = max(operand.index + operand.count for operand in operands if operand.kind == "v")
        if last > most:
            raise Unknown(f"`{instruction.text}` got v{last - 1} by M0; needs one of {most} registers")
        return decode(replace(instruction, operands=operands))

    def run(m: Machine) -> None:
        offsets = m.s[M0] & U32(0xFF)
        for offset in np.unique(offsets):
            m.execute(at(int(offset)), offsets == offset)

    return Step(run, instruction, (M0,), trusts=(M0,), spread="", touches=frozenset((M0,)))


def _moved(instruction: Instruction, places: frozenset[str], offset: int) -> Iterator[Operand]:
    for place, operand in zip(("DST", "SRC0", "SRC1", "SRC2"), instruction.operands, strict=False):
        added = offset if place in places and operand.kind == "v" else 0
        yield replace(operand, index=operand.index + added)


def _named(instruction: Instruction) -> list[str]:
    return instruction.operands[1].text.removeprefix("gpr_idx(").rstrip(")").split(",")


ROWS: tuple[Row, ...] = (IndexOn(ON), IndexOff(OFF))
