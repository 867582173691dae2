"""The judge passes what is right, catches every known fault at every length, and says what it found."""

import math

import pytest
import torch

from anymla.contract import AttentionOutput
from anymla.errors import AnyMLAError
from anymla.verification import faults
from anymla.verification.faults import FAULTS, INPUTS, LENGTHS, Kernel
from anymla.verification.judge import (
    Judgement,
    JudgementFailed,
    judge,
    judge_tensor,
    judge_topk,
    judge_written,
    together,
)

INF, NAN = math.inf, math.nan


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def result(out: torch.Tensor, lse: torch.Tensor | None = None) -> AttentionOutput:
    return AttentionOutput(out, lse)


class TestFaults:
    """What the field got wrong must not pass; what is right must pass with room to spare."""

    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("inputs", INPUTS)
    def test_a_right_kernel_uses_less_than_half_of_the_budget(self, inputs, length):
        judgement = faults.trial(inputs, length).judge(Kernel())
        judgement.require_pass()
        assert judgement.share < 0.5

    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
    def test_every_fault_is_caught_at_every_length_with_twice_the_budget_or_more(self, fault, length):
        assert faults.trial(fault.inputs, length).judge(fault()).share > 2

    def test_the_classic_bugs_of_the_field_are_among_them(self):
        assert {fault.__name__ for fault in FAULTS} >= {
            "Base2Merge",
            "AbsorbedScale",
            "UnmaskedTail",
            "CausalOffByOne",
            "RowsAllEqual",
            "SinkPerSplit",
            "SinkDropped",
            "PlusInfinity",
            "Int32Offset",
            "FnuzReadAsFn",
            "MinusOneIsSlotZero",
            "WrongUnpad",
        }

    def test_a_fault_that_passes_is_reported_as_missed(self):
        missed = faults.caught(Kernel, LENGTHS[:1])
        assert not missed.passed
        assert missed.share > 1
        assert "of the budget at 17 tokens" in missed.reasons[0]

    def test_names_are_distinct(self):
        assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 12


class TestBudget:
    """Twice the eager error and two roundings, of the largest value and of the mean, whole and row by row."""

    def test_the_eager_result_itself_uses_less_than_half(self):
        right = torch.randn(4, 8, 64, generator=draw(0), dtype=torch.float64)
        eager = right.bfloat16()
        assert judge_tensor("out", eager, right, eager).share < 0.5

    def test_an_error_of_the_budget_passes_and_one_above_fails(self):
        right = torch.ones(1, 64, dtype=torch.float64)
        eps = torch.finfo(torch.float32).eps
        assert judge_tensor("out", (right + 2 * eps).float(), right).share == pytest.approx(1.0)
        assert not judge_tensor("out", (right + 3 * eps).float(), right).passed

    def test_noise_of_the_eager_run_widens_it(self):
        right = torch.ones(1, 64, dtype=torch.float64)
        off = right.clone()
        off[0, 0] += 0.01
        assert not judge_tensor("out", off.float(), right).passed
        assert judge_tensor("out", off.float(), right, off.float()).share == pytest.approx(0.5, rel=1e-3)

    def test_the_luckiest_of_several_eager_runs_does_not_count(self):
        right = torch.ones(1, 64, dtype=torch.float64)
        off = (right + 1e-3).float()
        assert judge_tensor("out", off, right, right.float(), off).passed

    def test_an_error_spread_over_all_elements_is_seen_in_the_mean(self):
        right = torch.ones(1, 1000, dtype=torch.float64)
        eager = right.clone()
        eager[0, 0] += 0.01
        assert judge_tensor("out", eager.float(), right, eager.float()).passed
        everywhere = judge_tensor("out", (right + 0.005).float(), right, eager.float())
        assert everywhere.share > 100
        assert "mean error" in everywhere.reasons[0]

    def test_a_wrong_row_of_small_values_cannot_hide_below_a_large_one(self):
        right = torch.stack((torch.full((64,), 10.0), torch.full((64,), 0.1))).double()
        eager = right.bfloat16()
        got = eager.clone()
        got[1] *= 1.1  # less than one rounding of the other row
        assert judge_tensor("out", got, right, eager, by_row=False).passed
        judgement = judge_tensor("out", got, right, eager)
        assert judgement.share > 5
        assert "error of its row" in judgement.reasons[0]

    def test_a_row_of_exact_zeros_must_be_exact_zeros(self):
        right = torch.stack((torch.ones(8), torch.zeros(8))).double()
        got = right.float()
        got[1, 3] = 1e-30
        assert judge_tensor("out", got, right, right.float()).share == INF

    def test_subnormal_results_of_fp16_are_given_their_spacing(self):
        right = torch.full((2, 8), 1.4e-7, dtype=torch.float64)
        assert judge_tensor("out", right.half(), right, right.half()).passed

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_is_no_normal_number_of_fp32_may_be_zero_and_no_more(self, dtype):
        zero = torch.zeros(2, 8, dtype=dtype)
        for size, passes in ((3e-41, True), (3e-38, False)):
            right = torch.full((2, 8), size, dtype=torch.float64)
            assert judge_tensor("out", zero, right, right.to(dtype)).passed is passes

    def test_the_lse_is_held_to_fp32_even_if_out_is_bf16(self):
        out, lse = torch.ones(2, 3, 8, dtype=torch.float64), torch.full((2, 3), 9.3, dtype=torch.float64)
        eager = result(out.bfloat16(), lse.float())
        assert judge(eager, result(out, lse), eager).passed
        assert judge(result(out.bfloat16(), lse.bfloat16().float()), result(out, lse), eager).share > 1000

    def test_no_lse_is_not_judged(self):
        out = torch.ones(2, 3, 8, dtype=torch.float64)
        assert judge(result(out.float()), result(out, torch.zeros(2, 3)), result(out.float())).passed

    def test_no_rows_pass(self):
        none = torch.zeros(0, 3, 8)
        assert judge(result(none), result(none.double()), result(none)).share == 0


