"""The facts of what an attached layer asks of a backend: the same at attach and in every step."""

from typing import Any

import torch

from anymla.integrations.transformers.families import LatentSite, Site
from anymla.kv_formats import KV_FORMATS
from anymla.problem import Feature, Problem, canonical_name


def attention(site: Site, op: str, q_dtype: torch.dtype, kv_format: str, **facts: Any) -> Problem:
    """A "decode", or with `topk` keys a "sparse_decode", of this layer."""
    return Problem(
        op=op,
        q_dtype=canonical_name(str(q_dtype)),
        kv_format=kv_format,
        num_heads=site.num_heads,
        kv_lora_rank=site.kv_lora_rank,
        qk_rope_head_dim=site.qk_rope_head_dim,
        block_size=site.settings.block_size,
        **{"features": frozenset({Feature.SINKS} if site.has_sinks else ()), **facts},
    )


def prefill(site: Site, q_dtype: torch.dtype, kv_format: str, q_len: int) -> Problem:
    """The decompressed form of this layer, after a cached context."""
    asked = {Feature.MULTI_TOKEN, Feature.CACHED_CONTEXT, *([Feature.SINKS] if site.has_sinks else [])}
    return attention(
        site,
        "prefill",
        q_dtype,
        kv_format,
        qk_nope_head_dim=site.qk_nope_head_dim,
        v_head_dim=site.v_head_dim,
        q_len=q_len,
        features=frozenset(asked),
    )


def write(
    dtype: torch.dtype, kv_format: str, kv_lora_rank: int, qk_rope_head_dim: int, block_size: int
) -> Problem:
    """New rows into pages, of latents or of index keys: in one format these differ by their widths."""
    return Problem(
        op="write_cache",
        q_dtype=canonical_name(str(dtype)),
        kv_format=kv_format,
        num_heads=1,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_size=block_size,
    )


def index_topk(site: LatentSite, topk: int, q_len: int = 1) -> Problem:
    """The choice of this layer's indexer; pools are chosen as tokens are."""
    row, pool = KV_FORMATS[str(site.settings.index_format)], max(site.pool_size, 1)
    kept = site.weight.dtype if row.value_dtype.itemsize > 1 else row.value_dtype
    return Problem(
        op="index_topk",
        q_dtype=canonical_name(str(kept)),
        kv_format=row.name,
        num_heads=site.indexer.n_heads,
        kv_lora_rank=site.indexer.head_dim,
        qk_rope_head_dim=0,
        block_size=site.settings.block_size // pool,
        q_len=q_len,
        topk=topk,
        features=frozenset({Feature.MULTI_TOKEN} if q_len > 1 else ()),
    )
