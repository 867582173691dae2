"""What a step has decided, ready to run a layer: the plan objects that `plans` makes.

T query tokens, H heads, L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim, V = v_head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from anymla import contract, select
from anymla import kv_cache as kv
from anymla.contract import AttentionOutput, Batch
from anymla.errors import InvalidInput, Reasons
from anymla.problem import FP8_NAMES, Feature, Problem, canonical_name
from anymla.rules import listed


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
        contract.check_flags(reasons, return_lse=return_lse)
        offered = self.problem.features
        planned = "as planned; plan again with"
        reasons.need(
            sinks is None or Feature.SINKS in offered, "sinks", "a tensor", f"None, {planned} sinks=True"
        )
        reasons.need(
            return_lse is not True or Feature.LSE in offered,
            "return_lse",
            True,
            f"False, {planned} return_lse=True",
        )

    def _knows(self, reasons: Reasons, name: str, q: Tensor) -> None:
        """Queries are of the dtype for which kernels were chosen; in place of fp8 attention takes 16 bits."""
        if isinstance(q, Tensor):
            given, planned = canonical_name(str(q.dtype)), self.problem.q_dtype
            op, in_fp8 = self.problem.op, planned in FP8_NAMES
            able = [] if in_fp8 and op == "prefill" else [planned]
            able += ["bf16", "fp16"] if in_fp8 and op != "index_topk" else []
            needs = f"{listed(able)}, as planned; plan again with q_dtype={q.dtype}"
            reasons.need(given in able, name, f"dtype {given}", needs)


@dataclass
class StepPlan(Plan):
    """A plan whose lengths and pages those of another step may replace, in the buffers that it has."""

    batch: Batch

    def update(self, batch: Batch) -> None:
        """Take the lengths and pages of another step, within the bounds that were planned.

        No buffer of the plan moves. A captured `run` stays valid if the tensors of `batch` are those that it
        was captured with, written in place: its kernels read pages and lengths there. Rows past the new
        qo_indptr[-1] come out empty.

        Raises:
            InvalidInput: the step leaves the planned bounds.
        """
        batch = within(batch, self.batch)
        getattr(module_of(self.choice), f"update_{self.problem.op}")(self.state, batch)
        self.batch = batch


@dataclass
class DecodePlan(StepPlan):
    """A planned dense decode step; see `plan_decode`."""

    def run(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_cache: Tensor | kv.KVCache,
        *,
        sm_scale: float,
        sinks: Tensor | None = None,
        q_scale: Tensor | None = None,
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
        self._knows(reasons, "ql_nope", ql_nope)
        if cache is not None:
            tokens, heads = self.batch.num_tokens, self.problem.num_heads
            contract.check_queries(
                reasons, ql_nope, q_pe, cache, sm_scale, sinks, tokens, heads, q_scale=q_scale
            )
        if not reasons.found:
            out, lse = outputs(reasons, ql_nope.shape, ql_nope, out, lse, return_lse)
        reasons.raise_if_any()
        assert cache is not None and out is not None
        args = contract.DecodeArgs(ql_nope, q_pe, cache, float(sm_scale), sinks, out, lse, q_scale)
        module_of(self.choice).decode(args, self.state)
        return AttentionOutput(out, lse)


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
        q_scale: Tensor | None = None,
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
        self._knows(reasons, "ql_nope", ql_nope)
        contract.check_flags(reasons, check=check)
        tokens, heads = self.num_tokens, self.problem.num_heads
        if cache is not None and contract.check_queries(
            reasons, ql_nope, q_pe, cache, sm_scale, sinks, tokens, heads, q_scale=q_scale, check=check
        ):
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
        args = contract.SparseArgs(
            ql_nope, q_pe, cache, indices, counts, float(sm_scale), sinks, out, lse, q_scale
        )
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
        self._knows(reasons, "q_nope", q_nope)
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
            if cache is not None and isinstance(q_nope, Tensor):
                contract.check_place(reasons, "kv_cache", cache, q_nope.device)
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


@dataclass
class IndexPlan(StepPlan):
    """A planned choice of keys; see `plan_index_topk`."""

    def run(
        self,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor | kv.KVCache,
        *,
        as_slots: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Choose keys for one layer's index queries, as planned.

        With `out` given, nothing is allocated that the plan did not allocate, and the call can be captured.
        Arguments, result and errors are those of `index_topk`.
        """
        reasons, problem, tokens = Reasons("index_topk"), self.problem, self.batch.num_tokens
        contract.check_flags(reasons, as_slots=as_slots)
        cache = self._opened(reasons, index_cache, None)
        if cache is not None and contract.check_index_queries(
            reasons, q, weights, cache, tokens, problem.num_heads
        ):
            self._knows(reasons, "q", q)
            if out is not None:
                check_output(reasons, "out", out, (tokens, problem.topk), (torch.int32,), q.device)
        reasons.raise_if_any()
        assert cache is not None
        if out is None:
            out = torch.empty((tokens, problem.topk), dtype=torch.int32, device=q.device)
        args = contract.IndexArgs(q, weights, cache, problem.topk, out, as_slots)
        module_of(self.choice).index_topk(args, self.state)
        return out


