"""What `attach` is asked for, checked, and a backend for each operation that it needs."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from anymla import select
from anymla.errors import NoBackend, Reasons
from anymla.hardware.probe import Machine
from anymla.integrations.transformers import problems
from anymla.integrations.transformers.families import LatentSite, Site
from anymla.kv_cache import KV_FORMATS
from anymla.problem import Problem, canonical_name
from anymla.rules import listed


class Chosen(NamedTuple):
    """A choice, and for which layers it was made, "" for all."""

    choice: select.Choice
    layers: str

    def __str__(self) -> str:
        return f"{self.layers}{self.choice}"


def format_named(reasons: Reasons, kv_format: str, dtype: torch.dtype, machine: Machine) -> str:
    """The row of latents, in the fp8 of the chip where the name leaves it open."""
    name = canonical_name(str(dtype if kv_format == "auto" else kv_format), machine.fp8_flavour)
    usable = [known for known in KV_FORMATS if not known.startswith("index_k")]
    reasons.need(name in usable, "kv_format", repr(kv_format), f"auto or one of {', '.join(usable)}")
    return name


def index_format_named(
    reasons: Reasons, index_format: str | None, has_indexer: bool, dtype: torch.dtype, machine: Machine
) -> str | None:
    """The row of index keys, in the fp8 of the chip where the name leaves it open; None without any."""
    if index_format is None or not has_indexer:
        known = index_format in (None, "auto")
        reasons.need(known, "index_format", repr(index_format), "auto: there is no indexer")
        return None
    name = canonical_name(str(dtype if index_format == "auto" else index_format))
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


def choices(sites: Mapping[int, Site], machine: Machine, dtype: torch.dtype) -> tuple[Chosen, ...]:
    """The backends of every form of every layer, chosen now: a refusal comes before anything has changed."""
    found: dict[Problem, list[int]] = {}
    for index, site in sites.items():
        for problem in _problems(site, dtype):
            found.setdefault(problem, []).append(index)
    return tuple(_chosen(problem, layers, sites, machine) for problem, layers in found.items())


def _chosen(problem: Problem, layers: list[int], sites: Mapping[int, Site], machine: Machine) -> Chosen:
    settings = sites[layers[0]].settings
    named = settings.backend if problem.op in ("decode", "sparse_decode") else settings.asked(problem)
    words = "" if len(layers) == len(sites) else f"layers {', '.join(map(str, layers))}: "
    try:
        return Chosen(select.choose(problem, machine, named), words)
    except NoBackend as refusal:
        raise NoBackend(f"{words}{refusal}", refusal.verdicts) from None


def _problems(site: Site, dtype: torch.dtype) -> Iterator[Problem]:
    settings = site.settings
    row, size = settings.kv_format, settings.block_size
    yield problems.attention(site, "decode", dtype, row)
    if site.topk:
        yield problems.attention(site, "sparse_decode", dtype, row, topk=site.most_chosen)
    if settings.prefill_threshold is not None:
        yield problems.prefill(site, dtype, row, settings.prefill_threshold)
    if site.owns_tokens:
        yield problems.write(dtype, row, site.kv_lora_rank, site.qk_rope_head_dim, size)
    if isinstance(site, LatentSite) and site.scores:
        choice = problems.index_topk(site, site.topk)
        yield choice
        yield problems.write(dtype, choice.kv_format, choice.kv_lora_rank, 0, choice.block_size)
