"""`anymla explain`: every backend's verdict on a model, for this machine or any other. Imports no torch."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from anymla import select
from anymla.errors import InvalidInput, Reasons
from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import Launch, launch_rows
from anymla.hardware.probe import Machine, machine_named, this_machine
from anymla.hardware.tiles import attend_row, prefill_row
from anymla.models import MODELS, model_named
from anymla.problem import DTYPE_NAMES, FORMAT_NAMES, OPS, Feature, Problem, canonical_name
from anymla.rules import listed
from anymla.select import Verdict

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

NOT_RUN = {
    "compiled": "compiled for {}, not run there",
    "emulated": "executed on an emulator of {}, not on hardware",
    "contract double": "run against a double of its library for {}, not run there",
}
"""How what is known of a backend reads where it has not run."""


@dataclass(frozen=True)
class Answer:
    """What was asked of one machine, and what every backend says."""

    problem: Problem
    machine: Machine
    verdicts: tuple[Verdict, ...]

    @property
    def choice(self) -> str | None:
        """The backend that would be chosen."""
        return self.chosen.backend.name if self.chosen else None

    @property
    def chosen(self) -> Verdict | None:
        """The verdict of that backend."""
        return select.preferred(self.verdicts)


def explain(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.", show_default=False)],
    tp: Annotated[int, typer.Option(help="Tensor parallel size; splits the heads.")] = 1,
    machine: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(ARCHES)}, or all; may be repeated. Left out: this machine."),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(help=f"Cache format: fp8, or one of {', '.join(FORMAT_NAMES)}. Left out: as --dtype."),
    ] = None,
    q_len: Annotated[int, typer.Option(help="The most query tokens of any one sequence.")] = 1,
    sinks: Annotated[bool, typer.Option("--sinks", help="With attention sinks.")] = False,
    sparse: Annotated[bool, typer.Option("--sparse", help="Sparse decode over chosen tokens.")] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of the queries.")] = "bf16",
    op: Annotated[str, typer.Option(help=f"One of {', '.join(OPS)}.")] = "decode",
    block_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    topk: Annotated[
        int | None, typer.Option(help="Keys a query token in sparse decode. Left out: as the model.")
    ] = None,
    lse: Annotated[bool, typer.Option("--lse", help="With the lse.")] = False,
    cached_context: Annotated[
        bool, typer.Option("--cached-context", help="A prefill after tokens that are in the cache.")
    ] = False,
    aiter: Annotated[
        str | None,
        typer.Option(help="A release of AITER, such as v0.1.16.post2. Left out: what the machine has."),
    ] = None,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what every backend would do with a model on a machine, and why.

    It needs neither that machine nor torch, and imports what is installed here in a process of its own. Exit
    code 0 also if no backend takes the call.
    """
    reasons = Reasons("explain")
    row = _asked(reasons, model_named, model)
    tp_heads = tuple((size, row.local_heads(size)) for size in row.tp_sizes) if row else ()
    if row:
        _asked(reasons, row.local_heads, tp)
    names = list(ARCHES) if machine and "all" in machine else machine or []
    machines = [_asked(reasons, machine_named, name) for name in names] or [this_machine()]
    wanted = canonical_name(dtype), canonical_name(kv or "bf16")
    reasons.need(wanted[0] in DTYPE_NAMES, "dtype", dtype, f"one of {listed(DTYPE_NAMES)}")
    reasons.need(wanted[1] in FORMAT_NAMES, "kv", kv, f"fp8, {listed(FORMAT_NAMES)}")
    reasons.need(op in OPS, "op", op, f"one of {listed(OPS)}")
    reasons.need(not sparse or op in ("decode", "sparse_decode"), "op", op, "sparse_decode with --sparse")
    reasons.need(not cached_context or op == "prefill", "op", op, "prefill with --cached-context")
    reasons.raise_if_any()
    assert row is not None
    answers = []
    for place in machines:
        assert place is not None
        place = place.having("aiter", aiter) if aiter else select.tried(place)
        problem = row.problem(
            "sparse_decode" if sparse else op,
            tp=tp,
            q_dtype=canonical_name(dtype, place.fp8_flavour),
            kv_format=kv_format_of(kv, op, place),
            block_size=block_size,
            q_len=q_len,
            topk=topk,
            lse=lse,
            sinks=sinks or None,
            cached_context=cached_context,
        )
        answers.append(Answer(problem, place, select.explain(problem, place, tp_heads)))
    if in_json:
        found = [answer_fields(answer) for answer in answers]
        for one in found:
            one["problem"].update(model=model, tp=tp, sm_scale=row.sm_scale)
        print(json.dumps(found[0] if len(found) == 1 else {"machines": found}, indent=2))
    elif len(answers) == 1:
        show_answer(terminal(), model, tp, answers[0])
    else:
        show_answers(terminal(), model, tp, answers)


