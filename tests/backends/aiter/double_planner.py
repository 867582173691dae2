"""AITER's planner of persistent work, and what must hold of every plan that a kernel is given."""

from typing import Any

import torch
from double_stages import Aborted

from anymla.verification.aiter_objects import planner
from anymla.verification.aiter_objects.planner import sizes

__all__ = ["check", "plan", "sizes"]


def plan(given: dict[str, Any], *, fold: int, units: int, whole_tails: bool) -> None:
    """A plan in AITER's format; a buffer that is too small would be written past its end."""
    try:
        planner.plan(given, fold=fold, units=units, whole_tails=whole_tails)
    except planner.PlanTooSmall as error:
        raise Aborted(str(error)) from None


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
