"""What the tests of the transformers integration share: stock models to compare with, and hostile pages."""

import copy
import random

import pytest
import torch
import transformers

from anymla.integrations import presets
from anymla.integrations.transformers.pages import PagePool
from anymla.kv_cache import KVCache

DENSE = [name for name, row in presets.PRESETS.items() if not row.sparse]
SPARSE = [name for name, row in presets.PRESETS.items() if row.sparse]
PROMPTS = ("a first prompt, the longest one of all", "short", "neither long nor short")

INDEXED = {**presets.PRESETS["tiny-axk2"].config, "n_group": 1, "topk_group": 1}
LARGER = {
    "MistralLarge4ForConditionalGeneration": (
        {
            **INDEXED,
            "num_hidden_layers": 5,
            "no_rope_layers": [1, 0, 1, 0, 1],
            "kv_source_layers": [0, 1, 0, 1, 4],
            "indexer_types": ["full", "full", "shared", "full", "shared"],
        },
        {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
        | dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    ),
    "Glm5NextForConditionalGeneration": (
        {
            **INDEXED,
            "num_hidden_layers": 4,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", *["deepseek_sparse_attention"] * 3],
            "indexer_types": ["full", "full", "shared", "full"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "index_kpool": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "hc_mult": 2,
        },
        {"depth": 1, "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64}
        | dict.fromkeys(("hidden_size", "intermediate_size", "projection_intermediate_size"), 32),
    ),
    "HYV4VLForConditionalGeneration": (
        {
            **presets.PRESETS["tiny-hy-v4"].config,
            "hc_mult": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14, "out_hidden_size": 64}
        | dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    ),
}
"""Text models with indexers that exist only inside models that see as well: their text and vision configs."""

_allocate = KVCache.allocate.__func__


def make_pages_hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new pages with NaN and hand them out in no order: reading a dead slot or a wrong page is seen."""

    def allocate(cls, *args, **kwargs):
        store = _allocate(cls, *args, **kwargs)
        nothing = 0xFF if store.data.dtype.itemsize == 1 else float("nan")
        store.storage.fill_(nothing)
        return store

    draw = random.Random(0)
    take = PagePool._take

    def shuffled(pool):
        draw.shuffle(pool._free)
        return take(pool)

    monkeypatch.setattr(KVCache, "allocate", classmethod(allocate))
    monkeypatch.setattr(PagePool, "_take", shuffled)


def build(name: str, **changes):
    """A preset's model, or a skip where the installed transformers does not have it."""
    if not hasattr(transformers, presets.PRESETS[name].model_class):
        pytest.skip(
            f"{presets.PRESETS[name].model_class} is newer than transformers {transformers.__version__}"
        )
    return presets.build(name, **changes)


def larger(name, **changes):
    """A tiny model of that class, its pools weighted, its sinks learned and its index heads of one sign."""
    if not hasattr(transformers, name):
        pytest.skip(f"{name} is newer than transformers {transformers.__version__}")
    kind = getattr(transformers, name)
    text, vision = LARGER[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class(text_config={**text, **changes}, vision_config=vision)).eval()
        for parameter_name, parameter in model.named_parameters():
            if "kpool" in parameter_name or parameter_name.endswith(".sinks"):
                parameter.data.normal_()
            elif parameter_name.endswith("indexer.weights_proj.weight"):
                parameter.data.abs_()
    model.generation_config.eos_token_id = None
    return model


def eager(model):
    """A stock copy of a model with the plainest attention."""
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    return stock


def fp64(model):
    """A stock copy in fp64; its mixture of experts runs as plain loops, the only form that has fp64."""
    stock = eager(model).double()
    stock.set_experts_implementation("eager")
    return stock


def padded(*texts: str):
    """Prompts as one batch, padded on the left."""
    return presets.byte_tokenizer()(list(texts or PROMPTS), padding=True, return_tensors="pt")


def real_logits(model, batch):
    """[N, vocabulary] logits of the tokens that are not padding."""
    with torch.no_grad():
        return model(**batch).logits[batch["attention_mask"].bool()]


def exact_logits(model, batch):
    """The same in fp64, each prompt alone and without padding: independent of every mask."""
    stock = fp64(model)
    with torch.no_grad():
        rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        return torch.cat([stock(ids[keep][None]).logits[0] for ids, keep in rows])


def greedy(model, batch, new=64, **options):
    """Token ids of a greedy generation, prompt included."""
    return model.generate(**batch, max_new_tokens=new, do_sample=False, **options)


def given(cache):
    """The cache under the name that this transformers calls it by."""
    newer = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    return {"cache" if newer else "past_key_values": cache}


def fp64_rows(model, batch):
    """[B, q, vocabulary] fp64 logits; the mask hides with a number that fp64 can add to."""
    stock = fp64(model)
    keep = batch["attention_mask"].bool()
    size = keep.shape[1]
    seen = keep[:, None, None, :] & torch.ones(size, size, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return stock(input_ids=batch["input_ids"], attention_mask=mask).logits


def state(model):
    """What attach may change: attributes of the model, its modules and configs, hooks, attention choice."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    modules = {
        name: (sorted(vars(module)), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    }
    return modules, [config._attn_implementation for config in configs.values()]
