"""Assembly text to a program: what Triton emits, or a disassembled code object; nothing is executed here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from anymla.errors import AnyMLAError

NAMED = {
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "m0": (124, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
    "scc": (253, 1),
    "src_scc": (253, 1),
}
"""Scalar registers with a name: first register and how many."""

TTMP = 108
"""The scalar register that ttmp0 is."""


class Unknown(AnyMLAError, NotImplementedError):
    """An instruction, modifier or operand that the emulator does not have; it is never guessed."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand as written.

    Attributes:
        kind: "v", "a" or "s" for registers, "int", "float", "off" for none, "word" for anything else.
        index: First register.
        count: Registers.
        value: Of a number.
        text: As written, without modifiers.
        neg, abs, sext: Modifiers of a source.
    """

    kind: str
    index: int = 0
    count: int = 1
    value: float = 0
    text: str = ""
    neg: bool = False
    abs: bool = False
    sext: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction as written.

    Attributes:
        mnemonic: Without the encoding's suffix `_e32` or `_e64`.
        operands: In order.
        modifiers: Names to values, "" for one without a value.
        line: Of the assembly text, from 1.
        text: The line, without its comment.
        source: "file:line" that a compiler noted, or "".
        second: The other half of a dual instruction.
    """

    mnemonic: str
    operands: tuple[Operand, ...]
    modifiers: Mapping[str, str]
    line: int
    text: str
    source: str = ""
    second: "Instruction | None" = None


@dataclass(frozen=True)
class Text:
    """A parsed kernel.

    Attributes:
        name: Of the kernel.
        instructions: In order.
        labels: Name of each label to the index of the instruction behind it.
        descriptor: The `.amdhsa_` fields that are numbers.
        hidden: Arguments that the runtime adds: name to offset and bytes.
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    descriptor: Mapping[str, int]
    hidden: Mapping[str, tuple[int, int]] = field(default_factory=dict)


_REGISTER = re.compile(r"([vsa]|ttmp)(?:(\d+)|\[(\d+):(\d+)\])$")
_INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)$")
_FLOAT = re.compile(r"-?(?:\d+\.\d*|\.\d+)(?:e[+-]?\d+)?$")
_WORDS = re.compile(r"(?:[^\s\[(\"]|\[[^\]]*\]|\([^)]*\)|\"[^\"]*\")+")
_DESCRIPTOR = re.compile(r"^\s*\.amdhsa_(\w+)\s+(\d+)", re.M)
_HIDDEN = re.compile(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+hidden_(\w+)")
_DISASSEMBLED = re.compile(r"(.*?)\s*// ([0-9A-F]{6,}):((?: [0-9A-F]{8})*)$")


def parse(assembly: str) -> Text:
    """Parse one kernel.

    Args:
        assembly: The text of an assembler file, or of `llvm-objdump -d` with `.amdhsa_` lines for what the
            descriptor says; branch targets are labels, or distances where the line ends in its address.

    Returns:
        The program.

    Raises:
        Unknown: a line that is no instruction.
    """
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    addresses: dict[int, int] = {}
    branches: dict[int, int] = {}
    files: dict[str, str] = {}
    source = ""
    for number, raw in enumerate(assembly.splitlines(), 1):
        line = raw.partition(";")[0].strip()
        if line.startswith(".section") and ".rodata" in line:
            break
        if disassembled := _DISASSEMBLED.match(line):
            line = disassembled[1]
            addresses[int(disassembled[2], 16)] = len(found)
            if line.startswith(("s_branch", "s_cbranch")):
                distance = int(disassembled[3].split()[0], 16) & 0xFFFF
                branches[len(found)] = int(disassembled[2], 16) + 4 + 4 * (distance - (distance >> 15 << 16))
        line = line.partition("//")[0].strip()
        if label := re.match(r"([\w.$]+):", line):
            labels[label[1]] = len(found)
        elif named := re.match(r"\.file\s+(\d+)\s+(?:\"[^\"]*\"\s+)?\"([^\"]*)\"", line):
            files[named[1]] = named[2]
        elif place := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
            source = f"{files.get(place[1], '?')}:{place[2]}"
        elif line and not line.startswith("."):
            found.append(_instruction(line, number, source))
    for index, address in branches.items():
        labels[f"@{index}"] = addresses[address]
    return Text(
        (re.search(r"^\s*\.globl\s+(\S+)", assembly, re.M) or ["", "kernel"])[1],
        tuple(found),
        labels,
        {name: int(value) for name, value in _DESCRIPTOR.findall(assembly)},
        {name: (int(offset), int(size)) for offset, size, name in _HIDDEN.findall(assembly)},
    )


def _instruction(line: str, number: int, source: str) -> Instruction:
    first, dual, second = line.partition(" :: ")
    other = _instruction(second.strip(), number, source) if dual else None
    words = first.split(None, 1)
    mnemonic = re.sub(r"_e(32|64)(?=$|_dpp)", "", words[0])
    fields, modifiers = _split(words[1]) if len(words) > 1 else ([], {})
    operands = tuple(map(operand, fields))
    return Instruction(mnemonic, operands, modifiers, number, line, source, other)


def _split(text: str) -> tuple[list[str], dict[str, str]]:
    """Operands, which commas divide, and modifiers, which follow the last operand."""
    fields, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "[(") - (character in "])")
        if character == "," and not depth:
            fields.append(text[start:place].strip())
            start = place + 1
    modifiers: dict[str, str] = {}
    words = _WORDS.findall(text[start:])
    for position, word in enumerate(words):
        name, colon, value = word.partition(":")
        if position == 0 and not (colon and name.isidentifier()):
            fields.append(word)
        else:
            modifiers[name] = value
    return fields, modifiers


@lru_cache(maxsize=8192)
def operand(text: str) -> Operand:
    """Read one operand with its source modifiers."""
    neg = absolute = sext = False
    while True:
        if text.startswith("-") and not re.match(r"-[\d.]", text):
            neg, text = True, text[1:]
        elif text.startswith("|") and text.endswith("|"):
            absolute, text = True, text[1:-1]
        elif wrapped := re.match(r"(neg|abs|sext)\((.*)\)$", text):
            neg, absolute = neg or wrapped[1] == "neg", absolute or wrapped[1] == "abs"
            sext, text = sext or wrapped[1] == "sext", wrapped[2]
        else:
            break
    kind, index, count, value = "word", 0, 1, 0.0
    if register := _REGISTER.match(text):
        kind = register[1]
        index = int(register[2] or register[3])
        count = 1 if register[2] else int(register[4]) - index + 1
        if kind == "ttmp":
            kind, index = "s", index + TTMP
    elif text in NAMED:
        kind, (index, count) = "s", NAMED[text]
    elif text in ("off", "null"):
        kind = "off"
    elif _INTEGER.match(text):
        kind, value = "int", int(text, 0)
    elif _FLOAT.match(text):
        kind, value = "float", float(text)
    return Operand(kind, index, count, value, text, neg, absolute, sext)
