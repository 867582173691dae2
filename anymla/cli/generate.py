"""`anymla generate`: a model writes through the paged latent cache, and how fast, by what, at what size.

Everything here is local: a model folder, the packaged SmolLM2, or a tiny model made from a seed.
"""

import copy
import json
import os
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anymla.backends import BACKENDS
from anymla.errors import Reasons
from anymla.problem import KV_FORMAT_NAMES, canonical_name

if TYPE_CHECKING:
    from torch import Tensor

    from anymla.integrations.presets import Loaded
    from anymla.integrations.transformers import Attachment
    from anymla.select import Choice

AFFORDABLE_PARAMETERS = 20_000_000
"""Up to this size a check also runs the model in fp64, and holds the logits to the judge's budget."""


@dataclass(frozen=True)
class Run:
    """What a model wrote: token ids, their logits [n, vocabulary] if they were asked for, and how fast."""

    tokens: list[int]
    logits: "Tensor | None"
    first_token_seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Check:
    """How the tokens and logits compare with those of stock transformers.

    Attributes:
        passed: Tokens match, and the logits are within the budget if it was computed.
        tokens_match: Whether every token is the same.
        max_logit_error: The largest difference of a logit, up to the first token that differs; None if not
            finite.
        budget_share: The share of the judge's budget against fp64 that was used; None: a model too large, or
            a cache format that rounds.
        chosen_steps: The steps, the prompt's included, that attended to chosen keys only; None: a model that
            has no indexer.
        words: The same as a sentence.
    """

    passed: bool
    tokens_match: bool
    max_logit_error: float | None
    budget_share: float | None
    chosen_steps: int | None
    words: str


def generate(
    prompt: Annotated[
        str | None,
        typer.Option(help="What to continue, or to answer. A preset has one of its own.", show_default=False),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a model: config.json, *.safetensors, tokenizer.", show_default=False),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="smollm2 (needs the extra demo), or a tiny model with random weights: tiny-deepseek-v3, "
            "tiny-glm-4.7-flash, tiny-llama and more. An unknown name lists all.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to write.")] = 64,
    check: Annotated[bool, typer.Option("--check", help="Compare with stock transformers.")] = False,
    kv_format: Annotated[str, typer.Option(help="Cache format; auto: the model's dtype.")] = "auto",
    index_format: Annotated[
        str,
        typer.Option(help="Format of an indexer's keys; auto: the model's dtype, own: the model's indexer."),
    ] = "auto",
    backend: Annotated[str, typer.Option(help="Who attends; auto: the first that accepts.")] = "auto",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, above 0 samples.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Draws the samples, and the weights of a tiny model.")] = 0,
    in_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Generate text through the paged latent cache.

    Exit code 1 if --check finds a difference.
    """
    reasons = Reasons("generate")
    given = "both" if model and preset else "neither"
    reasons.need(bool(model) != bool(preset), "--model and --preset", given, "one of them")
    needs = "some text" if model is None else "some text, as a folder has no prompt of its own"
    got = "nothing" if prompt is None else repr(prompt)
    reasons.need(bool(prompt) or (prompt is None and model is None), "--prompt", got, needs)
    reasons.need(max_new_tokens >= 1, "--max-new-tokens", max_new_tokens, "at least 1")
    reasons.need(0 <= temperature < float("inf"), "--temperature", temperature, "a finite number, at least 0")
    formats = ("auto", *(known for known in KV_FORMAT_NAMES if not known.startswith("index_k")))
    known = canonical_name(kv_format) in formats
    reasons.need(known, "--kv-format", repr(kv_format), f"one of {', '.join(formats)}")
    key_formats = ("auto", "own", *(known for known in KV_FORMAT_NAMES if not known.startswith("fp8")))
    known = canonical_name(index_format) in key_formats
    reasons.need(known, "--index-format", repr(index_format), f"one of {', '.join(key_formats)}")
    backends = dict.fromkeys(row.name for row in BACKENDS)
    reasons.need(
        backend in ("auto", *backends), "--backend", repr(backend), f"one of auto, {', '.join(backends)}"
    )
    needs = f"pip install 'anymla[{'transformers' if model else 'demo'}]'"
    reasons.need(find_spec("transformers") is not None, "packages", "no transformers", needs)
    reasons.raise_if_any()
    from rich.markup import escape

    name, console = preset or str(model), _terminal(in_json)
    patience = ", about half a minute" if preset == "smollm2" else ""
    with _quiet(), console.status(f"loading {escape(name)}{patience}"):
        began = time.perf_counter()
        from anymla.integrations import model_folder, presets
        from anymla.integrations.transformers import attach

        loaded = model_folder.load(model) if model else presets.load(name, seed=seed)
        prompt = presets.PROMPT if prompt is None else prompt
        inputs = _encoded(loaded, prompt, max_new_tokens)
        keys = None if index_format == "own" else index_format
        handle = attach(loaded.model, kv_format=kv_format, index_format=keys, backend=backend)
        load_seconds = time.perf_counter() - began
    console.print(f"[dim]{escape(name)}: {loaded.source}, loaded in {load_seconds:.1f} s[/]\n")

    def shown(text: str) -> None:
        console.print(_harmless(text), end="", markup=False, soft_wrap=True)

    with _quiet():
        run = _run(loaded, inputs, max_new_tokens, temperature, seed, shown, with_logits=check)
    console.print("\n")
    report: dict[str, Any] = {
        "model": name,
        "prompt": prompt,
        "text": loaded.tokenizer.decode(run.tokens, skip_special_tokens=True),
        "tokens": run.tokens,
        "new_tokens": len(run.tokens),
        "tokens_per_second": round(run.tokens_per_second, 2),
        "first_token_seconds": round(run.first_token_seconds, 3),
        "load_seconds": round(load_seconds, 1),
        "backend": handle.backend,
        "why": handle.explain(),
        "kv_format": handle.settings.kv_format,
        "index_format": handle.settings.index_format,
        "cache_bytes_per_token": handle.bytes_per_token,
        "stock_cache_bytes_per_token": handle.stock_bytes_per_token,
        "check": None,
    }
    handle.detach()
    found = None
    if check:
        with _quiet(), console.status("checking against stock transformers"):
            stock = _run(loaded, inputs, max_new_tokens, temperature, seed, None, with_logits=True)
            stored = [handle.settings.kv_format, handle.settings.index_format]
            named, steps = [name for name in stored if name], _chosen_steps(handle)
            found = compared(loaded, inputs["input_ids"], run, stock, named, steps)
        report["check"] = asdict(found)
    if in_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        _show(console, report, _short_reason(handle.choices, backend))
    if found is not None and not found.passed:
        raise typer.Exit(1)


def _chosen_steps(handle: "Attachment") -> int | None:
    """How many steps attended to chosen keys; None where no layer has an indexer, its own or another's."""
    choosing = [site for site in handle.sites.values() if site.topk]
    return handle.settings.calls["sparse"] // len(choosing) if choosing else None


