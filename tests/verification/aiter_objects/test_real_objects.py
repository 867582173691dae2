"""AITER's own code objects, where they and a disassembler are here; a few kernels of each kind.

AITER_WHEEL names a wheel of amd-aiter, or AITER_OBJECTS a folder with an AITER; LLVM_OBJDUMP an llvm-objdump,
if none that is new enough is on the path. `anymla verify --machine gfx942 --aiter PATH` runs them all.
"""

import os
import zipfile
from pathlib import Path

import pytest

from anymla.verification.aiter_objects import run
from anymla.verification.aiter_objects.code_object import Disassembler, NoDisassembler

WHEEL, FOLDER = os.environ.get("AITER_WHEEL", ""), os.environ.get("AITER_OBJECTS", "")
KERNELS = (
    "mla_dec_stage1_bf16_a16w16_subQ16_mqa16",
    "mla_a8w8_qh16_qseqlen1_gqaratio16",
    "mla_a8w8_qh16_qseqlen2_gqaratio16_ps",
)


@pytest.fixture(scope="module")
def aiter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an AITER, or a reason for skipping."""
    if FOLDER:
        return Path(FOLDER)
    if not Path(WHEEL).is_file():
        pytest.skip("AITER_OBJECTS names no folder, and AITER_WHEEL no wheel of amd-aiter")
    folder = tmp_path_factory.mktemp("aiter")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if "/mla/" in name])
    return folder


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_right_by_the_clock_and_no_more(aiter: Path, kernel: str, chip: str) -> None:
    try:
        Disassembler.of(chip)
    except NoDisassembler as none:
        pytest.skip(str(none))
    (found, *_) = run.verify(aiter, chip, quick=True, only=kernel).kernels
    assert found.outcome == "undecided", found
    assert found.timing
    assert found.facts["NaN in slot 0 reaches"] != "no row"
