"""Attach: one call that moves a model's attention onto our pages, and one that takes it back."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, StaticCache

from anymla import select
from anymla.errors import InvalidInput, Reasons
from anymla.integrations.transformers import attention, indexer, options
from anymla.integrations.transformers.cache import adopt, is_paged
from anymla.integrations.transformers.families import (
    GROUPED,
    LATENT,
    LatentSite,
    Settings,
    Site,
    break_even_tokens,
    is_windowed,
    site_of,
)
from anymla.integrations.transformers.pages import PagePool
from anymla.kv_cache import KV_FORMATS
from anymla.plans import machine_of
from anymla.rules import listed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Attachment:
    """A model whose attention runs on latent pages; `detach`, or leaving a `with` block, restores it.

    Attributes:
        model: The model given to `attach`.
        settings: What was asked for; `settings.calls` counts the layers that ran in each form.
        sites: The attention modules, by their layer index in the cache.
    """

    def __init__(
        self, model: Any, owner: Any, sites: dict[int, Site], chosen: tuple[options.Chosen, ...]
    ) -> None:
        self.model, self.sites = model, sites
        self.settings = next(iter(sites.values())).settings
        self._owner, self._chosen = owner, chosen
        self._signature = inspect.signature(owner.forward)
        self._undo: list[Callable[[], object]] = []

    @property
    def is_attached(self) -> bool:
        """Whether the model's attention is ours now."""
        return bool(self._undo)

    @property
    def backend(self) -> str:
        """The backend that decodes, in the first layer."""
        return self._chosen[0].choice.backend.name

    @property
    def choices(self) -> tuple[select.Choice, ...]:
        """What was chosen for every operation of every kind of layer, decoding first, with every verdict."""
        return tuple(chosen.choice for chosen in self._chosen)

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token, all layers, index keys included."""
        row = KV_FORMATS[self.settings.kv_format]
        latents = sum(
            row.bytes_per_token(s.kv_lora_rank, s.qk_rope_head_dim) for s in self._owning().values()
        )
        return latents + sum(s.index_bytes_per_token for s in self.sites.values())

    @property
    def stock_bytes_per_token(self) -> int:
        """Bytes of one token in the cache that this transformers would use itself, all layers."""
        latents = sum(s.stored_width * s.weight.element_size() for s in self._owning().values())
        return latents + sum(s.stock_index_bytes_per_token for s in self.sites.values())

    def explain(self) -> str:
        """Which backend decodes and which prefills, in which layers, why, and why the others do not."""
        return "\n".join(map(str, self._chosen))

    def new_cache(self, *, max_cache_len: int | None = None) -> Any:
        """An empty paged cache for `generate(cache=...)` or several calls of the model.

        Args:
            max_cache_len: Tokens a sequence for which pages are set aside; None lets the cache grow.

        Returns:
            A DynamicCache, or a StaticCache if max_cache_len is given, whose attention layers are paged.
        """
        config = self._owner.config
        cache = DynamicCache(config=config)
        if max_cache_len is not None:
            cache = StaticCache(config=config, max_cache_len=max_cache_len)
        self._adopt(cache)
        return cache

    def detach(self) -> None:
        """Restore the model exactly. Caches made meanwhile cannot be used without it. Twice is once."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _owning(self) -> dict[int, Site]:
        """The sites that have tokens of their own in a cache."""
        return {index: site for index, site in self.sites.items() if site.owns_tokens}

    def _adopt(self, cache: Any) -> None:
        wanted = self.settings
        pool = PagePool(
            kv_format=wanted.kv_format,
            block_size=wanted.block_size,
            device=next(iter(self.sites.values())).weight.device,
            num_blocks=wanted.num_blocks,
            k_scale=wanted.k_scale,
        )
        paged = [index for index, site in self.sites.items() if site.owns_tokens or site.scores]
        adopt(cache, pool, paged, self._owner.config)

    def _before_forward(
        self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put pages into the cache of this forward pass, making a cache where the model would make one."""
        bound = self._signature.bind_partial(*args, **kwargs)
        given = {**bound.arguments.get("kwargs", {}), **bound.arguments}
        weights = given.get("output_attentions") or getattr(owner.config, "output_attentions", False)
        if weights:
            needs = "False: attention weights are never formed; detach() to see them"
            raise InvalidInput("attention", [f"output_attentions got True; needs {needs}"])
        names = ("cache", "past_key_values")
        cache = next((given[name] for name in names if given.get(name) is not None), None)
        uses_cache = given.get("use_cache")
        if uses_cache is None:
            uses_cache = getattr(owner.config, "use_cache", False)
        if cache is not None:
            if not is_paged(cache):
                self._adopt(cache)
            if "attention_mask" in kwargs and any(site.topk for site in self.sites.values()):
                states = next(given[n] for n in ("input_ids", "inputs_embeds") if given.get(n) is not None)
                length = cache.layers[min(self._owning())].tokens + states.shape[1]
                return args, {**kwargs, "attention_mask": _cut(kwargs["attention_mask"], length)}
        elif uses_cache:
            # transformers 5.24 renamed the argument.
            name = next(n for n in names if n in self._signature.parameters)
            place = list(self._signature.parameters).index(name)
            if place < len(args):
                return (*args[:place], self.new_cache(), *args[place + 1 :]), kwargs
            return args, {**kwargs, name: self.new_cache()}
        return args, kwargs

    def _apply(self) -> None:
        owner, modules = self._owner, [site.module for site in self.sites.values()]
        for site in self.sites.values():
            self._set(site.module, attention.SITE, site)
            if hasattr(site.module, "expand_kv"):
                self._set(site.module, "expand_kv", _keep_latents)
            if hasattr(site.module, "build_attention_mask_from_topk"):
                self._set(site.module, "build_attention_mask_from_topk", _keep_choice)
                hook = site.module.register_forward_pre_hook(partial(_note_kept, site), with_kwargs=True)
                self._undo.append(hook.remove)
            if isinstance(site, LatentSite) and site.scores:
                self._set(site.indexer, "forward", partial(indexer.run, site, site.indexer.forward))
        for module in owner.modules():
            if is_windowed(module):
                self._set(module, attention.STOCK, True)
                modules.append(module)
        configs = {id(module.config): module.config for module in (owner, *modules)}
        for config in configs.values():
            self._set(config, "_attn_implementation_internal", attention.NAME)
        if hasattr(self.model, "_valid_auto_compile_criteria"):
            # A compiled forward would bake this step's pages into its graph.
            self._set(self.model, "_valid_auto_compile_criteria", _never)
        hook = owner.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._undo.append(hook.remove)

    def _set(self, target: Any, name: str, value: object) -> None:
        """Set an attribute of this one object; undone by its old value, or by none if it had none."""
        if name in vars(target):
            old = vars(target)[name]
            self._undo.append(lambda: setattr(target, name, old))
        else:
            self._undo.append(lambda: delattr(target, name))
        setattr(target, name, value)


def attach(
    model: Any,
    *,
    kv_format: str = "auto",
    block_size: int = 64,
    backend: str = "auto",
    prefill_threshold: int | str | None = "auto",
    num_blocks: int | None = None,
    k_scale: Tensor | float | None = None,
    index_format: str | None = "auto",
    index_power_of_two: bool = False,
) -> Attachment:
    """Run a transformers model's attention as absorbed MLA over our paged latent cache.

    `model(...)` and `model.generate(...)` are used as before. The weights stay where they are. Grouped-query
    models of the Llama kind are MLA with the latent [keys | values] and are served the same way.
    Inference only: training and gradients are refused; a model wrapped by `torch.compile` is not tested.

    Args:
        model: A transformers model in evaluation mode. Every attention must be of a served family.
        kv_format: "auto" for the dtype of the model, or the name of a row of KV_FORMATS that its widths fit.
        block_size: Tokens a page.
        backend: Who decodes: a registry name, or "auto" for the first that accepts. Prefill, writes and
            choices of keys are asked of it too if it takes them, else of the first that does.
        prefill_threshold: New tokens of a sequence from which keys are decompressed once instead of every
            query being absorbed; "auto" is where that is less work; None never does it.
        num_blocks: Pages of each cache, all layers alike. None starts small; the cache then grows between
            steps, and its pages move.
        k_scale: Multiplies the values of an fp8 cache with one scale. None: calibrated at each layer's
            first tokens, with room for twice their largest value.
        index_format: How the keys of an indexer are stored, "index_k" having its queries in fp8 too; "auto"
            for the dtype of the model, which chooses as the model does. None leaves all of it to the model.
        index_power_of_two: Let the scales of index_k and of its queries be powers of two, as some models are
            trained.

    Returns:
        The attachment. Nothing of the model has changed but where its attention reads.

    Raises:
        InvalidInput: the model is not served, with every reason; it is unchanged.
        NoBackend: no backend, or not the named one, takes this model on its device; it is unchanged.
    """
    reasons = Reasons("attach")
    if not isinstance(model, PreTrainedModel):
        reasons.need(False, "model", type(model).__name__, "a transformers model")
        reasons.raise_if_any()
    found = _attention_modules(reasons, model)
    reasons.raise_if_any()
    owner = _owner_of(reasons, model, [name for name, _ in found])
    weight = _check_weights(reasons, [module for _, module in found])
    reasons.raise_if_any()
    machine = machine_of(weight.device)
    row = options.format_named(reasons, kv_format, weight.dtype, machine)
    scale = options.scale_for(reasons, row, k_scale, weight.device)
    options.check_numbers(
        reasons, block_size=block_size, num_blocks=num_blocks, prefill_threshold=prefill_threshold
    )
    has_indexer = any(getattr(module, "indexer", None) is not None for _, module in found)
    keys = options.index_format_named(reasons, index_format, has_indexer, weight.dtype, machine)
    rounds = keys in KV_FORMATS and KV_FORMATS[keys].tile != 0
    reasons.need(not index_power_of_two or rounds, "index_power_of_two", True, "an index format with scales")
    settings = Settings(row, block_size, backend, machine, None, num_blocks, scale, keys, index_power_of_two)
    sites = _sites(reasons, found, settings)
    reasons.need(not getattr(owner.config, "output_attentions", False), "output_attentions", True, "False")
    reasons.need(getattr(owner.config, "is_causal", True), "is_causal", False, "True")
    _check_layers(reasons, owner.config, sites)
    reasons.raise_if_any()
    first = next(iter(sites.values()))
    settings.prefill_threshold = (
        break_even_tokens(first) if isinstance(prefill_threshold, str) else prefill_threshold
    )
    chosen = options.choices(sites, machine, weight.dtype)
    attention.register()
    attachment = Attachment(model, owner, sites, chosen)
    attachment._apply()
    return attachment


def _attention_modules(reasons: Reasons, model: nn.Module) -> list[tuple[str, Any]]:
    """The attention modules that we serve, by name, with every other one noted."""
    found: list[tuple[str, Any]] = []
    foreign: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if is_windowed(module):
            continue
        if kind in LATENT or kind in GROUPED:
            found.append((name, module))
            if hasattr(module, attention.SITE):
                reasons.need(False, name, "an attached module", "one that is not attached yet")
        elif hasattr(module, "expand_kv") or hasattr(module, "indexer"):
            needs = f"one of {', '.join(sorted(LATENT))}"
            foreign.setdefault(
                kind, f"{name} got {kind}, a latent attention that is not known; needs {needs}"
            )
    reasons.found.extend(foreign.values())
    if not found and not foreign:
        needs = f"{', '.join(sorted((*LATENT, *GROUPED)))}"
        reasons.need(False, "model", f"{type(model).__name__} without such attention", f"one of {needs}")
    return found


def _owner_of(reasons: Reasons, model: Any, names: Iterable[str]) -> Any:
    """The innermost model around all attention modules: it is handed the cache and makes the masks."""
    owners = {}
    for name in names:
        path = name
        while path:
            path = path.rpartition(".")[0]
            candidate = model.get_submodule(path) if path else model
            if isinstance(candidate, PreTrainedModel):
                owners[path] = candidate
                break
    reasons.need(
        len(owners) == 1, "model", f"attention in {len(owners)} text models", "one; attach each by itself"
    )
    return next(iter(owners.values()))


def _check_weights(reasons: Reasons, modules: list[Any]) -> Tensor:
    """Note weights that are not on one device in one usable dtype; the first of them."""
    weights = [getattr(module, "kv_b_proj", module.o_proj).weight for module in modules]
    devices, dtypes = {w.device for w in weights}, {w.dtype for w in weights}
    shown = ", ".join(sorted(map(str, devices)))
    reasons.need(
        len(devices) == 1 and not weights[0].is_meta,
        "model",
        f"attention on {shown}",
        "one device that holds its weights",
    )
    usable = len(dtypes) == 1 and weights[0].dtype in _DTYPES
    reasons.need(
        usable, "model", f"weights of {', '.join(sorted(map(str, dtypes)))}", "float32, bfloat16 or float16"
    )
    weight: Tensor = weights[0]
    return weight


def _sites(reasons: Reasons, found: list[tuple[str, Any]], settings: Settings) -> dict[int, Site]:
    sites: dict[int, Site] = {}
    for name, module in found:
        site = site_of(module, settings)
        assert site is not None
        reasons.need(
            module.layer_idx not in sites, name, f"layer_idx {module.layer_idx} again", "one of its own"
        )
        site.check(reasons, name)
        if isinstance(site, LatentSite) and site.scores:
            before = len(reasons.found)
            site.check_indexer(reasons)
            reasons.found[before:] = [
                why for why in reasons.found[before:] if why not in reasons.found[:before]
            ]
        if settings.kv_format in KV_FORMATS:
            row = KV_FORMATS[settings.kv_format]
            refusal = row.refusal(site.kv_lora_rank, site.qk_rope_head_dim)
            if refusal and refusal not in reasons.found:
                reasons.found.append(refusal)
        sites[module.layer_idx] = site
    return sites


def _check_layers(reasons: Reasons, config: Any, sites: Iterable[int]) -> None:
    """Note layers whose cache is not one of all their tokens."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        for name in ("sliding_window", "attention_chunk_size"):
            value = getattr(config, name, None)
            reasons.need(value is None, name, value, "None: every key is kept and attended to")
        return
    # The last is the older name of the one before it.
    served = ("full_attention", "indexed_attention", "deepseek_sparse_attention")
    for kind in sorted({kinds[index] for index in sites} - set(served)):
        reasons.need(False, "layer_types", kind, f"{listed(served)}, for every attention that is attached")


def _keep_latents(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of expand_kv: attention gets the latents as they are cached."""
    return kv_nope, k_rot


def _cut(mask: Any, length: int) -> Any:
    """Masks of a static cache end where it does; an indexer wants them to end where the tokens do."""
    if isinstance(mask, dict):
        return {kind: _cut(part, length) for kind, part in mask.items()}
    return mask[..., :length] if isinstance(mask, Tensor) and mask.dim() == 4 else mask


def _keep_choice(topk_indices: Tensor, *args: object, **kwargs: object) -> Tensor:
    """In the place of a mask made of the choice: attention gets the choice."""
    return topk_indices


def _note_kept(site: Any, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Remember which new tokens are not hidden, which the choice does not say."""
    site.kept = kwargs["attention_mask"]


def _never(*args: object, **kwargs: object) -> bool:
    return False
