"""What the product does not reach: ragged steps, updates, unknown lengths, graphs, what is planned when."""

from dataclasses import replace

import cases
import pytest
import torch
from cases import Case
from double import AiterDouble

from anymla import reference
from anymla.backends.aiter_mla import decode, operands, pages
from anymla.contract import AttentionOutput, Batch
from anymla.errors import BackendError, InvalidInput
from anymla.planned import DecodePlan
from anymla.plans import decode_plan
from anymla.verification import eager
from anymla.verification.judge import judge

FOLDED = Case("HEAD", "gfx942", 48, "bf16", 2, False, False, "a tail of one")
PLAIN = Case("HEAD", "gfx942", 16, "bf16", 3, True, False, "ragged")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> AiterDouble:
    """The newest AITER on gfx942."""
    return AiterDouble("HEAD", "gfx942", cases.UNITS).install(monkeypatch)


def step(lens: list[int], q_lens: list[int], **more: object) -> Batch:
    """Sequences on pages of 8, the last page first."""
    table = torch.zeros(len(lens), 12, dtype=torch.int32)
    page = cases.SLOTS // 8
    for row, n in enumerate(lens):
        for at in range(-(-n // 8)):
            page -= 1
            table[row, at] = page
    indptr = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor(lens, dtype=torch.int32)
    return Batch.of(seq_lens=lengths, block_table=table, qo_indptr=indptr, block_size=8, **more)


def plan_of(case: Case, batch: Batch) -> DecodePlan:
    """The plan of a step for a case's heads and formats."""
    problem = replace(cases.problem_of(case), q_len=batch.max_q_len)
    return decode_plan(batch, problem, "aiter", cases.machine_of(case))


def require_right(plan: DecodePlan, batch: Batch, case: Case) -> AttentionOutput:
    """Run a plan and hold the result to the judge."""
    q = cases._queries(case.heads, plan.batch.num_tokens)
    cache = cases._values("bf16")
    got = plan.run(*q, cache, sm_scale=cases.SM_SCALE, return_lse=case.lse)
    given = {
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "qo_indptr": batch.qo_indptr,
        "sm_scale": cases.SM_SCALE,
        "causal": batch.causal,
    }
    judge(got, reference.decode(*q, cache, **given), *eager.decode(*q, cache, **given)).require_pass()
    return got


STEPS = {
    "several tokens each": ([33, 9, 17], [3, 3, 3]),
    "ragged tokens": ([33, 9, 17], [1, 3, 2]),
    "a sequence without tokens": ([33, 9, 17], [2, 0, 3]),
    "fewer keys than tokens": ([2, 1, 17], [3, 3, 3]),
    "no keys": ([0, 0], [3, 1]),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize(("lens", "q_lens"), STEPS.values(), ids=STEPS)
def test_any_step_is_right(double: AiterDouble, lens: list[int], q_lens: list[int], causal: bool) -> None:
    batch = step(lens, q_lens, causal=causal)
    require_right(plan_of(PLAIN, batch), batch, PLAIN)


def test_rows_past_the_last_sequence_come_out_empty(double: AiterDouble) -> None:
    batch = step([33, 9], [1, 1], num_tokens=5)
    got = require_right(plan_of(PLAIN, batch), batch, PLAIN)
    assert (got.out[2:] == 0).all()
    assert got.lse is not None and (got.lse[2:] == -torch.inf).all()


def test_a_step_of_no_sequences_is_empty(double: AiterDouble) -> None:
    batch = step([], [])
    got = plan_of(PLAIN, batch).run(
        *cases._queries(16, 0), cases._values("bf16"), sm_scale=1.0, return_lse=True
    )
    assert got.out.shape == (0, 16, 512)


def test_lengths_that_only_the_device_knows_are_never_read_back(double: AiterDouble) -> None:
    known = step([33, 9, 17], [2, 2, 2])
    unknown = replace(known, seq_lens_host=None, qo_indptr_host=None)
    plan = plan_of(PLAIN, unknown)
    assert plan.state.layout is plan.state.single
    require_right(plan, known, PLAIN)


def test_a_uniform_step_takes_the_kernel_of_several_tokens(double: AiterDouble) -> None:
    plan = plan_of(PLAIN, batch := step([33, 9, 17], [4, 4, 4]))
    assert plan.state.layout is plan.state.several
    require_right(plan, batch, PLAIN)
    assert double.launched == ["mla_a16w16_qh16_m16x4_n16x1_coex0_mask1"]


@pytest.mark.parametrize("case", [PLAIN, FOLDED], ids=["rows", "persistent"])
def test_an_update_takes_new_lengths_into_the_same_memory(double: AiterDouble, case: Case) -> None:
    plan = plan_of(case, step([65, 70], [2, 2], max_seq_len=96))
    before = [plan.state.indices.data_ptr(), plan.state.layout.kv_indptr.data_ptr()]
    for lens, q_lens in (([80, 9], [2, 2]), ([5, 96], [1, 2]), ([64, 64], [2, 2])):
        batch = step(lens, q_lens, num_tokens=4)
        plan.update(batch)
        require_right(plan, batch, case)
    assert before[0] == plan.state.indices.data_ptr()
    assert before[1] == plan.state.layout.kv_indptr.data_ptr()


def test_aiter_plans_again_only_when_lengths_change(double: AiterDouble) -> None:
    plan = plan_of(FOLDED, step([65, 70], [2, 2], max_seq_len=96))
    assert double.plans == 1
    plan.update(step([65, 70], [2, 2]))
    assert double.plans == 1
    plan.update(step([65, 71], [2, 2]))
    assert double.plans == 2


def test_pages_that_move_are_followed_without_another_plan(double: AiterDouble) -> None:
    batch = step([65, 70], [2, 2])
    plan = plan_of(FOLDED, batch)
    moved = replace(batch, block_table=batch.block_table.flip(0).contiguous())
    plan.update(moved)
    require_right(plan, moved, FOLDED)
    assert double.plans == 1


def test_a_captured_call_refuses_a_step_of_another_layout(double: AiterDouble) -> None:
    plan = plan_of(PLAIN, step([33, 9, 17], [4, 4, 4]))
    plan.state.captured = True
    plan.update(step([32, 8, 16], [4, 4, 4]))
    with pytest.raises(
        InvalidInput, match="query tokens got 1 a row; needs 4 for every sequence, as captured"
    ):
        plan.update(step([32, 8, 16], [4, 3, 4], num_tokens=12))


def test_a_kernel_that_returns_no_lse_is_an_error(
    double: AiterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(PLAIN, batch := step([33], [1]))
    call = plan.state.calls["mla_decode_fwd"]
    monkeypatch.setattr(plan.state, "calls", {"mla_decode_fwd": lambda **given: (call(**given)[0], None)})
    with pytest.raises(BackendError, match="was asked for an lse and AITER returned none"):
        require_right(plan, batch, PLAIN)


def test_a_cache_with_gaps_between_rows_and_pages_is_read_where_it_lies(double: AiterDouble) -> None:
    plan = plan_of(PLAIN, batch := step([33, 9], [1, 3]))
    cache, q = cases._values("bf16"), cases._queries(16, 4)
    storage = torch.full((cache.num_blocks, 3 * 8, 592), torch.nan, dtype=torch.bfloat16)
    storage[0] = 0
    apart = storage[:, 8:16, :576]
    apart.copy_(cache.data)
    got, dense = (
        plan.run(*q, one, sm_scale=cases.SM_SCALE, return_lse=True)
        for one in (replace(cache, data=apart), cache)
    )
    assert torch.equal(got.out, dense.out) and batch.num_tokens == 4


def test_a_cache_whose_pages_are_no_whole_rows_apart_is_refused(double: AiterDouble) -> None:
    plan = plan_of(PLAIN, step([33], [1]))
    odd = torch.zeros(24 * 8 * 600, dtype=torch.bfloat16).as_strided((24, 8, 576), (8 * 576 + 64, 576, 1))
    with pytest.raises(
        InvalidInput, match=r"kv_cache got strides \(4672, 576, 1\); needs pages of whole rows"
    ):
        plan.run(
            *cases._queries(16, 1), replace(cases._values("bf16"), data=odd), sm_scale=1.0, return_lse=True
        )


def test_keys_seen_are_counted_by_rows() -> None:
    batch = step([9, 4], [3, 2], num_tokens=6)
    sequence, lengths = pages.keys_seen(batch)
    assert lengths.tolist() == [7, 8, 9, 3, 4, 0]
    assert sequence[:5].tolist() == [0, 0, 0, 1, 1]


def test_chosen_slots_are_closed_up() -> None:
    chosen = torch.tensor([[-1, 5, -1, 7], [-1, -1, -1, -1], [3, 2, 1, -1]], dtype=torch.int32)
    indptr, lengths = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    indices = torch.full((13,), 99, dtype=torch.int32)
    pages.write_chosen(indptr, indices, lengths, chosen, None)
    assert (indptr.tolist(), lengths.tolist()) == ([0, 2, 2, 5], [2, 0, 3])
    assert indices[:5].tolist() == [5, 7, 3, 2, 1]
    pages.write_chosen(indptr, indices, lengths, chosen, torch.tensor([2, 4, 1], dtype=torch.int32))
    assert indices[: indptr[-1]].tolist() == [5, 3]


@pytest.mark.parametrize(
    ("rows", "keys", "knobs", "splits"),
    [
        (1, 100_000, {}, 16),
        (64, 1000, {}, 1),
        (64, 1000, {"min_num_kv_splits": 2}, 2),
        (1, 100_000, {"num_kv_splits": 1}, 1),
        (0, 0, {}, 1),
    ],
)
def test_splits_fill_the_chip_within_what_quirks_allow(
    rows: int, keys: int, knobs: dict[str, int], splits: int
) -> None:
    assert decode.split_count(rows, keys, 64, knobs) == splits


@pytest.mark.parametrize("heads", [16, 12, 128])
def test_queries_in_fp8_reach_the_kernel_as_they_are_with_their_scale(
    double: AiterDouble, heads: int
) -> None:
    case = Case("HEAD", "gfx942", heads, "fp8", 1, False, False, "ragged")
    plan, cache = plan_of(case, step([33, 0, 17], [1, 1, 1])), cases._values("fp8_e4m3fnuz")
    nope, rope = cases._queries(heads, 3)
    fp8, scale = operands.rounded(torch.cat((nope, rope), -1), torch.float8_e4m3fnuz)
    out = torch.empty(3, heads, 512, dtype=torch.float16)
    by_rounding = plan.run(nope, rope, cache, sm_scale=cases.SM_SCALE).out
    parts = fp8[..., :512], fp8[..., 512:]
    assert torch.equal(by_rounding, plan.run(*parts, cache, sm_scale=cases.SM_SCALE, q_scale=scale).out)
    plan.run(*parts, cache, sm_scale=cases.SM_SCALE / 2, q_scale=2 * scale, out=out)
    assert torch.equal(by_rounding.half(), out)


def test_rounded_queries_come_back_by_their_scale() -> None:
    q = torch.randn(3, 2, 576).bfloat16()
    rounded, scale = operands.rounded(q, torch.float8_e4m3fnuz)
    assert scale.shape == (1,)
    assert (rounded.float() * scale - q.float()).abs().max() <= q.abs().max() / 16
    nothing, scale = operands.rounded(torch.zeros(1, 1, 576).bfloat16(), torch.float8_e4m3fn)
    assert scale.isfinite().all() and (nothing.float() == 0).all()
