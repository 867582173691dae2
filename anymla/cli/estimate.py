"""`anymla bench --machine CHIP`: estimates for a chip that is not here, beside what others have published."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from anymla.cli.explain import terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from anymla.benchmarking.workloads import Workload


def tell(machine: str, works: "Sequence[Workload]", *, in_json: bool) -> None:
    """Print the estimates of workloads of one problem; as JSON one a line."""
    from rich.console import Console

    from anymla.benchmarking.estimate import estimates

    if in_json:
        for made in estimates(machine, works):
            typer.echo(json.dumps(made.to_dict()))
        return
    console = terminal()
    with Console(stderr=True).status(f"compiling for {machine}"):
        found = [made.to_dict() for made in estimates(machine, works)]
    p, peaks = works[0].problem, found[0]["peaks"]
    console.print(
        f"[bold]Estimates, not measurements[/], for {machine}: {works[0].model} at tensor parallel size "
        f"{works[0].tp}, {p.op}, {p.num_heads} heads, {p.q_len} query tokens in {p.q_dtype} "
        f"over {p.kv_format}"
    )
    fp8 = f", of fp8 {_tera(peaks['fp8_rate'])}FLOP/s" if peaks["fp8_rate"] else ""
    console.print(
        f"Published by its vendor, of {peaks['part']}: memory {_tera(peaks['bandwidth'])}B/s, "
        f"products of 16 bits {_tera(peaks['rate'])}FLOP/s{fp8} ({peaks['source']})"
    )
    console.print(_rooflines(found))
    console.print(_kernels(found))
    executed = found[0]["estimate"]["executed"]
    if executed is None:
        console.print("Instructions by kind and LDS banks: only for chips of AMD that the emulator executes.")
    elif not any(kernel["lds"] for kernel in executed["kernels"]):
        console.print("LDS: no kernel uses it.")
    else:
        console.print(_banks(executed))
        console.print(
            "Passes are counted while the emulator executes that call. Assumed: banks of four bytes; phases "
            "of as many lanes as fill the banks, those of 16-byte reads in the documented order; lanes that "
            "want the same word share it. AMD documents 32 or 64 banks, by chip: both are shown."
        )
    _show_published(console, found[0]["published"])


def _table(title: str, *headings: str, words: int = 1) -> "Table":
    """A table whose first columns hold words, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < words else "right", overflow="fold")
    return table


def _rooflines(found: Sequence[dict[str, Any]]) -> "Table":
    headings = (
        "batch",
        "context",
        "bytes that must move",
        "memory floor",
        "matrix floor",
        "FLOP a byte",
        "limit",
    )
    table = _table("Roofline (estimate from published peaks)", *headings, words=0)
    for facts in found:
        line = facts["estimate"]
        table.add_row(
            str(facts["batch"]),
            str(facts["context"]),
            f"{line['num_bytes'] / 1e6:.2f} MB",
            f"{line['memory_us']:.1f} µs",
            f"{line['matrix_us']:.1f} µs",
            f"{line['intensity']:.0f} of {line['ridge']:.0f}",
            line["limit"],
        )
    return table


def _kernels(found: Sequence[dict[str, Any]]) -> "Table":
    """Each kernel once for each way in which it is compiled, with the first workload that wants it."""
    kernels: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for facts in found:
        for kernel in facts["estimate"]["kernels"]:
            kernels.setdefault(json.dumps(kernel), (facts, kernel))
    kinds = next((list(k["mix"]) for _, k in kernels.values() if k["mix"]), [])
    headings = ("kernel", "launch row", "batch × context", "waves a SIMD", "registers", "on-chip bytes")
    table = _table("Kernels as compiled (estimate)", *headings, *kinds, words=2)
    for facts, kernel in kernels.values():
        table.add_row(
            kernel["kernel"],
            kernel["row"],
            f"{facts['batch']} × {facts['context']}",
            f"{kernel['waves']:g}",
            str(kernel["registers"]),
            f"{kernel['shared_bytes']:,}",
            *(f"{count:,}" for count in (kernel["mix"] or {}).values()),
        )
    return table


def _banks(executed: dict[str, Any]) -> "Table":
    title = f"LDS passes for each that would do without conflicts (estimate; {executed['shape']})"
    headings = ("kernel", "launch row", "instruction", "executed", "of 32 banks", "of 64 banks")
    table = _table(title, *headings, words=3)
    for kernel in executed["kernels"]:
        for row in kernel["lds"]:
            ratios = [f"{row['passes'][banks] / max(row['least'][banks], 1):.1f}" for banks in ("32", "64")]
            names = kernel["kernel"], kernel["row"], row["instruction"]
            table.add_row(*names, f"{row['executed']:,}", *ratios)
    return table


def _show_published(console: "Console", published: Sequence[dict[str, Any]]) -> None:
    from rich.markup import escape

    if not published:
        console.print("Published by others for this operation on such a chip: nothing that we know of.")
        return
    headings = ("published by", "on", "figure", "conditions", "source", "roofline there (estimate)")
    table = _table("Published by others, none of it measured here", *headings, words=5)
    for row in published:
        floor = row["estimated_floor_us"]
        table.add_row(
            *(escape(row[name]) for name in ("by", "on", "figure", "conditions", "source")),
            "conditions incomplete" if floor is None else f"{floor:.1f} µs",
        )
    console.print(table)


def _tera(value: float) -> str:
    return f"{value / 1e12:.4g} T"
