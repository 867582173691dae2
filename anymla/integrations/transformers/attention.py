"""The attention function and the mask function that transformers calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from anymla.api import write_cache
from anymla.errors import InvalidInput, Reasons
from anymla.integrations.transformers import steps
from anymla.integrations.transformers.cache import LatentCarrier
from anymla.integrations.transformers.families import Site
from anymla.integrations.transformers.pages import PagePool
from anymla.kv_cache import KVCache
from anymla.problem import canonical_name

NAME = "anymla"
"""Under which transformers knows both functions."""

SITE = "anymla_site"
"""The attribute by which an attention module leads to its site."""

_ABSENT = ("sliding_window", "softcap", "s_aux", "indices", "cu_seq_lens_q", "cu_seq_lens_k", "position_bias")
"""Arguments of other attentions; ignoring one would be a silent error."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend one layer: store its new latents in pages, then absorbed, or decompressed for long prompts.

    Args:
        module: The attention module.
        query: [B, H, q, P + R], rotated.
        key: MLA: latents [B, 1, q, L]; grouped-query: keys [B, G, q, d]. From a paged cache, their carrier.
        value: MLA: [B, 1, q, R], rotated; grouped-query: values [B, G, q, d].
        attention_mask: See `steps.begin`.
        scaling: Multiplies q·k, taken as it is.
        dropout: Must be 0.
        kwargs: What else the model passes; what would change the result is refused.

    Returns:
        [B, q, H, V], 0 where a row sees nothing, and None: no attention weights exist.

    Raises:
        InvalidInput: with every reason why the result would not be what was asked for.
    """
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
        reasons.need(kwargs.get(name) is None, name, "a value", "None")
    reasons.raise_if_any()
    assert site is not None and scaling is not None
    with torch.no_grad():
        out = _attend(site, query, key, value, attention_mask, float(scaling))
    return (_NoGradient.apply(out, query) if query.requires_grad else out), None  # type: ignore[no-untyped-call]


def _attend(
    site: Site, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sm_scale: float
) -> Tensor:
    batch, heads, new, _ = query.shape
    layer = key.layer if isinstance(key, LatentCarrier) else None
    if layer is not None:
        assert isinstance(key, LatentCarrier) and isinstance(value, LatentCarrier)
        key, value, pool, index = key.fresh, value.fresh, layer.pool, layer.index
        if layer.tokens == pool.tokens:
            pool.step = steps.begin(pool, (batch, new), mask)
    else:
        tokens = key.shape[2]
        if tokens != new:
            got = f"{tokens} tokens for {new} queries"
            raise InvalidInput(
                "attention", [f"key got {got}; needs a cache that was made or adopted after attach"]
            )
        pool, index = _scratch(site, key), 0
        pool.step = steps.begin(pool, (batch, new), mask)
    step: steps.Step = pool.step
    rows = query.transpose(1, 2).flatten(0, 1)
    kv_c, k_pe = site.new_tokens(key, value)
    if step.rows is not None:
        kv_c, k_pe = kv_c[step.rows], k_pe[step.rows]
    if not kv_c.shape[0] and index not in pool.stores:
        out = query.new_zeros(batch, new, heads, site.v_head_dim)
    else:
        store = pool.store(index, kv_c, k_pe)
        out = _run(site, step, store, rows, kv_c, k_pe, sm_scale).view(batch, new, heads, site.v_head_dim)
    if layer is not None:
        layer.tokens += new
    return out


def _run(
    site: Site, step: steps.Step, store: KVCache, query: Tensor, kv_c: Tensor, k_pe: Tensor, sm_scale: float
) -> Tensor:
    """[B·q, H, V] of queries [B·q, H, P + R], 0 in rows that see nothing."""
    parts = []
    if step.batch is not None:
        write_cache(kv_c, k_pe, store, step.slot_mapping, backend=site.settings.backend)
        stored = query if step.rows is None else query[step.rows]
        parts.append((step.rows, _stored(site, step, store, stored, kv_c, k_pe, sm_scale)))
    if step.hidden is not None and step.hidden_rows is not None:
        hidden = query[step.hidden_rows]
        plan = step.decode_plan(site, hidden, store.format.name, step.hidden)
        ql_nope, q_pe = site.absorb(hidden)
        latent = plan.run(ql_nope, q_pe, store, sm_scale=sm_scale).out
        parts.append((step.hidden_rows, site.project(latent)))
    if len(parts) == 1 and parts[0][0] is None:
        return parts[0][1].contiguous()
    out = query.new_zeros(*query.shape[:2], site.v_head_dim)
    for rows, part in parts:
        assert rows is not None
        out[rows] = part
    return out


def _stored(
    site: Site, step: steps.Step, store: KVCache, query: Tensor, kv_c: Tensor, k_pe: Tensor, sm_scale: float
) -> Tensor:
    assert step.batch is not None
    threshold = site.settings.prefill_threshold
    if threshold is not None and step.batch.max_q_len >= threshold:
        site.settings.calls["decompressed"] += 1
        prefill = step.prefill_plan(site, query, store.format.name, step.batch)
        q_nope, q_pe = site.split_query(query)
        w_uk, w_uv = site.up_projections(query.shape[1])
        return prefill.run(q_nope, q_pe, kv_c, k_pe, w_uk, w_uv, sm_scale=sm_scale, kv_cache=store).out
    site.settings.calls["absorbed"] += 1
    decode = step.decode_plan(site, query, store.format.name, step.batch)
    ql_nope, q_pe = site.absorb(query)
    return site.project(decode.run(ql_nope, q_pe, store, sm_scale=sm_scale).out)


def _scratch(site: Site, key: Tensor) -> PagePool:
    """Pages for a forward without a cache: of this layer only, and unquantised."""
    kv_format = canonical_name(str(key.dtype))
    return PagePool(kv_format=kv_format, block_size=site.settings.block_size, device=key.device)


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
    **kwargs: Any,
) -> Tensor | None:
    """The mask that transformers hands to `attend`: None if it is causal and hides nothing, else spelled out.

    Args:
        q_length: New tokens.
        q_offset: Tokens before them.
        mask_function: What the model wants; anything but causal is spelled out, for `attend` to judge.
        attention_mask: [B, tokens] bool, False where hidden.
        kwargs: The rest of what transformers passes.

    Returns:
        None, or [B, 1, q, kv] bool.
    """
    if mask_function is causal_mask_function:
        length = int(q_offset) + q_length
        if attention_mask is None:
            return None
        if attention_mask.shape[-1] >= length and bool(attention_mask[:, :length].all()):
            return None
    spelled: Tensor | None = sdpa_mask(
        **{
            **kwargs,
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
