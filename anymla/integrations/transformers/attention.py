"""The attention function and the mask function that transformers calls."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from anymla.errors import InvalidInput, Reasons
from anymla.integrations.transformers import steps
from anymla.integrations.transformers.cache import LatentCarrier
from anymla.integrations.transformers.families import Site
from anymla.kv_cache import KVCache

NAME = "anymla"
"""Under which transformers knows both functions."""

SITE = "anymla_site"
"""The attribute by which an attention module leads to its site."""

STOCK = "anymla_stock"
"""Marks an attention module, among attached ones, that keeps its own attention and cache."""

_ABSENT = ("sliding_window", "softcap", "cu_seq_lens_q", "cu_seq_lens_k", "position_bias")
"""Arguments of other attentions; ignoring one would be a silent error."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend one layer: store its new latents in pages, then absorbed, or decompressed for long prompts.

    Args:
        module: The attention module.
        query: [B, H, q, P + R], rotated.
        key: MLA: latents [B, 1, q, L]; grouped-query: keys [B, G, q, d]. From a paged cache, their carrier.
        value: MLA: [B, 1, q, R], rotated; grouped-query: values [B, G, q, d].
        attention_mask: See `steps.begin`; or the choice itself, in the place of a mask made of it.
        scaling: Multiplies q·k, taken as it is.
        dropout: Must be 0.
        indices: [B, q, K] int32 tokens that an indexer chose for each query token; None: all.
        s_aux: [H] learned sinks.
        kwargs: What else the model passes; what would change the result is refused.

    Returns:
        [B, q, H, V], 0 where a row sees nothing, and None: no attention weights exist.

    Raises:
        InvalidInput: with every reason why the result would not be what was asked for.
    """
    if getattr(module, STOCK, False):
        return _stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    site: Site | None = getattr(module, SITE, None)
    reasons = Reasons("attention")
    kind = type(module).__name__
    reasons.need(site is not None, "module", f"{kind} that is not attached", "attach(model)")
    reasons.need(scaling is not None, "scaling", None, "the model's softmax scale")
    reasons.need(not dropout and not module.training, "training", True, "model.eval()")
    reasons.need(
        not kwargs.get("output_attentions"), "output_attentions", True, "False: weights are never formed"
    )
    for name in _ABSENT:
        reasons.need(kwargs.get(name) is None, name, _shown(kwargs.get(name)), "None")
    if site is not None and attention_mask is not None and attention_mask.dtype == torch.int32:
        indices, attention_mask = attention_mask, site.kept
    if site is not None:
        for name, given_one, known in (("indices", indices, site.topk), ("s_aux", s_aux, site.has_sinks)):
            wanted = "a value, as this attention has one" if known else "None"
            reasons.need((given_one is None) != bool(known), name, _shown(given_one), wanted)
    reasons.raise_if_any()
    assert site is not None and scaling is not None
    with torch.no_grad():
        asked = _Given(site, float(scaling), indices, None if s_aux is None else s_aux.detach().float())
        out = _attend(asked, query, key, value, attention_mask)
    return (_NoGradient.apply(out, query) if query.requires_grad else out), None  # type: ignore[no-untyped-call]


def _shown(value: object) -> object:
    return None if value is None else "a value"


@dataclass(frozen=True)
class _Given:
    """What a layer is asked beside its tensors.

    Attributes:
        site: The layer.
        sm_scale: Multiplies q·k.
        indices: [B, q, K] chosen tokens, or None.
        sinks: [H] fp32, or None.
    """

    site: Site
    sm_scale: float
    indices: Tensor | None
    sinks: Tensor | None


def _attend(given: _Given, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    batch, heads, new, _ = query.shape
    site = given.site
    layer = key.layer if isinstance(key, LatentCarrier) else None
    stores = layer is None or site.owns_tokens
    if layer is not None:
        assert isinstance(key, LatentCarrier) and isinstance(value, LatentCarrier)
        key, value, pool, index = key.fresh, value.fresh, layer.pool, layer.index
        step = steps.begun(site, layer, (batch, new), mask)
    else:
        tokens = key.shape[2]
        if tokens != new:
            got = f"{tokens} tokens for {new} queries"
            raise InvalidInput(
                "attention", [f"key got {got}; needs a cache that was made or adopted after attach"]
            )
        pool, index = steps.scratch(site, key), 0
        step = steps.begin(site, pool, (batch, new), mask)
    rows = query.transpose(1, 2).flatten(0, 1)
    kv_c, k_pe = site.new_tokens(key, value)
    if step.rows is not None:
        kv_c, k_pe = kv_c[step.rows], k_pe[step.rows]
    if not kv_c.shape[0] and index not in pool.stores:
        out = query.new_zeros(batch, new, heads, site.v_head_dim)
    else:
        store = pool.store(index, kv_c, k_pe)
        if stores and step.batch is not None:
            steps.write(site, kv_c, k_pe, store, step.slot_mapping)
        # A choice of as many as there are is all of them, but for tokens in a pool with a gap.
        lacks = given.indices is not None and given.indices.shape[2] < step.tokens
        if lacks or not site.chooses_all or (site.pool_size and step.has_gap):
            out = _chosen(given, step, store, rows)
        else:
            out = _run(given, step, store, rows, kv_c, k_pe)
        out = out.view(batch, new, heads, site.v_head_dim)
    if stores and layer is not None:
        layer.settle(stored=True)
    return out


def _chosen(given: _Given, step: steps.Step, store: KVCache, query: Tensor) -> Tensor:
    """[B·q, H, V] of queries [B·q, H, P + R] over the tokens chosen for each."""
    site = given.site
    assert given.indices is not None
    site.settings.calls["sparse"] += 1
    slots, counts = step.slots(given.indices, store.block_size)
    plan = step.sparse_plan(site, query, store, slots.shape[1])
    ql_nope, q_pe = site.absorb(query)
    latent = plan.run(
        ql_nope, q_pe, store, indices=slots, counts=counts, sm_scale=given.sm_scale, sinks=given.sinks
    )
    return site.project(latent.out)


def _run(
    given: _Given, step: steps.Step, store: KVCache, query: Tensor, kv_c: Tensor, k_pe: Tensor
) -> Tensor:
    """[B·q, H, V] of queries [B·q, H, P + R] over all that each sees, 0 in rows that see nothing."""
    site, parts = given.site, []
    if step.batch is not None:
        stored = query if step.rows is None else query[step.rows]
        parts.append((step.rows, _stored(given, step, store, stored, kv_c, k_pe)))
    if step.hidden is not None and step.hidden_rows is not None:
        hidden = query[step.hidden_rows]
        plan = step.decode_plan(site, hidden, store.format.name, step.hidden)
        ql_nope, q_pe = site.absorb(hidden)
        latent = plan.run(ql_nope, q_pe, store, sm_scale=given.sm_scale, sinks=given.sinks).out
        parts.append((step.hidden_rows, site.project(latent)))
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1].contiguous()
    out = query.new_zeros(*query.shape[:2], site.v_head_dim)
    for rows, part in parts:
        assert rows is not None
        out[rows] = part
    return out


def _stored(
    given: _Given, step: steps.Step, store: KVCache, query: Tensor, kv_c: Tensor, k_pe: Tensor
) -> Tensor:
    assert step.batch is not None
    site, threshold = given.site, given.site.settings.prefill_threshold
    options: dict[str, Any] = {"sm_scale": given.sm_scale, "sinks": given.sinks}
    if threshold is not None and step.batch.max_q_len >= threshold:
        site.settings.calls["decompressed"] += 1
        prefill = step.prefill_plan(site, query, store.format.name, step.batch)
        q_nope, q_pe = site.split_query(query)
        w_uk, w_uv = site.up_projections(query.shape[1])
        return prefill.run(q_nope, q_pe, kv_c, k_pe, w_uk, w_uv, kv_cache=store, **options).out
    site.settings.calls["absorbed"] += 1
    decode = step.decode_plan(site, query, store.format.name, step.batch)
    ql_nope, q_pe = site.absorb(query)
    return site.project(decode.run(ql_nope, q_pe, store, **options).out)


def _stock(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The plain attention of the model's own file; our mask as one that it can add."""
    if mask is not None and mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, hidden)
    eager = import_module(type(module).__module__).eager_attention_forward
    return eager(module, query, key, value, mask, **kwargs)[0], None


