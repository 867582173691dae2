"""Dense and sparse decode: which tiles, how the line is cut, the workspace, and the launches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module

import torch
import triton
from torch import Tensor

from anymla.backends.triton_mla.attend import attend_kernel
from anymla.backends.triton_mla.combine import combine_kernel
from anymla.backends.triton_mla.elements import elements, query_elements
from anymla.backends.triton_mla.keys import PLAIN
from anymla.backends.triton_mla.schedule import JOIN, schedule_kernel
from anymla.backends.triton_mla.warpgroups import aligned, key_boxes, missing
from anymla.contract import Batch, DecodeArgs, SparseArgs
from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import Launch, launch_rows
from anymla.hardware.probe import Machine
from anymla.hardware.tiles import attend_row, padded
from anymla.problem import Feature, Problem

LOG2_E = 1.4426950408889634
LEAST_BLOCKS = 4
"""A stretch is not cut shorter: the pieces would cost more than the keys."""
INVARIANT_KEYS = 4096
"""Keys of one piece of a batch-invariant row."""
PIECES_BYTES = 256 << 20
"""Pieces of batch-invariant rows that exist at a time, unless one sequence may have more."""
TILE = 128
"""Latent values that share a scale in a tiled row."""
_CHUNK = 32


@dataclass
class Group:
    """Sequences with a line of their own: one group has all of them, unless their pieces would be too many.

    Attributes:
        seqs: Which; of a sparse decode, which query tokens.
        line, stretches: See `schedule`.
        batch: These sequences in the step; None for a sparse decode.
    """

    seqs: slice
    line: Tensor
    stretches: Tensor
    batch: Batch | None = None

    @property
    def num_seqs(self) -> int:
        """How many."""
        return int(self.seqs.stop - self.seqs.start)


@dataclass
class State:
    """A planned step: the schedule, the workspace and how to launch.

    Attributes:
        launch: Tile sizes and warps.
        pieces: Items of a tile on the line, more than one where the split must depend on the row alone.
        groups: What is scheduled and launched one after another, in the same workspace.
        joins: See `schedule`.
        part_out: [slots, block_m, L_PADDED] fp32, pieces of rows.
        part_lse: [slots, block_m] fp32, natural log.
    """

    problem: Problem
    launch: Launch
    arch: str
    num_tokens: int
    tiles_a_seq: int
    chunks: int
    pieces: int
    num_stretches: int
    causal: bool
    groups: tuple[Group, ...]
    joins: Tensor
    part_out: Tensor
    part_lse: Tensor


def plan_decode(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> State:
    """Plan a dense decode; lengths stay on the device."""
    device = batch.seq_lens.device
    state = _plan(problem, machine, device, batch.num_seqs, batch.num_tokens, batch.max_seq_len)
    state.causal = batch.causal
    update_decode(state, batch)
    return state


def update_decode(state: State, batch: Batch) -> None:
    """Cut the lines anew for another step, into the same buffers."""
    for group in state.groups:
        group.batch = batch if len(state.groups) == 1 else _part(batch, group.seqs)
        _schedule(state, group)


def plan_sparse_decode(
    num_tokens: int, device: torch.device, problem: Problem, machine: Machine, knobs: Mapping[str, int]
) -> State:
    """Plan a sparse decode; each query token is a sequence of its own."""
    state = _plan(problem, machine, device, num_tokens, num_tokens, problem.topk)
    for group in state.groups:
        _schedule(state, group)
    return state


def decode(args: DecodeArgs, state: State) -> None:
    """Fill args.out and args.lse."""
    for group in state.groups:
        _attend(args, state, group, None, None)


def sparse_decode(args: SparseArgs, state: State) -> None:
    """Fill args.out and args.lse."""
    for group in state.groups:
        part = args if len(state.groups) == 1 else _rows(args, group.seqs)
        _attend(part, state, group, part.indices, part.counts)


def decode_workspace_bytes(problem: Problem, machine: Machine, num_seqs: int, max_seq_len: int) -> int:
    """The most bytes that a plan within these bounds holds, dense or sparse.

    No pieces are a product of batch and splits: there are two a stretch, whatever the batch. Batch-invariant
    ones take PIECES_BYTES, or as much as one sequence needs, and 4 bytes each in the lines.

    Args:
        problem: Facts of the call.
        machine: The chip.
        num_seqs: B, or the query tokens of a sparse decode.
        max_seq_len: Keys of the longest sequence, or the topk of a sparse decode.

    Returns:
        Bytes: pieces of rows, lines, stretches and joins.
    """
    shape = _Shape.of(problem, machine, num_seqs, max_seq_len)
    pieces = shape.slots * shape.launch.block_m * (shape.width + 1)
    lines = num_seqs * shape.items_a_seq + shape.num_groups
    cuts = shape.num_groups * 3 * (shape.num_stretches + 1)
    return 4 * (pieces + lines + cuts + int(JOIN.value) * shape.num_stretches)


@dataclass(frozen=True)
class _Shape:
    """What follows from the bounds of a step: tiles, how they are cut, and how many sequences at a time."""

    launch: Launch
    tiles_a_seq: int
    pieces: int
    num_stretches: int
    group: int
    num_groups: int
    slots: int
    chunk: int
    width: int

    @property
    def items_a_seq(self) -> int:
        return self.tiles_a_seq * self.pieces

    @classmethod
    def of(cls, problem: Problem, machine: Machine, num_seqs: int, max_seq_len: int) -> "_Shape":
        rows = problem.num_heads * problem.q_len
        invariant = _invariant(problem)
        launch = _launch_for(problem, machine, problem.num_heads if invariant else rows)
        tiles_a_seq = -(-rows // launch.block_m)
        # A tiled row has one scale for each chunk, so its chunks are as wide as its tiles.
        chunk = min(launch.chunk, TILE) if problem.kv_format.startswith("fp8_ds_mla") else launch.chunk
        width = padded(problem.kv_lora_rank, chunk)
        stretches = (machine.multiprocessors or 1) * launch.programs_a_unit
        pieces = max(1, -(-max_seq_len // INVARIANT_KEYS)) if invariant else 1
        # A stretch begins and ends inside a tile once each, at most; an uncut tile needs no slot.
        group, slots = max(num_seqs, 1), 1 if invariant else 2 * stretches
        if pieces > 1:
            items = tiles_a_seq * pieces
            slots = min(group * items, max(items, PIECES_BYTES // (4 * launch.block_m * width)))
            group = slots // items
        return cls(
            launch,
            tiles_a_seq,
            pieces,
            stretches,
            group,
            num_groups=max(1, -(-num_seqs // group)),
            slots=slots,
            chunk=min(chunk, width) if width % chunk == 0 else width,
            width=width,
        )


def _launch_for(problem: Problem, machine: Machine, rows: int) -> Launch:
    return attend_row(
        machine.arch,
        rows,
        problem.kv_lora_rank,
        problem.qk_rope_head_dim,
        problem.kv_format,
        problem.block_size,
        sparse=problem.op == "sparse_decode",
        element_bytes=4 if problem.q_dtype == "fp32" else 2,
        refuses=lambda row: row.kernel and missing(),
    )


def _plan(
    problem: Problem, machine: Machine, device: torch.device, num_seqs: int, num_tokens: int, max_seq_len: int
) -> State:
    shape = _Shape.of(problem, machine, num_seqs, max_seq_len)
    launch, stretches = shape.launch, shape.num_stretches

    def new(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def group(first: int) -> Group:
        seqs = slice(first, min(first + shape.group, num_seqs))
        items = (seqs.stop - first) * shape.items_a_seq
        return Group(seqs, new(items + 1, dtype=torch.int32), new(stretches + 1, 3, dtype=torch.int32))

    return State(
        problem=problem,
        launch=launch,
        arch=machine.arch,
        num_tokens=num_tokens,
        tiles_a_seq=shape.tiles_a_seq,
        chunks=shape.width // shape.chunk,
        pieces=shape.pieces,
        num_stretches=stretches,
        causal=True,
        groups=tuple(group(number * shape.group) for number in range(shape.num_groups)),
        joins=new(stretches, JOIN.value, dtype=torch.int32),
        part_out=new(shape.slots, launch.block_m, shape.width, dtype=torch.float32),
        part_lse=new(shape.slots, launch.block_m, dtype=torch.float32),
    )


def _part(batch: Batch, seqs: slice) -> Batch:
    """Some sequences of a step; their query tokens stay where they are among all."""
    return replace(
        batch,
        block_table=batch.block_table[seqs],
        seq_lens=batch.seq_lens[seqs],
        qo_indptr=batch.qo_indptr[seqs.start : seqs.stop + 1],
        seq_lens_host=None,
        qo_indptr_host=None,
    )


def _rows(args: SparseArgs, tokens: slice) -> SparseArgs:
    """Some query tokens of a sparse call."""
    return replace(
        args,
        ql_nope=args.ql_nope[tokens],
        q_pe=args.q_pe[tokens],
        indices=args.indices[tokens],
        counts=None if args.counts is None else args.counts[tokens],
        out=args.out[tokens],
        lse=None if args.lse is None else args.lse[tokens],
    )


def _schedule(state: State, group: Group) -> None:
    launch, batch = state.launch, group.batch
    schedule_kernel[(1,)](
        None if batch is None else batch.seq_lens,
        None if batch is None else batch.qo_indptr,
        group.line,
        group.stretches,
        state.joins,
        group.line.shape[0] - 1,
        group.num_seqs,
        state.problem.num_heads,
        state.problem.topk,
        state.num_stretches,
        LEAST_BLOCKS,
        INVARIANT=_invariant(state.problem),
        PIECES=state.pieces,
        PIECE_BLOCKS=INVARIANT_KEYS // launch.block_n,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        CAUSAL=state.causal,
        SPARSE=batch is None,
        CHUNK=_CHUNK,
        STRETCHES_POW2=triton.next_power_of_2(state.num_stretches + 1),
        num_warps=8,
    )


def _attend(
    args: DecodeArgs | SparseArgs, state: State, group: Group, indices: Tensor | None, counts: Tensor | None
) -> None:
    batch = group.batch
    problem, launch, joining = state.problem, state.launch, launch_rows("combine", state.arch)[0]
    sparse = indices is not None
    data, form = elements(args.cache, state.arch)
    table = None if batch is None else batch.block_table
    common = {
        "L": problem.kv_lora_rank,
        "BLOCK_M": launch.block_m,
        "INVARIANT": _invariant(problem),
        "PIECES": state.pieces,
        "PIECE_BLOCKS": INVARIANT_KEYS // launch.block_n,
        "SPARSE": sparse,
        "HAS_SINKS": args.sinks is not None,
        "HAS_LSE": args.lse is not None,
        "OVERLAP": joining.overlap,
    }
    out_strides = (*args.out.stride(), *(args.lse.stride() if args.lse is not None else (0, 0)))
    indptr = None if batch is None else batch.qo_indptr
    constants = common | {
        "R": problem.qk_rope_head_dim,
        "BLOCK_N": launch.block_n,
        "BLOCK_SIZE": problem.block_size,
        "FORMAT": form,
        "CAUSAL": state.causal,
        "HAS_COUNTS": counts is not None,
        "HAS_SCALE": args.cache.scale is not None,
    }
    queries = args.ql_nope, args.q_pe
    if args.q_scale is not None:
        queries = query_elements(args.ql_nope, form), query_elements(args.q_pe, form)
    placed = launch.kernel if data.dtype.itemsize > 1 or aligned(data) else ""
    if placed:
        kernel = getattr(import_module(f"anymla.backends.triton_mla.{placed}"), f"{placed}_kernel")
        own = _copies(args, data, problem, launch)
    else:
        if launch.kernel:
            # Bytes that lie anyhow go to the portable kernel, whose tiles are the same.
            tile = (launch.block_m, launch.block_n, launch.chunk)
            rows = launch_rows("attend", state.arch)
            launch = next(r for r in rows if not r.kernel and (r.block_m, r.block_n, r.chunk) == tile)
        kernel = attend_kernel
        own = {
            "L_PADDED": state.part_out.shape[-1],
            "CHUNKS": state.chunks,
            "R_PADDED": padded(problem.qk_rope_head_dim),
            "AHEAD": data.dtype.itemsize == 1,
            "q_scale": args.q_scale,
            "FP8_SCORES": args.q_scale is not None and _multiplies_fp8(state, form),
            "SWAP": launch.swap,
            "REREAD": launch.reread,
            "num_stages": launch.num_stages,
        }
    kernel[(state.num_stretches,)](
        *queries,
        data,
        args.cache.scale,
        table,
        None if batch is None else batch.seq_lens,
        indptr,
        indices,
        counts,
        args.sinks,
        args.out,
        args.lse,
        state.part_out,
        state.part_lse,
        group.line,
        group.stretches,
        args.sm_scale * LOG2_E,
        # Rows of no sequence are of the last group.
        state.num_tokens if group is state.groups[-1] else 0,
        group.num_seqs,
        problem.num_heads,
        0 if indices is None else indices.shape[1],
        *args.ql_nope.stride(),
        *args.q_pe.stride(),
        data.stride(0),
        data.stride(1),
        *((0, 0) if table is None else table.stride()),
        *((0, 0) if indices is None else indices.stride()),
        *out_strides,
        **constants,
        **own,
        num_warps=launch.num_warps,
    )
    tiles = group.num_seqs * state.tiles_a_seq
    if not _invariant(problem):
        # Each has a cut.
        joins = min(tiles, state.num_stretches - 1)
    else:
        joins = tiles if state.pieces > 1 else 0
    if joins:
        columns = state.part_out.shape[-1]
        width = columns & -columns
        if not _invariant(problem):
            # As wide as leaves work for every unit: the fewer tiles are cut, the more pieces each has.
            enough = 2 * state.num_stretches
            while width > joining.chunk and joins * launch.block_m * columns < enough * width:
                width //= 2
        combine_kernel[(joins * launch.block_m, columns // width)](
            state.part_out,
            state.part_lse,
            group.line,
            state.joins,
            indptr,
            args.sinks,
            args.out,
            args.lse,
            group.num_seqs,
            problem.num_heads,
            *out_strides,
            L_PADDED=columns,
            WIDTH=width,
            BLOCK_P=max(joining.block_n * joining.chunk // width, 1),
            **common,
            num_warps=joining.num_warps,
            num_stages=joining.num_stages,
            **({"launch_pdl": True} if joining.overlap else {}),
        )


def _multiplies_fp8(state: State, form: int) -> bool:
    """Whether queries in fp8 meet keys as they are: in sums of fp32, of products at least 32 deep."""
    widths = [state.part_out.shape[-1] // state.chunks]
    widths += [padded(state.problem.qk_rope_head_dim)] if state.problem.qk_rope_head_dim else []
    chip = ARCHES.get(state.arch)
    return form == PLAIN.value and chip is not None and chip.sums_fp8_in_fp32 and min(widths) >= 32


def _copies(
    args: DecodeArgs | SparseArgs, data: Tensor, problem: Problem, launch: Launch
) -> dict[str, object]:
    """How keys and queries come on chip: in boxes, row by row, or through registers."""
    as_bytes = launch.kernel == "attend_bytes"
    copied = as_bytes or (data.dtype == args.out.dtype and aligned(data))
    boxes = key_boxes(data, problem, launch.block_n) if copied and problem.op == "decode" else None
    latents, ropes = boxes or (None, None)
    own = {"latents": latents, "ropes": ropes, "BOXES": boxes is not None}
    if as_bytes:
        return own | {"q_scale": args.q_scale, "ROOMS": launch.num_stages}
    own |= {"Q_COPIED": args.q_scale is None and aligned(args.ql_nope, args.q_pe), "COPIED": copied}
    return own | ({"q_scale": args.q_scale} if launch.kernel == "attend_wgmma" else {})


def _invariant(problem: Problem) -> bool:
    return Feature.BATCH_INVARIANT in problem.features
