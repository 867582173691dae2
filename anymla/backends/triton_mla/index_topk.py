"""Indexer: logits of as many rows as memory is set aside for, the largest of each, then the rows after."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.backends.triton_mla import keys
from anymla.backends.triton_mla.choose import choose_kernel, narrow_kernel
from anymla.backends.triton_mla.elements import elements
from anymla.backends.triton_mla.index_logits import index_logits_kernel, index_rows_kernel
from anymla.contract import Batch, IndexArgs
from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import Launch, launch_rows
from anymla.hardware.probe import Machine
from anymla.kv_cache import KVCache
from anymla.problem import Problem

LOGITS_BYTES = 256 << 20
"""Logits that exist at a time, unless one tile of rows has more."""
MOST_TILES = 65535
"""Tiles of rows of a launch, whose grid takes no more in its second axis."""
SPAN_BLOCKS = 16
"""Blocks of keys of a program, for each product: enough to hide its start, few enough to fill a chip."""

_PRODUCTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_FP8 = {"fp8_e4m3fn": tl.float8e4nv, "fp8_e4m3fnuz": tl.float8e4b8}


@dataclass
class IndexState:
    """A planned top-k: what each row sees, and the memory between the kernels.

    Attributes:
        batch: The step.
        arch: The chip.
        launch: Columns (query tokens × heads) and keys of a tile of logits.
        tokens: Query tokens of a product.
        products: Products of a tile.
        narrowing: Logits that a program of the narrowing looks at, at a time.
        choice: Logits that a program of the choice holds, and its warps.
        sequences: [T] int32, the sequence of each row; -1: none.
        visible: [T] int32, the keys that it sees.
        logits: [rows, keys] fp32.
        ids: What each narrowing leaves, [rows, pieces · room] int32.
        room: Ids that are left of a piece.
    """

    problem: Problem
    batch: Batch
    arch: str
    launch: Launch
    tokens: int
    products: int
    narrowing: Launch
    choice: Launch
    sequences: Tensor
    visible: Tensor
    logits: Tensor
    ids: tuple[Tensor, ...]
    room: int


def plan_index_topk(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> IndexState:
    """Plan one top-k step; lengths stay on the device.

    Args:
        batch: Lengths and pages.
        problem: Facts of the call.
        machine: The chip.
        knobs: None are known.

    Returns:
        The state that `index_topk` takes, for any number of layers.
    """
    device = batch.seq_lens.device
    shape = _Shape.of(problem, machine, batch.num_tokens, batch.max_q_len, batch.max_seq_len)
    sequences, visible = torch.empty((2, batch.num_tokens), dtype=torch.int32, device=device).unbind()
    state = IndexState(
        problem=problem,
        batch=batch,
        arch=machine.arch,
        launch=shape.launch,
        tokens=shape.tokens,
        products=shape.products,
        narrowing=shape.narrowing,
        choice=shape.choice,
        sequences=sequences,
        visible=visible,
        logits=torch.empty((shape.rows, shape.width), dtype=torch.float32, device=device),
        ids=tuple(torch.empty((shape.rows, n), dtype=torch.int32, device=device) for n in shape.ids),
        room=shape.room,
    )
    update_index_topk(state, batch)
    return state


def update_index_topk(state: IndexState, batch: Batch) -> None:
    """Work out anew, where the lengths are, the sequence of each row and the keys that it sees."""
    state.batch = batch
    index_rows_kernel[(batch.num_seqs + 1,)](
        batch.seq_lens,
        batch.qo_indptr,
        state.sequences,
        state.visible,
        batch.num_tokens,
        batch.num_seqs,
        BLOCK=128,
    )


def index_topk(args: IndexArgs, state: IndexState) -> None:
    """Write the chosen tokens of every row, or their slots, into args.indices, in any order; -1 follows.

    Args:
        args: Checked tensors.
        state: From `plan_index_topk`.
    """
    for first, last in _parts(state):
        _logits(args, state, first, last)
        _choose(args, state, first, last)


def index_scores(args: IndexArgs, state: IndexState) -> None:
    """Only the logits of `index_topk`; arguments as there. Those of the last rows stay in state.logits."""
    for first, last in _parts(state):
        _logits(args, state, first, last)


def index_choice(args: IndexArgs, state: IndexState) -> None:
    """Only the choice of `index_topk`, from what is in state.logits; arguments as there."""
    for first, last in _parts(state):
        _choose(args, state, first, last)


def index_workspace_bytes(problem: Problem, machine: Machine, num_tokens: int, max_seq_len: int) -> int:
    """The most bytes that any step within these bounds takes beside its outputs.

    Args:
        problem: Facts of the call.
        machine: The chip.
        num_tokens: T.
        max_seq_len: Keys of the longest sequence.

    Returns:
        Bytes: logits and narrowed ids of the rows of one pass, a sequence and a count a query token.
    """
    shape = _Shape.of(problem, machine, num_tokens, problem.q_len, max_seq_len)
    return 4 * (shape.rows * (shape.width + sum(shape.ids)) + 2 * num_tokens)


@dataclass(frozen=True)
class _Shape:
    """What follows from the bounds of a step: tiles, and the rows and columns of a pass."""

    launch: Launch
    tokens: int
    products: int
    narrowing: Launch
    choice: Launch
    rows: int
    width: int
    ids: tuple[int, ...]
    room: int

    @classmethod
    def of(
        cls, problem: Problem, machine: Machine, num_tokens: int, max_q_len: int, max_seq_len: int
    ) -> "_Shape":
        launches = launch_rows("index_logits", machine.arch)
        heads = triton.next_power_of_2(max(problem.num_heads, 16))
        most_q_len = triton.next_power_of_2(max(max_q_len, 1))
        launch = next((row for row in launches if row.block_m >= heads * most_q_len), launches[-1])
        tokens = min(max(1, min(launch.chunk, launch.block_m) // heads), most_q_len)
        products = min(max(1, launch.block_m // (heads * tokens)), most_q_len // tokens)
        width = -(-max(max_seq_len, 1) // 16) * 16
        tile = tokens * products
        at_once = max(1, LOGITS_BYTES // (4 * width) // tile) * tile
        at_once = min(at_once, max(num_tokens, 1), MOST_TILES * tile)
        most = 2 * problem.topk
        narrowing = next(row for row in launch_rows("narrow", machine.arch) if row.block_n >= most)
        able = [row for row in launch_rows("choose", machine.arch) if row.block_n >= most]
        room, widths = able[0].block_n, [max_seq_len]
        while widths[-1] > able[-1].block_n:
            # As many pieces as keep the chip busy, each of which leaves at most a quarter.
            pieces = min((machine.multiprocessors or 1) // at_once, widths[-1] // (4 * room))
            widths.append(max(1, pieces) * room)
        choice = next(row for row in able if row.block_n >= widths[-1])
        return cls(launch, tokens, products, narrowing, choice, at_once, width, tuple(widths[1:]), room)


def _parts(state: IndexState) -> Iterator[tuple[int, int]]:
    """First and last row, one past it, of what is worked on at a time."""
    at_once, num_tokens = state.logits.shape[0], state.batch.num_tokens
    for first in range(0, num_tokens, at_once):
        yield first, min(first + at_once, num_tokens)


def _logits(args: IndexArgs, state: IndexState, first: int, last: int) -> None:
    """Fill the first last - first rows of state.logits, as far as each of them sees."""
    launch, table, heads = state.launch, state.batch.block_table, args.q.shape[1]
    data, form = elements(args.cache, state.arch)
    if form in (keys.TILED_FN.value, keys.TILED_FNUZ.value):
        # In the dtype of the product, copies go straight to where it reads them.
        data = data.view(args.cache.format.value_dtype)
    q, q_form, product = _query_form(args.q, args.cache, form, state.arch)
    span = SPAN_BLOCKS * state.products * launch.block_n
    tile = state.tokens * state.products
    grid = (-(-state.batch.max_seq_len // span), -(-(last - first) // tile))
    if not grid[0]:
        return
    index_logits_kernel[grid](
        q,
        args.weights,
        data,
        table,
        state.sequences,
        state.visible,
        state.logits,
        first,
        last,
        *q.stride(),
        *args.weights.stride(),
        data.stride(0),
        data.stride(1),
        *table.stride(),
        state.logits.stride(0),
        HEADS=heads,
        HEADS_PADDED=triton.next_power_of_2(max(heads, 16)),
        L=args.cache.kv_lora_rank,
        L_PADDED=triton.next_power_of_2(max(args.cache.kv_lora_rank, 32)),
        PRODUCTS=state.products,
        TOKENS=state.tokens,
        BLOCK_N=launch.block_n,
        SPAN=span,
        BLOCK_SIZE=args.cache.block_size,
        FORMAT=form,
        Q_FORMAT=q_form,
        DTYPE=product,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        # Wider operands take more registers, and on-chip memory that leaves more for each program.
        **({"maxnreg": launch.registers} if launch.registers and product.primitive_bitwidth == 8 else {}),
    )


def _query_form(q: Tensor, cache: KVCache, form: int, arch: str) -> tuple[Tensor, int, tl.dtype]:
    """Queries as device code reads them, their FORMAT, and the dtype of products with these keys.

    fp8 meets fp8 where the chip multiplies that flavour; else both are bf16, which holds every fp8 value.
    """
    if q.dtype.itemsize > 1:
        return q, keys.PLAIN.value, _PRODUCTS[q.dtype]
    fnuz, chip = q.dtype == torch.float8_e4m3fnuz, ARCHES.get(arch)
    name = "fp8_e4m3fnuz" if fnuz else "fp8_e4m3fn"
    if chip is not None and chip.has_fp8 and name == f"fp8_{chip.fp8_flavour}":
        own = (keys.TILED_FN, keys.TILED_FNUZ)[fnuz].value
        return q, own, _FP8[name] if form == own else tl.bfloat16
    own = (keys.TILED_FN_BYTES, keys.TILED_FNUZ_BYTES)[fnuz].value
    return q.view(torch.uint8), own, tl.bfloat16


def _choose(args: IndexArgs, state: IndexState, first: int, last: int) -> None:
    """Narrow the logits of a row, piece by piece, until what is left of it can be chosen from at once."""
    topk, room, visible = args.indices.shape[1], state.room, state.visible[first:]
    given, count, narrowing, choice = None, state.batch.max_seq_len, state.narrowing, state.choice
    for kept in state.ids:
        pieces = kept.shape[1] // room
        narrow_kernel[(last - first, pieces)](
            state.logits,
            visible,
            given,
            kept,
            count,
            topk,
            *state.logits.stride(),
            0 if given is None else given.stride(0),
            kept.stride(0),
            -(-count // pieces),
            BLOCK_N=narrowing.block_n,
            ROOM=room,
            HAS_IDS=given is not None,
            NUM_STAGES=narrowing.num_stages,
            OVERLAP=choice.overlap,
            num_warps=narrowing.num_warps,
            # Loops are unrolled instead.
            num_stages=1,
        )
        given, count = kept, kept.shape[1]
    chosen = args.indices[first:last]
    choose_kernel[(last - first,)](
        state.logits,
        visible,
        given,
        state.sequences[first:],
        state.batch.block_table,
        chosen,
        count,
        topk,
        *state.logits.stride(),
        0 if given is None else given.stride(0),
        *state.batch.block_table.stride(),
        *chosen.stride(),
        TOPK_PADDED=triton.next_power_of_2(topk),
        PIECE=choice.block_n,
        BLOCK_SIZE=args.cache.block_size if args.as_slots else 1,
        AS_SLOTS=args.as_slots,
        HAS_IDS=given is not None,
        OVERLAP=choice.overlap,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        **({"launch_pdl": True} if choice.overlap else {}),
    )
