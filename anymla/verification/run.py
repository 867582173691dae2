"""One verification: the cases of a backend, or random calls of it, a report, and the evidence of it."""

import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import anymla
from anymla import select
from anymla.backends import BACKENDS
from anymla.errors import InvalidInput, UnknownBackend
from anymla.hardware.probe import Machine, this_machine
from anymla.verification import faults, fuzz
from anymla.verification.cases import Case, cases
from anymla.verification.checks import check_case
from anymla.verification.judge import Judgement, wrong
from anymla.verification.workers import shared_out

Progress = Callable[[int, int, str], None]
"""Called with what is done, what there is, and what is next."""

FAILED = "failed: "
"""What is said first of a case that is wrong, as soon as it is known."""

Item = Case | fuzz.Fuzzed | type[faults.Kernel]
"""What a process may be given to do."""


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
        extent: What was run, as evidence says it: {"quick": ...}, or {"fuzz": ..., "seed": ...}.
        outcomes: One for each case.
        faults: One for each wrong kernel; it passed if it was caught.
        seconds: How long it all took.
    """

    backend: str
    machine: Machine
    extent: dict[str, Any]
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

    def again(self, outcome: Outcome) -> str:
        """The command that makes a random call again; "" for a case or fault."""
        if "fuzz" not in self.extent:
            return ""
        seed, number = outcome.name.split()[0].split(":")
        return f"anymla verify --backend {self.backend} --seed {seed} --fuzz-case {number}"

    def to_dict(self) -> dict[str, Any]:
        """The figures, as `--json` prints them."""
        caught = [fault for fault in self.faults if fault.judgement.passed]
        tried = {"faults_caught": len(caught), "faults_total": len(self.faults)} if self.faults else {}
        return {
            "backend": self.backend,
            "arch": self.machine.arch,
            "device": self.machine.device_name,
            **self.extent,
            "cases": len(self.outcomes),
            "failed": sum(not outcome.judgement.passed for outcome in self.outcomes),
            **tried,
            "seconds": round(self.seconds, 1),
            "worst": {
                op: {"share": _finite(outcome.judgement.share), "case": outcome.name}
                for op, outcome in self.worst.items()
            },
            "failures": [
                {"case": o.name, "reasons": list(o.judgement.reasons), "again": self.again(o)}
                for o in self.failures
            ],
        }


def verify(
    backend: str = "cpu",
    *,
    quick: bool = False,
    device: str | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Run every case of a backend, and every fault against the judge.

    Args:
        backend: A name in BACKENDS.
        quick: Only a part of the cases, and the faults only at the shorter lengths.
        device: A torch device. None: the CPU if a row of the backend runs there, else "cuda".
        processes: How many share the cases.
        progress: Told before each case and fault.

    Returns:
        The report; see `Report.failures`.

    Raises:
        UnknownBackend: no row has that name.
        NoBackend: the backend cannot run here; the message gives every reason.
    """
    began = time.monotonic()
    place, machine, found = _offered(backend, device, quick=quick)
    # The faults share what they are tried at, so they stay together.
    groups: list[list[Item]] = [[case] for case in found]
    groups.append([*faults.FAULTS])
    work = partial(_outcome, backend=backend, device=place, quick=quick)
    outcomes = _each(work, groups if processes <= 1 else groups[::-1], processes, progress)
    tried = tuple(outcome for outcome in outcomes if outcome.op == "fault")
    judged = tuple(outcome for outcome in outcomes if outcome.op != "fault")
    return Report(backend, machine, {"quick": quick}, judged, tried, time.monotonic() - began)


def _offered(
    backend: str, device: str | None, *, quick: bool
) -> tuple[torch.device, Machine, tuple[Case, ...]]:
    """Where a backend is verified, and its cases; NoBackend if it can do nothing there."""
    place = torch.device(device or device_of(backend))
    machine = this_machine(place)
    found = cases(backend, machine, quick=quick)
    if not any(case.check == "right" for case in found):
        # Nothing is offered here, and choosing says why.
        select.choose(found[0].problem, machine, backend)
    return place, machine, found