def compared(
    loaded: "Loaded",
    prompt: "Tensor",
    run: Run,
    stock: Run,
    formats: Sequence[str],
    chosen_steps: int | None = None,
) -> Check:
    """Hold a run against that of stock transformers.

    Args:
        loaded: The detached model.
        prompt: [1, n] token ids.
        run: What the attached model wrote, with logits.
        stock: What the detached model wrote, with logits.
        formats: Of the attached cache; with one that rounds, it is not held to the budget of fp64.
        chosen_steps: How many steps of the run attended to chosen keys; None: the model has no indexer.

    Returns:
        The comparison.
    """
    assert run.logits is not None and stock.logits is not None
    pairs = list(zip(run.tokens, stock.tokens, strict=False))
    differs = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    match = run.tokens == stock.tokens
    # The first token that differs still had the same tokens before it; later ones had not.
    steps = len(pairs) if differs is None else differs + 1
    error: float | None = (run.logits[:steps] - stock.logits[:steps]).abs().max().item()
    error = error if error is not None and error < float("inf") else None
    rounding = [name for name in formats if name != canonical_name(str(loaded.model.dtype))]
    share, passed = None, match and error is not None
    if passed and not rounding and loaded.model.num_parameters() <= AFFORDABLE_PARAMETERS:
        share, passed = _judged(loaded, prompt, run, stock)
    shown = "not finite" if error is None else f"at most {error:.2g}"
    if match:
        words = f"all {len(run.tokens)} tokens are those of stock transformers; logits differ by {shown}"
    else:
        words = f"token {steps} is not that of stock transformers; up to there logits differ by {shown}"
    words += "" if share is None else f", {share:.2g} of the budget against fp64"
    if rounding:
        words += f"; a cache in {' and '.join(rounding)} rounds, one in the model's dtype does not"
    if chosen_steps is not None:
        done = "chose among their keys" if chosen_steps else "had more keys than are chosen"
        words += f"; {chosen_steps or 'none'} of {len(run.tokens)} steps {done}"
    return Check(passed, match, error, share, chosen_steps, words)


