"""Prefill in MHA form: passes over the cached context and the new tokens, each decompressed and attended to.

T query tokens, B sequences, H heads, L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim,
V = v_head_dim. A pass decompresses as many tokens as fit in EXPANDED_BYTES, so memory does not grow with the
length of the context.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import triton
from torch import Tensor

from anymla.backends.triton_mla.elements import elements
from anymla.backends.triton_mla.expand import expand_kernel, gather_kernel
from anymla.backends.triton_mla.mha import mha_kernel
from anymla.contract import Batch, PrefillArgs
from anymla.hardware.launch import Launch, launch_rows
from anymla.hardware.probe import Machine
from anymla.hardware.tiles import chunked, padded, prefill_row
from anymla.kv_cache import KVCache
from anymla.problem import Feature, Problem

LOG2_E = 1.4426950408889634
ALIGN = 128
"""Lines are cut at multiples of this, which every BLOCK_N divides."""
EXPANDED_BYTES = 512 << 20
"""Keys and values of one pass: enough tokens for products at full speed, at any width."""
LATENT_WIDTH = 128
"""Latent columns moved at a time, and those that share a scale in a tiled row."""
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.bfloat16,
    "fp8_e4m3fnuz": torch.bfloat16,
}
"""Of a pass. One in fp8 lets a backend round to it: this one does not, and takes both dtypes of 16 bits."""


@dataclass(frozen=True)
class PrefillState:
    """A planned prefill: which tile is which, and all memory that its passes need.

    Attributes:
        context: Places of the contexts, one after another; a bound where only the device knows them.
        chunk: Places of a pass.
        by_library: Whether latents are decompressed by torch; else rows past the last are left out, and a row
            has the same bits in any batch.
        tiles: [n, 2] int32, sequence and first row of each tile. Sequence B has the rows of no sequence,
            later ones have none.
        q_starts: [B + 2] int32, qo_indptr and T.
        context_starts: [B + 1] int64, where each context starts among the places; that of a sequence without
            new tokens has none.
        keys, values: [H, n, P] and [H, n, V] of one pass.
        latents, rope: [n, L] and [n, R] gathered from the cache.
        kept_acc, kept_top, kept_total: [T, H, V], [T, H] and [T, H] fp32, running sums between passes; None
            with one pass.
    """

    problem: Problem
    launch: Launch
    arch: str
    batch: Batch
    context: int
    chunk: int
    by_library: bool
    tiles: Tensor
    q_starts: Tensor
    context_starts: Tensor
    keys: Tensor
    values: Tensor
    latents: Tensor
    rope: Tensor
    kept_acc: Tensor | None
    kept_top: Tensor | None
    kept_total: Tensor | None

    def holding(self, dtype: torch.dtype) -> "PrefillState":
        """The same memory, its passes of another dtype of 16 bits."""
        if self.keys.dtype == dtype:
            return self
        passes = {name: getattr(self, name) for name in ("keys", "values", "latents", "rope")}
        return replace(self, **{name: buffer.view(dtype) for name, buffer in passes.items()})


def plan_prefill(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> PrefillState:
    """Allocate what one prefill step needs and lay out its tiles; no length is read back from the device.

    Args:
        batch: Lengths and pages. Where the host does not know the lengths, every sequence is taken to be as
            long as max_seq_len and its pages allow, and passes that turn out to be empty cost a launch each.
        problem: Facts of the call.
        machine: The chip.
        knobs: None are known.

    Returns:
        The state that `prefill` takes, for any number of layers.
    """
    device, dtype = batch.seq_lens.device, DTYPES[problem.q_dtype]
    context = _context_tokens(batch)
    shape = _Shape.of(problem, machine, batch.num_tokens, batch.num_seqs, context)
    known = batch.context_lens_host is not None

    def new(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    q_starts = new(batch.num_seqs + 2, dtype=torch.int32)
    q_starts[:-1].copy_(batch.qo_indptr)
    q_starts[-1:].fill_(batch.num_tokens)
    context_starts = torch.zeros(batch.num_seqs + 1, dtype=torch.int64, device=device)
    q_lens = batch.qo_indptr.diff()
    lens = (batch.seq_lens - q_lens).clamp_(min=0).mul_(q_lens > 0)
    torch.cumsum(lens, 0, dtype=torch.int64, out=context_starts[1:])
    heads, kept = problem.num_heads, (batch.num_tokens, problem.num_heads) if shape.carries else None
    return PrefillState(
        problem=problem,
        launch=shape.launch,
        arch=machine.arch,
        batch=batch,
        context=context,
        chunk=shape.chunk,
        by_library=known and Feature.BATCH_INVARIANT not in problem.features,
        tiles=_tiles(q_starts, shape.num_tiles, shape.launch.block_m),
        q_starts=q_starts,
        context_starts=context_starts,
        keys=new(heads, shape.rows, problem.qk_nope_head_dim),
        values=new(heads, shape.rows, problem.v_head_dim),
        latents=new(shape.gathered, problem.kv_lora_rank),
        rope=new(shape.gathered, problem.qk_rope_head_dim),
        kept_acc=new(*kept, problem.v_head_dim, dtype=torch.float32) if kept else None,
        kept_top=new(*kept, dtype=torch.float32) if kept else None,
        kept_total=new(*kept, dtype=torch.float32) if kept else None,
    )


def prefill(args: PrefillArgs, state: PrefillState) -> None:
    """Fill args.out, and args.lse if it is there, for every row; nothing is allocated.

    Args:
        args: Checked tensors.
        state: From `plan_prefill`.
    """
    state, tokens = state.holding(args.q_nope.dtype), args.q_nope.shape[0]
    context = 0 if args.cache is None or not tokens else state.context
    for first in range(0, context, state.chunk):
        assert args.cache is not None
        end, origin = min(first + state.chunk, context), max(first - ALIGN, 0)
        latents, rope = state.latents[: end - origin], state.rope[: end - origin]
        _gather(args.cache, state, latents, rope, origin, end)
        _expand(args, state, latents, origin, state.context_starts)
        _attend(args, state, rope, (first, end, origin), is_context=True, after_context=False)
    for first in range(0, tokens, state.chunk):
        end, origin = min(first + state.chunk, tokens), max(first - ALIGN, 0)
        _expand(args, state, args.kv_c[origin:end], origin, None)
        step = (first, end, origin)
        _attend(args, state, args.k_pe[origin:end], step, is_context=False, after_context=context > 0)


def prefill_workspace_bytes(
    problem: Problem, machine: Machine, num_tokens: int, num_seqs: int, context_tokens: int
) -> int:
    """The most bytes that a prefill within these bounds takes beside its outputs.

    Args:
        problem: Facts of the call.
        machine: The chip.
        num_tokens: T.
        num_seqs: B.
        context_tokens: Cached tokens of all sequences together.

    Returns:
        Bytes: keys, values and latents of one pass, running sums of T tokens, and the tables of the plan.
    """
    shape = _Shape.of(problem, machine, num_tokens, num_seqs, context_tokens)
    item = DTYPES[problem.q_dtype].itemsize
    total = shape.rows * _expanded_bytes(problem)
    total += shape.gathered * (problem.kv_lora_rank + problem.qk_rope_head_dim) * item
    total += num_tokens * problem.num_heads * (problem.v_head_dim + 2) * 4 if shape.carries else 0
    return total + 8 * shape.num_tiles + 4 * (num_seqs + 2) + 8 * (num_seqs + 1)


@dataclass(frozen=True)
class _Shape:
    """What follows from the bounds of a step: tiles, places of a pass, rows of its buffers."""

    launch: Launch
    num_tiles: int
    chunk: int
    rows: int
    gathered: int
    carries: bool

    @classmethod
    def of(cls, problem: Problem, machine: Machine, num_tokens: int, num_seqs: int, context: int) -> "_Shape":
        launch = _launch_for(problem, machine)
        chunk = max(ALIGN, EXPANDED_BYTES // max(1, _expanded_bytes(problem)) // ALIGN * ALIGN)
        longest = max(num_tokens, context)
        # A line whose cut is not at a place of its own is decompressed from up to ALIGN places before it.
        rows = longest if longest <= chunk else chunk + ALIGN
        return cls(
            launch,
            num_tiles=-(-num_tokens // launch.block_m) + num_seqs + 1,
            chunk=chunk,
            rows=rows,
            gathered=min(context, rows),
            carries=context > 0 or num_tokens > chunk,
        )


def _expanded_bytes(problem: Problem) -> int:
    """Bytes of the keys and values of one token."""
    width = problem.qk_nope_head_dim + problem.v_head_dim
    return problem.num_heads * width * DTYPES[problem.q_dtype].itemsize


def _context_tokens(batch: Batch) -> int:
    """Tokens of all contexts that are attended to, or a bound where the host does not know."""
    if batch.context_lens_host is not None and batch.qo_indptr_host is not None:
        q_lens = (b - a for a, b in pairwise(batch.qo_indptr_host))
        return sum(n for n, q_len in zip(batch.context_lens_host, q_lens, strict=True) if q_len)
    capacity = batch.block_table.shape[1] * batch.block_size
    return batch.num_seqs * min(batch.max_seq_len, capacity)


def _tiles(q_starts: Tensor, num_tiles: int, block_m: int) -> Tensor:
    """Sequence and first row of each tile, worked out on the device."""
    counts = (q_starts.diff() + (block_m - 1)) // block_m
    ends = counts.cumsum(0)
    index = torch.arange(num_tiles, dtype=ends.dtype, device=q_starts.device)
    seq = torch.searchsorted(ends, index, right=True)
    starts = (ends - counts)[seq.clamp(max=len(counts) - 1)]
    return torch.stack((seq, (index - starts) * block_m), 1).int()


def _launch_for(problem: Problem, machine: Machine) -> Launch:
    return prefill_row(
        machine.arch,
        problem.q_len,
        problem.qk_nope_head_dim,
        problem.qk_rope_head_dim,
        problem.v_head_dim,
        DTYPES[problem.q_dtype].itemsize,
        largest=Feature.BATCH_INVARIANT in problem.features,
    )


def _gather(
    cache: KVCache, state: PrefillState, latents: Tensor, rope: Tensor, origin: int, end: int
) -> None:
    data, form = elements(cache, state.arch)
    problem, table = state.problem, state.batch.block_table
    launch = launch_rows("gather", state.arch)[0]
    gather_kernel[(triton.cdiv(end - origin, launch.block_m),)](
        data,
        cache.scale,
        table,
        state.context_starts,
        latents,
        rope,
        origin,
        end,
        state.batch.num_seqs,
        max(state.batch.num_seqs - 1, 1).bit_length(),
        data.stride(0),
        data.stride(1),
        *table.stride(),
        L=problem.kv_lora_rank,
        R=problem.qk_rope_head_dim,
        WIDTH=LATENT_WIDTH,
        CHUNKS=triton.cdiv(problem.kv_lora_rank, LATENT_WIDTH),
        R_PADDED=padded(problem.qk_rope_head_dim) if problem.qk_rope_head_dim else 0,
        BLOCK_M=launch.block_m,
        BLOCK_SIZE=cache.block_size,
        FORMAT=form,
        HAS_SCALE=cache.scale is not None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _expand(
    args: PrefillArgs, state: PrefillState, latents: Tensor, origin: int, starts: Tensor | None
) -> None:
    """Keys and values of the latents [n, L] into the first n rows of the pass; `starts` may end sooner."""
    count = latents.shape[0]
    for weights, expanded in ((args.w_uk.mT, state.keys[:, :count]), (args.w_uv, state.values[:, :count])):
        heads, rank, width = weights.shape
        if not width:
            continue
        if state.by_library:
            torch.bmm(latents.expand(heads, -1, -1), weights, out=expanded)
            continue
        launch = launch_rows("expand", state.arch)[0]
        row_blocks = triton.cdiv(count, launch.block_m)
        expand_kernel[(row_blocks * triton.cdiv(width, launch.block_n) * heads,)](
            latents,
            weights,
            expanded,
            starts,
            origin,
            count,
            state.batch.num_seqs,
            row_blocks,
            *latents.stride(),
            *weights.stride(),
            expanded.stride(0),
            L=rank,
            N=width,
            BLOCK_M=launch.block_m,
            BLOCK_N=launch.block_n,
            BLOCK_K=launch.chunk,
            BOUNDED=starts is not None,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )


def _attend(
    args: PrefillArgs,
    state: PrefillState,
    rope: Tensor,
    step: tuple[int, int, int],
    *,
    is_context: bool,
    after_context: bool,
) -> None:
    problem, launch = state.problem, state.launch
    num_tiles = state.tiles.shape[0]
    (p_width, p_chunks), (v_width, v_chunks) = map(chunked, (problem.qk_nope_head_dim, problem.v_head_dim))
    mha_kernel[(num_tiles * problem.num_heads,)](
        args.q_nope,
        args.q_pe,
        state.keys,
        rope,
        state.values,
        args.sinks,
        args.out,
        args.lse,
        state.kept_acc,
        state.kept_top,
        state.kept_total,
        state.tiles,
        state.q_starts,
        state.context_starts,
        args.sm_scale * LOG2_E,
        *step,
        num_tiles,
        state.batch.num_seqs,
        problem.num_heads,
        *args.q_nope.stride(),
        *args.q_pe.stride(),
        state.keys.stride(0),
        state.values.stride(0),
        *rope.stride(),
        *args.out.stride(),
        *(args.lse.stride() if args.lse is not None else (0, 0)),
        P=problem.qk_nope_head_dim,
        R=problem.qk_rope_head_dim,
        V=problem.v_head_dim,
        P_WIDTH=p_width,
        P_CHUNKS=p_chunks,
        R_PADDED=padded(problem.qk_rope_head_dim) if problem.qk_rope_head_dim else 0,
        V_WIDTH=v_width,
        V_CHUNKS=v_chunks,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        ALIGN=ALIGN,
        REREAD=launch.reread,
        CONTEXT=is_context,
        AFTER_CONTEXT=after_context,
        CARRY=state.kept_acc is not None,
        CAUSAL=state.batch.causal,
        HAS_SINKS=args.sinks is not None,
        HAS_LSE=args.lse is not None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
