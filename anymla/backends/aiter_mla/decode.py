"""Dense and sparse decode through AITER: which kernel, its lists of slots, its plan, and the call.

T query tokens, B sequences, H heads, L = 512, R = 64. A row is what the kernel takes for a sequence. In one
layout each query token is a row, which fits any step, in another each sequence is a row of several tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from anymla.backends.aiter_mla.calls import Call, call_of
from anymla.backends.aiter_mla.manifest import Route, route_of
from anymla.backends.aiter_mla.operands import dtype_of, rounded, rows_of
from anymla.backends.aiter_mla.pages import keys_seen, write_chosen, write_lists
from anymla.backends.aiter_mla.provider import aiter_of
from anymla.contract import Batch, DecodeArgs, SparseArgs
from anymla.errors import BackendError, Reasons
from anymla.hardware.probe import Machine
from anymla.heads import HeadPadding
from anymla.merging import apply_sinks
from anymla.problem import Problem

MOST_SPLITS = 16
SPLIT_COST = 84.1
"""Keys that a split costs beside its own; AITER's figure."""
PLAN_FIELDS = (
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


@dataclass
class Layout:
    """How one kind of row is run.

    Attributes:
        route: The kernel.
        q_len: Query tokens a row.
        qo_indptr: [rows + 1] int32, where each row's tokens start.
        kv_indptr: [rows + 1] int32, where each row's slots start.
        last_page_lens: [rows] int32 ones: a page is a token.
        splits, splits_indptr: Splits of each row and where they start; None for a persistent kernel.
        plan: AITER's own plan, for a persistent kernel.
        planned_for: The lengths that it was made for, where the host knows them.
    """

    route: Route
    q_len: int
    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_lens: Tensor
    splits: int | None
    splits_indptr: Tensor | None
    plan: dict[str, Tensor] = field(default_factory=dict)
    planned_for: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.last_page_lens.shape[0]


@dataclass
class State:
    """A planned step.

    Attributes:
        single: Each query token a row.
        several: Each sequence a row, or None where no kernel takes that many tokens.
        layout: The one of this step.
        lengths: [T] int32 keys that each query token sees.
        indices: Slots of all rows, at the capacity of the planned bounds.
        captured: Whether a graph holds a call of this state, and with it the layout.
    """

    problem: Problem
    machine: Machine
    calls: Mapping[str, Call]
    single: Layout
    several: Layout | None
    layout: Layout
    lengths: Tensor
    indices: Tensor
    captured: bool = False


def plan_decode(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> State:
    """Plan a dense decode: its buffers at the bounds of the batch, its splits, its layout."""
    tokens = batch.num_tokens
    state = _plan(problem, machine, batch.seq_lens.device, tokens, tokens * batch.max_seq_len, batch)
    update_decode(state, batch)
    return state


def update_decode(state: State, batch: Batch) -> None:
    """Take another step into the same buffers, and plan it where its lengths are new."""
    layout = state.single
    if state.several is not None and _is_whole(batch, state.several):
        layout = state.several
    if state.captured and layout is not state.layout:
        reasons = Reasons("plan.update")
        needs = f"{state.layout.q_len} for every sequence, as captured; plan again"
        reasons.need(False, "query tokens", f"{layout.q_len} a row", needs)
        reasons.raise_if_any()
    state.layout = layout
    sequence, lengths = keys_seen(batch)
    state.lengths.copy_(lengths)
    known = _known_lengths(batch, layout.q_len > 1)
    total = None if known is None else sum(known)
    if layout.q_len > 1:
        write_lists(layout.kv_indptr, state.indices, batch.seq_lens, None, batch, total)
    else:
        write_lists(layout.kv_indptr, state.indices, lengths, sequence, batch, total)
    if layout.plan and (known is None or known != layout.planned_for):
        _write_plan(state, layout)
        layout.planned_for = known


def plan_sparse_decode(
    num_tokens: int, device: torch.device, problem: Problem, machine: Machine, knobs: Mapping[str, int]
) -> State:
    """Plan a sparse decode: each query token is a row of its own."""
    return _plan(problem, machine, device, num_tokens, num_tokens * problem.topk + 1, None)


def decode(args: DecodeArgs, state: State) -> None:
    """Fill args.out and args.lse."""
    _attend(args, state, state.indices)


def sparse_decode(args: SparseArgs, state: State) -> None:
    """Fill args.out and args.lse."""
    layout = state.single
    write_chosen(layout.kv_indptr, state.indices, state.lengths, args.indices, args.counts)
    if layout.plan:
        _write_plan(state, layout)
    _attend(args, state, state.indices[:-1])


def is_captured(out: Tensor) -> bool:
    """Whether a graph is being captured of what is launched now."""
    return out.is_cuda and torch.cuda.is_current_stream_capturing()


def split_count(rows: int, keys: int, units: int, knobs: Mapping[str, int]) -> int:
    """Splits of each row of a kernel that is not persistent.

    Args:
        rows: Rows of the step.
        keys: Keys of a row, on average or at most.
        units: Compute units, each of which takes one split of a row at a time.
        knobs: `num_kv_splits` fixes the number, `min_num_kv_splits` bounds it.

    Returns:
        The number that fills the last wave of workgroups best for what splits cost, from 1 to 16.

    Source: AITER get_meta_param, whose own number would be a guess from the capacity of the list.
    """
    if "num_kv_splits" in knobs:
        return knobs["num_kv_splits"]

    def score(splits: int) -> float:
        groups = rows * splits
        return groups / (-(-groups // units) * units) * keys / (keys + SPLIT_COST * splits)

    best = max(range(1, MOST_SPLITS + 1), key=score) if rows and keys and units else 1
    return max(best, knobs.get("min_num_kv_splits", 1))


def _plan(
    problem: Problem,
    machine: Machine,
    device: torch.device,
    tokens: int,
    capacity: int,
    batch: Batch | None,
) -> State:
    aiter = aiter_of(machine)
    one, reasons = route_of(problem, aiter, 1)
    assert one is not None, f"{aiter} was chosen for {problem}: {reasons}"
    many = None
    if batch is not None and batch.causal and batch.max_q_len > 1:
        many, _ = route_of(problem, aiter, batch.max_q_len)
    names = ["mla_decode_fwd"]
    if one.call.persistent or (many is not None and many.call.persistent):
        names += ["get_mla_metadata_info_v1", "get_mla_metadata_v1"]
    calls = {name: call_of(aiter, name) for name in names}
    keys = problem.topk if batch is None else _usual_keys(batch)
    single = _layout(one, problem, machine, calls, device, tokens, keys)
    several = None
    if batch is not None and many is not None:
        several = _layout(many, problem, machine, calls, device, batch.num_seqs, keys)
    return State(
        problem=problem,
        machine=machine,
        calls=calls,
        single=single,
        several=several,
        layout=single,
        lengths=torch.zeros(tokens, dtype=torch.int32, device=device),
        indices=torch.zeros(capacity, dtype=torch.int32, device=device),
    )


def _layout(
    route: Route,
    problem: Problem,
    machine: Machine,
    calls: Mapping[str, Call],
    device: torch.device,
    rows: int,
    keys: int,
) -> Layout:
    def new(*values: Any) -> Tensor:
        return torch.arange(*values, dtype=torch.int32, device=device)

    call, splits = route.call, None
    if not call.persistent:
        splits = split_count(rows, keys, machine.multiprocessors, route.knobs)
    layout = Layout(
        route=route,
        q_len=call.q_len,
        qo_indptr=new(0, (rows + 1) * call.q_len, call.q_len),
        kv_indptr=torch.zeros(rows + 1, dtype=torch.int32, device=device),
        last_page_lens=torch.ones(rows, dtype=torch.int32, device=device),
        splits=splits,
        splits_indptr=None if splits is None else new(0, (rows + 1) * splits, splits),
    )
    if call.persistent and rows:
        sizes = calls["get_mla_metadata_info_v1"](
            batch_size=rows,
            max_seqlen_qo=call.q_len,
            num_head_qo=call.lanes,
            q_dtype=dtype_of(call.q, problem),
            kv_dtype=dtype_of(call.kv, problem),
            is_sparse=False,
            fast_mode=True,
        )
        layout.plan = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in zip(PLAN_FIELDS, sizes, strict=True)
        }
    return layout


def _write_plan(state: State, layout: Layout) -> None:
    """Have AITER plan the rows whose slots stand in kv_indptr; asynchronous, into the same buffers."""
    call, plan, planner = layout.route.call, dict(layout.plan), state.calls["get_mla_metadata_v1"]
    optional: dict[str, Any] = {}
    if planner.binding.takes("kv_last_page_lens"):
        optional["kv_last_page_lens"] = layout.last_page_lens
    if call.kv == "fp8":
        # Without dtypes it plans for bf16.
        optional["dtype_q"] = dtype_of(call.q, state.problem)
        optional["dtype_kv"] = dtype_of(call.kv, state.problem)
    planner(
        seqlens_qo_indptr=layout.qo_indptr,
        seqlens_kv_indptr=layout.kv_indptr,
        num_heads_per_head_k=call.lanes,
        num_heads_k=1,
        is_causal=True,
        work_metadata_ptrs=plan.pop("work_meta_data"),
        **plan,
        page_size=1,
        # AITER's tests use 32 for the one kernel whose tile has as many keys.
        kv_granularity=32 if call.q == "fp8" and call.lanes == 64 else 16,
        max_seqlen_qo=call.q_len,
        uni_seqlen_qo=call.q_len,
        fast_mode=True,
        **optional,
    )


def _attend(args: DecodeArgs | SparseArgs, state: State, indices: Tensor) -> None:
    layout = state.layout
    if not layout.rows:
        return _finish(args, state, None, None)
    state.captured |= is_captured(args.out)
    route, cache = layout.route, args.cache
    call, rows = route.call, rows_of(cache, route.knobs)
    rows_a_page = cache.data.stride(0) // cache.data.stride(1)
    if rows_a_page != cache.block_size:
        indices = indices // cache.block_size * rows_a_page + indices % cache.block_size
    padding = HeadPadding.between(state.problem.num_heads, call.lanes)
    queries, q_scale = _queries(args, padding, call.q)
    # The kernels write bf16, whatever memory they are given.
    fits = args.out.is_contiguous() and args.out.dtype == torch.bfloat16
    own = padding.rule != "identity" or "own_out" in route.knobs or not fits
    shape = (queries.shape[0], call.lanes, cache.kv_lora_rank)
    out = torch.empty(shape, dtype=torch.bfloat16, device=args.out.device) if own else args.out
    splits = layout.splits
    if "keep_persistent" in route.knobs:
        splits = max(state.machine.multiprocessors, 1)
    _, lse = state.calls["mla_decode_fwd"](
        q=queries,
        kv_buffer=rows,
        o=out,
        qo_indptr=layout.qo_indptr,
        kv_indptr=layout.kv_indptr,
        kv_indices=indices,
        kv_last_page_lens=layout.last_page_lens,
        max_seqlen_q=layout.q_len,
        page_size=1,
        nhead_kv=1,
        sm_scale=args.sm_scale,
        num_kv_splits=splits,
        num_kv_splits_indptr=layout.splits_indptr,
        q_scale=q_scale,
        kv_scale=cache.scale,
        return_lse=call.lse,
        causal=True,
        **layout.plan,
    )
    if call.lse and lse is None:
        raise BackendError(f"{call.kernel} was asked for an lse and AITER returned none")
    _finish(args, state, padding.unpad_out(out), padding.unpad_lse(lse) if call.lse else None)


def _queries(args: DecodeArgs | SparseArgs, padding: HeadPadding, kind: str) -> tuple[Tensor, Tensor | None]:
    """Queries [T, lanes, L + R] as a kernel takes them, and their scale where that is fp8."""
    parts = args.ql_nope, args.q_pe
    if args.q_scale is not None:
        # Few operations take fp8, all of them bytes; 0 is 0.
        nope, rope = (part.view(torch.uint8) for part in parts)
        queries = padding.pad_q(torch.cat((nope, rope), -1)).contiguous()
        return queries.view(args.ql_nope.dtype), args.q_scale
    queries = padding.pad_q(torch.cat(parts, -1)).contiguous()
    return rounded(queries, args.cache.data.dtype) if kind == "fp8" else (queries, None)


def _finish(args: DecodeArgs | SparseArgs, state: State, out: Tensor | None, lse: Tensor | None) -> None:
    """Rows without keys by contract, whatever the kernel left there; then sinks, once."""
    if out is None:
        args.out.zero_()
        if args.lse is not None:
            args.lse.fill_(-torch.inf)
        return
    is_empty = (state.lengths == 0)[:, None]
    if lse is not None:
        lse = lse.masked_fill(is_empty, -torch.inf)
        if args.lse is not None:
            args.lse.copy_(lse)
    if args.sinks is not None:
        assert lse is not None
        out = apply_sinks(out, lse, args.sinks)
    if out is not args.out:
        args.out.copy_(out)
    args.out.masked_fill_(is_empty[..., None], 0.0)


def _is_whole(batch: Batch, layout: Layout) -> bool:
    """Whether every sequence is known to have just the tokens of a row, and a key for each."""
    indptr, lens = batch.qo_indptr_host, batch.seq_lens_host
    if indptr is None or lens is None or batch.num_seqs != layout.rows:
        return False
    same = all(end - start == layout.q_len for start, end in pairwise(indptr))
    return same and batch.num_tokens == indptr[-1] and all(n >= layout.q_len for n in lens)


def _known_lengths(batch: Batch, by_sequence: bool) -> tuple[int, ...] | None:
    """Keys of each row where the host knows them."""
    indptr, lens = batch.qo_indptr_host, batch.seq_lens_host
    if indptr is None or lens is None:
        return None
    if by_sequence:
        return lens
    seen = [
        max(n - (end - 1 - row) if batch.causal else n, 0)
        for n, (start, end) in zip(lens, pairwise(indptr), strict=True)
        for row in range(start, end)
    ]
    return (*seen, *[0] * (batch.num_tokens - indptr[-1]))


def _usual_keys(batch: Batch) -> int:
    """Keys of a row on average where the host knows them, else the most."""
    known = _known_lengths(batch, by_sequence=False)
    return sum(known) // len(known) if known else batch.max_seq_len
