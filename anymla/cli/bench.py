"""`anymla bench`: times of a backend on cases that it has just passed, beside what the machine can do."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anymla.cli import estimate
from anymla.cli.explain import terminal
from anymla.errors import Reasons

if TYPE_CHECKING:
    from anymla.benchmarking.run import Record


def bench(
    backend: Annotated[
        str, typer.Option(help="Name of a backend, or auto for the first that accepts.")
    ] = "auto",
    model: Annotated[str, typer.Option(help="Name of a model.")] = "deepseek-v3",
    tp: Annotated[int, typer.Option(help="Tensor parallel size; splits the heads.")] = 8,
    op: Annotated[
        str, typer.Option(help="decode, sparse_decode, prefill, write_cache or index_topk.")
    ] = "decode",
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences; may be repeated.  [default: 1 4]")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Cached tokens; may be repeated.  [default: 1024 4096]")
    ] = None,
    q_len: Annotated[int, typer.Option(help="Query tokens of each sequence.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="Of the queries.  [default: fp32 on a CPU, else bf16]")
    ] = None,
    kv: Annotated[str | None, typer.Option(help="Cache format.  [default: as --dtype]")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    topk: Annotated[int | None, typer.Option(help="Keys a query token.  [default: as the model]")] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Estimate for this chip instead, which need not be here; nothing is timed."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda.  [default: a GPU if one is here that the backend runs on; of a suite, a GPU]"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each case.")] = 20,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Run a named suite instead: targets, sweep over length and batch, or choose for top-k."
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Part of the name of a case of the suite.")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Propose a launch row for this GPU instead; changes nothing.")
    ] = False,
    kernel: Annotated[
        str | None, typer.Option(help="To tune: attend, combine, prefill, gather or cache_write.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Case of a suite to tune on.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="File to append the records to, one a line; of a suite, the folder for its record."
        ),
    ] = None,
    in_json: Annotated[bool, typer.Option("--json", help="Print one JSON record a line.")] = False,
) -> None:
    """Time a backend on cases that it has just passed.

    Each case is verified against the fp64 definition, on the very tensors that are then timed; a case that
    fails shows no time and makes the exit code 1. With --machine nothing runs and nothing is timed: it prints
    estimates of the kernels of the backend "triton", beside what others have published.
    """
    if machine is not None:
        reasons = Reasons("bench")
        for name, value in {"suite": suite, "tune": tune, "record": record, "device": device}.items():
            reasons.need(not value, name, value, "to be absent with --machine, where nothing is timed")
        reasons.need(backend in ("auto", "triton"), "backend", backend, "triton with --machine")
        reasons.raise_if_any()
    if suite is not None or tune:
        from anymla.benchmarking.commands import main

        options = {"backend": backend, "device": device, "record": record, "kernel": kernel, "case": case}
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        given += ["--only", *only] if only else []
        raise typer.Exit(main([suite or "tune", *given, f"--repeats={repeats}", *["--json"] * in_json]))

    import torch

    from anymla.benchmarking import run
    from anymla.benchmarking.workloads import workloads
    from anymla.hardware.probe import machine_named, this_machine
    from anymla.problem import canonical_name

    place = torch.device("cpu" if machine else device or _device(backend))
    flavour = (machine_named(machine) if machine else this_machine(place)).fp8_flavour
    on_cpu = place.type == "cpu" and not machine
    cases = workloads(
        model,
        tp=tp,
        op=op,
        batches=batch or (1, 4),
        contexts=context or ((0,) if op == "prefill" else (1024, 4096)),
        q_len=q_len,
        q_dtype=canonical_name(dtype or ("fp32" if on_cpu else "bf16")),
        kv_format=kv and canonical_name(kv, flavour),
        block_size=block_size,
        topk=topk,
    )
    if machine is not None:
        estimate.tell(machine, list(cases), in_json=in_json)
        return
    made = run.provenance(place)
    records = []
    for work in cases:
        found = run.bench(work, backend, place, repeats=repeats)
        records.append(found)
        line = json.dumps({**_fields(found), **made})
        if in_json:
            typer.echo(line)
        if record is not None:
            record.parent.mkdir(parents=True, exist_ok=True)
            with record.open("a") as file:
                file.write(line + "\n")
    if not in_json:
        _show(records, made)
    raise typer.Exit(0 if all(found.passed for found in records) else 1)


def _device(backend: str) -> str:
    """A GPU if there is one that the backend may run on."""
    import torch

    from anymla.verification.run import device_of

    if backend == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device_of(backend)


def _fields(record: "Record") -> dict[str, Any]:
    gigabytes = round(record.copy_bandwidth / 1e9, 2)
    return {
        **record.to_dict(),
        "copy_gb_s": gigabytes,
        "product_gflop_s": round(record.product_rate / 1e9, 1),
    }


def _show(records: Sequence["Record"], made: dict[str, Any]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = terminal()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("batch", "context", "backend", "budget", "median", "quartiles"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for heading in ("of copy bandwidth", "of product rate"):
        table.add_column(heading, justify="right")
    wrong = []
    for record in records:
        work = record.workload
        row = [str(work.batch), str(work.context), record.backend]
        if record.timing is None:
            wrong.append(record)
            row += ["[red]wrong[/]", *[""] * 4]
        else:
            first, third = record.timing.quartiles_us
            row += [f"[green]{record.verified.judgement.share:.2f}[/]", _time(record.timing.median_us)]
            row += [f"{_time(first)} to {_time(third)}"]
            row += [f"{record.bandwidth_share:.1%}", f"{record.product_share:.1%}"]
        table.add_row(*row)
    what = records[0].workload
    p = what.problem
    console.print(
        f"[bold]{what.model}[/] at tensor parallel size {what.tp}: {p.op}, {p.num_heads} heads, "
        f"{p.q_len} query tokens in {p.q_dtype} over {p.kv_format}"
    )
    console.print(
        f"on {escape(str(made['chip']))}, torch {made.get('torch')}, commit {made['commit'] or '?'}"
    )
    console.print(table)
    for record in wrong:
        console.print(f"[red]{record.workload.id}[/]: {escape('; '.join(record.verified.judgement.reasons))}")


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f} ms" if microseconds >= 1e3 else f"{microseconds:.1f} µs"
