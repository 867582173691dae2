"""`anymla verify --aiter`: what the kernels of an AITER do, as tables."""

from pathlib import Path
from typing import TYPE_CHECKING

from anymla.cli.explain import terminal

if TYPE_CHECKING:
    from anymla.verification.aiter_objects.findings import Finding
    from anymla.verification.aiter_objects.run import AiterReport

COLOURS = {"right": "green", "undecided": "yellow", "wrong": "red", "faults": "red"}


def show(report: "AiterReport", written: Path | None) -> None:
    """Print a report."""
    from rich.markup import escape

    console, facts = terminal(), report.to_dict()
    which = f"{report.release or 'of no known release'}, objects {report.digest}"
    console.print(f"[bold]aiter[/] {which}, on {report.chip}: {facts['how']}, by LLVM {report.llvm}")
    for title, found in (("kernels", report.kernels), ("our adapter", report.routes)):
        if found:
            console.print(f"[bold]{title}[/]")
        for one in found:
            for line in _lines(one):
                console.print(line)
    if report.no_routes:
        console.print(f"our adapter was not run: {escape(report.no_routes)}")
    console.print("[bold]not run[/]" if report.not_run else "")
    for name, why in report.not_run.items():
        console.print(f"  {escape(name)}: {escape(why)}")
    console.print(
        "undecided: right by a crude clock, but it depends on the timing of waves, which no emulator has"
    )
    good = "[red]is wrong[/]" if report.failures else "goes nowhere wrong" if report.routes else "was not run"
    console.print(f"our adapter {good}; {facts['cases']} findings in {facts['seconds']} s")
    if written:
        console.print(f"recorded in {written}")


def _lines(finding: "Finding") -> list[str]:
    from rich.markup import escape

    colour = COLOURS[finding.outcome]
    timing = f", {finding.timing} places" if finding.timing else ""
    share = f" {finding.share:.2f} of the budget" if finding.share < float("inf") else ""
    lines = [f"  [{colour}]{finding.outcome}{timing}[/]{share}: {escape(finding.name)}"]
    lines += [f"    {escape(finding.why)}"] if finding.why else []
    return lines + [f"    {escape(name)}: {escape(value)}" for name, value in finding.facts.items()]
