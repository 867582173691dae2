"""The instruction tables: one row an instruction, grouped by encoding."""

from dataclasses import replace

import numpy as np

from anymla.hardware.arches import ARCHES
from anymla.verification.amdgcn.instructions import (
    control,
    conversions,
    floats,
    integers,
    lanes,
    matrix,
    moves,
    relative,
    scalar,
    shared,
)
from anymla.verification.amdgcn.instructions.rows import Context, Row
from anymla.verification.amdgcn.machine import SCALARS, Machine, Step
from anymla.verification.amdgcn.parse import Instruction, Text, Unknown, operand

GROUPS = {
    "scalar": scalar.ROWS,
    "integers": integers.ROWS,
    "floats": floats.ROWS,
    "conversions": conversions.ROWS,
    "lanes": lanes.ROWS,
    "matrix": matrix.ROWS,
    "moves": moves.ROWS,
    "shared": shared.ROWS,
    "control": control.ROWS,
    "relative": relative.ROWS,
}

ROWS: dict[str, Row] = {form: row for rows in GROUPS.values() for row in rows for form in row.forms()}
"""Every mnemonic that is known, to its row."""


def decode(text: Text, chip: str, accumulators: int) -> tuple[Step, ...]:
    """Decode a program.

    Args:
        text: From `parse`.
        chip: A key of ARCHES, what it was compiled for.
        accumulators: The register number of a0.

    Returns:
        A step for each instruction.

    Raises:
        Unknown: mnemonics, all of them at once, or a modifier or operand that no row knows.
    """
    written = [half for i in text.instructions for half in (i, i.second) if half is not None]
    missing = sorted({i.mnemonic for i in written if _name(i) not in ROWS})
    if missing:
        raise Unknown(f"program {text.name} got {', '.join(missing)}; needs instructions that are known")
    labels, places = dict(text.labels), relative.relative(text)

    def decoded(instruction: Instruction, index: int = -1) -> Step:
        return _step(instruction, index, labels, chip, accumulators)

    return tuple(
        relative.moved(instruction, places[index], accumulators - SCALARS, decoded)
        if index in places
        else decoded(instruction, index)
        for index, instruction in enumerate(text.instructions)
    )


def _step(instruction: Instruction, index: int, labels: dict[str, int], chip: str, accumulators: int) -> Step:
    if instruction.operands and f"@{index}" in labels:
        # A disassembled branch has a distance for a label.
        labels = {**labels, instruction.operands[0].text: labels[f"@{index}"]}
    if instruction.second is None:
        return _decoded(instruction, labels, chip, accumulators)
    halves = [
        _decoded(half, labels, chip, accumulators)
        for half in (replace(instruction, second=None), instruction.second)
    ]
    return dual(instruction, *halves)


def _name(instruction: Instruction) -> str:
    """The mnemonic of a half of a dual instruction is that of the single one."""
    return instruction.mnemonic.replace("v_dual_", "v_")


def _decoded(instruction: Instruction, labels: dict[str, int], chip: str, accumulators: int) -> Step:
    if instruction.mnemonic == "v_dual_cndmask_b32" and len(instruction.operands) == 3:
        instruction = replace(instruction, operands=(*instruction.operands, operand("vcc_lo")))
    facts = ARCHES[chip]
    left = dict(instruction.modifiers)
    context = Context(chip, facts, facts.wave_size, accumulators, instruction, labels, left)
    step = ROWS[_name(instruction)].decode(context)
    context.refuse_what_is_left()
    return step


def dual(instruction: Instruction, first: Step, second: Step) -> Step:
    """Two instructions at once: both read before either writes."""
    (written,) = first.writes
    number = written - SCALARS

    def run(m: Machine) -> None:
        before = np.array(m.v[number])
        first.run(m)
        if written in second.reads:
            after = np.array(m.v[number])
            m.put(number, before)
            second.run(m)
            m.put(number, after)
        else:
            second.run(m)

    reads, writes = (*first.reads, *second.reads), (*first.writes, *second.writes)
    touches = first.touches | second.touches
    return Step(run, instruction, reads, writes, touches=touches, halves=(first, second))


__all__ = ["GROUPS", "ROWS", "SCALARS", "decode"]
