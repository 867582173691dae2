"""What is found of a kernel, with kernels that are torch: right, wrong, or silent about something."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anymla.backends.aiter_mla.manifest import route_of
from anymla.backends.aiter_mla.provider import recorded_aiter
from anymla.errors import InvalidInput
from anymla.problem import Problem
from anymla.verification.aiter_objects import adapter, findings, launch, planner, run, stages
from anymla.verification.aiter_objects.code_object import Disassembler
from anymla.verification.aiter_objects.findings import Finding, examine
from anymla.verification.aiter_objects.kernels import KERNELS, Kernel
from anymla.verification.aiter_objects.launch import Faulted, Objects, Ran
from anymla.verification.aiter_objects.stand_in import NotModelled, kernel_of

OBJECTS = Objects(Path(), "gfx942", Disassembler("", 19))
ROWS = Kernel("rows", "bf16", "bf16", 4, 2, 16, 16)
WALKS = Kernel("walks", "fp8", "fp8", 4, 2)
Attend = Callable[[Tensor, Tensor, int, int, int], tuple[Tensor, Tensor]]


def attend(q: Tensor, keys: Tensor, first: int, stop: int, end: int) -> tuple[Tensor, Tensor]:
    """Tokens [n, H, 576] over keys [first, stop) of a row of `end`, causal."""
    n = q.shape[0]
    scores = torch.einsum("nhd,kd->nhk", q, keys[first:stop]) * findings.SM_SCALE
    seen = end - (n - 1 - torch.arange(n))
    hidden = torch.arange(first, stop)[None] >= seen[:, None]
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    return torch.einsum("nhk,kd->nhd", weights, keys[first:stop, :512]), lse


def unmasked(q: Tensor, keys: Tensor, first: int, stop: int, end: int) -> tuple[Tensor, Tensor]:
    """A kernel that is not causal."""
    parts = [attend(q[t : t + 1], keys, first, stop, end) for t in range(q.shape[0])]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def kernel_of_torch(attend: Attend = attend, tile: int = 16, notes: frozenset[str] = frozenset()):
    """A stand-in for `launch` that does the maths."""

    def launched(
        objects: Objects,
        kernel: Kernel,
        tensors: Mapping[str, Tensor | None],
        *,
        results: Mapping[str, Tensor | None],
        sm_scale: float,
        splits: int,
        grid: tuple[int, int, int],
    ) -> Ran:
        scales = [1.0 if tensors[name] is None else float(tensors[name]) for name in ("QSCALE", "KVSCALE")]
        q, kv = tensors["Q"].float() * scales[0], tensors["KV"]
        slots, starts = tensors["LTD"].long(), tensors["LTP"].tolist()
        n = kernel.q_len
        if kernel.persistent:
            for row, part, first, last, start, stop, *_ in tensors["work_info_set"].tolist():
                keys = kv[slots[starts[row] : starts[row + 1]]].float() * scales[1]
                at = [start - starts[row], stop - starts[row], len(keys)]
                out, lse = attend(q[first:last], keys, *at)
                to = slice(first, last) if part < 0 else slice(part, part + n)
                results["RP" if part < 0 else "R"][to] = out.to(
                    results["RP"].dtype if part < 0 else out.dtype
                )
                results["LSEP" if part < 0 else "LSE"][to] = lse
            return Ran(notes, "")
        for row, (start, end) in enumerate(pairwise(starts)):
            keys, at = kv[slots[start:end]].float() * scales[1], slice(row * n, row * n + n)
            blocks = -(-len(keys) // tile)
            for split in range(min(splits, blocks)):
                cut = [blocks * (split + more) // min(splits, blocks) * tile for more in (0, 1)]
                out, lse = attend(q[at], keys, cut[0], min(cut[1], len(keys)), len(keys))
                results["R"][at, split], results["LSE"][at, split] = out, lse
        return Ran(notes, "")

    return launched


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finding]:
    """Examine a kernel that is torch."""

    def examined(kernel: Kernel, **made: object) -> Finding:
        monkeypatch.setattr(stages, "launch", kernel_of_torch(**made))
        return examine(OBJECTS, kernel, quick=True)

    return examined


def test_a_kernel_of_rows_that_is_right_is_right(found) -> None:
    one = found(ROWS)
    assert (one.outcome, one.why, one.timing) == ("right", "", 0)
    assert one.share < 1
    assert one.facts == {
        "reads splits that were not written": "no",
        "writes splits that are not read": "no",
        "NaN in slot 0 reaches": "no row",
        "one split writes": "fp32",
        "lse of one split": "right",
        "lse of the row, one split": "not written",
    }


def test_a_persistent_kernel_that_is_right_is_right(found) -> None:
    one = found(replace(WALKS, q="bf16", kv="bf16"))
    assert (one.outcome, one.why) == ("right", "")
    assert one.facts == {
        "lse of cut rows": "right",
        "lse of whole rows": "right",
        "NaN in slot 0 reaches": "no row",
    }


def test_what_depends_on_time_is_undecided_and_never_right(found) -> None:
    one = found(ROWS, notes=frozenset({"a race", "another"}))
    assert (one.outcome, one.timing) == ("undecided", 2)


@pytest.mark.parametrize("kernel", [ROWS, WALKS], ids=["rows", "persistent"])
def test_a_kernel_that_is_not_causal_is_wrong(found, kernel: Kernel) -> None:
    one = found(kernel, attend=unmasked)
    assert one.outcome == "wrong"
    assert "of its budget" in one.why


def test_splits_that_the_second_stage_reads_and_nobody_wrote_are_named(found) -> None:
    # Tiles of 32 keys, merged as if of 16: of 17 keys two splits are read and one was written.
    assert found(ROWS, tile=32).facts["reads splits that were not written"] == "at [17] keys"
    assert found(replace(ROWS, step=64)).facts["writes splits that are not read"] == "at [17, 33] keys"


def test_slot_0_is_told_where_a_kernel_reads_it(found) -> None:
    def careless(q: Tensor, keys: Tensor, *at: int) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, keys, *at)
        return out + 0 * careless.slot_0, lse  # type: ignore[attr-defined]

    def launched(*given: object, **more: object) -> Ran:
        careless.slot_0 = given[2]["KV"][0, :512].float()  # type: ignore[attr-defined, index]
        return kernel_of_torch(careless)(*given, **more)

    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(stages, "launch", launched)
        one = examine(OBJECTS, ROWS, quick=True)
    assert one.facts["NaN in slot 0 reaches"] == "rows of [3, 17, 33, 77, 520] keys"
    assert one.outcome == "right"


def test_a_kernel_that_goes_astray_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def astray(*given: object, **more: object) -> Ran:
        raise Faulted("`buffer_store`: an address in no buffer")

    monkeypatch.setattr(stages, "launch", astray)
    one = examine(OBJECTS, ROWS, quick=True)
    assert one.outcome == "faults"
    assert one.facts["one split"] == "faults: `buffer_store`: an address in no buffer"


def test_keys_past_what_a_kernel_can_count_to_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_24_bits(*given: object, **more: object) -> Ran:
        tensors = dict(given[2])  # type: ignore[call-overload]
        tensors["LTD"] = tensors["LTD"] & 0xFFFFFF
        return kernel_of_torch()(*given[:2], tensors, **more)  # type: ignore[arg-type]

    for launched, found in ((kernel_of_torch(), True), (in_24_bits, False)):
        monkeypatch.setattr(stages, "launch", launched)
        assert [findings.finds_far_keys(OBJECTS, kernel) for kernel in (ROWS, WALKS)] == [found] * 2


def test_a_kernel_of_which_nothing_is_known_is_not_run_and_not_wrong() -> None:
    aiter = recorded_aiter("HEAD", "gfx942")
    (route, _) = route_of(Problem("decode", "bf16", "bf16", 16, 512, 64), aiter, 1)
    assert route is not None
    with pytest.raises(NotModelled, match="mla_new is not run: it has no row in KERNELS"):
        kernel_of(OBJECTS, route.call._replace(kernel="mla_new"))
    with pytest.raises(NotModelled, match=f"{route.call.kernel} is not run: its code object is not there"):
        kernel_of(OBJECTS, route.call)


def test_every_number_of_heads_and_of_query_tokens_that_our_adapter_has_routes_for_is_asked() -> None:
    asked = {(call.heads, call.q_len) for call in adapter.calls()}
    assert asked >= set(product(range(8, 129, 8), (1, 2, 3, 4)))


def test_a_plan_covers_every_key_once_and_is_refused_where_it_does_not_fit() -> None:
    kv_indptr = torch.tensor([0, 5, 5, 300], dtype=torch.int32)
    plan = planner.planned(kv_indptr, heads=16, q_len=2, units=6)
    items = plan["work_info_set"][: int(plan["work_indptr"][-1])].tolist()
    keys = [key for row, _, _, _, start, stop, _, _ in items for key in range(start, stop)]
    assert sorted(keys) == list(range(300))
    assert {item[0] for item in items} == {0, 2}
    small = {**plan, "reduce_partial_map": plan["reduce_partial_map"][:1]}
    given = {"seqlens_kv_indptr": kv_indptr, "max_seqlen_qo": 2, "kv_granularity": 16}
    with pytest.raises(planner.PlanTooSmall, match=r"reduce_partial_map got .* needs no more than 1"):
        planner.plan(small | given, fold=1, units=6)


def test_arguments_lie_where_the_kernel_reads_them() -> None:
    assert [launch.SLOTS.index(name) * 16 for name in ("R", "s_MQA", "STP", "RP", "LSEP")] == [
        0, 0x80, 0xE0, 0xF0, 0x130,
    ]  # fmt: skip


def report(*routes: Finding) -> run.AiterReport:
    return run.AiterReport("gfx942", "0.1.20", "0123", 19, True, (), {"mla_new": "why"}, routes, "", 1.0)


def test_evidence_is_of_an_adapter_that_is_right(tmp_path: Path) -> None:
    fine, bad = (Finding("a call", outcome, 0.5, "", {}, 3, 1.0) for outcome in ("undecided", "wrong"))
    written = run.record(report(fine), tmp_path)
    assert written == tmp_path / "gfx942" / "aiter_objects.json"
    assert '"undecided": 1' in written.read_text()
    with pytest.raises(InvalidInput, match="report got 1 failures; needs none"):
        run.record(report(fine, bad), tmp_path)


def test_every_kernel_is_tried_on_some_chip() -> None:
    assert {chip for kernel in KERNELS for chip in kernel.chips} == {"gfx942", "gfx950"}
    assert all(kernel.persistent == (kernel.step == 0) for kernel in KERNELS)
