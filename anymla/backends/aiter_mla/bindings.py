"""Bindings: every AITER function that is called, bound by the names of its parameters, never by position.

The parameters come from what is installed: from the parsed stub, which is what AITER registers its operators
from, or, where a function says more about itself, from its signature or operator schema.
"""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from anymla.backends.aiter_mla import facts
from anymla.errors import InvalidInput


class Parameter(NamedTuple):
    """A parameter; a required one has no default."""

    name: str
    required: bool


@dataclass(frozen=True)
class Function:
    """A function of AITER as we mean it. A row of FUNCTIONS.

    Attributes:
        modules: Where it may be, the newest place first.
        needs: Our names of what it must take; its own names are the same unless `called` says more.
        may: What it takes in some releases, with the value that means the same as leaving it out.
        given: Those of `may` that every call has a value for, where they are taken.
        called: Our name to the names that releases give it.
        swapped: A parameter by which releases are known whose stubs name two buffers the wrong way round, and
            what our names are called there.
    """

    name: str
    modules: tuple[str, ...]
    needs: tuple[str, ...]
    may: Mapping[str, object] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    swapped: tuple[str, Mapping[str, str]] | None = None


_PLAN = ("work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
_ATTENTION = ("aiter.ops.attention",)
_LOGITS = ("aiter.ops.triton.attention.pa_mqa_logits", "aiter.ops.triton.pa_mqa_logits")

FUNCTIONS: dict[str, Function] = {
    row.name: row
    for row in (
        Function(
            "mla_decode_fwd",
            ("aiter.mla",),
            needs=(
                "q",
                "kv_buffer",
                "o",
                "qo_indptr",
                "kv_indptr",
                "kv_indices",
                "kv_last_page_lens",
                "max_seqlen_q",
                "sm_scale",
                "num_kv_splits",
            ),
            may={
                "page_size": 1,
                "nhead_kv": 1,
                "logit_cap": 0.0,
                "num_kv_splits_indptr": None,
                "work_meta_data": None,
                **dict.fromkeys(_PLAN),
                "q_scale": None,
                "kv_scale": None,
                "intra_batch_mode": False,
                "return_logits": False,
                "return_lse": False,
                "g_kv_indptr": None,
                "cp_world_size": 1,
                "cp_rank": 0,
                "causal": True,
            },
            given=(
                "page_size",
                "nhead_kv",
                "num_kv_splits_indptr",
                "q_scale",
                "kv_scale",
                "return_lse",
                "causal",
            ),
        ),
        Function(
            "get_mla_metadata_info_v1",
            _ATTENTION,
            needs=("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse"),
            may={
                "fast_mode": True,
                "num_kv_splits": 32,
                "intra_batch_mode": False,
                "max_split_per_batch": -1,
            },
            given=("fast_mode",),
        ),
        Function(
            "get_mla_metadata_v1",
            _ATTENTION,
            needs=(
                "seqlens_qo_indptr",
                "seqlens_kv_indptr",
                "num_heads_per_head_k",
                "num_heads_k",
                "is_causal",
                "work_metadata_ptrs",
                *_PLAN,
                "kv_granularity",
                "max_seqlen_qo",
                "uni_seqlen_qo",
                "fast_mode",
            ),
            # A planner without dtypes plans for bf16.
            may={
                "kv_last_page_lens": None,
                "page_size": 1,
                "topk": -1,
                "max_split_per_batch": -1,
                "intra_batch_mode": False,
                "is_cp_round_robin": False,
                "mla_version": None,
                "dtype_q": None,
                "dtype_kv": None,
                "dtype_q_nope": None,
                "dtype_q_rope": None,
                "dtype_kv_nope": None,
                "dtype_kv_rope": None,
            },
            given=("kv_last_page_lens", "page_size"),
            # Up to 0.1.7.post5 the stub has these two the other way round than the code that it calls.
            swapped=("work_info", {"work_info_set": "work_indptr", "work_indptr": "work_info"}),
        ),
        Function(
            "mla_reduce_v1",
            _ATTENTION,
            needs=(
                "partial_output",
                "partial_lse",
                "reduce_indptr",
                "reduce_final_map",
                "reduce_partial_map",
                "final_output",
                "final_lse",
            ),
            # 0 is what it did before it took a number: as many as there are compute units.
            may={"max_seqlen_q": None, "num_kv_splits": 0},
            given=("max_seqlen_q", "num_kv_splits"),
        ),
        Function(
            "mla_prefill_ps_asm_fwd",
            _ATTENTION,
            needs=(
                "Q",
                "K",
                "V",
                "qo_indptr",
                "kv_indptr",
                "kv_page_indices",
                "work_indptr",
                "work_info_set",
                "max_seqlen_q",
                "softmax_scale",
                "is_causal",
                "splitData",
                "splitLse",
                "output",
                "q_scale",
                "k_scale",
                "v_scale",
            ),
        ),
        Function(
            "flash_attn_varlen_func",
            ("aiter.ops.mha",),
            needs=(
                "q",
                "k",
                "v",
                "cu_seqlens_q",
                "cu_seqlens_k",
                "max_seqlen_q",
                "max_seqlen_k",
                "softmax_scale",
                "causal",
                "return_lse",
            ),
        ),
        Function(
            "get_ps_metadata_info_v1",
            _ATTENTION,
            needs=("batch_size", "num_head_k", "max_qlen", "qlen_granularity"),
        ),
        Function(
            "get_ps_metadata_v1",
            _ATTENTION,
            needs=(
                "seqlens_qo_indptr",
                "pages_kv_indptr",
                "context_lens",
                "gqa_ratio",
                "num_heads_k",
                "work_metadata_ptrs",
                "work_indptr",
                "work_info",
                "reduce_indptr",
                "reduce_final_map",
                "reduce_partial_map",
                "qhead_granularity",
                "qlen_granularity",
                "kvlen_granularity",
                "block_size",
                "is_causal",
            ),
        ),
        Function(
            "concat_and_cache_mla",
            ("aiter.ops.cache",),
            needs=("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale"),
        ),
        Function(
            "indexer_k_quant_and_cache",
            ("aiter.ops.cache",),
            needs=("k", "kv_cache", "slot_mapping", "quant_block_size", "scale_fmt"),
            may={"preshuffle": False},
        ),
        Function(
            "deepgemm_fp8_paged_mqa_logits",
            _LOGITS,
            needs=(
                "q_fp8",
                "kv_cache",
                "weights",
                "out_logits",
                "context_lens",
                "kv_indices",
                "max_model_len",
            ),
            called={"kv_cache": ("kv_cache", "kv_cache_fp8")},
            may={
                "Preshuffle": False,
                "KVBlockSize": 1,
                "ChunkK": None,
                "SplitKV": None,
                "TotalCuCount": None,
                "WavePerEU": None,
                "VarCtxSchedule": None,
            },
        ),
        Function(
            "deepgemm_fp8_paged_mqa_logits_stage1",
            _LOGITS,
            needs=("q_fp8", "kv_cache", "weights", "out_qk", "context_lens", "kv_indices", "max_model_len"),
            called={"kv_cache": ("kv_cache_fp8", "kv_cache")},
            may={"ChunkQ": None, "ChunkK": None, "TotalCuCount": None, "WavePerEU": None},
        ),
    )
}
"""Every function of AITER that is called, by name."""

DECODE = ("mla_decode_fwd", "get_mla_metadata_info_v1", "get_mla_metadata_v1")
"""What a decode may call; where none of the kernels is persistent, only the first."""
PREFILL = ("mla_prefill_ps_asm_fwd", "get_ps_metadata_info_v1", "get_ps_metadata_v1", "mla_reduce_v1")
CHUNKED = ("flash_attn_varlen_func",)
"""What a prefill after a cached context calls."""


def index_logits(kv_format: str, block_size: int) -> tuple[str, tuple[str, ...]]:
    """The function that gives logits of these keys, and what it must take beside what it always does."""
    if "shuffled" in kv_format:
        return "deepgemm_fp8_paged_mqa_logits", ("Preshuffle", "KVBlockSize", "ChunkK")
    if block_size == 1:
        return "deepgemm_fp8_paged_mqa_logits", ("KVBlockSize", "ChunkK")
    return "deepgemm_fp8_paged_mqa_logits_stage1", ("ChunkQ", "ChunkK")


def cache_writer(kv_format: str) -> tuple[str, tuple[str, ...]]:
    """The function that writes this format, and what it must take beside what it always does."""
    if kv_format.startswith("index_k"):
        return "indexer_k_quant_and_cache", ("preshuffle",) if "shuffled" in kv_format else ()
    return "concat_and_cache_mla", ()


@dataclass(frozen=True)
class Binding:
    """A function as one release has it: our names, and what they are called there.

    Attributes:
        names: Our name to the parameter's.
        neutral: Our name to the value that may be left out, for what this release does not take.
    """

    function: str
    provider: str
    names: Mapping[str, str]
    neutral: Mapping[str, object]

    def takes(self, name: str) -> bool:
        """Whether this release has a parameter of that meaning."""
        return name in self.names

    def arguments(self, **ours: Any) -> dict[str, Any]:
        """Keyword arguments for the call.

        Args:
            **ours: Values under our names.

        Returns:
            The same values under the names of this release.

        Raises:
            InvalidInput: a value has no parameter here and leaving it out would mean something else.
        """
        lost = [
            f"{name} got {value!r}; needs a parameter that {self} does not have"
            for name, value in ours.items()
            if name not in self.names and not self._may_drop(name, value)
        ]
        if lost:
            raise InvalidInput(self.function, lost)
        return {self.names[name]: value for name, value in ours.items() if name in self.names}

    def _may_drop(self, name: str, value: object) -> bool:
        """Whether leaving a parameter out says the same as this value; a tensor never does."""
        if name not in self.neutral or hasattr(value, "shape"):
            return False
        return value is self.neutral[name] or value == self.neutral[name]

    def __str__(self) -> str:
        return f"{self.function} of {self.provider}"


def bind(function: str, parameters: Sequence[Parameter] | None, provider: str) -> Binding | tuple[str, ...]:
    """Match what we mean by a function with what a release takes.

    Args:
        function: A name of FUNCTIONS.
        parameters: What the release's function takes, or None where it has none of that name.
        provider: How a reason names the release.

    Returns:
        The binding, or every reason why there is none.
    """
    if parameters is None:
        return (f"{provider} has no {function}",)
    row, offered = FUNCTIONS[function], {parameter.name for parameter in parameters}
    swapped = row.swapped[1] if row.swapped and row.swapped[0] in offered else {}
    names = {}
    for ours in (*row.needs, *row.may):
        theirs = (swapped[ours],) if ours in swapped else row.called.get(ours, (ours,))
        found = next((name for name in theirs if name in offered), None)
        if found is not None:
            names[ours] = found
    reasons = [
        f"{function} of {provider} has no parameter {ours!r}" for ours in row.needs if ours not in names
    ]
    meant = {theirs: ours for ours, theirs in names.items()}
    reasons += [
        f"{function} of {provider} needs an argument {name!r}, "
        + ("which no call has a value for" if name in meant else "whose meaning is not known")
        for name, required in parameters
        if required and meant.get(name) not in (*row.needs, *row.given)
    ]
    neutral = {ours: value for ours, value in row.may.items() if ours not in names}
    return tuple(reasons) or Binding(function, provider, names, neutral)


def recorded(function: str, release: str) -> tuple[Parameter, ...] | None:
    """Parameters of a function in a recorded release; None where it has no such function."""
    text = facts.recorded_parameters(function, release)
    return None if text is None else _of_arguments(_arguments_in(text))


def parsed(function: str, root: Path) -> tuple[Parameter, ...] | None:
    """Parameters of a function from the source in a folder that holds the package; None if there is none."""
    for module in FUNCTIONS[function].modules:
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return _of_arguments(node.args)
    return None


def introspected(function: Callable[..., Any], name: str) -> tuple[Parameter, ...] | None:
    """Parameters that a function itself or its operator tells; None where neither does.

    A compiled operator is a wrapper that takes anything, so it is asked by its schema.

    Raises:
        TypeError: it cannot be called.
        ValueError: it is compiled and tells nothing.
        AttributeError: its operator has no schema.
    """
    kinds = inspect.Parameter
    told = list(inspect.signature(function).parameters.values())
    if all(p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) for p in told):
        return tuple(
            Parameter(f"{p.name}, /" if p.kind is kinds.POSITIONAL_ONLY else p.name, p.default is kinds.empty)
            for p in told
        )
    import torch

    operator = getattr(torch.ops.aiter, name, None)
    if operator is None:
        return None
    told_by_schema = operator.default._schema.arguments
    return tuple(
        Parameter(argument.name, not argument.has_default_value())
        for argument in told_by_schema
        # A stub whose first parameter is no tensor is registered with one more in front, which it fills.
        if argument.name != "dummy"
    )


def _arguments_in(text: str) -> ast.arguments:
    definition = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition.args


def _of_arguments(arguments: ast.arguments) -> tuple[Parameter, ...]:
    positional = [*(f"{one.arg}, /" for one in arguments.posonlyargs), *(one.arg for one in arguments.args)]
    first_default = len(positional) - len(arguments.defaults)
    # What has a place and no name cannot be given by name, so it is none that is known.
    found = [Parameter(name, at < first_default) for at, name in enumerate(positional)]
    found += [
        Parameter(one.arg, default is None)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return tuple(found)
