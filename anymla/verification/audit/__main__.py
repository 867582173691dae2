"""`python -m anymla.verification.audit`: compile for chips, print what is found, record it."""

import argparse
import json
import sys
import time

from anymla.hardware.arches import ARCHES
from anymla.verification.audit.run import Finding, audit, compile_listed


def main() -> int:
    """Exit code 1 if anything is not clean."""
    parser = argparse.ArgumentParser(prog="anymla.verification.audit", description=__doc__)
    parser.add_argument("arches", nargs="*", metavar="CHIP")
    parser.add_argument("--few", action="store_true", help="one form for each kernel, row and cache reading")
    parser.add_argument("--kernel", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compile", metavar="CHIP", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compile:
        compile_listed(asked.compile, json.load(sys.stdin), everything=not asked.few)
        return 0
    arches = asked.arches or [name for name, chip in ARCHES.items() if chip.waves > 1]
    started = time.monotonic()
    found = audit(
        arches, everything=not asked.few, kernels=asked.kernel, workers=asked.workers, progress=_show
    )
    dirty = [finding for finding in found if finding.faults()]
    print(f"{len(found)} compiled in {time.monotonic() - started:.0f} s, {len(dirty)} not clean")
    return bool(dirty)


def _show(finding: Finding) -> None:
    f = finding.figures
    words = [finding.arch, finding.kernel, f"[{finding.row}]", finding.form]
    if f is not None:
        matrix = " ".join(f"{count} {name}" for name, count in f.matrix.items())
        words += [
            f"| {f.registers} registers, {f.shared_bytes} B, {f.waves:g} waves, {f.instructions} instructions"
        ]
        words += [f"{f.scalars_moved} scalars moved"] if f.scalars_moved else []
        words += [matrix]
    print(*words, *(f"!! {fault}" for fault in finding.faults()), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