def _judged(loaded: "Loaded", prompt: "Tensor", run: Run, stock: Run) -> tuple[float, bool]:
    """The share of the budget used, and whether that passes, against the same model in fp64."""
    import torch

    from anymla.verification.judge import judge_tensor

    assert run.logits is not None and stock.logits is not None
    written = prompt.new_tensor([run.tokens[:-1]])
    ids, first = torch.cat([prompt, written], dim=1), prompt.shape[1] - 1
    exact = copy.deepcopy(loaded.model).double()
    # The grouped product of experts, stock transformers' choice, knows no fp64.
    exact.set_experts_implementation("eager")
    with torch.inference_mode():
        whole = loaded.model(input_ids=ids).logits[0, first:]
        right = exact(input_ids=ids).logits[0, first:]
    verdict = judge_tensor("logits", run.logits, right, stock.logits, whole)
    return verdict.share, verdict.passed


def _run(
    loaded: "Loaded",
    inputs: dict[str, "Tensor"],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    show: Callable[[str], None] | None,
    *,
    with_logits: bool,
) -> Run:
    import torch

    stream = _Stream(loaded.tokenizer, show)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        written = loaded.model.generate(
            **inputs,
            **(sampling if temperature else greedy),
            max_new_tokens=max_new_tokens,
            streamer=stream,
            return_dict_in_generate=True,
            output_logits=with_logits,
        )
    tokens = written.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    start, first, *_, last = [*stream.times, stream.times[-1]]
    rate = (len(tokens) - 1) / (last - first) if len(tokens) > 1 else 1 / (first - start)
    logits = torch.cat(written.logits) if with_logits else None
    return Run(tokens, logits, first - start, rate)


class _Stream:
    """Shows text as soon as its bytes are whole, and notes when the prompt and each token came."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None] | None) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.shown = 0

    def put(self, ids: "Tensor") -> None:
        """Take the prompt, then one token each time."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self.tokens += ids.tolist()
            self._show_new(even_if_cut=False)

    def end(self) -> None:
        """Show what is left."""
        self._show_new(even_if_cut=True)

    def _show_new(self, *, even_if_cut: bool) -> None:
        if self.show is None:
            return
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        # A replacement character at the end may be the start of a character that the next token completes.
        if even_if_cut or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.show(text[self.shown :])
            self.shown = len(text)


def _encoded(loaded: "Loaded", prompt: str, max_new_tokens: int) -> dict[str, "Tensor"]:
    """The prompt's token ids and mask, in the words that a chat model expects around it."""
    tokenizer = loaded.tokenizer
    if loaded.is_chat:
        said = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    length, longest = (
        encoded["input_ids"].shape[1],
        getattr(loaded.model.config, "max_position_embeddings", None),
    )
    reasons = Reasons("generate")
    reasons.need(length > 0, "--prompt", "0 tokens", "at least 1")
    if longest is not None:
        room = longest - length
        needs = f"at most {room}: the model takes {longest} and the prompt has {length}"
        reasons.need(max_new_tokens <= room, "--max-new-tokens", max_new_tokens, needs)
    reasons.raise_if_any()
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what transformers says while it loads and runs off the terminal; errors still come through."""
    # Read by tqdm when it is imported, which transformers does.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="transformers|torch|gguf|tokenizers")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _terminal(in_json: bool) -> Any:
    """Where progress and text go: with JSON to stderr, and only if somebody looks at it."""
    from rich.console import Console

    watched = (sys.stderr if in_json else sys.stdout).isatty()
    width = None if watched else 120
    return Console(stderr=in_json, quiet=in_json and not watched, highlight=False, width=width)


def _harmless(text: str) -> str:
    """Text without control characters: a model could write escape sequences to the terminal."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _short_reason(choices: "Sequence[Choice]", backend: str) -> str:
    """Who decodes and prefills, and the first thing that those before it object to."""
    decode, others = choices[0], {choice.problem.op: choice.backend.name for choice in choices}
    name = decode.backend.name
    refused = [f"{v.backend.name}: {v.reasons[0]}" for v in decode.verdicts if not v.accepted]
    words = [f"{name}, {'the first that accepts' if backend == 'auto' else 'as asked for'}"]
    words += [f"{op} by {other}" for op, other in others.items() if other != name]
    return "; ".join(words + (refused if backend == "auto" else []))


def _show(console: Any, report: dict[str, Any], short_reason: str) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    rate, first = report["tokens_per_second"], report["first_token_seconds"]
    table.add_row(
        "speed", f"{report['new_tokens']} tokens, {rate:.1f} tokens/s, the first after {first:.2f} s"
    )
    table.add_row("backend", short_reason)
    ours, stock = report["cache_bytes_per_token"], report["stock_cache_bytes_per_token"]
    ratio = f", {stock / ours:.2g} times as much" if stock != ours else ", the same"
    table.add_row(
        "cache", f"{ours:,} bytes a token in {report['kv_format']}; stock transformers {stock:,}{ratio}"
    )
    if report["check"]:
        verdict = "[bold green]passed[/]" if report["check"]["passed"] else "[bold red]failed[/]"
        table.add_row("check", f"{verdict}: {report['check']['words']}")
    console.print(table)
