"""The instruction tables: one row an instruction, grouped by encoding."""

from anymla.hardware.arches import Arch
from anymla.verification.amdgcn.instructions import (
    control,
    conversions,
    floats,
    integers,
    lanes,
    matrix,
    moves,
    scalar,
    shared,
)
from anymla.verification.amdgcn.instructions.rows import Context, Row
from anymla.verification.amdgcn.machine import SCALARS, Step
from anymla.verification.amdgcn.parse import Instruction, Text, Unknown

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
}

ROWS: dict[str, Row] = {form: row for rows in GROUPS.values() for row in rows for form in row.forms()}
"""Every mnemonic that is known, to its row."""


def decode(text: Text, chip: Arch, accumulators: int) -> tuple[Step, ...]:
    """Decode a program.

    Args:
        text: From `parse`.
        chip: What it was compiled for.
        accumulators: The register number of a0.

    Returns:
        A step for each instruction.

    Raises:
        Unknown: mnemonics, all of them at once, or a modifier or operand that no row knows.
    """
    missing = sorted({i.mnemonic for i in text.instructions if i.mnemonic not in ROWS})
    if missing:
        raise Unknown(f"program {text.name} got {', '.join(missing)}; needs instructions that are known")
    labels = dict(text.labels)
    return tuple(
        _step(instruction, index, labels, chip, accumulators)
        for index, instruction in enumerate(text.instructions)
    )


def _step(
    instruction: Instruction, index: int, labels: dict[str, int], chip: Arch, accumulators: int
) -> Step:
    if instruction.operands and f"@{index}" in labels:
        # A disassembled branch has a distance for a label.
        labels = {**labels, instruction.operands[0].text: labels[f"@{index}"]}
    left = dict(instruction.modifiers)
    context = Context(chip, chip.wave_size, accumulators, instruction, labels, left)
    step = ROWS[instruction.mnemonic].decode(context)
    context.refuse_what_is_left()
    return step


__all__ = ["GROUPS", "ROWS", "SCALARS", "decode"]
