"""One verification: every case of a backend, every fault, a report, and the evidence of it."""

import json
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import anymla
from anymla import select
from anymla.backends import BACKENDS
from anymla.errors import InvalidInput, UnknownBackend
from anymla.hardware.probe import Machine, this_machine
from anymla.verification import faults
from anymla.verification.cases import cases
from anymla.verification.checks import check_case
from anymla.verification.judge import Judgement

Progress = Callable[[int, int, str], None]
"""Called with what is done, what there is, and what is next."""


@dataclass(frozen=True)
class Outcome:
    """A case and what the judge found, or a fault and whether it was caught at every length."""

    name: str
    op: str
    judgement: Judgement


@dataclass(frozen=True)
class Report:
    """What was verified.

    Attributes:
        backend: Its name.
        machine: Where it ran.
        quick: Whether it was only a part.
        outcomes: One for each case.
        faults: One for each wrong kernel; it passed if it was caught.
        seconds: How long it all took.
    """

    backend: str
    machine: Machine
    quick: bool
    outcomes: tuple[Outcome, ...]
    faults: tuple[Outcome, ...]
    seconds: float

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The cases that are wrong and the faults that were missed."""
        return tuple(o for o in (*self.outcomes, *self.faults) if not o.judgement.passed)

    @property
    def worst(self) -> dict[str, Outcome]:
        """Of each operation, the case that used the largest share of its budget."""
        found: dict[str, Outcome] = {}
        for outcome in self.outcomes:
            if outcome.op not in found or outcome.judgement.share > found[outcome.op].judgement.share:
                found[outcome.op] = outcome
        return found

    def to_dict(self) -> dict[str, Any]:
        """The figures, as `--json` prints them."""
        caught = [fault for fault in self.faults if fault.judgement.passed]
        return {
            "backend": self.backend,
            "arch": self.machine.arch,
            "device": self.machine.device_name,
            "quick": self.quick,
            "cases": len(self.outcomes),
            "failed": sum(not outcome.judgement.passed for outcome in self.outcomes),
            "faults_caught": len(caught),
            "faults_total": len(self.faults),
            "seconds": round(self.seconds, 1),
            "worst": {
                op: {"share": _finite(outcome.judgement.share), "case": outcome.name}
                for op, outcome in self.worst.items()
            },
            "failures": [{"case": o.name, "reasons": list(o.judgement.reasons)} for o in self.failures],
        }


def verify(
    backend: str = "cpu", *, quick: bool = False, device: str | None = None, progress: Progress | None = None
) -> Report:
    """Run every case of a backend, and every fault against the judge.

    Args:
        backend: A name in BACKENDS.
        quick: Only a part of the cases, and the faults only at the shorter lengths.
        device: A torch device. None: the CPU if a row of the backend runs there, else "cuda".
        progress: Told before each case and fault.

    Returns:
        The report; see `Report.failures`.

    Raises:
        UnknownBackend: no row has that name.
        NoBackend: the backend cannot run here; the message gives every reason.
    """
    began = time.monotonic()
    place = torch.device(device or device_of(backend))
    machine = this_machine(place)
    found = cases(backend, machine, quick=quick)
    if not any(case.check == "right" for case in found):
        # Nothing is offered here, and choosing says why.
        select.choose(found[0].problem, machine, backend)
    lengths = faults.LENGTHS[:3] if quick else faults.LENGTHS
    total = len(found) + len(faults.FAULTS)
    outcomes: list[Outcome] = []
    for case in found:
        if progress:
            progress(len(outcomes), total, case.id)
        judgement = check_case(case, backend, machine, place)
        outcomes.append(Outcome(case.id, case.problem.op, judgement))
    tried: list[Outcome] = []
    for fault in faults.FAULTS:
        if progress:
            progress(len(found) + len(tried), total, f"fault: {fault.name}")
        tried.append(Outcome(fault.name, "fault", faults.caught(fault, lengths)))
    if progress:
        progress(total, total, "")
    return Report(backend, machine, quick, tuple(outcomes), tuple(tried), time.monotonic() - began)


def device_of(backend: str) -> str:
    """Where a backend is verified: on the CPU if a row runs there, else on the first GPU.

    Args:
        backend: A name in BACKENDS.

    Returns:
        "cpu" or "cuda"; "cpu" also where there is no GPU, and there the backend refuses.

    Raises:
        UnknownBackend: no row has that name.
    """
    rows = [row for row in BACKENDS if row.name == backend]
    if not rows:
        raise UnknownBackend(backend, dict.fromkeys(row.name for row in BACKENDS))
    return "cpu" if any(r.arch.accepts("cpu") for r in rows) or not torch.cuda.is_available() else "cuda"


def record(report: Report, folder: Path) -> Path:
    """Write a report as evidence: `folder/<arch>/<backend>.json`.

    Args:
        report: Of a run in which everything passed.
        folder: Usually "evidence".

    Returns:
        The file.

    Raises:
        InvalidInput: something failed; evidence is of what is right.
    """
    if report.failures:
        raise InvalidInput("record", [f"report got {len(report.failures)} failures; needs none"])
    facts = report.to_dict()
    facts.pop("failures")
    made = {"date": datetime.now(UTC).date().isoformat(), **made_with("torch", "triton")}
    path = folder / report.machine.arch / f"{report.backend}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**made, **facts}, indent=2) + "\n")
    return path


def made_with(*packages: str) -> dict[str, str]:
    """What a record is made with: commit, Python, anymla, and those of the packages that are installed."""
    versions = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "anymla": anymla.__version__,
        **versions,
    }


def _finite(share: float) -> float | None:
    return round(share, 4) if share < float("inf") else None


def _commit() -> str:
    """The commit of the checkout that this package is in; "" outside one."""
    root = Path(anymla.__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    answers = []
    for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "anymla"]):
        git = ["git", "-C", str(root), *command]
        answers.append(subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip())
    return answers[0] + (" with changes" if answers[1] else "")
