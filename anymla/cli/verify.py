"""`anymla verify`: a backend against the fp64 definition on hostile inputs, the judge against known bugs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from anymla.cli.explain import terminal
from anymla.errors import Reasons
from anymla.problem import OPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from anymla.verification.run import Progress, Report

R = TypeVar("R")
EVIDENCE = Path("evidence")
"""Where `--record` writes, in the current folder."""

HEARD = {
    "--aiter": ("aiter", "machine", "quick"),
    "--machine": ("machine", "quick", "rows", "op", "processes"),
    "--fuzz": ("backend", "fuzz", "fuzz_case", "seed", "processes"),
    "the cases": ("backend", "quick", "processes"),
}
"""The options that each kind of run hears, beside --record and --json. The first kind asked for is run."""


def verify(
    context: typer.Context,
    backend: Annotated[str, typer.Option(help="Name of a backend.")] = "cpu",
    machine: Annotated[
        str, typer.Option(help="A chip of AMD to compile for; its code is executed on the emulator.")
    ] = "",
    aiter: Annotated[
        str, typer.Option(help="With --machine: where an AITER is, whose own code objects are executed.")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Only a part, in a fraction of the time.")] = False,
    rows: Annotated[
        bool, typer.Option("--rows", help="With --machine: only calls for each launch row of each kernel.")
    ] = False,
    op: Annotated[
        str, typer.Option(help="With --machine: only launch rows, by calls of this operation.")
    ] = "",
    fuzz: Annotated[int, typer.Option(min=0, help="Run so many random calls, not the cases.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random calls.")] = 0,
    fuzz_case: Annotated[
        int | None, typer.Option("--fuzz-case", min=0, help="Run only the random call of this number.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
    record: Annotated[
        bool, typer.Option("--record", help=f"Write {EVIDENCE}/<chip>/<backend>.json if all passes.")
    ] = False,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a backend against the fp64 definition, and that every known fault is caught.

    The cases come from what the backend's rows offer: each is run on hostile inputs and judged by one budget;
    what is not offered must be refused. Random calls (--fuzz) come from the rows too; one that fails prints
    the command that makes it again. With --machine, the kernels of the backend "triton" are compiled for that
    chip and executed by an emulator of its instructions, on any machine, at small sizes; with --aiter too,
    the code objects of that AITER are, alone and under the backend "aiter". Exit code 1 if anything fails or
    a fault is missed, 2 if an option is given that such a run does not hear.
    """
    asked = {
        "--aiter": aiter,
        "--machine": machine,
        "--fuzz": fuzz or fuzz_case is not None,
        "the cases": True,
    }
    _check(next(kind for kind, wanted in asked.items() if wanted), context)
    from anymla.verification import run

    if aiter:
        _verify_aiter(Path(aiter), machine, quick, record, in_json)

    def verified(progress: "run.Progress | None" = None) -> "Report":
        shared: dict[str, Any] = {"processes": processes, "progress": progress}
        if machine:
            from anymla.verification.amdgcn import conformance

            return conformance.verify(machine, quick=quick, only_rows=rows, op=op, **shared)
        if fuzz or fuzz_case is not None:
            numbers = range(fuzz) if fuzz_case is None else [fuzz_case]
            return run.verify_random(backend, numbers, seed=seed, **shared)
        return run.verify(backend, quick=quick, **shared)

    report = verified() if in_json else _with_progress(verified)
    failed = bool(report.failures)
    written = run.record(report, EVIDENCE) if record and not failed and fuzz_case is None else None
    if in_json:
        typer.echo(json.dumps({**report.to_dict(), "evidence": written and str(written)}))
    else:
        _show(report, written)
    raise typer.Exit(1 if failed else 0)


def _check(kind: str, context: typer.Context) -> None:
    """Refuse an operation that is none, and every option that a run of this kind would not hear."""
    reasons = Reasons("verify")
    op = context.params["op"]
    reasons.need(op in ("", *OPS), "op", repr(op), f"one of {', '.join(OPS)}")
    for name, value in context.params.items():
        kinds = [other for other, names in HEARD.items() if name in names]
        source = context.get_parameter_source(name)
        given = kinds and source is not None and source.name == "COMMANDLINE"
        needs = f"{' or '.join(kinds)}: a run of {kind} does not hear it"
        reasons.need(not given or kind in kinds, name, repr(value), needs)
    reasons.raise_if_any()


def _verify_aiter(path: Path, chip: str, quick: bool, record: bool, in_json: bool) -> None:
    from anymla.cli import verify_aiter
    from anymla.verification.aiter_objects import run

    def verified(progress: "Progress | None" = None) -> run.AiterReport:
        return run.verify(path, chip, quick=quick, progress=progress)

    report = verified() if in_json else _with_progress(verified)
    written = run.record(report, EVIDENCE) if record and not report.failures else None
    if in_json:
        typer.echo(json.dumps({**report.to_dict(), "evidence": written and str(written)}))
    else:
        verify_aiter.show(report, written)
    raise typer.Exit(1 if report.failures else 0)


def _with_progress(verified: "Callable[[Progress], R]") -> "R":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def told(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        return verified(told)


def _show(report: "Report", written: Path | None) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console, facts = terminal(), report.to_dict()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("operation", "cases", "failed", "worst share of the budget"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for op, worst in report.worst.items():
        of_op = [outcome for outcome in report.outcomes if outcome.op == op]
        failed = sum(not outcome.judgement.passed for outcome in of_op)
        mark = f"[red]{failed}[/]" if failed else "0"
        table.add_row(op.replace("_", " "), f"{len(of_op)}", mark, f"{worst.judgement.share:.2f}")
    console.print(f"[bold]{report.backend}[/] on {report.machine.arch} ({report.machine.device_name})")
    console.print(table)
    if report.faults:
        console.print(f"faults caught: {facts['faults_caught']} of {facts['faults_total']}")
    for outcome in report.failures:
        console.print(
            f"[red]failed[/] {escape(outcome.name)}: {escape('; '.join(outcome.judgement.reasons))}"
        )
        if again := report.again(outcome):
            console.print(f"again: {again}")
    good = "[red]not right[/]" if report.failures else "[green]right[/]"
    console.print(f"{report.backend} is {good}: {facts['cases']} cases in {facts['seconds']} s")
    if written:
        console.print(f"recorded in {written}")
