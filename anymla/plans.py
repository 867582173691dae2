"""Plans: what a step decides once (checks, backend, splits, scratch), so that every layer only runs.

T query tokens, H heads, L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim, V = v_head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from anymla import contract, select
from anymla import kv_cache as kv
from anymla.contract import AttentionOutput, Batch
from anymla.errors import InvalidInput, Reasons
from anymla.hardware.probe import Machine, this_machine
from anymla.problem import Feature, Problem, canonical_name


@dataclass
class Plan:
    """What is decided once a step and used by every layer.

    Attributes:
        choice: The backend, why it was chosen, and why the others were not.
        state: The backend's own: split counts, page lists, scratch.
    """

    choice: select.Choice
    state: Any

    @property
    def problem(self) -> Problem:
        """The facts that the plan was made for."""
        return self.choice.problem

    @property
    def backend(self) -> str:
        """The name of the chosen backend."""
        return self.choice.backend.name

    def explain(self) -> str:
        """Every backend's verdict, the knobs that quirks set, and the choice, as text."""
        return str(self.choice)

    def _opened(
        self, reasons: Reasons, kv_cache: Tensor | kv.KVCache, k_scale: Tensor | None
    ) -> kv.KVCache | None:
        problem = self.problem
        cache = opened(
            reasons, kv_cache, problem.kv_lora_rank, problem.qk_rope_head_dim, problem.kv_format, k_scale
        )
        if cache is not None:
            size = problem.block_size
            reasons.need(cache.block_size == size, "block_size", cache.block_size, f"{size}, as planned")
        return cache

    def _allows(self, reasons: Reasons, sinks: Tensor | None, return_lse: bool) -> None:
        offered = self.problem.features
        planned = "as planned; plan again with"
        reasons.need(
            sinks is None or Feature.SINKS in offered, "sinks", "a tensor", f"None, {planned} sinks=True"
        )
        reasons.need(
            not return_lse or Feature.LSE in offered, "return_lse", True, f"False, {planned} return_lse=True"
        )


