"""The transformers cache layer that writes latents into our pages, and how a cache comes to have it."""

from collections.abc import Collection
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    StaticCache,
    StaticIndexedLayer,
    StaticLayer,
)

from anymla.errors import InvalidInput, Reasons
from anymla.integrations.transformers.pages import PagePool
from anymla.rules import listed

_PLAIN = (DynamicLayer, StaticLayer, DynamicIndexedLayer, StaticIndexedLayer)
"""Layers that keep every token, which ours can take the place of."""


class LatentCarrier(Tensor):
    """The shape of all cached tokens without their values; the attention function reads the pages instead.

    Whoever computes with it meets an error, never wrong numbers.
    """

    layer: "PagedLatentLayer"
    fresh: Tensor

    # Straight to __torch_dispatch__: nothing here needs the function-level hook.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(fresh: Tensor, layer: "PagedLatentLayer") -> "LatentCarrier":
        """Carry new states [B, G, q, width] behind the shape [B, G, tokens + q, width]."""
        batch, groups, new, width = fresh.shape
        carrier: LatentCarrier = torch.Tensor._make_wrapper_subclass(
            LatentCarrier,
            (batch, groups, layer.tokens + new, width),
            dtype=fresh.dtype,
            device=fresh.device,
        )
        carrier.layer, carrier.fresh = layer, fresh
        return carrier

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> NoReturn:
        """Refuse every operation."""
        needs = "the attention function of anymla; is the model detached?"
        raise InvalidInput("latent pages", [f"reader got {func}; needs {needs}"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LatentCarrier(shape={tuple(self.shape)})"


class PagedLatentLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer's part of a cache whose tokens live in pages.

    `update` only carries the new states; the attention function, which knows the mask, stores them.
    Operations on whole sequences act on the pool that all layers share, so only its leader carries them out.
    A layer that reads the latents of another one has index keys of its own at most.
    """

    is_compileable: ClassVar[bool] = False
    is_croppable: ClassVar[bool] = True
    is_sliding: ClassVar[bool] = False
    supports_early_init: ClassVar[bool] = False

    def __init__(self, pool: PagePool, index: int, leads: bool) -> None:
        super().__init__()
        self.pool, self.index, self.leads = pool, index, leads
        self.keys: Tensor | None
        self.tokens = self.pending = 0
        self.index_keys: Tensor | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool makes this layer's pages when its first tokens are stored."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Carry new states to the attention function, which stores those that the mask does not hide."""
        # Indexers look at the shape of the keys, and at the length with the new tokens.
        self.keys, self.pending = LatentCarrier.of(key_states, self), key_states.shape[2]
        return self.keys, LatentCarrier.of(value_states, self)

    def settle(self, stored: bool) -> None:
        """Count the tokens that were carried, if they are stored now; a step may be refused."""
        self.tokens += self.pending if stored else 0
        self.pending, self.keys = 0, None

    def settle_with_pool(self) -> None:
        """Count the tokens of a step whose latents another layer stores."""
        self.tokens = self.pool.tokens

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Keep the new keys [B, q, D] of the model's own indexer, and give it those of all tokens so far."""
        if self.index_keys is not None:
            # A step that was refused has left keys after the last token.
            indexer_key_states = torch.cat((self.index_keys[:, : self.tokens], indexer_key_states), 1)
        self.index_keys = indexer_key_states
        return indexer_key_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that a mask must cover, and where they start."""
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each sequence, hidden ones and those on their way to the attention function included."""
        return self.tokens + self.pending

    def get_max_length(self) -> int:
        """The most tokens a sequence may have; -1: no limit."""
        return -1 if self.pool.max_length is None else self.pool.max_length

    def reset(self) -> None:
        """Forget every token; the pages stay allocated."""
        self.tokens, self.pending, self.keys, self.index_keys = 0, 0, None, None
        if self.leads:
            self.pool.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens of every sequence."""
        if tokens_to_remove > 0:
            needs = "0, or minus the number of tokens to remove"
            raise InvalidInput("crop", [f"tokens_to_remove got {tokens_to_remove}; needs {needs}"])
        if self.leads:
            self.pool.crop(-tokens_to_remove)
        self.tokens = max(0, self.tokens + tokens_to_remove)
        if self.index_keys is not None:
            self.index_keys = self.index_keys[:, : self.tokens]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let beam i continue what is now beam beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue every sequence `repeats` times."""
        if self.leads:
            self.pool.select([b for b in range(self.pool.num_seqs) for _ in range(repeats)])
        if self.index_keys is not None:
            self.index_keys = self.index_keys.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences at these indices (or where a bool mask is True)."""
        if self.leads and self.pool.num_seqs:
            self.pool.select(torch.arange(self.pool.num_seqs)[indices.cpu()].tolist())
        if self.index_keys is not None:
            self.index_keys = self.index_keys[indices.to(self.index_keys.device)]

    def offload(self) -> None:
        """Refuse: pages stay on their device."""
        raise InvalidInput("cache", ["offloading got True; needs False, pages stay on their device"])

    prefetch = offload


def adopt(cache: Any, pool: PagePool, indices: Collection[int], config: Any) -> None:
    """Replace the empty attention layers of a cache by paged ones, in place.

    Args:
        cache: A DynamicCache or StaticCache without tokens.
        pool: Fresh; takes over the length limit of a static cache.
        indices: The layers to replace; the first has tokens of its own.
        config: The text model's, for caches that make their layers on demand.

    Raises:
        InvalidInput: with every reason why this cache cannot be used; it is unchanged then.
    """
    reasons = Reasons("cache")
    kind = type(cache).__name__
    if not reasons.need(
        type(cache) in (DynamicCache, StaticCache), "cache", kind, "DynamicCache or StaticCache"
    ):
        reasons.raise_if_any()
    reasons.need(not cache.offloading, "offloading", True, "False, pages stay on their device")
    layers = list(cache.layers) or DynamicCache(config=config).layers
    reasons.need(len(layers) > max(indices), "cache", f"{len(layers)} layers", f"more than {max(indices)}")
    for index in sorted(indices)[: len(layers)]:
        layer = layers[index] if index < len(layers) else None
        name, plain = f"layer {index}", type(layer) in _PLAIN
        if layer is not None and reasons.need(
            plain, name, type(layer).__name__, listed([kind.__name__ for kind in _PLAIN])
        ):
            length = int(layer.get_seq_length())
            reasons.need(
                length == 0,
                name,
                f"{length} tokens",
                "0: a cache that was filled before attach stays where it was",
            )
    reasons.raise_if_any()
    leader = min(indices)
    if isinstance(layers[leader], StaticLayer):
        pool.max_length = layers[leader].max_cache_len
    for index in indices:
        layers[index] = PagedLatentLayer(pool, index, index == leader)
    cache.layers, cache.layer_class_to_replicate = layers, None


def is_paged(cache: Cache) -> bool:
    """Whether a cache has paged layers.

    Raises:
        InvalidInput: they do not all hold the same tokens, because an earlier forward pass stopped midway.
    """
    paged = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, PagedLatentLayer)]
    behind = next((layer for layer in paged if layer.tokens != layer.pool.tokens), None)
    if behind is not None:
        got = f"{behind.tokens} tokens in layer {behind.index} and {behind.pool.tokens} in others"
        raise InvalidInput(
            "cache", [f"cache got {got}, a forward stopped midway; needs reset(), or a new cache"]
        )
    return bool(paged)
