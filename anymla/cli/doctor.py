"""`anymla doctor`: this machine, its versions, each backend's verdict, quirks, and what is verified here."""

import json
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import anymla
from anymla import select
from anymla.cli.explain import kv_format_of, machine_fields, terminal, verdict_fields
from anymla.hardware.probe import Machine, this_machine, torch_report
from anymla.hardware.quirks import QUIRKS, Quirk
from anymla.models import model_named
from anymla.problem import OPS, canonical_name

if TYPE_CHECKING:
    from rich.console import Console

VERSIONS_OF = ("numpy", "transformers", "vllm", "typer", "rich")
SHOWN_OF_A_RECORD = (
    "backend",
    "only",
    "op",
    "objects",
    "date",
    "cases",
    "failed",
    "faults_caught",
    "faults_total",
    "torch",
    "triton",
)
FEW = 3
"""How many kernels a line names."""
ASKED_MODEL, ASKED_TP = "deepseek-v3.2", 8
"""The model whose every operation each backend is asked about; it has an index, so all operations exist."""


def doctor(in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show this machine, its versions, each backend's verdict, active quirks and what is verified here.

    It prints with a broken torch, too, and then ends with exit code 1.
    """
    machine = select.tried(this_machine())
    torch = torch_report()
    versions = _versions(machine)
    model, fp8 = model_named(ASKED_MODEL), canonical_name("fp8", machine.fp8_flavour)
    problems = {
        op: model.problem(
            op,
            tp=ASKED_TP,
            # An indexer as it is served: queries and keys in the fp8 of the machine.
            q_dtype=fp8 if op == "index_topk" else "bf16",
            kv_format=kv_format_of(None, op, machine),
        )
        for op in OPS
    }
    verdicts = {op: select.explain(problem, machine) for op, problem in problems.items()}
    quirks = [quirk for quirk in QUIRKS if _is_active(quirk, machine)]
    evidence = list(_evidence(machine.arch))
    libraries = select.library_report(machine)
    if in_json:
        found = {
            "machine": machine_fields(machine),
            "versions": versions,
            "torch": torch,
            "verdicts": {op: [verdict_fields(one, problems[op]) for one in verdicts[op]] for op in OPS},
            "quirks": [
                {"backend": quirk.backend, "does": str(quirk), "source": quirk.source} for quirk in quirks
            ],
            "evidence": evidence,
            "libraries": libraries,
        }
        print(json.dumps(found, indent=2))
    else:
        console = terminal()
        _show(console, machine, torch, versions, verdicts, quirks, evidence)
        _show_libraries(console, libraries)
    if "error" in torch:
        raise typer.Exit(1)


def _versions(machine: Machine) -> dict[str, str]:
    versions = {"anymla": anymla.__version__, "python": platform.python_version(), **dict(machine.packages)}
    for name in VERSIONS_OF:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _is_active(quirk: Quirk, machine: Machine) -> bool:
    return quirk.arch.accepts(machine.arch) and not quirk.is_expired(dict(machine.packages))


def _evidence(arch: str) -> Iterator[dict[str, Any]]:
    """What `anymla verify --record` wrote for a chip, in this folder and in the checkout of this package."""
    roots = dict.fromkeys(root.resolve() for root in (Path.cwd(), Path(anymla.__file__).parents[1]))
    for path in (path for root in roots for path in sorted((root / "evidence" / arch).glob("*.json"))):
        try:
            yield {"file": path.name, **json.loads(path.read_text())}
        except (OSError, ValueError, TypeError) as error:
            yield {"file": path.name, "error": str(error)}


def _show(
    console: "Console",
    machine: Machine,
    torch: dict[str, str],
    versions: dict[str, str],
    verdicts: dict[str, tuple[select.Verdict, ...]],
    quirks: list[Quirk],
    evidence: list[dict[str, Any]],
) -> None:
    from rich.markup import escape

    console.print(f"[bold]machine[/]   {machine.arch} ({machine.device_name})")
    console.print(f"[bold]torch[/]     {_torch_in_words(torch)}")
    console.print(f"[bold]versions[/]  {', '.join(f'{name} {value}' for name, value in versions.items())}")
    _show_verdicts(console, verdicts)
    console.print(f"[bold]quirks[/]    {'' if quirks else 'none on this machine'}")
    for quirk in quirks:
        console.print(f"  {quirk.backend}: {escape(str(quirk))} [dim]({escape(quirk.source)})[/]")
    verified = "" if evidence else "nothing recorded; run anymla verify --record"
    console.print(f"[bold]verified[/]  {verified}")
    for record in evidence:
        console.print(f"  {escape(_record_in_words(record))}")


def _show_libraries(console: "Console", libraries: dict[str, dict[str, Any]]) -> None:
    """What is known of the libraries that backends call, read from their own files."""
    from rich.markup import escape

    for name, found in libraries.items():
        commit = f", commit {found['commit']}" if found["commit"] else ""
        console.print(f"[bold]{name}[/]     {found['release'] or 'not installed'}{commit}")
        console.print(f"  bound: {', '.join(found['bound']) or 'nothing'}")
        rows = [f"{count} of {kind}" for kind, count in found["kernels"].items()]
        console.print(f"  kernels: {', '.join(rows) or 'none'}")
        for quirk in found["quirks"]:
            kernels = _kernels_in_words(quirk["kernels"])
            console.print(f"  quirk: {escape(quirk['does'])}; {kernels} [dim]({escape(quirk['source'])})[/]")
        for reason in found["missing"]:
            console.print(f"  [red]missing: {escape(reason)}[/]")
        if found["advice"]:
            console.print(f"  what would help: {escape(found['advice'])}")


def _kernels_in_words(names: list[str]) -> str:
    return f"in {', '.join(names)}" if len(names) <= FEW else f"in {len(names)} kernels"


def _record_in_words(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"{record['file']} cannot be read: {record['error']}"
    words = [f"{name.replace('_', ' ')} {record[name]}" for name in SHOWN_OF_A_RECORD if name in record]
    words += [record["how"]] if "how" in record else []
    shares = [op["share"] for op in record.get("worst", {}).values() if op.get("share") is not None]
    return ", ".join(words + ([f"worst share of the budget {max(shares):.2f}"] if shares else []))


def _torch_in_words(torch: dict[str, str]) -> str:
    from rich.markup import escape

    if "error" in torch:
        return f"[red]broken: {escape(torch['error'])}[/]"
    platforms = [f"{name} {torch[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "hip")) if torch[key]]
    return ", ".join([torch["torch"], *(platforms or ["CPU only"]), torch["devices"] or "no GPU in sight"])


def _show_verdicts(console: "Console", verdicts: dict[str, tuple[select.Verdict, ...]]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("backend", *(op.replace("_", " ") for op in verdicts), "why not"):
        table.add_column(heading, no_wrap=heading != "why not")
    for row in zip(*verdicts.values(), strict=True):
        marks, reasons = [], dict[str, None]()
        for op, verdict in zip(verdicts, row, strict=True):
            is_offered = verdict.backend.op.accepts(op)
            reasons.update(dict.fromkeys(verdict.reasons if is_offered else ()))
            marks.append("[green]✓[/]" if verdict.accepted else "[red]✗[/]" if is_offered else "[dim]–[/]")
        table.add_row(f"[bold]{row[0].backend.name}[/]", *marks, "\n".join(map(escape, reasons)))
    asked = f"{ASKED_MODEL} at tensor parallel size {ASKED_TP} in bf16, its indexer in fp8"
    console.print(f"[bold]backends[/]  asked for {asked}")
    console.print(table)