class _NoGradient(torch.autograd.Function):
    """Passes a result on, and refuses to carry gradients back instead of dropping them unseen."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise InvalidInput(
            "attention", ["backward got called; needs detach(): these kernels have no gradient"]
        )


def latent_mask(
    *,
    q_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask that transformers hands to `attend`: None if it is causal and hides nothing, else spelled out.

    Args:
        q_length: New tokens.
        q_offset: Tokens before them.
        mask_function: What the model wants; anything but causal is spelled out, for `attend` to judge.
        attention_mask: [B, tokens] bool, False where hidden.
        config: The text model's.
        kwargs: The rest of what transformers passes.

    Returns:
        None, or [B, 1, q, kv] bool.
    """
    # An indexer reads the mask as well, and takes no None for a causal one.
    if mask_function is causal_mask_function and not getattr(config, "index_topk", None):
        length = int(q_offset) + q_length
        if attention_mask is None:
            return None
        if attention_mask.shape[-1] >= length and bool(attention_mask[:, :length].all()):
            return None
    spelled: Tensor | None = sdpa_mask(
        **{
            **kwargs,
            "config": config,
            "q_length": q_length,
            "q_offset": q_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
    )
    return spelled


def register() -> None:
    """Make both functions known; without a mask function, attention would silently not be causal."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, latent_mask)
