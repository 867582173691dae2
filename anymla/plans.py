"""Plans: what a step decides once (checks, backend, splits, scratch), so that every layer only runs.

T query tokens, H heads, L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim, V = v_head_dim.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from anymla import contract, select
from anymla import kv_cache as kv
from anymla.contract import Batch
from anymla.errors import Reasons
from anymla.hardware.probe import Machine, this_machine
from anymla.planned import DecodePlan, IndexPlan, PrefillPlan, SparsePlan, check_step, module_of
from anymla.problem import FP8_NAMES, Feature, Problem, canonical_name


def plan_decode(
    batch: Batch,
    *,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    q_dtype: torch.dtype,
    kv_format: str,
    sinks: bool = False,
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    machine: Machine | None = None,
) -> DecodePlan:
    """Plan one dense decode step; `DecodePlan.run` is then called once a layer.

    Args:
        batch: The step, from `Batch.of`.
        num_heads: H, the heads of this rank.
        kv_lora_rank: L.
        qk_rope_head_dim: R, 0 for rope-free models.
        q_dtype: Dtype of the queries: fp32, bf16 or fp16. With an fp8, `run` takes queries in it with a
            q_scale, and a backend may round those of 16 bits to it.
        kv_format: Name of a row of KV_FORMATS.
        sinks: Whether `run` will be given sinks.
        return_lse: Whether `run` may be asked for lse.
        batch_invariant: Demand bitwise the same row alone and in any batch.
        backend: A registry name, or "auto" for the first that accepts. Never falls back.
        machine: The chip to plan for. None: the device of the batch.

    Returns:
        The plan. `plan.explain()` says why its backend was chosen.

    Raises:
        InvalidInput: an argument contradicts another one.
        NoBackend: nothing, or not the named backend, takes this step; the message gives every reason.
    """
    reasons = Reasons("plan_decode")
    machine = _machine_for(reasons, batch, machine)
    wanted = _wanted(reasons, batch, sinks=sinks, return_lse=return_lse, batch_invariant=batch_invariant)
    facts = _facts(
        reasons,
        machine,
        q_dtype,
        kv_format,
        num_heads=num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_size=batch.block_size,
    )
    problem = Problem(op="decode", q_len=batch.max_q_len, features=wanted, **facts)
    return decode_plan(batch, problem, backend, machine)


def plan_sparse_decode(
    num_tokens: int,
    *,
    topk: int,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    q_dtype: torch.dtype,
    kv_format: str,
    device: torch.device | str = "cpu",
    sinks: bool = False,
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    machine: Machine | None = None,
) -> SparsePlan:
    """Plan one sparse decode step; `SparsePlan.run` is then called once a layer.

    Args:
        num_tokens: T query tokens, each with indices of its own.
        topk: The most indices a query token.
        num_heads: H, the heads of this rank.
        kv_lora_rank: L.
        qk_rope_head_dim: R, 0 for rope-free models.
        block_size: Tokens a page.
        q_dtype: Dtype of the queries: fp32, bf16 or fp16. With an fp8, `run` takes queries in it with a
            q_scale, and a backend may round those of 16 bits to it.
        kv_format: Name of a row of KV_FORMATS.
        device: Where the step runs.
        sinks: Whether `run` will be given sinks.
        return_lse: Whether `run` may be asked for lse.
        batch_invariant: Demand bitwise the same row alone and in any batch.
        backend: A registry name, or "auto" for the first that accepts. Never falls back.
        machine: The chip to plan for. None: that of `device`.

    Returns:
        The plan. `plan.explain()` says why its backend was chosen.

    Raises:
        InvalidInput: an argument contradicts another one.
        NoBackend: nothing, or not the named backend, takes this step; the message gives every reason.
    """
    reasons = Reasons("plan_sparse_decode")
    topk = contract.check_count(reasons, "topk", topk, 0)
    num_tokens = contract.check_count(reasons, "num_tokens", num_tokens, 0)
    place = _place(reasons, device)
    machine = machine_on(reasons, place, machine)
    wanted = _wanted(reasons, None, sinks=sinks, return_lse=return_lse, batch_invariant=batch_invariant)
    facts = _facts(
        reasons,
        machine,
        q_dtype,
        kv_format,
        num_heads=num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_size=block_size,
    )
    problem = Problem(op="sparse_decode", topk=topk, features=wanted, **facts)
    return sparse_plan(num_tokens, problem, place, backend, machine)


def plan_prefill(
    batch: Batch,
    *,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    q_dtype: torch.dtype,
    kv_format: str | None = None,
    sinks: bool = False,
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    machine: Machine | None = None,
) -> PrefillPlan:
    """Plan one prefill step; `PrefillPlan.run` is then called once a layer.

    Args:
        batch: The step, from `Batch.of(..., new_tokens_are_cached=False)`.
        num_heads: H, the heads of this rank.
        kv_lora_rank: L.
        qk_rope_head_dim: R, 0 for rope-free models.
        qk_nope_head_dim: P.
        v_head_dim: V.
        q_dtype: Dtype of the queries and the new latents: fp32, bf16 or fp16. An fp8 lets a backend round
            queries, keys and values to it; they come in 16 bits, and where none rounds, they are kept.
        kv_format: Format of the cached context. None: there is none, or it has the dtype of the queries, bf16
            for an fp8.
        sinks: Whether `run` will be given sinks.
        return_lse: Whether `run` may be asked for lse.
        batch_invariant: Demand bitwise the same row alone and in any batch.
        backend: A registry name, or "auto" for the first that accepts. Never falls back.
        machine: The chip to plan for. None: the device of the batch.

    Returns:
        The plan. `plan.explain()` says why its backend was chosen.

    Raises:
        InvalidInput: an argument contradicts another one.
        NoBackend: nothing, or not the named backend, takes this step; the message gives every reason.
    """
    reasons = Reasons("plan_prefill")
    machine = _machine_for(reasons, batch, machine)
    wanted = _wanted(reasons, batch, sinks=sinks, return_lse=return_lse, batch_invariant=batch_invariant)
    like = canonical_name(str(q_dtype))
    like = "bf16" if like in FP8_NAMES else like
    facts = _facts(
        reasons,
        machine,
        q_dtype,
        like if kv_format is None else kv_format,
        num_heads=num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        qk_nope_head_dim=qk_nope_head_dim,
        v_head_dim=v_head_dim,
        block_size=batch.block_size,
    )
    problem = Problem(op="prefill", q_len=batch.max_q_len, features=wanted, **facts)
    return prefill_plan(batch, problem, backend, machine)


def plan_index_topk(
    batch: Batch,
    *,
    topk: int,
    index_heads: int,
    index_head_dim: int,
    q_dtype: torch.dtype,
    kv_format: str = "index_k",
    backend: str = "auto",
    machine: Machine | None = None,
) -> IndexPlan:
    """Plan one choice of keys for sparse attention; `IndexPlan.run` is then called once a layer.

    Args:
        batch: The step, from `Batch.of`. Of pooled keys its lengths and pages count pools.
        topk: K.
        index_heads: H of the indexer; every tensor parallel rank has all of them.
        index_head_dim: D of an index key.
        q_dtype: Dtype of the index queries: fp32, bf16, fp16 or fp8.
        kv_format: Name of a row of KV_FORMATS: of the index keys.
        backend: A registry name, or "auto" for the first that accepts. Never falls back.
        machine: The chip to plan for. None: the device of the batch.

    Returns:
        The plan. `plan.explain()` says why its backend was chosen.

    Raises:
        InvalidInput: an argument contradicts another one.
        NoBackend: nothing, or not the named backend, takes this step; the message gives every reason.
    """
    reasons = Reasons("plan_index_topk")
    topk = contract.check_count(reasons, "topk", topk)
    machine = _machine_for(reasons, batch, machine)
    reasons.need(batch.causal, "causal", batch.causal, "True: a query token chooses among what it sees")
    facts = _facts(
        reasons,
        machine,
        q_dtype,
        kv_format,
        index_heads=index_heads,
        index_head_dim=index_head_dim,
        block_size=batch.block_size,
    )
    problem = Problem(
        op="index_topk",
        num_heads=facts.pop("index_heads"),
        kv_lora_rank=facts.pop("index_head_dim"),
        qk_rope_head_dim=0,
        q_len=batch.max_q_len,
        topk=topk,
        features=features(batch),
        **facts,
    )
    return index_plan(batch, problem, backend, machine)


def decode_plan(
    batch: Batch, problem: Problem, backend: str = "auto", machine: Machine | None = None
) -> DecodePlan:
    """The plan of a decode whose facts are known to be right."""
    choice = select.choose(problem, machine or machine_of(batch.seq_lens.device), backend)
    return DecodePlan(choice, _planned(choice, "plan_decode", batch), batch)


def sparse_plan(
    num_tokens: int,
    problem: Problem,
    device: torch.device,
    backend: str = "auto",
    machine: Machine | None = None,
) -> SparsePlan:
    """The plan of a sparse decode whose facts are known to be right."""
    choice = select.choose(problem, machine or machine_of(device), backend)
    return SparsePlan(choice, _planned(choice, "plan_sparse_decode", num_tokens, device), num_tokens)


def prefill_plan(
    batch: Batch, problem: Problem, backend: str = "auto", machine: Machine | None = None
) -> PrefillPlan:
    """The plan of a prefill whose facts are known to be right; the batch says what of lengths is known."""
    shown = {
        Feature.CACHED_CONTEXT: batch.may_have_context,
        Feature.DEVICE_LENGTHS: batch.context_lens_host is None,
    }
    found = {feature for feature, wanted in shown.items() if wanted}
    problem = replace(problem, features=problem.features | found)
    choice = select.choose(problem, machine or machine_of(batch.seq_lens.device), backend)
    return PrefillPlan(choice, _planned(choice, "plan_prefill", batch), batch)


def index_plan(
    batch: Batch, problem: Problem, backend: str = "auto", machine: Machine | None = None
) -> IndexPlan:
    """The plan of a choice of keys whose facts are known to be right."""
    choice = select.choose(problem, machine or machine_of(batch.seq_lens.device), backend)
    return IndexPlan(choice, _planned(choice, "plan_index_topk", batch), batch)


def features(
    batch: Batch | None, *, sinks: bool = False, return_lse: bool = False, batch_invariant: bool = False
) -> frozenset[Feature]:
    """What a step needs beyond the plain operation."""
    asked = {
        Feature.LSE: return_lse,
        Feature.SINKS: sinks,
        Feature.MULTI_TOKEN: batch is not None and batch.max_q_len > 1,
        Feature.NON_CAUSAL: batch is not None and not batch.causal,
        Feature.BATCH_INVARIANT: batch_invariant,
    }
    return frozenset(feature for feature, wanted in asked.items() if wanted)


def machine_on(reasons: Reasons, device: torch.device, machine: Machine | None) -> Machine:
    """The machine given, else that of the device, noting what is none."""
    needs = "a Machine, from machine_named or this_machine, or None"
    good = reasons.need(machine is None or isinstance(machine, Machine), "machine", repr(machine), needs)
    return machine if machine is not None and good else machine_of(device)


@lru_cache(maxsize=64)
def machine_of(device: torch.device) -> Machine:
    """What a device is, asked of its driver once."""
    return this_machine(device)


def _place(reasons: Reasons, device: object) -> torch.device:
    """The device of a name, or the CPU's in place of what names none."""
    try:
        return torch.device(device)  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError):
        reasons.need(False, "device", repr(device), "a torch.device or the name of one, such as cuda:0")
        return torch.device("cpu")


