"""anymla: Multi-head Latent Attention on every chip. The public names, each imported at first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anymla.api import decode, explain, index_topk, prefill, sparse_decode, write_cache
    from anymla.contract import AttentionOutput, Batch
    from anymla.errors import AnyMLAError, BackendError, InvalidInput, NoBackend, UnknownBackend
    from anymla.hardware.probe import Machine, machine_named, this_machine
    from anymla.indices import compacted, quantise_queries, to_slots
    from anymla.kv_cache import KV_FORMATS, KVCache, calibrate_scale, open_cache
    from anymla.latent import absorb_q, project_v, split_kv_b
    from anymla.merging import apply_sinks, merge
    from anymla.models import MODELS, Model, model_named
    from anymla.planned import DecodePlan, IndexPlan, PrefillPlan, SparsePlan
    from anymla.plans import plan_decode, plan_index_topk, plan_prefill, plan_sparse_decode
    from anymla.problem import Feature, Problem
    from anymla.workspace import workspace_bytes

__version__ = "0.1.0.dev0"

_HOMES = {
    "anymla.api": ("decode", "explain", "index_topk", "prefill", "sparse_decode", "write_cache"),
    "anymla.contract": ("AttentionOutput", "Batch"),
    "anymla.errors": ("AnyMLAError", "BackendError", "InvalidInput", "NoBackend", "UnknownBackend"),
    "anymla.hardware.probe": ("Machine", "machine_named", "this_machine"),
    "anymla.indices": ("compacted", "quantise_queries", "to_slots"),
    "anymla.kv_cache": ("KV_FORMATS", "KVCache", "calibrate_scale", "open_cache"),
    "anymla.latent": ("absorb_q", "project_v", "split_kv_b"),
    "anymla.merging": ("apply_sinks", "merge"),
    "anymla.models": ("MODELS", "Model", "model_named"),
    "anymla.planned": ("DecodePlan", "IndexPlan", "PrefillPlan", "SparsePlan"),
    "anymla.plans": ("plan_decode", "plan_index_topk", "plan_prefill", "plan_sparse_decode"),
    "anymla.problem": ("Feature", "Problem"),
    "anymla.workspace": ("workspace_bytes",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "KV_FORMATS",
    "MODELS",
    "AnyMLAError",
    "AttentionOutput",
    "BackendError",
    "Batch",
    "DecodePlan",
    "Feature",
    "IndexPlan",
    "InvalidInput",
    "KVCache",
    "Machine",
    "Model",
    "NoBackend",
    "PrefillPlan",
    "Problem",
    "SparsePlan",
    "UnknownBackend",
    "absorb_q",
    "apply_sinks",
    "calibrate_scale",
    "compacted",
    "decode",
    "explain",
    "index_topk",
    "machine_named",
    "merge",
    "model_named",
    "open_cache",
    "plan_decode",
    "plan_index_topk",
    "plan_prefill",
    "plan_sparse_decode",
    "prefill",
    "project_v",
    "quantise_queries",
    "sparse_decode",
    "split_kv_b",
    "this_machine",
    "to_slots",
    "workspace_bytes",
    "write_cache",
]


def __getattr__(name: str) -> Any:
    """Import a public name's home: selection needs no torch, so the package must not need it either."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
