"""The audit's table in the documentation, and what tells that it is out of date."""

import ast
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from anymla.hardware.arches import ARCHES
from anymla.verification.audit.capture import BACKEND, Specialisation
from anymla.verification.audit.run import KNOWN_SPILLS, Finding

AUDITED = tuple(name for name, chip in ARCHES.items() if chip.registers)
"""Chips that the oldest supported Triton compiles these kernels for."""
COMMAND = "python -m anymla.verification.audit --record"

_HEAD = """\
# What every kernel takes on every chip

Each Triton kernel, compiled for each chip in each launch row, in all forms that change its code: query and
cache formats, pages of 64, 16 and 1 token, caches below and above 2 GiB, dense and sparse, widths of the
models. Compiled, not run: no number here is a measurement. Of the forms of a row the table has the most
registers, bytes and instructions, and the fewest waves.

Made with Triton {triton}, which needs no GPU, by `{command}`. With `--few` it
compiles one form for each kernel, row and way to read a cache. `tests/verification/test_audit.py` holds the
table.

- *on-chip*: bytes of LDS or shared memory of a program, of what a program may have there;
- *registers*: 32-bit vector registers of a lane, with accumulation registers;
- *spilled*: bytes of memory of a lane for registers that it does not have;
- *scalars*: scalar registers that AMD keeps in lanes of vector registers, without memory;
- *waves*: waves or warps that a SIMD holds at once, by registers and on-chip memory.
"""
_ROW = "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |"
_HEADINGS = (
    "kernel",
    "rows × keys, warps, stages",
    "forms",
    "on-chip",
    "registers",
    "spilled",
    "scalars",
    "waves",
    "instructions",
    "matrix instructions",
)


def table(findings: Iterable[Finding], digests: dict[str, str], triton: str) -> str:
    """The document.

    Args:
        findings: Of one or more chips, each chip's together.
        digests: Of each chip, from `digest`.
        triton: Version that compiled.
    """
    lines = [_HEAD.format(command=COMMAND, triton=triton)]
    for arch, of_chip in groupby(findings, key=lambda finding: finding.arch):
        chip = ARCHES[arch]
        lines += [
            f"## {arch} ({chip.part}), {chip.shared_bytes} bytes on chip",
            "",
            f"digest {digests[arch]}",
            "",
        ]
        lines += [_ROW.format(*_HEADINGS), _ROW.format(*("---" for _ in _HEADINGS))]
        rows: dict[tuple[str, str], list[Finding]] = {}
        for finding in sorted(of_chip, key=lambda finding: finding.kernel):
            rows.setdefault((finding.kernel, finding.row), []).append(finding)
        lines += [_row_of(kernel, row, found) for (kernel, row), found in rows.items()]
        lines += ["", *_notes(arch, rows)]
    return "\n".join(lines).rstrip() + "\n"


def _row_of(kernel: str, row: str, found: list[Finding]) -> str:
    compiled = [finding.figures for finding in found if finding.figures]
    if not compiled:
        return _ROW.format(kernel, row, len(found), "", "", "", "", "", "", found[0].error)
    names = dict.fromkeys(_plain(name) for figures in compiled for name in figures.matrix)
    return _ROW.format(
        kernel,
        row,
        len(found),
        max(figures.shared_bytes for figures in compiled),
        max(figures.registers for figures in compiled),
        max(figures.spilled_bytes for figures in compiled) or "",
        max(figures.scalars_moved for figures in compiled) or "",
        f"{min(figures.waves for figures in compiled):g}",
        max(figures.instructions for figures in compiled),
        ", ".join(names),
    )


def _notes(arch: str, rows: dict[tuple[str, str], list[Finding]]) -> Iterator[str]:
    for (kernel, row), found in rows.items():
        known = KNOWN_SPILLS.get((arch, kernel, row))
        if known:
            yield f"{kernel} {row} spills at most {known.most_bytes} bytes: {known.reason}.\n"
        faults = {f"{finding.form}: {fault}" for finding in found for fault in finding.faults()}
        yield from (f"Not clean: {kernel} {row}, {fault}.\n" for fault in sorted(faults))


def _plain(instruction: str) -> str:
    """A PTX instruction without what all of its kind have."""
    return re.sub(r"\.(sync|aligned|row|col|cta_group::1)\b", "", instruction)


def digest(specialisations: Iterable[Specialisation]) -> str:
    """What stands for the code that a chip compiles: of kernels, and of what they are specialised to.

    Comments, names of files and other chips' rows do not change it.
    """
    whole = hashlib.sha256()
    listed = list(specialisations)
    modules = dict.fromkeys(one.function.fn.__module__ for one in listed)
    for name in sorted(_with_device_code(modules)):
        whole.update(_code(name).encode())
    for key in sorted(one.key for one in listed):
        whole.update(key.encode())
    return whole.hexdigest()[:16]


def recorded_digests(document: str) -> dict[str, str]:
    """The digest of each chip in a document."""
    return dict(re.findall(r"^## (\w+) .*\n\ndigest (\w+)$", document, re.M))


def _with_device_code(modules: Iterable[str]) -> set[str]:
    """These modules and those of the backend that they import."""
    found: set[str] = set()
    left = list(modules)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse(_source(name))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(BACKEND + "."):
                left.append(str(node.module))
    return found


def _code(module: str) -> str:
    """A module's code, without comments, positions and documentation."""
    tree = ast.parse(_source(module))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
    return ast.dump(tree)


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()