def _machine_for(reasons: Reasons, batch: Batch, machine: Machine | None) -> Machine:
    check_step(reasons, batch)
    return machine_on(reasons, batch.seq_lens.device, machine)


def _wanted(reasons: Reasons, batch: Batch | None, **flags: bool) -> frozenset[Feature]:
    """The features of a step whose flags may be wrong."""
    contract.check_flags(reasons, **flags)
    return features(batch, **{name: value is True for name, value in flags.items()})


def _facts(
    reasons: Reasons, machine: Machine, q_dtype: torch.dtype, kv_format: str, **widths: int
) -> dict[str, Any]:
    for name, value in widths.items():
        least = 0 if name in ("qk_rope_head_dim", "qk_nope_head_dim") else 1
        widths[name] = contract.check_count(reasons, name, value, least)
    needs = "torch.float32, torch.bfloat16 or torch.float16, or an fp8"
    known = isinstance(q_dtype, torch.dtype) and q_dtype in contract.INDEX_Q_DTYPES
    reasons.need(known, "q_dtype", repr(q_dtype), needs)
    form = canonical_name(kv_format, machine.fp8_flavour) if isinstance(kv_format, str) else ""
    reasons.need(form in kv.KV_FORMATS, "kv_format", repr(kv_format), f"one of {', '.join(kv.KV_FORMATS)}")
    reasons.raise_if_any()
    return {"q_dtype": canonical_name(str(q_dtype)), "kv_format": form, **widths}


def _planned(choice: select.Choice, planner: str, *step: Batch | int | torch.device) -> Any:
    return getattr(module_of(choice), planner)(*step, choice.problem, choice.machine, choice.knobs)
