"""What `attach` is asked for, checked, and a backend for each operation that it needs."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from anymla import select
from anymla.errors import Reasons
from anymla.hardware.probe import Machine
from anymla.integrations.transformers import indexer
from anymla.integrations.transformers.families import LatentSite, Site
from anymla.kv_cache import KV_FORMATS
from anymla.problem import Feature, Problem, canonical_name
from anymla.rules import listed


def format_named(reasons: Reasons, kv_format: str, dtype: torch.dtype, machine: Machine) -> str:
    """The row of latents, in the fp8 of the chip where the name leaves it open."""
    name = str(dtype) if kv_format == "auto" else kv_format
    name = canonical_name(name, machine.fp8_flavour)
    usable = [known for known in KV_FORMATS if not known.startswith("index_k")]
    reasons.need(name in usable, "kv_format", repr(kv_format), f"auto or one of {', '.join(usable)}")
    return name


def index_format_named(
    reasons: Reasons, index_format: str | None, has_indexer: bool, dtype: torch.dtype, machine: Machine
) -> str | None:
    """The row of index keys, in the fp8 of the chip where the name leaves it open; None without any."""
    if index_format is None or not has_indexer:
        known = index_format in (None, "auto")
        reasons.need(known, "index_format", repr(index_format), "None or auto: there is no indexer")
        return None
    name = canonical_name(str(dtype) if index_format == "auto" else index_format)
    if name == "index_k" and machine.fp8_flavour == "e4m3fnuz":
        name = "index_k_fnuz"
    usable = [row.name for row in KV_FORMATS.values() if row.block_flat or row.value_dtype.itemsize > 1]
    reasons.need(name in usable, "index_format", repr(index_format), f"None, auto or {listed(usable)}")
    return name


def scale_for(
    reasons: Reasons, kv_format: str, k_scale: Tensor | float | None, device: torch.device
) -> Tensor | None:
    """[1] fp32, noted unless it is a positive number that the format uses."""
    if k_scale is None:
        return None
    scaled = kv_format in KV_FORMATS and KV_FORMATS[kv_format].scaled
    reasons.need(scaled, "k_scale", "a value", f"None: {kv_format} has no scale of its own")
    scale = torch.as_tensor(k_scale, dtype=torch.float32, device=device).reshape(-1)
    good = scale.numel() == 1 and bool((scale > 0).all()) and bool(scale.isfinite().all())
    reasons.need(good, "k_scale", k_scale, "one positive finite number")
    return scale


def check_numbers(reasons: Reasons, **numbers: object) -> None:
    """Note counts below 1, by their names."""
    for name, value in numbers.items():
        free = name != "block_size" and (value is None or (name == "prefill_threshold" and value == "auto"))
        reasons.need(free or (isinstance(value, int) and value > 0), name, value, "at least 1")


def choices(sites: Collection[Site], machine: Machine, dtype: torch.dtype) -> tuple[select.Choice, ...]:
    """The backends of every form, chosen now so that a refusal comes before anything has changed."""
    site, *_ = sites
    settings = site.settings
    sinks = frozenset({Feature.SINKS} if site.has_sinks else ())
    decode = Problem(
        op="decode",
        q_dtype=canonical_name(str(dtype)),
        kv_format=settings.kv_format,
        num_heads=site.num_heads,
        kv_lora_rank=site.kv_lora_rank,
        qk_rope_head_dim=site.qk_rope_head_dim,
        block_size=settings.block_size,
        features=sinks,
    )
    attends, others = [decode], []
    if settings.prefill_threshold is not None:
        others.append(
            replace(
                decode,
                op="prefill",
                qk_nope_head_dim=site.qk_nope_head_dim,
                v_head_dim=site.v_head_dim,
                q_len=settings.prefill_threshold,
                features=sinks | {Feature.MULTI_TOKEN, Feature.CACHED_CONTEXT},
            )
        )
    if site.topk:
        attends.append(replace(decode, op="sparse_decode", topk=site.most_chosen))
    write = replace(decode, op="write_cache", num_heads=1, features=frozenset())
    others.append(write)
    indexed = next((s for s in sites if isinstance(s, LatentSite) and s.scores), None)
    if indexed is not None:
        choice = indexer.problem_of(indexed, indexed.topk)
        keys = replace(
            write, kv_format=choice.kv_format, kv_lora_rank=choice.kv_lora_rank, qk_rope_head_dim=0
        )
        others += [choice, replace(keys, block_size=choice.block_size)]
    found = [select.choose(problem, machine, settings.backend) for problem in attends]
    for problem in others:
        takers = {verdict.backend.name for verdict in select.explain(problem, machine) if verdict.accepted}
        if settings.backend in takers:
            settings.taken.add((problem.op, problem.kv_format))
        named = settings.backend_of(problem.op, problem.kv_format)
        found.append(select.choose(problem, machine, named))
    return tuple(found)