@dataclass
class DecodePlan(Plan):
    """A planned dense decode step; see `plan_decode`."""

    batch: Batch

    def run(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_cache: Tensor | kv.KVCache,
        *,
        sm_scale: float,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> AttentionOutput:
        """Attend one layer's queries to its cache, as planned.

        With `out` (and `lse`, if asked for) given, nothing is allocated that the plan did not allocate,
        and the call can be captured. Arguments, result and errors are those of `decode`.
        """
        reasons = Reasons("decode")
        cache = self._opened(reasons, kv_cache, k_scale)
        self._allows(reasons, sinks, return_lse)
        if cache is not None:
            contract.check_queries(
                reasons, ql_nope, q_pe, cache, sm_scale, sinks, self.batch.num_tokens, self.problem.num_heads
            )
        if not reasons.found:
            out, lse = outputs(reasons, ql_nope.shape, ql_nope, out, lse, return_lse)
        reasons.raise_if_any()
        assert cache is not None and out is not None
        args = contract.DecodeArgs(ql_nope, q_pe, cache, float(sm_scale), sinks, out, lse)
        module_of(self.choice).decode(args, self.state)
        return AttentionOutput(out, lse)

    def update(self, batch: Batch) -> None:
        """Take the lengths and pages of another step, within the bounds that were planned.

        No buffer of the plan moves. A captured `run` stays valid if the tensors of `batch` are those that it
        was captured with, written in place: its kernels read pages and lengths there. Rows past the new
        qo_indptr[-1] come out empty.

        Raises:
            InvalidInput: the step leaves the planned bounds.
        """
        batch = contract.within(batch, self.batch)
        module_of(self.choice).update_decode(self.state, batch)
        self.batch = batch


@dataclass
class SparsePlan(Plan):
    """A planned sparse decode step; see `plan_sparse_decode`."""

    num_tokens: int

    def run(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_cache: Tensor | kv.KVCache,
        *,
        indices: Tensor,
        sm_scale: float,
        counts: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        check: bool = False,
    ) -> AttentionOutput:
        """Attend one layer's queries to chosen slots; all the rest is as in `sparse_decode`."""
        reasons = Reasons("sparse_decode")
        cache = self._opened(reasons, kv_cache, k_scale)
        self._allows(reasons, sinks, return_lse)
        if cache is not None:
            contract.check_queries(
                reasons, ql_nope, q_pe, cache, sm_scale, sinks, self.num_tokens, self.problem.num_heads
            )
            contract.check_indices(reasons, indices, counts, cache, self.num_tokens, ql_nope.device, check)
            if isinstance(indices, Tensor) and indices.dim() == 2:
                most = self.problem.topk
                reasons.need(
                    indices.shape[1] <= most,
                    "indices",
                    f"{indices.shape[1]} columns",
                    f"at most {most}, as planned",
                )
        if not reasons.found:
            out, lse = outputs(reasons, ql_nope.shape, ql_nope, out, lse, return_lse)
        reasons.raise_if_any()
        assert cache is not None and out is not None
        args = contract.SparseArgs(ql_nope, q_pe, cache, indices, counts, float(sm_scale), sinks, out, lse)
        module_of(self.choice).sparse_decode(args, self.state)
        return AttentionOutput(out, lse)


@dataclass
class PrefillPlan(Plan):
    """A planned prefill step; see `plan_prefill`."""

    batch: Batch

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        *,
        sm_scale: float,
        kv_cache: Tensor | kv.KVCache | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> AttentionOutput:
        """Attend one layer's new tokens; all the rest is as in `prefill`."""
        reasons, problem, tokens = Reasons("prefill"), self.problem, self.batch.num_tokens
        self._allows(reasons, sinks, return_lse)
        contract.check_scale(reasons, sm_scale)
        heads, width_p, width_r = problem.num_heads, problem.qk_nope_head_dim, problem.qk_rope_head_dim
        rank, width_v = problem.kv_lora_rank, problem.v_head_dim
        origin = "as planned"
        if contract.check_tensor(
            reasons, "q_nope", q_nope, (tokens, heads, width_p), contract.Q_DTYPES, origin=origin
        ):
            same = ((q_nope.dtype,), q_nope.device, origin)
            contract.check_tensor(reasons, "q_pe", q_pe, (tokens, heads, width_r), *same)
            contract.check_tensor(reasons, "kv_c", kv_c, (tokens, rank), *same)
            contract.check_tensor(reasons, "k_pe", k_pe, (tokens, width_r), *same)
            contract.check_tensor(reasons, "w_uk", w_uk, (heads, width_p, rank), *same)
            contract.check_tensor(reasons, "w_uv", w_uv, (heads, rank, width_v), *same)
            contract.check_sinks(reasons, sinks, heads, q_nope.device)
        cache = None
        if kv_cache is not None:
            cache = self._opened(reasons, kv_cache, k_scale)
        else:
            context = max(self.batch.context_lens_host or (), default=0)
            reasons.need(context == 0, "kv_cache", None, f"a cache: a sequence has {context} earlier tokens")
        if not reasons.found:
            out, lse = outputs(reasons, (tokens, heads, width_v), q_nope, out, lse, return_lse)
        reasons.raise_if_any()
        assert out is not None
        args = contract.PrefillArgs(
            q_nope, q_pe, kv_c, k_pe, w_uk, w_uv, cache, float(sm_scale), sinks, out, lse
        )
        module_of(self.choice).prefill(args, self.state)
        return AttentionOutput(out, lse)


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
        q_dtype: Dtype of the queries: fp32, bf16 or fp16; an fp8 lets a backend round them to it.
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
    machine = machine or machine_of(batch.seq_lens.device)
    facts = _facts(
        Reasons("plan_decode"),
        machine,
        q_dtype,
        kv_format,
        num_heads=num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_size=batch.block_size,
    )
    wanted = features(batch, sinks=sinks, return_lse=return_lse, batch_invariant=batch_invariant)
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
        q_dtype: Dtype of the queries: fp32, bf16 or fp16; an fp8 lets a backend round them to it.
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
    reasons.need(isinstance(topk, int) and topk >= 0, "topk", topk, "at least 0")
    reasons.need(isinstance(num_tokens, int) and num_tokens >= 0, "num_tokens", num_tokens, "at least 0")
    machine = machine or machine_of(torch.device(device))
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
    wanted = features(None, sinks=sinks, return_lse=return_lse, batch_invariant=batch_invariant)
    problem = Problem(op="sparse_decode", topk=topk, features=wanted, **facts)
    return sparse_plan(num_tokens, problem, torch.device(device), backend, machine)


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
        q_dtype: Dtype of the queries and the new latents: fp32, bf16 or fp16; an fp8 lets a backend round
            queries, keys and values to it.
        kv_format: Format of the cached context. None: there is none, or it has the dtype of the queries.
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
    machine = machine or machine_of(batch.seq_lens.device)
    facts = _facts(
        Reasons("plan_prefill"),
        machine,
        q_dtype,
        canonical_name(str(q_dtype)) if kv_format is None else kv_format,
        num_heads=num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        qk_nope_head_dim=qk_nope_head_dim,
        v_head_dim=v_head_dim,
        block_size=batch.block_size,
    )
    wanted = features(batch, sinks=sinks, return_lse=return_lse, batch_invariant=batch_invariant)
    contexts = batch.context_lens_host
    if contexts is None or any(contexts):
        wanted |= {Feature.CACHED_CONTEXT}
    problem = Problem(op="prefill", q_len=batch.max_q_len, features=wanted, **facts)
    return prefill_plan(batch, problem, backend, machine)


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
    """The plan of a prefill whose facts are known to be right."""
    choice = select.choose(problem, machine or machine_of(batch.seq_lens.device), backend)
    return PrefillPlan(choice, _planned(choice, "plan_prefill", batch), batch)


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


def module_of(choice: select.Choice) -> ModuleType:
    """The chosen backend, imported now and not before."""
    return import_module(choice.backend.module)


@lru_cache(maxsize=64)
def machine_of(device: torch.device) -> Machine:
    """What a device is, asked of its driver once."""
    return this_machine(device)


def outputs(
    reasons: Reasons,
    shape: Sequence[int],
    like: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The caller's output tensors, checked, or new ones; None while something is wrong."""
    if out is not None:
        contract.check_output(reasons, "out", out, shape, like)
    if lse is not None:
        reasons.need(return_lse, "lse", "a tensor", "return_lse=True")
        contract.check_output(reasons, "lse", lse, shape[:2], like)
    if reasons.found:
        return None, None
    out = torch.empty(shape, dtype=like.dtype, device=like.device) if out is None else out
    if return_lse and lse is None:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=like.device)
    return out, lse


def opened(
    reasons: Reasons,
    kv_cache: Tensor | kv.KVCache,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    kv_format: str | None,
    k_scale: Tensor | None,
    check: bool = False,
) -> kv.KVCache | None:
    """The tagged cache behind what the caller gave, or None and the reasons why it cannot be opened."""
    if isinstance(kv_cache, kv.KVCache):
        name, rank, rope = kv_cache.format.name, kv_cache.kv_lora_rank, kv_cache.qk_rope_head_dim
        wanted = name if kv_format is None else canonical_name(kv_format)
        reasons.need(
            name == wanted, "kv_cache", f"tag {kv_cache.tag}", f"format {wanted}; use kv_cache.convert"
        )
        widths = (kv_lora_rank, qk_rope_head_dim)
        reasons.need(
            (rank, rope) == widths, "kv_cache", f"tag {kv_cache.tag}", f"L={widths[0]} R={widths[1]}"
        )
        reasons.need(k_scale is None, "k_scale", "a tensor", "None: the KVCache carries its scale")
        return kv_cache
    try:
        return kv.open_cache(
            kv_cache,
            kv_format=kv_format,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            scale=k_scale,
            check=check,
        )
    except InvalidInput as refusal:
        reasons.found.extend(refusal.reasons)
        return None


def _facts(
    reasons: Reasons, machine: Machine, q_dtype: torch.dtype, kv_format: str, **widths: int
) -> dict[str, Any]:
    for name, value in widths.items():
        least = 0 if name in ("qk_rope_head_dim", "qk_nope_head_dim") else 1
        reasons.need(isinstance(value, int) and value >= least, name, value, f"at least {least}")
    needs = "float32, bfloat16 or float16, or an fp8 to round to"
    reasons.need(q_dtype in contract.INDEX_Q_DTYPES, "q_dtype", q_dtype, needs)
    known, form = kv.KV_FORMATS, canonical_name(kv_format, machine.fp8_flavour)
    reasons.need(form in known, "kv_format", repr(kv_format), f"one of {', '.join(known)}")
    reasons.raise_if_any()
    return {"q_dtype": canonical_name(str(q_dtype)), "kv_format": form, **widths}


def _planned(choice: select.Choice, planner: str, *step: Batch | int | torch.device) -> Any:
    return getattr(module_of(choice), planner)(*step, choice.problem, choice.machine, choice.knobs)