def verify_random(
    backend: str,
    numbers: Sequence[int],
    *,
    seed: int = 0,
    device: str | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Run random calls of a backend, each against the fp64 definition.

    Args:
        backend: A name in BACKENDS.
        numbers: Of the calls; range(n) for the first n.
        seed: Of all of them.
        device: As in `verify`.
        processes: How many share the calls.
        progress: Told before each call.

    Returns:
        The report. The name of an outcome begins with what makes it again, "seed:number".

    Raises:
        UnknownBackend: no row has that name.
        NoBackend: the backend cannot run here; the message gives every reason.
    """
    began = time.monotonic()
    place, machine, _ = _offered(backend, device, quick=True)
    drawn = [fuzz.fuzzed(backend, machine, seed, number) for number in numbers]
    families: dict[int, list[fuzz.Fuzzed]] = {}
    for call in drawn:
        families.setdefault(call.number % fuzz.FAMILIES, []).append(call)
    # What takes long to compile first, so that no process is left alone with it at the end.
    groups = sorted(families.values(), key=lambda calls: calls[0].case.problem.op != "prefill")
    outcomes = _each(partial(_outcome, backend=backend, device=place), groups, processes, progress)
    extent = {"fuzz": len(drawn), "seed": seed}
    return Report(backend, machine, extent, outcomes, (), time.monotonic() - began)


def _each(
    work: Callable[[Item], Outcome],
    groups: Sequence[Sequence[Item]],
    processes: int,
    progress: Progress | None,
) -> tuple[Outcome, ...]:
    """The outcomes of all groups. Progress hears what failed, and what is next or, with processes, done."""
    names = [_name(item) for group in groups for item in group]
    tell = progress or (lambda done, total, what: None)
    outcomes: list[Outcome] = []
    tell(0, len(names), names[0] if names else "")
    for outcome in shared_out(work, groups, processes, _lost):
        outcomes.append(outcome)
        following = [*names[len(outcomes) : len(outcomes) + 1], ""][0]
        if not outcome.judgement.passed:
            tell(len(outcomes), len(names), f"{FAILED}{outcome.name}: {'; '.join(outcome.judgement.reasons)}")
        elif processes > 1:
            following = outcome.name
        tell(len(outcomes), len(names), following)
    return tuple(outcomes)


def _outcome(item: Item, backend: str, device: torch.device, quick: bool = False) -> Outcome:
    if isinstance(item, fuzz.Fuzzed):
        judgement = fuzz.check(item, backend, device)
    elif isinstance(item, Case):
        judgement = check_case(item, backend, this_machine(device), device)
    else:
        return Outcome(
            item.name, "fault", faults.caught(item, faults.LENGTHS[:3] if quick else faults.LENGTHS)
        )
    return Outcome(_name(item), _op(item), judgement)


def _lost(item: Item, reason: str) -> Outcome:
    return Outcome(_name(item), _op(item), wrong(reason))


def _name(item: Item) -> str:
    return item.id if isinstance(item, Case | fuzz.Fuzzed) else f"fault: {item.name}"


def _op(item: Item) -> str:
    if isinstance(item, fuzz.Fuzzed):
        return item.case.problem.op
    return item.problem.op if isinstance(item, Case) else "fault"


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


def record(report: Report, folder: Path, commit: str | None = None) -> Path:
    """Write a report as evidence: `folder/<arch>/<backend>.json`, or with `_fuzz`, `_rows`, `_rows_<op>`.

    Args:
        report: Of a run in which everything passed.
        folder: Usually "evidence".
        commit: Of what was run. None: that of the checkout that this package is in.

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
    made |= {"commit": commit} if commit else {}
    part = "_fuzz" if "fuzz" in report.extent else "_rows" if "only" in report.extent else ""
    part += f"_{report.extent['op']}" if "op" in report.extent else ""
    path = folder / report.machine.arch / f"{report.backend}{part}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**made, **facts}, indent=2, ensure_ascii=False) + "\n")
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
