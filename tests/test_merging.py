"""Joining partial results, sinks, and the doors through which foreign LSE conventions enter."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from anymla import reference
from anymla.contract import AttentionOutput
from anymla.errors import InvalidInput
from anymla.merging import (
    apply_sinks,
    from_base2,
    from_bhq,
    from_head_first,
    from_plus_inf_empty,
    from_sink_included,
    merge,
)
from anymla.verification.judge import judge, judge_tensor

INF, NAN = math.inf, math.nan
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def part(out: float, lse: float, dtype: torch.dtype = torch.float32) -> AttentionOutput:
    """One row of one head."""
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return AttentionOutput(torch.full((1, 1, 1), out, dtype=dtype), torch.full((1, 1), lse, dtype=lse_dtype))


def drawn(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[AttentionOutput]:
    """Parts of 5 rows and 3 heads; in each some rows are empty and hold NaN, and one row is empty in all."""
    rand = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(count):
        out = torch.randn(5, 3, 7, generator=rand)
        lse = torch.randn(5, 3, generator=rand) * 4
        empty = torch.rand(5, 3, generator=rand) < 0.3
        empty[2] = True
        parts.append(
            AttentionOutput(out.masked_fill(empty[..., None], NAN).to(dtype), lse.masked_fill(empty, -INF))
        )
    return parts


def eager(parts: list[AttentionOutput]) -> list[AttentionOutput]:
    """Plain fp32 runs of the merge, forwards and backwards."""
    runs = []
    for ordered in (parts, parts[::-1]):
        outs = torch.stack([p.out.float().nan_to_num() for p in ordered])
        lses = torch.stack([p.lse for p in ordered])
        weights = lses.softmax(0).nan_to_num()[..., None]
        runs.append(AttentionOutput((weights * outs).sum(0).to(parts[0].out.dtype), lses.logsumexp(0)))
    return runs


def require_right(got: AttentionOutput, parts: list[AttentionOutput]) -> None:
    judge(got, reference.merge(parts), *eager(parts)).require_pass()


class TestMerge:
    def test_partition_sums_2_and_8_with_outputs_1_and_0_give_one_fifth(self):
        out, lse = merge([part(1, math.log(2)), part(0, math.log(8))])
        judge_tensor("out", out, torch.tensor([[[0.2]]]).double(), torch.tensor([[[0.2]]])).require_pass()
        judge_tensor(
            "lse", lse, torch.tensor([[10.0]]).double().log(), torch.tensor([[10.0]]).log()
        ).require_pass()

    def test_the_same_in_base_2_is_converted_by_name(self):
        one, two = (from_base2(*part(out, lse)) for out, lse in ((1, 1), (0, 3)))
        assert torch.equal(merge([one, two]).out, merge([part(1, math.log(2)), part(0, math.log(8))]).out)

    def test_base_2_read_as_natural_would_be_wrong(self):
        assert round(merge([part(1, 1), part(0, 3)]).out.item(), 4) == 0.1192

    def test_natural_read_as_base_2_would_be_wrong(self):
        # Converting twice is the same mistake as exp2 of a natural logarithm.
        parts = [from_base2(*part(1, math.log(2))), from_base2(*part(0, math.log(8)))]
        assert round(merge(parts).out.item(), 4) == 0.2767

    @DTYPES
    @pytest.mark.parametrize("count", [1, 2, 3, 7])
    def test_it_is_the_reference(self, count, dtype):
        parts = drawn(count, dtype)
        got = merge(parts)
        assert got.out.dtype == dtype and got.lse.dtype == torch.float32
        require_right(got, parts)

    def test_one_part_comes_back_as_it_is(self):
        (only,) = drawn(1)
        got = merge([only])
        assert torch.equal(got.lse, only.lse)
        assert torch.equal(got.out, only.out.nan_to_num())

    def test_the_order_of_the_parts_does_not_matter(self):
        parts = drawn(4)
        for order in permutations(parts):
            require_right(merge(order), parts)

    def test_it_does_not_matter_which_parts_are_merged_first(self):
        a, b, c, d = parts = drawn(4)
        for got in (
            merge([merge([a, b]), merge([c, d])]),
            merge([a, merge([b, merge([c, d])])]),
            merge([merge([merge([a, b]), c]), d]),
        ):
            require_right(got, parts)

    @pytest.mark.parametrize("size", [1, 2, 3, 10, 37, 100])
    def test_the_size_of_the_parts_does_not_matter(self, size):
        rand = torch.Generator().manual_seed(1)
        scores = torch.randn(2, 3, 37, generator=rand) * 3
        values = torch.randn(37, 4, generator=rand)
        whole = AttentionOutput(scores.double().softmax(-1) @ values.double(), scores.double().logsumexp(-1))
        runs = [
            AttentionOutput(s.softmax(-1) @ v, s.logsumexp(-1))
            for s, v in ((scores, values), (scores.flip(-1), values.flip(0)))
        ]
        parts = [
            AttentionOutput(s.softmax(-1) @ v, s.logsumexp(-1))
            for s, v in zip(scores.split(size, -1), values.split(size), strict=True)
        ]
        judge(merge(parts), whole, *runs).require_pass()

    def test_an_empty_part_is_never_read(self):
        for rubbish in (NAN, INF, -INF):
            out, lse = merge([part(rubbish, -INF), part(3, 1), part(rubbish, -INF)])
            assert out.item() == 3 and lse.item() == 1

    def test_only_empty_parts_are_empty(self):
        out, lse = merge([part(NAN, -INF), part(NAN, -INF)])
        assert out.item() == 0 and lse.item() == -INF

    @pytest.mark.parametrize("shift", [-1e30, -1e4, 1e4, 1e30], ids=str)
    def test_large_lses_do_not_overflow(self, shift):
        out, lse = merge([part(1, shift), part(0, shift)])
        assert out.item() == 0.5 and lse.isfinite().all()

    def test_a_live_nan_is_not_taken_for_an_empty_row(self):
        out, lse = merge([part(1, NAN), part(2, 0)])
        assert out.isnan().all() and lse.isnan().all()

    def test_fp64_stays_fp64(self):
        got = merge([part(1, math.log(2), torch.float64), part(0, math.log(8), torch.float64)])
        assert got.out.dtype == got.lse.dtype == torch.float64
        judge_tensor("out", got.out, torch.tensor([[[0.2]]], dtype=torch.float64)).require_pass()

    def test_the_parts_do_not_change(self):
        parts = drawn(3)
        before = [(p.out.clone(), p.lse.clone()) for p in parts]
        merge(parts)
        for p, (out, lse) in zip(parts, before, strict=True):
            assert torch.equal(p.out.nan_to_num(), out.nan_to_num()) and torch.equal(p.lse, lse)

    @pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0)], ids=str)
    def test_nothing_merges_to_nothing(self, shape):
        nothing = AttentionOutput(torch.ones(shape), torch.zeros(shape[:2]))
        assert merge([nothing, nothing]).out.shape == shape


class TestWhatMergeRefuses:
    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            (
                AttentionOutput(torch.ones(1, 1, 1), None),
                r"parts\[1\].lse got NoneType; needs a torch.Tensor",
            ),
            (
                AttentionOutput(torch.ones(1, 1, 1), torch.zeros(1, 1).bfloat16()),
                r"parts\[1\].lse got dtype bfloat16; needs float32",
            ),
            (
                AttentionOutput(torch.ones(1, 1, 1), torch.zeros(1, 1).double()),
                r"parts\[1\].lse got dtype float64; needs float32",
            ),
            (
                AttentionOutput(torch.ones(1, 1, 1), torch.zeros(1)),
                r"parts\[1\].lse got shape \(1,\); needs \(1, 1\)",
            ),
            (
                AttentionOutput(torch.ones(1, 2, 1), torch.zeros(1, 2)),
                r"parts\[1\].out got shape \(1, 2, 1\); needs \(1, 1, 1\), from the first part",
            ),
            (
                AttentionOutput(torch.ones(1, 1, 1).half(), torch.zeros(1, 1)),
                r"parts\[1\].out got dtype float16; needs float32",
            ),
            ((torch.ones(1, 1, 1), torch.zeros(1, 1)), r"parts\[1\] got tuple; needs an AttentionOutput"),
            (
                AttentionOutput(torch.ones(1, 1, 1), torch.full((1, 1), INF)),
                r"parts\[1\].lse got \+inf at \[0, 0\]; needs -inf for an empty row; see from_plus_inf_empty",
            ),
        ],
        ids=[
            "no lse",
            "bf16 lse",
            "fp64 lse",
            "lse shape",
            "other shape",
            "other dtype",
            "a plain tuple",
            "+inf",
        ],
    )
    def test_a_part_that_is_not_ours(self, wrong, reason):
        with pytest.raises(InvalidInput, match=reason):
            merge([part(1, 0), wrong])

    def test_it_names_all_reasons_at_once(self):
        with pytest.raises(InvalidInput) as error:
            merge(
                [
                    part(1, 0),
                    AttentionOutput(torch.ones(2, 1, 1).half(), None),
                    AttentionOutput(torch.ones(1, 1, 1), torch.zeros(1, 1).half()),
                    part(1, INF),
                ]
            )
        assert [r.split(" got")[0] for r in error.value.reasons] == [
            "parts[1].out",
            "parts[1].out",
            "parts[1].lse",
            "parts[2].lse",
            "parts[3].lse",
        ]

    def test_no_parts(self):
        with pytest.raises(InvalidInput, match="parts got none; needs at least 1"):
            merge([])


class TestSinks:
    @DTYPES
    def test_it_is_the_reference(self, dtype):
        rand = torch.Generator().manual_seed(0)
        out, lse = torch.randn(5, 3, 7, generator=rand).to(dtype), torch.randn(5, 3, generator=rand)
        sinks = torch.tensor([0.5, -2.0, 3.0])
        plain = (out.float() * torch.sigmoid(lse - sinks)[..., None]).to(dtype)
        other = (out.float() * torch.exp(lse - torch.logaddexp(lse, sinks))[..., None]).to(dtype)
        got = apply_sinks(out, lse, sinks)
        assert got.dtype == dtype
        judge_tensor("out", got, reference.apply_sinks(out, lse, sinks), plain, other).require_pass()

    def test_minus_infinity_is_the_identity_and_plus_infinity_takes_everything(self):
        out, lse = drawn(1)[0]
        out = out.nan_to_num()
        got = apply_sinks(out, lse, torch.tensor([-INF, INF, -INF]))
        assert torch.equal(got[:, [0, 2]], out[:, [0, 2]]) and (got[:, 1] == 0).all()

    @pytest.mark.parametrize("sink", [-INF, -1e30, 0.0, 1e30, INF], ids=str)
    def test_an_empty_row_is_zero_whatever_the_sink_and_whatever_it_holds(self, sink):
        assert apply_sinks(*part(NAN, -INF), torch.tensor([sink])).item() == 0

    @pytest.mark.parametrize("sink", [-1e30, 1e30, 88.0, -88.0, 1e4], ids=str)
    def test_extreme_sinks_do_not_overflow(self, sink):
        assert apply_sinks(*part(2, 0), torch.tensor([sink])).isfinite().all()

    def test_once_after_the_merge_is_one_key_and_once_a_part_is_one_key_a_part(self):
        one, two, sink = part(1, math.log(2)), part(0, math.log(8)), torch.tensor([math.log(10)])
        once = apply_sinks(*merge([one, two]), sink)
        judge_tensor("out", once, torch.tensor([[[0.1]]]).double(), torch.tensor([[[0.1]]])).require_pass()
        per_part = merge([AttentionOutput(apply_sinks(*p, sink), p.lse) for p in (one, two)])
        assert round(per_part.out.item(), 4) == 0.0333

    def test_they_are_refused_with_all_reasons(self):
        with pytest.raises(InvalidInput) as error:
            apply_sinks(torch.ones(2, 3, 4), torch.zeros(3, 2), torch.zeros(4).half())
        assert error.value.reasons == (
            "lse got shape (3, 2); needs (2, 3), T, H from out",
            "sinks got shape (4,); needs (3,), H from out",
            "sinks got dtype float16; needs float32",
        )


class TestForeignConventions:
    def rows(self) -> AttentionOutput:
        """Three rows of two heads, the last of them empty, in our units."""
        rand = torch.Generator().manual_seed(0)
        out, lse = torch.randn(3, 2, 4, generator=rand), torch.randn(3, 2, generator=rand)
        out[2], lse[2] = 0, -INF
        return AttentionOutput(out, lse)

    def test_base_2(self):
        ours = self.rows()
        got = from_base2(ours.out, (ours.lse.double() / math.log(2)).float())
        assert torch.equal(got.out, ours.out)
        judge_tensor("lse", got.lse, ours.lse.double(), by_row=False).require_pass()

    def test_plus_infinity_for_an_empty_row_with_rubbish_in_it(self):
        ours = self.rows()
        out, lse = ours.out.clone(), ours.lse.clone()
        out[2], lse[2] = NAN, INF
        got = from_plus_inf_empty(out, lse)
        assert torch.equal(got.out, ours.out) and torch.equal(got.lse, ours.lse)

    def test_plus_infinity_means_nothing_about_nan(self):
        got = from_plus_inf_empty(*part(1, NAN))
        assert got.lse.isnan().all()

    def test_heads_before_the_tokens_of_each_sequence(self):
        out = torch.randn(2, 3, 5, 4)
        lse = torch.randn(2, 5, 3)
        got = from_bhq(out, lse)
        assert got.out.shape == (6, 5, 4) and got.lse.shape == (6, 5)
        for b in range(2):
            for t in range(3):
                assert torch.equal(got.out[b * 3 + t], out[b, t]) and torch.equal(
                    got.lse[b * 3 + t], lse[b, :, t]
                )

    def test_heads_first(self):
        ours = self.rows()
        got = from_head_first(ours.out, ours.lse.t().contiguous())
        assert torch.equal(got.out, ours.out) and torch.equal(got.lse, ours.lse)

    def test_conventions_compose(self):
        """FlashMLA: [B, H, q], and +inf for an empty row."""
        ours = self.rows()
        theirs = ours.lse.t()[None].clone()
        theirs[theirs == -INF] = INF
        got = from_plus_inf_empty(*from_bhq(ours.out[None], theirs))
        assert torch.equal(merge([got]).lse, ours.lse)

    def test_sinks_taken_out(self):
        ours, sinks = self.rows(), torch.tensor([0.3, -INF])
        out, lse = apply_sinks(*ours, sinks), torch.logaddexp(ours.lse, sinks)
        got = from_sink_included(out, lse, sinks)

        def by_definition(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            total, sink = lse.to(dtype).exp(), sinks.to(dtype).exp()
            return out.to(dtype) * (total / (total - sink))[..., None], (total - sink).log()

        for name, x, right, eager in zip(
            ("out", "lse"), got, by_definition(torch.float64), by_definition(torch.float32), strict=True
        ):
            judge_tensor(name, x[:2], right[:2], eager[:2], by_row=False).require_pass()
        assert (got.out[2] == 0).all() and (got.lse[2] == -INF).all()
        assert torch.equal(got.out[:, 1], ours.out[:, 1]) and torch.equal(got.lse[:, 1], ours.lse[:, 1])

    def test_an_empty_row_with_a_sink_has_the_sink_as_lse(self):
        sinks = torch.tensor([0.7])
        got = from_sink_included(*part(NAN, 0.7), sinks)
        assert got.out.item() == 0 and got.lse.item() == -INF

    def test_a_sink_of_plus_infinity_cannot_be_taken_out(self):
        got = from_sink_included(*part(0, INF), torch.tensor([INF]))
        assert got.lse.isnan().all() and got.out.isnan().all()

    @pytest.mark.parametrize(
        "take",
        [from_base2, from_plus_inf_empty, lambda o, s: from_sink_included(o, s, torch.zeros(2))],
        ids=["base 2", "+inf", "sink included"],
    )
    def test_a_rounded_lse_is_refused(self, take):
        with pytest.raises(InvalidInput, match="lse got dtype bfloat16; needs float32"):
            take(torch.ones(3, 2, 4), torch.zeros(3, 2).bfloat16())

    def test_an_lse_in_another_order_is_refused(self):
        with pytest.raises(InvalidInput, match=r"lse got shape \(2, 3\); needs \(3, 2\), T, H from out"):
            from_base2(torch.ones(3, 2, 4), torch.zeros(2, 3))
        with pytest.raises(
            InvalidInput, match=r"lse got shape \(1, 3, 2\); needs \(1, 2, 3\), B, H, q from out"
        ):
            from_bhq(torch.ones(1, 3, 2, 4), torch.zeros(1, 3, 2))
        with pytest.raises(InvalidInput, match=r"lse got shape \(3, 2\); needs \(2, 3\), H, T from out"):
            from_head_first(torch.ones(3, 2, 4), torch.zeros(3, 2))


def test_merge_reads_no_value_of_a_device_tensor():
    meta: list[Tensor] = [torch.ones(2, 3, 4, device="meta"), torch.zeros(2, 3, device="meta")]
    out, lse = merge([AttentionOutput(*meta)] * 2)
    assert out.shape == (2, 3, 4) and lse.shape == (2, 3)
    assert apply_sinks(out, lse, torch.zeros(3, device="meta")).device.type == "meta"