def kv_format_of(kv: str | None, op: str, machine: Machine) -> str | None:
    """The format that is meant on a machine; None for that of the model and op."""
    if kv is None and op == "index_topk" and machine.fp8_flavour == "e4m3fnuz":
        return "index_k_fnuz"
    return kv and canonical_name(kv, machine.fp8_flavour)


def _asked(reasons: Reasons, question: Callable[..., T], *facts: object) -> T | None:
    """The answer, or None with its reasons noted, so that all wrong options are named at once."""
    try:
        return question(*facts)
    except InvalidInput as refusal:
        reasons.found.extend(refusal.reasons)
        return None


def answer_fields(answer: Answer) -> dict[str, Any]:
    """One machine's answer as JSON has it."""
    problem = answer.problem
    features = sorted(feature.name.lower() for feature in problem.features)
    return {
        "problem": {**asdict(problem), "features": features},
        "machine": machine_fields(answer.machine),
        "verdicts": [verdict_fields(verdict, problem) for verdict in answer.verdicts],
        "choice": answer.choice,
        "launch": asdict(row) if (row := launch_row(answer)) else None,
    }


def launch_row(answer: Answer) -> Launch | None:
    """The tile and warps of triton, chosen or behind the choice; None where it refuses or has none."""
    problem, arch = answer.problem, answer.machine.arch
    if not any(verdict.accepted for verdict in answer.verdicts if verdict.backend.name == "triton"):
        return None
    if problem.op == "write_cache":
        return launch_rows("cache_write", arch)[0]
    invariant = Feature.BATCH_INVARIANT in problem.features
    if problem.op == "prefill":
        widths = problem.qk_nope_head_dim, problem.qk_rope_head_dim, problem.v_head_dim
        return prefill_row(arch, problem.q_len, *widths, largest=invariant)
    if problem.op not in ("decode", "sparse_decode"):
        return None
    tokens = 1 if invariant else problem.q_len
    return attend_row(
        arch,
        problem.num_heads * tokens,
        problem.kv_lora_rank,
        problem.qk_rope_head_dim,
        problem.kv_format,
        problem.block_size,
        sparse=problem.op == "sparse_decode",
    )


def machine_fields(machine: Machine) -> dict[str, Any]:
    """A machine as JSON has it."""
    tables = {"packages": dict(machine.packages), "failures": dict(machine.failures)}
    return {**asdict(machine), **tables}


def verdict_fields(verdict: Verdict, problem: Problem) -> dict[str, Any]:
    """A verdict as JSON has it."""
    padding = None
    if verdict.padding:
        heads, padded_heads = verdict.padding
        padding = {"heads": heads, "padded_heads": padded_heads, "price": round(verdict.price, 3)}
    return {
        "backend": verdict.backend.name,
        "accepted": verdict.accepted,
        "evidence": verdict.backend.evidence,
        "reasons": list(verdict.reasons),
        "quirks": [
            {
                "refuse": quirk.refuse,
                "knob": quirk.knob,
                "value": quirk.setting(problem),
                "until": quirk.until,
                "source": quirk.source,
            }
            for quirk in verdict.quirks
        ],
        "padding": padding,
        "nearest": verdict.nearest,
    }


def terminal() -> "Console":
    """Where text goes; wider than rich would have it where nobody looks at a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def show_answer(console: "Console", model: str, tp: int, answer: Answer) -> None:
    """Print one machine's answer as a table."""
    from rich import box
    from rich.table import Table

    console.print(f"[bold]{model}[/] at tensor parallel size {tp}: {_problem_in_words(answer.problem)}")
    console.print(f"on [bold]{answer.machine.arch}[/]{_machine_in_words(answer.machine)}\n")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("backend", "verdict", "heads", "why"):
        table.add_column(heading, no_wrap=heading != "why")
    for verdict in answer.verdicts:
        table.add_row(
            f"[bold]{verdict.backend.name}[/]",
            "[green]accepts[/]" if verdict.accepted else "[red]refuses[/]",
            _padding_in_words(verdict),
            "\n".join(_why(verdict)),
        )
    console.print(table)
    chosen = (
        f"[bold green]{answer.choice}[/]" if answer.choice else "[bold red]none[/], every backend refuses"
    )
    console.print(f"choice: {chosen}{_how(answer)}")


