"""`anymla verify --aiter PATH`: what the kernels of an AITER do, and whether our adapter is right over it."""

import csv
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anymla.errors import AnyMLAError, InvalidInput
from anymla.verification.aiter_objects import adapter, findings
from anymla.verification.aiter_objects.code_object import LEAST_LLVM, Disassembler
from anymla.verification.aiter_objects.findings import OUTCOMES, Finding
from anymla.verification.aiter_objects.kernels import KERNELS, why_not
from anymla.verification.aiter_objects.launch import Objects
from anymla.verification.run import made_with

HOW = "AITER's code objects, executed on the emulator, not on hardware"
"""What evidence says."""

Progress = Callable[[int, int, str], None]
"""Called with what is done, what there is, and what is next."""


@dataclass(frozen=True)
class AiterReport:
    """What was found.

    Attributes:
        chip: A key of LEAST_LLVM.
        release: What the package calls itself, "" where nothing says.
        digest: SHA-256 of the code objects, one after the other by name, its first 12 digits.
        llvm: The disassembler's version.
        quick: Whether only a part was run.
        kernels: A finding for each kernel.
        not_run: Code objects and rows of the kernel table that were not, with the reason.
        routes: A finding for each way that our adapter calls a kernel.
        no_routes: Why there is none, "" where there are.
        seconds: How long it all took.
    """

    chip: str
    release: str
    digest: str
    llvm: int
    quick: bool
    kernels: tuple[Finding, ...]
    not_run: Mapping[str, str]
    routes: tuple[Finding, ...]
    no_routes: str
    seconds: float

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The ways in which our adapter would be wrong; a kernel that is wrong and not taken harms nobody."""
        return tuple(route for route in self.routes if route.outcome in ("wrong", "faults"))

    def to_dict(self) -> dict[str, Any]:
        """The figures, as `--json` prints them and evidence holds them."""

        def counted(found: tuple[Finding, ...]) -> dict[str, int]:
            counts = Counter(one.outcome for one in found)
            return {outcome: counts[outcome] for outcome in OUTCOMES}

        return {
            "backend": "aiter",
            "arch": self.chip,
            "device": "emulator",
            "how": HOW,
            "release": self.release,
            "objects": self.digest,
            "llvm": self.llvm,
            "quick": self.quick,
            "cases": len(self.kernels) + len(self.routes),
            "failed": len(self.failures),
            "seconds": round(self.seconds, 1),
            "kernels": counted(self.kernels),
            "routes": counted(self.routes),
            "no_routes": self.no_routes,
            "findings": [_words(one) for one in self.kernels],
            "adapter": [_words(one) for one in self.routes],
            "not_run": dict(self.not_run),
        }


def verify(
    path: Path, chip: str, *, quick: bool = False, only: str = "", progress: Progress | None = None
) -> AiterReport:
    """Run the decode kernels of an AITER on the emulator, alone and under our adapter.

    Args:
        path: Where it is: the folder that holds the package `aiter` and, beside it, `aiter_meta` or `hsa` (an
            installation's site-packages, an unpacked wheel, a source tree), or a folder of code objects.
        chip: A key of LEAST_LLVM.
        quick: Fewer lengths.
        only: Part of the names of the kernels that are run; "" for all.
        progress: Told before each.

    Returns:
        The report.

    Raises:
        InvalidInput: the chip is none of these, or there are no code objects of it at the path.
        NoDisassembler: no llvm-objdump here is new enough.
    """
    if chip not in LEAST_LLVM:
        raise InvalidInput(
            "verify", [f"machine got {chip!r}; needs one of {', '.join(LEAST_LLVM)} with AITER"]
        )
    began, folder = time.monotonic(), objects_in(path, chip)
    disassembler = Disassembler.of(chip)
    objects = Objects(folder, chip, disassembler)
    tell = progress or (lambda done, total, what: None)
    kernels = [kernel for kernel in findings.tried(objects, KERNELS) if only in kernel.name]
    total, found, not_run = len(kernels) + 1, [], dict(_not_run(folder, chip))
    for at, kernel in enumerate(kernels):
        tell(at, total, str(kernel))
        try:
            found.append(findings.examine(objects, kernel, quick=quick))
        except AnyMLAError as error:
            not_run[kernel.name] = str(error)
    routes, no_routes = [], "only some kernels were asked for" if only else ""
    root, release = package_in(path)
    if root is None:
        no_routes = no_routes or "there is no package aiter beside the code objects"
    elif not no_routes:
        try:
            for route in adapter.examine(objects, root, release, not_run, quick=quick):
                routes.append(route)
                tell(len(kernels), total, f"our adapter: {route.name}")
        except adapter.NotTaken as refusal:
            no_routes = f"our adapter takes no call: {refusal}"
    tell(total, total, "")
    version, seconds = disassembler.version, time.monotonic() - began
    made = (chip, release, _digest(folder), version, quick)
    return AiterReport(*made, tuple(found), not_run, tuple(routes), no_routes, seconds)


def objects_in(path: Path, chip: str) -> Path:
    """The folder of MLA code objects of a chip.

    Raises:
        InvalidInput: there is none.
    """
    tails = (
        f"aiter_meta/hsa/{chip}/mla",
        f"hsa/{chip}/mla",
        f"{chip}/mla",
        f"../aiter_meta/hsa/{chip}/mla",
        ".",
    )
    for place in (path / tail for tail in tails):
        if any(place.glob("*.co")):
            return place.resolve()
    needs = f"an AITER with code objects in aiter_meta/hsa/{chip}/mla or hsa/{chip}/mla"
    raise InvalidInput("verify", [f"aiter got {str(path)!r}; needs {needs}"])


def package_in(path: Path) -> tuple[Path | None, str]:
    """The folder that holds the package `aiter`, and its release where that is said."""
    root = next((place for place in (path, path.parent) if (place / "aiter" / "mla.py").is_file()), None)
    if root is None:
        return None, ""
    for place in sorted(root.glob("amd_aiter-*.dist-info")) + sorted(root.glob("aiter-*.dist-info")):
        named = re.search(r"aiter-(.+)\.dist-info$", place.name)
        return root.resolve(), named[1] if named else ""
    return root.resolve(), ""


def record(report: AiterReport, folder: Path) -> Path:
    """Write a report as evidence: `folder/<arch>/aiter_objects.json`.

    Raises:
        InvalidInput: our adapter is wrong somewhere; evidence is of what is right.
    """
    if report.failures:
        raise InvalidInput("record", [f"report got {len(report.failures)} failures; needs none"])
    path = folder / report.chip / "aiter_objects.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {"date": datetime.now(UTC).date().isoformat(), **made_with("torch"), **report.to_dict()}
    path.write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    return path


def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(folder.glob("*.co")):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


def _not_run(folder: Path, chip: str) -> Mapping[str, str]:
    """Code objects without a row of ours, and rows of the kernel table whose code object is not there."""
    names = dict.fromkeys(path.stem for path in sorted(folder.glob("*.co")))
    found = {name: why for name in names if (why := why_not(name, chip))}
    try:
        with (folder / "mla_asm.csv").open(encoding="utf-8", newline="") as lines:
            listed = [row.get("co_name") or "" for row in csv.DictReader(lines)]
    except OSError:
        return found
    lost = (name.removesuffix(".co") for name in listed)
    return found | {name: "its code object is not there" for name in lost if name and name not in names}


def _words(finding: Finding) -> dict[str, Any]:
    facts = asdict(finding)
    share = facts.pop("share")
    return {
        **facts,
        "share": round(share, 4) if share < float("inf") else None,
        "seconds": round(finding.seconds, 1),
    }
