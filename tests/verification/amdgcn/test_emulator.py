"""The kernels that we ship, as machine code of each chip on a CPU: right, and no instruction is in vain.

Triton keeps tables of the first target of a process, so every chip has a process of its own.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import launch_rows
from anymla.hardware.probe import machine_named
from anymla.verification.amdgcn.conformance import BACKEND
from anymla.verification.amdgcn.driver import CHIPS, emulated
from anymla.verification.amdgcn.rows import row_cases, row_named, row_names
from anymla.verification.cases import offered

pytest.importorskip("triton", reason="Triton is not installed; pip install 'anymla[triton]'")

CDNA = ("gfx90a", "gfx942", "gfx950")
EVERY = {"gfx90a": 4, "gfx942": 2, "gfx950": 4, "gfx1100": 12, "gfx1201": 12}
"""Of how many sites one is tried here; all of them with `emulator_mutants.py CHIP`, see evidence."""


@lru_cache
def checked(script: str, chip: str, *what: str) -> list[dict]:
    """What a process found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).parent / f"emulator_{script}.py"), chip, *what]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-5000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("chip", CHIPS)
def test_the_whole_api_is_right_in_any_order_of_the_waves(chip):
    found = checked("calls", chip, "api")
    assert [(fact["name"], fact["reasons"]) for fact in found if fact["reasons"]] == []
    kernels = {kernel for fact in found for kernel in fact["kernels"]}
    assert kernels >= {
        "attend_kernel",
        "combine_kernel",
        "schedule_kernel",
        "mha_kernel",
        "gather_kernel",
        "store_kernel",
    }


@pytest.mark.parametrize("chip", CHIPS)
def test_rows_full_of_ties_are_narrowed_to_what_is_chosen(chip):
    once, twice = checked("calls", chip, "scores")
    assert once["wrong"] == twice["wrong"] == []
    assert once["kernels"] == ["narrow_kernel", "choose_kernel"]
    assert twice["kernels"] == ["narrow_kernel", *once["kernels"]]


@pytest.mark.parametrize("chip", CHIPS)
def test_products_of_every_type_and_size_are_exact(chip):
    found = checked("calls", chip, "dots", "part")
    assert [fact["name"] for fact in found if not fact["right"]] == []
    used = {name for fact in found for name in fact["instructions"]}
    types = ["bf16", "f16", *(["fp8_fp8", "bf8_bf8"] if chip in ("gfx942", "gfx1201") else [])]
    if chip in CDNA:
        types.append("f32")
        assert all(fact["instructions"] for fact in found)
        assert any("_16x16x" in name for name in used) and any("_32x32x" in name for name in used)
    for kind in types:
        assert any(name.split("x")[-1].lstrip("0123456789_").startswith(kind) for name in used), (kind, used)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_barrier_that_is_missing_is_found(chip):
    found = checked("mutants", chip, "barrier", "1" if chip in CDNA else "4", "--row=0")
    assert len(found) >= 5
    assert [fact for fact in found if not fact["found"] and not fact["redundant"]] == []


@pytest.mark.parametrize("chip", CHIPS)
def test_every_wait_mask_and_execution_mask_that_is_missing_is_found(chip):
    found = checked("mutants", chip, "exec,wait,mask,half", str(EVERY[chip]), "--row=0")
    assert {fact["kind"] for fact in found} >= {"exec", "wait", "mask"}
    assert [fact for fact in found if not fact["found"] and not fact["redundant"]] == []


@pytest.mark.parametrize("chip", CHIPS)
def test_every_launch_row_has_calls_that_are_offered(chip):
    machine = machine_named(chip)
    found = list(row_cases(machine))
    assert list(dict.fromkeys(row_named(each.kernel, each.row) for each in found)) == row_names(chip)
    assert all(offered(each.case.problem, BACKEND, machine) for each in found)
    assert len({each.id for each in found}) == len(found)


def test_a_call_takes_the_launch_row_that_it_is_given_and_is_wrong_if_it_takes_none():
    *given, astray = checked("calls", "gfx942", "rows")
    join, (write,) = launch_rows("combine", "gfx942")[0], launch_rows("cache_write", "gfx942")
    names = [row_named("combine", join), row_named("combine", replace(join, num_warps=2))]
    assert [fact["reasons"] for fact in given] == [[]] * 3
    assert [fact["name"].split(":")[0] for fact in given[:2]] == names
    assert given[-1]["name"].endswith("over 4 GiB") and given[-1]["rows"] == [row_named("cache_write", write)]
    needed = row_named("cache_write", write), row_named("attend", join)
    assert astray["reasons"] == ["launches got {}; need {}".format(*needed)]


@pytest.mark.parametrize(
    ("chip", "reason"),
    [("sm90", "needs one of gfx90a"), ("gfx7", "needs one of gfx90a")],
)
def test_a_chip_that_is_not_amds_is_refused(chip, reason):
    with pytest.raises(ValueError, match=reason), emulated(chip):
        raise AssertionError("entered")


def test_every_chip_is_one_that_we_know():
    assert set(CHIPS) <= set(ARCHES)