def _how(answer: Answer) -> str:
    """What is known of the chosen backend there, and its launch row."""
    if answer.chosen is None:
        return ""
    evidence, arch = answer.chosen.backend.evidence, answer.machine.arch
    words = [NOT_RUN[evidence].format(arch) if evidence in NOT_RUN else f"{evidence} on {arch}"]
    row = launch_row(answer)
    if row is not None:
        whose = "" if answer.choice == "triton" else "behind it triton, "
        tile = f"{row.block_m} rows × {row.block_n} keys, {row.num_warps} warps, {row.num_stages} stages"
        words.append(whose + tile)
    return f" [dim]({'; '.join(words)})[/]"


def show_answers(console: "Console", model: str, tp: int, answers: list[Answer]) -> None:
    """Print a table over machines: what each backend objects to, in short."""
    from rich import box
    from rich.table import Table

    console.print(f"[bold]{model}[/] at tensor parallel size {tp}: {_problem_in_words(answers[0].problem)}\n")
    names = [verdict.backend.name for verdict in answers[0].verdicts]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("machine", "kv format", *names, "choice", "triton's tile"):
        table.add_column(heading, no_wrap=heading not in names)
    for answer in answers:
        cells = ["[green]accepts[/]" if v.accepted else _in_short(v) for v in answer.verdicts]
        choice = f"[bold green]{answer.choice}[/]" if answer.choice else "[red]none[/]"
        row = launch_row(answer)
        tile = f"{row.block_m}×{row.block_n}" if row else ""
        table.add_row(f"[bold]{answer.machine.arch}[/]", answer.problem.kv_format, *cells, choice, tile)
    console.print(table)
    console.print("[dim]Name one --machine for the whole reasons, quirks and nearest changes.[/]")


def _problem_in_words(problem: Problem) -> str:
    asked = sorted(feature.value for feature in problem.features if feature.name != "MULTI_TOKEN")
    what = [problem.op.replace("_", " "), f"{problem.num_heads} local heads"]
    what += [f"{problem.q_len} query tokens a sequence"] if problem.q_len > 1 else []
    what += [f"top {problem.topk}"] if problem.topk else []
    what += [f"with {' and '.join(asked)}"] if asked else []
    cache = f"cache {problem.kv_format} in pages of {problem.block_size}"
    widths = f"widths {problem.kv_lora_rank} + {problem.qk_rope_head_dim}"
    return f"{', '.join(what)}\nqueries {problem.q_dtype}, {cache}, {widths}"


def _machine_in_words(machine: Machine) -> str:
    if machine.assumed:
        named = [f"{name} {version}" for name, version in machine.packages if version]
        with_named = f"{listed(named, 'and')} and " if named else ""
        rest = "every other" if named else "every"
        return f" ({machine.device_name}), assumed with {with_named}the newest release of {rest} package"
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages)
    return f" ({machine.device_name}), this machine, with {packages or 'no package that a backend needs'}"


def _padding_in_words(verdict: Verdict) -> str:
    if verdict.padding is None:
        return "[red]does not fit[/]"
    heads, padded_heads = verdict.padding
    if heads == padded_heads:
        return str(heads)
    return f"[yellow]{heads} → {padded_heads}[/] ({verdict.price:.2f}× work)"


def _why(verdict: Verdict) -> list[str]:
    from rich.markup import escape

    lines = [f"· {escape(reason)}" for reason in verdict.reasons]
    lines += [f"[yellow]quirk: {escape(str(quirk))}[/]" for quirk in verdict.quirks if quirk.knob]
    return lines + ([f"[cyan]→ {escape(verdict.nearest)}[/]"] if verdict.nearest else [])


def _in_short(verdict: Verdict) -> str:
    """What it objects to, without values."""
    quirks = {quirk.refuse for quirk in verdict.quirks}
    shorts = ["quirk" if reason in quirks else _subject(reason) for reason in verdict.reasons]
    return f"[dim]{', '.join(shorts)}[/]"


def _subject(reason: str) -> str:
    return (
        reason.partition(" got ")[0]
        .partition(" lacks ")[0]
        .removesuffix(" yet")
        .removesuffix(" is not installed")
    )
