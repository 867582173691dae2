"""`python -m anymla.verification.audit`: compile for chips, print what is found, record it."""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from anymla.verification.audit.record import AUDITED, digest, table
from anymla.verification.audit.run import Finding, audit, compile_listed, unused_rows, wanted

DOCUMENT = Path("docs/audit.md")


def main() -> int:
    """Exit code 1 if anything is not clean."""
    parser = argparse.ArgumentParser(prog="anymla.verification.audit", description=__doc__)
    parser.add_argument("arches", nargs="*", metavar="CHIP", help=f"of {', '.join(AUDITED)}; left out: all")
    parser.add_argument("--few", action="store_true", help="one form for each kernel, row and cache reading")
    parser.add_argument("--kernel", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--record", action="store_true", help=f"write {DOCUMENT}")
    parser.add_argument("--digests", action="store_true", help="print what tells whether that is up to date")
    parser.add_argument("--compile", metavar="CHIP", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compile:
        compile_listed(asked.compile, json.load(sys.stdin), everything=not asked.few)
        return 0
    arches, everything = asked.arches or AUDITED, not asked.few
    if asked.digests:
        print(json.dumps(_digests(arches)))
        return 0
    unused = [f"{arch} {row}" for arch in arches for row in unused_rows(arch)]
    started = time.monotonic()
    found = audit(arches, everything=everything, kernels=asked.kernel, workers=asked.workers, progress=_show)
    dirty = [finding for finding in found if finding.faults()]
    print(f"{len(found)} compiled in {time.monotonic() - started:.0f} s, {len(dirty)} not clean")
    print(*(f"no call takes the row {row}" for row in unused), sep="\n", end="\n" if unused else "")
    if asked.record:
        import triton

        DOCUMENT.write_text(table(found, _digests(arches), triton.__version__))
    return bool(dirty or unused)


def _digests(arches: Iterable[str]) -> dict[str, str]:
    return {arch: digest(launch for launch, _ in wanted(arch)) for arch in arches}


def _show(finding: Finding) -> None:
    f = finding.figures
    words = [finding.arch, finding.kernel, f"[{finding.row}]", finding.form]
    if f is not None:
        words += [f"| {f.registers} registers, {f.shared_bytes} B, {f.waves:g} waves,"]
        words += [f"{f.instructions} instructions"]
        words += [f"{f.scalars_moved} scalars moved"] if f.scalars_moved else []
        words += [f"{count} {name}" for name, count in f.matrix.items()]
    print(*words, *(f"!! {fault}" for fault in finding.faults()), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
