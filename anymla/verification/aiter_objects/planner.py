"""A planner of persistent work in AITER's format: which workgroup takes which part of which row.

AITER's own runs on the device. This one shares all blocks of keys equally and cuts a row where a workgroup is
full; kernels and reducers take any plan of that format.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

TILE_ROWS = 16
BUFFERS = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


class PlanTooSmall(ValueError):
    """A buffer of the plan is too small for what is to be written."""


def query_tiles(chip: str, q: str, heads: int, q_len: int) -> int:
    """Into how many tiles AITER's planner cuts the query tokens of a row; this one leaves them whole.

    Source: AITER csrc/kernels/mla/metadata/v1_2_device.cuh at e4048607, mla_v12_num_qo_tiles.
    """
    packed, most = heads * q_len, 128
    is_small = heads <= 64 and packed >= 64 and (packed < 128 or heads == 48)
    if chip == "gfx950" and ((q == "bf16" and is_small) or (q == "fp8" and (heads, q_len) == (32, 3))):
        most = 64
    return q_len if heads * 2 > most else -(-packed // most)


def sizes(batch_size: int, packed: int, units: int) -> tuple[tuple[Any, torch.dtype], ...]:
    """Shapes and dtypes of BUFFERS, as AITER counts them for its fast mode."""
    tiles_a_row = -(-packed // TILE_ROWS)
    tiles = batch_size * tiles_a_row
    work = (batch_size + units - 1) * tiles_a_row
    parts = min(batch_size + units - 1, (units - 1) * 2) * tiles_a_row
    return (
        (2, torch.uint64),
        (units + 1, torch.int32),
        ((work, 8), torch.int32),
        (tiles + 1, torch.int32),
        ((tiles, 2), torch.int32),
        (parts, torch.int32),
    )


def plan(given: Mapping[str, Any], *, fold: int, units: int, whole_tails: bool = True) -> None:
    """Write a plan.

    Args:
        given: BUFFERS, and `seqlens_kv_indptr` [rows + 1], `max_seqlen_qo`, `kv_granularity`.
        fold: Groups of heads that are rows of their own.
        units: Workgroups.
        whole_tails: Whether a tail with fewer keys than there are query tokens joins the part before it.

    Raises:
        PlanTooSmall: a buffer is.
    """
    starts = given["seqlens_kv_indptr"].tolist()
    q_len, step = given["max_seqlen_qo"], given["kv_granularity"]
    rows = [
        (row, group, start, end)
        for row, (start, end) in enumerate(pairwise(starts))
        for group in range(fold)
        if end > start
    ]
    overhead = TILE_ROWS
    blocks = sum(-(-(end - start) // step) + overhead for *_, start, end in rows)
    payload = max(-(-blocks // units), 1) + overhead
    work: list[list[list[int]]] = [[] for _ in range(units)]
    cuts: list[list[list[int]]] = []
    unit, left = 0, payload
    for row, group, start, end in rows:
        parts: list[list[int]] = []
        at = start
        while at < end:
            if left <= overhead:
                unit, left = unit + 1, payload
            take = min(left - overhead, -(-(end - at) // step))
            stop = min(at + take * step, end)
            if whole_tails and end - stop < q_len:
                stop = end
            first = (row * fold + group) * q_len
            item = [row, -1, first, first + q_len, at, stop, end - stop, 0]
            work[unit].append(item)
            parts.append(item)
            left -= take + overhead
            at = stop
        cuts.append(parts)
    _write(given, work, cuts, q_len)


def _write(
    given: Mapping[str, Any], work: list[list[list[int]]], cuts: list[list[list[int]]], q_len: int
) -> None:
    reduce_indptr, final_map, partial_map, partial = [0], [], [], 0
    for parts in cuts:
        if len(parts) == 1:
            continue
        for item in parts:
            item[1] = partial
            partial_map.append(partial)
            partial += q_len
        final_map.append(parts[0][2:4])
        reduce_indptr.append(len(partial_map))
    items = [item for one in work for item in one]
    ends = torch.tensor([len(one) for one in work]).cumsum(0).tolist()
    for name, values in (
        ("work_indptr", [0, *ends]),
        ("work_info_set", items),
        ("reduce_final_map", final_map),
        ("reduce_partial_map", partial_map),
        ("reduce_indptr", reduce_indptr),
    ):
        buffer = given[name]
        if len(values) > buffer.shape[0] or (name == "work_indptr" and len(values) != buffer.shape[0]):
            raise PlanTooSmall(f"{name} got {len(values)} rows; needs no more than {buffer.shape[0]}")
        if values:
            buffer[: len(values)] = torch.tensor(values, dtype=buffer.dtype)
    given["reduce_indptr"][len(reduce_indptr) :] = reduce_indptr[-1]
    addresses = [given[name].data_ptr() for name in ("work_indptr", "work_info_set")]
    given["work_metadata_ptrs"].view(torch.int64).copy_(torch.tensor(addresses))


def planned(
    kv_indptr: Tensor, *, heads: int, q_len: int, units: int, step: int = 16, fold: int = 1
) -> dict[str, Tensor]:
    """A plan of rows, in buffers of its own; arguments as for `plan` and `sizes`."""
    rows = kv_indptr.shape[0] - 1
    buffers = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in zip(BUFFERS, sizes(rows, heads * fold * q_len, units), strict=True)
    }
    given = {**buffers, "seqlens_kv_indptr": kv_indptr, "max_seqlen_qo": q_len, "kv_granularity": step}
    plan(given, fold=fold, units=units)
    return buffers
