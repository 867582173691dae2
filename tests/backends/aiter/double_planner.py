"""AITER's planner of persistent work, and what must hold of every plan that a kernel is given."""

from itertools import pairwise
from typing import Any

import torch
from double_stages import Aborted

TILE_ROWS = 16


def sizes(batch_size: int, packed: int, units: int) -> tuple[tuple[Any, torch.dtype], ...]:
    """Shapes and dtypes of the six buffers, as AITER counts them for its fast mode."""
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


def plan(given: dict[str, Any], *, fold: int, units: int) -> None:
    """Share all blocks of keys equally among workgroups, cutting a row where one is full."""
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
            # A tail with fewer keys than there are query tokens joins the part before it.
            if end - stop < q_len:
                stop = end
            first = (row * fold + group) * q_len
            item = [row, -1, first, first + q_len, at, stop, end - stop, 0]
            work[unit].append(item)
            parts.append(item)
            left -= take + overhead
            at = stop
        cuts.append(parts)
    _write(given, work, cuts, q_len)


def _write(given: dict[str, Any], work: Any, cuts: Any, q_len: int) -> None:
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
            raise Aborted(f"{name} is written past its end: {len(values)} of {buffer.shape[0]}")
        if values:
            buffer[: len(values)] = torch.tensor(values, dtype=buffer.dtype)
    given["reduce_indptr"][len(reduce_indptr) :] = reduce_indptr[-1]
    addresses = [given[name].data_ptr() for name in ("work_indptr", "work_info_set")]
    given["work_metadata_ptrs"].view(torch.int64).copy_(torch.tensor(addresses))


def check(given: dict[str, Any], kv_starts: list[int], q_len: int, fold: int) -> list[list[int]]:
    """The work items of a plan, after all that must hold of them."""
    pointers = given["work_meta_data"].view(torch.int64).tolist()
    if pointers != [given[name].data_ptr() for name in ("work_indptr", "work_info_set")]:
        raise Aborted("the plan's addresses are not those of its buffers")
    starts = given["work_indptr"].tolist()
    assert starts == sorted(starts), "work ranges are monotone"
    items = given["work_info_set"][: starts[-1]].tolist()
    ends = given["reduce_indptr"].tolist()
    assert ends == sorted(ends) and ends[-1] <= given["reduce_partial_map"].shape[0]
    by_tile: dict[int, list[list[int]]] = {}
    for item in items:
        by_tile.setdefault(item[2], []).append(item)
    partials = given["reduce_partial_map"].tolist()[: ends[-1]]
    used: list[int] = []
    for first, parts in by_tile.items():
        row = parts[0][0]
        edges = [kv_starts[row]] + [item[5] for item in parts]
        assert [item[4] for item in parts] == edges[:-1], "parts are sorted, disjoint and without gaps"
        assert edges[-1] == kv_starts[row + 1], "parts cover the row"
        assert all(item[6] == edges[-1] - item[5] for item in parts), "kv_offset is what follows"
        assert (len(parts) == 1) == (parts[0][1] == -1), "only an unsplit tile has no partial"
        assert first == parts[0][3] - q_len
        used += [item[1] for item in parts if item[1] >= 0]
    assert sorted(used) == sorted(partials), "the reducer reads each partial once"
    assert len(set(used)) == len(used), "no two parts share a row"
    return items
