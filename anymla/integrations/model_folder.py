"""Hugging Face model folders, loaded from safetensors only and without running any code of theirs."""

import json
from pathlib import Path
from typing import Any

import torch

from anymla.errors import InvalidInput, Reasons
from anymla.integrations.presets import Loaded

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
INDEX = "model.safetensors.index.json"


def load(folder: Path) -> Loaded:
    """Load a Hugging Face model folder in fp32, from safetensors only and without running code of its own.

    Args:
        folder: Holds config.json, *.safetensors and a tokenizer.

    Returns:
        The model in evaluation mode and its tokenizer.

    Raises:
        InvalidInput: with everything that is missing or cannot be used.
    """
    check(folder)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **local)
        # fp32 whatever was stored: products in bf16 are many times slower on most CPUs.
        model, notes = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            # Noted in `notes` instead of raised, and refused below.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **local,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        needs = "a causal language model that transformers loads by itself"
        raise InvalidInput("model folder", [f"folder got {folder}; needs {needs}: {error}"]) from error
    reasons = Reasons("model folder")
    absent = sorted(notes["missing_keys"])
    more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    reasons.need(
        not absent, "weights", f"no {absent[0]}{more}" if absent else "", f"all of {type(model).__name__}"
    )
    for key, stored, wanted in sorted(notes["mismatched_keys"]):
        reasons.need(False, key, f"shape {tuple(stored)}", f"{tuple(wanted)}, from config.json")
    reasons.raise_if_any()
    return Loaded(model.eval(), tokenizer, bool(tokenizer.chat_template), "safetensors")


def check(folder: Path) -> None:
    """Refuse a folder that lacks something, or whose weights could run code; nothing is loaded yet."""
    reasons = Reasons("model folder")
    if not reasons.need(folder.is_dir(), "folder", f"{folder}, no folder", "a folder on this machine"):
        reasons.raise_if_any()
    files = {file.name for file in folder.iterdir()}
    where = f"in {folder}"
    config = folder / "config.json"
    if reasons.need(
        "config.json" in files, "config.json", f"no such file {where}", "the model's config.json"
    ):
        _check_config(reasons, config)
    if not any(name.endswith(".safetensors") for name in files):
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        got = f"{', '.join(pickles)} {where}" if pickles else f"no file {where}"
        needs = "*.safetensors" + (
            ": opening a pickle can run code, converting it is yours to do" if pickles else ""
        )
        reasons.need(False, "weights", got, needs)
    elif INDEX in files:
        named = _json(reasons, folder / INDEX).get("weight_map")
        absent = sorted({*named.values()} - files) if isinstance(named, dict) else ["unnamed"]
        reasons.need(
            not absent, INDEX, f"shards {', '.join(absent)}, not {where}", "every shard that it names"
        )
    reasons.need(
        bool(files & set(TOKENIZERS)), "tokenizer", f"no file {where}", f"one of {', '.join(TOKENIZERS)}"
    )
    reasons.raise_if_any()


def _check_config(reasons: Reasons, config: Path) -> None:
    """Note a config of an architecture that transformers does not have itself."""
    values = _json(reasons, config)
    from transformers import CONFIG_MAPPING, __version__

    kind = values.get("model_type")
    own = ", code in the folder is never run" if "auto_map" in values else ""
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    reasons.need(
        known or not values, "model_type", repr(kind), f"one that transformers {__version__} has{own}"
    )


def _json(reasons: Reasons, file: Path) -> dict[str, Any]:
    """The object in a file; empty, and a note, if there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reasons.need(False, file.name, str(error), "a JSON object")
        return {}
    reasons.need(isinstance(values, dict) and bool(values), file.name, type(values).__name__, "a JSON object")
    return values if isinstance(values, dict) else {}