class TestPlaces:
    """Infinities and NaN stand where the reference has them, and nowhere else."""

    @pytest.mark.parametrize("wrong", [NAN, INF, -INF], ids=["NaN", "inf", "-inf"])
    def test_a_number_that_is_not_one_is_caught(self, wrong):
        right = torch.ones(2, 8, dtype=torch.float64)
        got = right.float()
        got[1, 5] = wrong
        judgement = judge_tensor("out", got, right, right.float())
        assert judgement.reasons == (
            f"out[1, 5] got {wrong}; needs 1.0; 1 of 16 elements are infinite or NaN in the wrong place",
        )

    def test_minus_infinity_is_not_plus_infinity(self):
        right = torch.tensor([[-INF, 2.0]], dtype=torch.float64)
        assert judge_tensor("lse", right.float(), right, right.float(), by_row=False).passed
        assert not judge_tensor("lse", right.abs().float(), right, right.float(), by_row=False).passed

    def test_a_nan_of_the_reference_must_be_there(self):
        right = torch.tensor([[NAN, 2.0]], dtype=torch.float64)
        assert judge_tensor("out", right.float(), right, right.float()).passed
        assert not judge_tensor("out", torch.tensor([[0.0, 2.0]]), right, right.float()).passed


class TestWords:
    """A refusal is read by a person."""

    def test_it_names_the_worst_element_and_the_share(self):
        right = torch.ones(2, 2, 4, dtype=torch.float64)
        got = right.float()
        got[1, 0, 2] = 1.5
        with pytest.raises(JudgementFailed) as failed:
            judge(result(got), result(right), result(right.float())).require_pass()
        assert str(failed.value).startswith("out[1, 0, 2] got 1.5; reference 1; max error of out 0.5 is ")

    def test_it_is_an_assertion_and_an_error_of_ours(self):
        assert issubclass(JudgementFailed, AssertionError)
        assert issubclass(JudgementFailed, AnyMLAError)

    def test_shapes_and_dtypes_are_named(self):
        out = torch.ones(2, 3, 8, dtype=torch.float64)
        lse = torch.zeros(2, 3, dtype=torch.float64)
        transposed = result(out.float(), lse.T.float())
        assert judge(transposed, result(out, lse), transposed).reasons == (
            "lse got shape (3, 2); needs (2, 3)",
        )
        narrow = result(out.float(), lse.half())
        assert judge(narrow, result(out, lse)).reasons == (
            "lse got dtype torch.float16; needs torch.float32",
        )

    def test_judgements_together_keep_every_reason_and_the_worst_share(self):
        both = together(Judgement(0.3, "here"), Judgement(2.0, "there", ("wrong",)))
        assert (both.share, both.where, both.reasons) == (2.0, "there", ("wrong",))


