"""The cases that verify every backend, through the public functions, over memory full of NaN."""

from dataclasses import replace

import cases as product
import pytest
import torch
from double import AiterDouble

from anymla import plans
from anymla.hardware.probe import Machine, machine_named
from anymla.verification.cases import Case, cases
from anymla.verification.checks import check_case

CHIPS = ("gfx942", "gfx950")


def machine(chip: str) -> Machine:
    """A chip with the newest AITER that is recorded, small enough for short sequences to be split."""
    return replace(machine_named(chip).having("aiter", "HEAD"), multiprocessors=product.UNITS)


def hostile(chip: str) -> list[Case]:
    """What it offers of attention; each chip takes every other case."""
    quick = cases("aiter", machine(chip), quick=True)
    attention = [case for case in quick if case.problem.op in ("decode", "sparse_decode")]
    return attention[CHIPS.index(chip) :: len(CHIPS)]


@pytest.mark.parametrize("chip", CHIPS)
def test_every_case_is_right_where_slot_0_is_finite(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(chip)
    monkeypatch.setattr(plans, "machine_of", lambda device: here)
    AiterDouble("HEAD", chip, product.UNITS).install(monkeypatch)
    made = Case.inputs

    def with_finite_slot_0(self, device="cpu"):
        call = made(self, device)
        first = call.cache.data[0, 0]
        if not bool(first.float().isfinite().all()):
            first.view(torch.uint8).zero_()
        return call

    monkeypatch.setattr(Case, "inputs", with_finite_slot_0)
    found = {case.id: check_case(case, "aiter", here, torch.device("cpu")) for case in hostile(chip)}
    assert len(found) > 80
    assert {name: judged.reasons for name, judged in found.items() if not judged.passed} == {}
