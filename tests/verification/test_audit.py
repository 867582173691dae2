"""Every kernel in every launch row, compiled for chips that are not here; docs/audit.md and what it rests on.

In processes of their own: one chip spoils Triton's fp8 conversions for the next, and memory is poisoned here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from anymla.hardware.arches import ARCHES
from anymla.verification.audit.figures import Figures, waves
from anymla.verification.audit.record import AUDITED, COMMAND, recorded_digests
from anymla.verification.audit.run import Finding

DOCUMENT = Path(__file__).parents[2] / "docs" / "audit.md"
IN_CI = ("gfx942", "gfx950", "sm90")
CLEAN = Figures(
    shared_bytes=1024,
    tensor_columns=0,
    registers=100,
    spilled_bytes=0,
    scalars_moved=0,
    waves=4.0,
    instructions=1000,
    matrix={"v_mfma_f32_16x16x16_bf16": 8},
    dots=2,
    bare_dots=0,
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the audit as a person does, with no interpreter in the way."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "anymla.verification.audit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_table_is_of_this_code() -> None:
    found = run("--digests")
    assert found.returncode == 0, found.stderr
    stale = [
        arch
        for arch, digest in json.loads(found.stdout).items()
        if recorded_digests(DOCUMENT.read_text()).get(arch) != digest
    ]
    assert not stale, f"{DOCUMENT.name} is out of date for {', '.join(stale)}; run {COMMAND}"


def test_every_kernel_compiles_clean_in_every_row() -> None:
    found = run("--few", *IN_CI)
    dirty = [line for line in found.stdout.splitlines() if "!!" in line or line.startswith("no call")]
    assert found.returncode == 0, "\n".join(dirty) or found.stderr


@pytest.mark.parametrize(
    ("arch", "registers", "shared_bytes", "num_warps", "expected"),
    [
        ("gfx942", 305, 36864, 4, 1),
        ("gfx950", 228, 36864, 4, 2),
        ("gfx942", 64, 36864, 4, 1),
        ("gfx90a", 64, 0, 4, 8),
        ("gfx1201", 240, 8192, 8, 6),
        ("sm90", 255, 221184, 8, 2),
        ("sm90", 128, 0, 4, 4),
        ("sm86", 32, 0, 4, 12),
    ],
)
def test_waves_are_what_registers_and_on_chip_memory_leave(
    arch: str, registers: int, shared_bytes: int, num_warps: int, expected: float
) -> None:
    assert waves(arch, registers, shared_bytes, num_warps) == expected


@pytest.mark.parametrize(
    ("arch", "change", "fault"),
    [
        ("gfx942", {"shared_bytes": 65537}, "65537 on-chip bytes of 65536"),
        ("gfx942", {"spilled_bytes": 4}, "4 bytes spilled"),
        ("gfx942", {"bare_dots": 1}, "1 products without matrix instructions"),
        ("gfx942", {"matrix": {}}, "2 products without matrix instructions"),
        ("sm100", {"tensor_columns": 528}, "528 columns of tensor memory of 512"),
        ("gfx942", {"instructions": 25_800}, "25800 instructions"),
    ],
)
def test_what_is_not_clean_is_said(arch: str, change: dict, fault: str) -> None:
    finding = Finding(arch, "attend", "", "", Figures(**{**vars(CLEAN), **change}))
    assert finding.faults() == [fault]
    assert Finding(arch, "attend", "", "", CLEAN).faults() == []


def test_every_chip_that_can_be_compiled_for_is_audited() -> None:
    assert set(AUDITED) == set(ARCHES) - {"cpu", "gfx1250"}