class TestWritten:
    """A cache gives back what the format can hold of what was written."""

    given = torch.tensor([[1.0, -3.3, 500.0, NAN], [0.1, 0.2, 0.3, 0.4]])
    expected = torch.tensor([[1.0, -3.25, 448.0, NAN], [0.1015625, 0.203125, 0.3125, 0.40625]]).double()

    def test_equal_rows_use_none_of_it(self):
        assert judge_written(self.expected.float(), self.expected, self.given).share == 0

    @pytest.mark.parametrize(("column", "value"), [(1, -3.5), (2, NAN), (2, 240.0), (3, 0.0)], ids=str)
    def test_another_value_is_wrong(self, column, value):
        got = self.expected.clone()
        got[0, column] = value
        judgement = judge_written(got, self.expected, self.given)
        assert not judgement.passed
        assert f"cache[0, {column}] got {value}" in judgement.reasons[0]

    def test_the_other_neighbour_passes_only_at_the_same_distance(self):
        given, expected = torch.tensor([[1.125]]), torch.tensor([[1.0]]).double()
        assert judge_written(torch.tensor([[1.25]]), expected, given).passed
        assert not judge_written(torch.tensor([[1.375]]), expected, given).passed

    def test_a_row_that_was_not_to_be_written_is_not_judged(self):
        expected = torch.tensor([[NAN, NAN]]).double()
        assert judge_written(torch.tensor([[7.0, 8.0]]), expected, torch.tensor([[1.0, 2.0]])).passed


class TestTopK:
    """Exact logits must give the ids of the reference; rounding may swap only near ties."""

    logits = (torch.tensor([1.0, 5.0, 5.0, 3.0]).double(),)
    chosen = torch.tensor([[1, 2, 3]], dtype=torch.int32)

    def judged(self, named, eager=None):
        eager = [logit.float() for logit in self.logits] if eager is None else eager
        return judge_topk(ids(named), self.chosen, self.logits, eager)

    def test_the_ids_of_the_reference_are_right(self):
        assert self.judged([1, 2, 3]).share == 0

    def test_their_order_is_left_open(self):
        assert self.judged([3, 1, 2]).share == 0

    def test_rows_without_one_finite_logit_have_an_order_left_open_too(self):
        nothing = torch.full((2,), math.nan)
        assert judge_topk(ids([1, 0]), ids([0, 1]), [nothing.double()], [nothing]).share == 0

    def test_of_exact_ties_the_later_token_is_wrong(self):
        found = judge_topk(ids([2]), ids([1]), self.logits, [logit.float() for logit in self.logits])
        assert found.reasons == ("indices[0] got 2; needs 1; [2]",)

    def test_ties_may_swap_where_fp32_rounds(self):
        rounded = [self.logits[0].float() + 1e-6]
        assert judge_topk(ids([2]), ids([1]), self.logits, rounded).passed
        assert not judge_topk(ids([3]), ids([1]), self.logits, rounded).passed
        assert not self.judged([0, 1, 2], rounded).passed

    @pytest.mark.parametrize("named", [[1, 1, 3], [1, 2, -1], [1, 2, 4], [1, 2, -7]], ids=str)
    def test_repeated_missing_and_foreign_tokens_are_wrong(self, named):
        assert "needs 3 distinct tokens" in self.judged(named).reasons[0]

    def test_a_row_that_sees_nothing_is_padded(self):
        nothing = [torch.zeros(0).double()]
        chosen = torch.full((1, 2), -1, dtype=torch.int32)
        assert judge_topk(chosen.clone(), chosen, nothing, [torch.zeros(0)]).passed
        assert not judge_topk(torch.zeros(1, 2, dtype=torch.int32), chosen, nothing, [torch.zeros(0)]).passed