def check_step(reasons: Reasons, batch: object) -> None:
    """Refuse what is not a Batch, at once: nothing else can be said of it."""
    # Not the batch itself as a refusal would print it: its values are on a device.
    if not reasons.need(isinstance(batch, Batch), "batch", type(batch).__name__, "a Batch, from Batch.of"):
        reasons.raise_if_any()


def within(batch: Batch, planned: Batch) -> Batch:
    """`batch` with the bounds of the plan it updates, or InvalidInput if it leaves them."""
    reasons = Reasons("plan.update")
    check_step(reasons, batch)
    reasons.need(
        batch.num_seqs == planned.num_seqs,
        "seq_lens",
        f"{batch.num_seqs} sequences",
        f"{planned.num_seqs}, as planned",
    )
    for name in ("num_tokens", "max_q_len", "max_seq_len"):
        got, bound = getattr(batch, name), getattr(planned, name)
        reasons.need(got <= bound, name, got, f"at most {bound}, as planned")
    for name in ("causal", "block_size"):
        got, bound = getattr(batch, name), getattr(planned, name)
        reasons.need(got == bound, name, got, f"{bound}, as planned")
    reasons.raise_if_any()
    return replace(
        batch, num_tokens=planned.num_tokens, max_q_len=planned.max_q_len, max_seq_len=planned.max_seq_len
    )


def module_of(choice: select.Choice) -> ModuleType:
    """The chosen backend, imported now and not before."""
    return import_module(choice.backend.module)


def check_output(
    reasons: Reasons,
    name: str,
    tensor: Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Note an output tensor that cannot be written in place."""
    if contract.check_tensor(reasons, name, tensor, shape, dtypes, device, "from the queries"):
        # From the innermost axis out, each begins behind all of those inside it.
        axes = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
        spans = accumulate((s * (n - 1) for s, n in axes), initial=1)
        own = tensor.numel() == 0 or all(s >= span for (s, _), span in zip(axes, spans, strict=False))
        reasons.need(own, name, f"strides {tensor.stride()}", "memory of its own for every element")


def outputs(
    reasons: Reasons,
    shape: Sequence[int],
    like: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The caller's output tensors, checked, or new ones; None while something is wrong."""
    dtypes = contract.out_dtypes(like.dtype)
    if out is not None:
        check_output(reasons, "out", out, shape, dtypes, like.device)
    if lse is not None:
        reasons.need(return_lse, "lse", "a tensor", "return_lse=True")
        check_output(reasons, "lse", lse, shape[:2], (torch.float32,), like.device)
    if reasons.found:
        return None, None
    out = torch.empty(shape, dtype=dtypes[0], device=like.device) if out is None else out
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
        wanted = name if kv_format is None else canonical_name(str(kv_format))
        reasons.need(
            name == wanted, "kv_cache", f"tag {kv_cache.tag}", f"format {wanted}; use kv_cache.convert"
        )
        widths = (kv_lora_rank, qk_rope_head_dim)
        reasons.need(
            (rank, rope) == widths, "kv_cache", f"tag {kv_cache.tag}", f"L={widths[0]} R={widths[1]}"
        )
        reasons.need(k_scale is None, "k_scale", "a tensor", "None: the KVCache carries its scale")
        scaled = not kv_cache.format.scaled or kv_cache.scale is not None
        reasons.need(scaled, "kv_cache", "no scale", f"the one of its {name}; see KVCache.allocate")
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
