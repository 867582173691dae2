"""The definition of right, against numbers computed by hand and other forms of the same maths."""

import math

import pytest
import torch
from torch import Tensor

from anymla import reference
from anymla.contract import AttentionOutput
from anymla.errors import InvalidInput
from anymla.kv_cache import KV_FORMATS, KVCache
from anymla.latent import absorb_q, project_v
from anymla.verification.judge import judge_tensor, judge_written

INF, NAN = math.inf, math.nan


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(
    sequences: list[Tensor],
    rope: int,
    block_size: int = 4,
    kv_format: str = "fp32",
    seed: int = 0,
    dead: float = NAN,
) -> tuple[KVCache, Tensor, Tensor]:
    """A cache with the rows [n, L + R] of each sequence on scattered pages, its table and lengths.

    Slots that hold no token are `dead`, table entries past the end are absurd, no page is to spare.
    """
    width = sequences[0].shape[1]
    needs = [-(-len(rows) // block_size) for rows in sequences]
    pages = torch.randperm(sum(needs), generator=draw(seed)).tolist()
    cache = KVCache.allocate(
        max(sum(needs), 1), block_size, kv_lora_rank=width - rope, qk_rope_head_dim=rope, kv_format=kv_format
    )
    cache.data.fill_(dead)
    table = torch.full((len(sequences), max(needs) + 1), 10**9, dtype=torch.int32)
    for b, (rows, need) in enumerate(zip(sequences, needs, strict=True)):
        own, pages = pages[:need], pages[need:]
        table[b, :need] = torch.tensor(own, dtype=torch.int32)
        token = torch.arange(len(rows))
        slots = table[b].long()[token // block_size] * block_size + token % block_size
        cache.write(rows[:, : width - rope], rows[:, width - rope :], slots)
    return cache, table, ints(*map(len, sequences))


def plain(q: Tensor, keys: Tensor, values: Tensor, scale: float, orders: int = 4) -> list[AttentionOutput]:
    """Softmax attention of q [T, H, D] to keys [n, D] in fp64, in several orders of summation."""
    runs = []
    for order in range(orders):
        width = torch.randperm(q.shape[-1], generator=draw(order))
        token = torch.randperm(keys.shape[0], generator=draw(order))
        scores = q[..., width].double() @ keys[token][:, width].double().T * scale
        runs.append(AttentionOutput(scores.softmax(-1) @ values[token].double(), scores.logsumexp(-1)))
    return runs


def require_same(got: AttentionOutput, right: AttentionOutput, eager: list[AttentionOutput]) -> None:
    """`got` is `right` up to the rounding that plain fp64 runs of the same maths show."""
    assert got.lse is not None and right.lse is not None
    judge_tensor("out", got.out, right.out, *(e.out for e in eager)).require_pass()
    lses = [e.lse for e in eager if e.lse is not None]
    judge_tensor("lse", got.lse, right.lse, *lses, by_row=False).require_pass()


def require_nearly(got: Tensor, expected: object) -> None:
    """`got` is `expected` up to two units in the last place."""
    judge_tensor(
        "value", got, torch.as_tensor(expected, dtype=torch.float64).reshape(got.shape)
    ).require_pass()


class TestDecode:
    def test_a_case_computed_by_hand(self):
        # Weights 1, 2, 5 of 8 on the values 1, 2, 4.
        rows = torch.tensor([[1.0, 0.0], [2.0, 1.0], [4.0, 3.0]])
        cache, table, lens = paged([rows], rope=1)
        q_pe = torch.tensor([[[1.0], [0.0], [-2.0]]])
        out, lse = reference.decode(
            torch.zeros(1, 3, 1), q_pe, cache, block_table=table, seq_lens=lens, sm_scale=0.5
        )
        e = [[math.exp(0.5 * f * x) for x in (0, 1, 3)] for f in (1, 0, -2)]
        require_nearly(out, [(a + 2 * b + 4 * c) / (a + b + c) for a, b, c in e])
        require_nearly(lse, [math.log(sum(row)) for row in e])

    def test_the_latent_is_key_and_value_at_once(self):
        cache, table, lens = paged([torch.tensor([[0.0], [math.log(3)]])], rope=0)
        value = float(cache.read(torch.tensor([int(table[0, 0]) * 4 + 1]), dtype=torch.float64))
        out, lse = reference.decode(
            torch.ones(1, 1, 1), torch.ones(1, 1, 0), cache, block_table=table, seq_lens=lens, sm_scale=1.0
        )
        weight = math.exp(value)
        require_nearly(out, value * weight / (1 + weight))
        require_nearly(lse, math.log1p(weight))

    @pytest.mark.parametrize("q_len", range(1, 9))
    def test_each_row_of_a_verify_block_sees_one_key_more_than_the_row_before(self, q_len):
        rows = torch.arange(64.0)[:, None].expand(64, 2).clone()
        cache, table, lens = paged([rows], rope=1, block_size=16)
        out, lse = reference.decode(
            torch.zeros(q_len, 16, 1),
            torch.zeros(q_len, 16, 1),
            cache,
            block_table=table,
            seq_lens=lens,
            qo_indptr=ints(0, q_len),
            sm_scale=1.0,
        )
        seen = torch.tensor([64 - q_len + i + 1 for i in range(q_len)], dtype=torch.float64)
        require_nearly(out[:, :, 0], ((seen - 1) / 2)[:, None].expand(-1, 16))
        require_nearly(lse, seen.log()[:, None].expand(-1, 16))

    def test_three_rows_over_64_keys_have_the_means_30_5_and_31_and_31_5(self):
        cache, table, lens = paged([torch.arange(64.0)[:, None]], rope=0)
        q = torch.zeros(3, 1, 1)
        out, _ = reference.decode(
            q, q[..., :0], cache, block_table=table, seq_lens=lens, qo_indptr=ints(0, 3), sm_scale=1.0
        )
        require_nearly(out, [30.5, 31.0, 31.5])

    def test_without_the_causal_limit_every_row_sees_every_key(self):
        cache, table, lens = paged([torch.arange(64.0)[:, None]], rope=0)
        q = torch.zeros(3, 1, 1)
        out, lse = reference.decode(
            q,
            q[..., :0],
            cache,
            block_table=table,
            seq_lens=lens,
            qo_indptr=ints(0, 3),
            sm_scale=1.0,
            causal=False,
        )
        assert out.flatten().tolist() == [31.5, 31.5, 31.5]
        require_nearly(lse, [math.log(64)] * 3)

    def test_rows_before_the_first_key_are_empty(self):
        cache, table, lens = paged([torch.tensor([[3.0], [5.0]])], rope=0)
        q = torch.zeros(4, 1, 1)
        out, lse = reference.decode(
            q, q[..., :0], cache, block_table=table, seq_lens=lens, qo_indptr=ints(0, 4), sm_scale=1.0
        )
        assert out.flatten().tolist() == [0, 0, 3, 4]
        assert lse.flatten().tolist() == [-INF, -INF, 0, math.log(2)]

    @pytest.mark.parametrize("sink", [None, -INF, 0.0, 3.0, INF], ids=str)
    def test_an_empty_sequence_gives_zero_and_minus_infinity_whatever_the_sink(self, sink):
        sequences = [torch.randn(n, 6, generator=draw(n)) for n in (5, 7, 3, 0)]
        cache, table, lens = paged(sequences, rope=2, block_size=16)
        table[3] = 0
        q = torch.randn(4, 16, 6, generator=draw(1)).bfloat16()
        sinks = None if sink is None else torch.full((16,), sink)
        out, lse = reference.decode(
            q[..., :4], q[..., 4:], cache, block_table=table, seq_lens=lens, sm_scale=0.3, sinks=sinks
        )
        assert (out[3] == 0).all() and (lse[3] == -INF).all()
        assert lse[:3].isfinite().all() and (sink == INF or out[:3].abs().amin() > 0)
        nothing = reference.decode(
            q[:2, :, :4],
            q[:2, :, 4:],
            cache,
            block_table=table[:2],
            seq_lens=ints(0, 0),
            sm_scale=0.3,
            sinks=sinks,
        )
        assert (nothing.out == 0).all() and (nothing.lse == -INF).all()

    def test_rows_past_the_last_sequence_are_empty(self):
        cache, table, lens = paged([torch.ones(3, 2), torch.ones(2, 2)], rope=0)
        q = torch.ones(5, 2, 2)
        out, lse = reference.decode(
            q, q[..., :0], cache, block_table=table, seq_lens=lens, qo_indptr=ints(0, 2, 3), sm_scale=1.0
        )
        assert (out[3:] == 0).all() and (lse[3:] == -INF).all()
        assert (out[:3] == 1).all() and lse[:3].isfinite().all()

    def test_no_tokens_give_no_rows(self):
        cache, table, lens = paged([torch.ones(3, 2)], rope=1)
        out, lse = reference.decode(
            torch.ones(0, 2, 1),
            torch.ones(0, 2, 1),
            cache,
            block_table=table,
            seq_lens=lens,
            qo_indptr=ints(0, 0),
            sm_scale=1.0,
        )
        assert out.shape == (0, 2, 1) and lse.shape == (0, 2)

    @pytest.mark.parametrize("dead", [NAN, INF, -INF, 1e30], ids=str)
    @pytest.mark.parametrize("kv_format", ["fp32", "bf16"])
    def test_slots_that_hold_no_token_are_not_read(self, dead, kv_format):
        rows = [torch.randn(n, 12, generator=draw(n)) for n in (13, 8, 1)]
        q = torch.randn(3, 16, 12, generator=draw(9))

        def run(filled: float) -> AttentionOutput:
            cache, table, lens = paged(rows, rope=4, block_size=4, dead=filled, kv_format=kv_format)
            return reference.decode(
                q[..., :8], q[..., 8:], cache, block_table=table, seq_lens=lens, sm_scale=0.4
            )

        for got, right in zip(run(dead), run(0.0), strict=True):
            assert torch.equal(got, right)

    @pytest.mark.parametrize("block_size", [1, 16, 32, 64, 128, 256])
    def test_neither_page_size_nor_page_order_matters(self, block_size):
        rows = [torch.randn(n, 12, generator=draw(n)) for n in (65, 130)]
        q = torch.randn(2, 3, 12, generator=draw(9))

        def run(size: int, seed: int) -> AttentionOutput:
            cache, table, lens = paged(rows, rope=4, block_size=size, seed=seed)
            return reference.decode(
                q[..., :8], q[..., 8:], cache, block_table=table, seq_lens=lens, sm_scale=0.4
            )

        for got, right in zip(run(block_size, 5), run(130, 0), strict=True):
            assert torch.equal(got, right)

    @pytest.mark.parametrize("num_heads", [1, 4, 8, 12, 20, 24, 32, 48, 64, 96, 128, 256])
    def test_heads_do_not_touch_each_other(self, num_heads):
        rows = [torch.randn(n, 24, generator=draw(n)) for n in (33, 70)]
        cache, table, lens = paged(rows, rope=8, block_size=16)
        q = torch.randn(2, num_heads, 24, generator=draw(num_heads))
        got = reference.decode(
            q[..., :16], q[..., 16:], cache, block_table=table, seq_lens=lens, sm_scale=0.2
        )
        for b, keys in enumerate(rows):
            eager = plain(q[b : b + 1], keys, keys[:, :16], 0.2)
            mine = AttentionOutput(got.out[b : b + 1], got.lse[b : b + 1])
            require_same(mine, eager[0], eager[1:])

    @pytest.mark.parametrize(
        "dims",
        [(512, 64), (512, 0), (256, 64), (256, 32), (128, 32), (64, 96), (1, 0), (3, 5)],
        ids="{0[0]}+{0[1]}".format,
    )
    def test_any_widths(self, dims):
        latent, rope = dims
        rows = torch.randn(9, latent + rope, generator=draw(latent))
        cache, table, lens = paged([rows], rope=rope, block_size=3)
        q = torch.randn(1, 8, latent + rope, generator=draw(rope))
        got = reference.decode(
            q[..., :latent], q[..., latent:], cache, block_table=table, seq_lens=lens, sm_scale=0.1
        )
        eager = plain(q, rows, rows[:, :latent], 0.1)
        require_same(got, eager[0], eager[1:])

    def test_queries_are_taken_in_their_own_dtype_and_promoted(self):
        rows = torch.randn(9, 12, generator=draw(0))
        cache, table, lens = paged([rows], rope=4)
        q = torch.randn(1, 2, 12, generator=draw(1)).bfloat16()
        half, whole = (
            reference.decode(x[..., :8], x[..., 8:], cache, block_table=table, seq_lens=lens, sm_scale=0.3)
            for x in (q, q.double())
        )
        assert torch.equal(half.out, whole.out) and half.out.dtype == half.lse.dtype == torch.float64


class TestLiveValuesThatAreNotFinite:
    def run(self, rows: list[list[float]], q: list[float]) -> AttentionOutput:
        cache, table, lens = paged([torch.tensor(rows)], rope=1)
        query = torch.tensor([[q]])
        return reference.decode(
            query[..., :-1], query[..., -1:], cache, block_table=table, seq_lens=lens, sm_scale=1.0
        )

    def test_a_nan_key_makes_its_row_nan(self):
        out, lse = self.run([[1.0, 2.0, 0.0], [1.0, NAN, 0.0]], [1.0, 1.0, 1.0])
        assert out.isnan().all() and lse.isnan().all()

    def test_a_score_of_plus_infinity_makes_its_row_nan(self):
        out, lse = self.run([[1.0, 2.0, 0.0], [1.0, 3.0, INF]], [1.0, 1.0, 1.0])
        assert out.isnan().all() and lse.isnan().all()

    def test_a_score_of_minus_infinity_is_a_key_of_no_weight(self):
        out, lse = self.run([[1.0, 2.0, 0.0], [1.0, 3.0, -INF]], [0.0, 0.0, 1.0])
        assert out.flatten().tolist() == [1.0, 2.0] and lse.item() == 0.0

    def test_a_row_with_nothing_but_such_scores_is_empty(self):
        out, lse = self.run([[1.0, 2.0, -INF], [1.0, 3.0, -INF]], [0.0, 0.0, 1.0])
        assert out.flatten().tolist() == [0.0, 0.0] and lse.item() == -INF

    def test_a_nan_stays_in_its_own_row(self):
        cache, table, lens = paged([torch.tensor([[NAN]]), torch.tensor([[2.0]])], rope=0)
        q = torch.ones(2, 1, 1)
        out, _ = reference.decode(q, q[..., :0], cache, block_table=table, seq_lens=lens, sm_scale=1.0)
        assert out[0].isnan().all() and out[1].item() == 2.0


class TestSinks:
    @pytest.mark.parametrize("sink", [-30.0, -1.0, 0.0, 2.5, 40.0])
    def test_a_sink_is_one_more_key_with_a_value_of_zero(self, sink):
        rows = torch.randn(7, 5, generator=draw(0))
        with_sink = torch.cat((rows, torch.zeros(1, 5)))
        cache, table, lens = paged([torch.cat((rows, torch.zeros(7, 1)), -1)], rope=1)
        as_key, key_table, key_lens = paged([torch.cat((with_sink, torch.eye(8)[:, 7:]), -1)], rope=1)
        ql, flag = torch.randn(1, 2, 5, generator=draw(1)), torch.full((1, 2, 1), sink)
        got = reference.decode(
            ql, flag, cache, block_table=table, seq_lens=lens, sm_scale=1.0, sinks=torch.full((2,), sink)
        )
        right = reference.decode(ql, flag, as_key, block_table=key_table, seq_lens=key_lens, sm_scale=1.0)
        eager = [e.out * torch.sigmoid(e.lse - sink)[..., None] for e in plain(ql, rows, rows, 1.0)]
        judge_tensor("out", got.out, right.out, *eager).require_pass()

    def test_lse_does_not_know_of_sinks(self):
        rows = torch.randn(7, 5, generator=draw(0))
        cache, table, lens = paged([rows], rope=0)
        q = torch.randn(1, 2, 5, generator=draw(1))
        lses = [
            reference.decode(
                q, q[..., :0], cache, block_table=table, seq_lens=lens, sm_scale=1.0, sinks=sinks
            ).lse
            for sinks in (None, torch.zeros(2), torch.tensor([INF, -INF]))
        ]
        assert torch.equal(lses[0], lses[1]) and torch.equal(lses[0], lses[2])

    def test_minus_infinity_is_the_identity_and_plus_infinity_takes_everything(self):
        rows = torch.randn(7, 5, generator=draw(0))
        cache, table, lens = paged([rows], rope=0)
        q = torch.randn(1, 2, 5, generator=draw(1))
        without, with_both = (
            reference.decode(
                q, q[..., :0], cache, block_table=table, seq_lens=lens, sm_scale=1.0, sinks=sinks
            ).out
            for sinks in (None, torch.tensor([-INF, INF]))
        )
        assert torch.equal(with_both[:, 0], without[:, 0]) and (with_both[:, 1] == 0).all()

    def test_a_sink_equal_to_lse_halves_the_row(self):
        out = reference.apply_sinks(
            torch.full((1, 2, 3), 8.0), torch.tensor([[1.5, -2.0]]), torch.tensor([1.5, -2.0])
        )
        assert (out == 4.0).all()

    @pytest.mark.parametrize("sink", [-INF, 0.0, INF], ids=str)
    def test_an_empty_row_stays_zero_even_if_it_holds_nan(self, sink):
        out = reference.apply_sinks(torch.full((1, 1, 2), NAN), torch.tensor([[-INF]]), torch.tensor([sink]))
        assert (out == 0).all()


class TestSparseDecode:
    def run(self, indices: Tensor, counts: Tensor | None = None, q_seed: int = 1) -> AttentionOutput:
        rows = torch.randn(40, 12, generator=draw(0))
        cache = KVCache.allocate(5, 8, kv_lora_rank=8, qk_rope_head_dim=4, kv_format="fp32")
        cache.write(rows[:, :8], rows[:, 8:], torch.arange(40))
        q = torch.randn(len(indices), 16, 12, generator=draw(q_seed))
        return reference.sparse_decode(
            q[..., :8], q[..., 8:], cache, indices=indices, counts=counts, sm_scale=0.4
        )

    @pytest.mark.parametrize("leading", [0, 16, 32])
    def test_minus_one_is_no_key_wherever_it_stands(self, leading):
        keys = [9, 2, 30, 7, 1]
        padded = torch.full((1, 64), -1, dtype=torch.int32)
        padded[0, leading : leading + 5] = ints(*keys)
        for got, right in zip(self.run(padded), self.run(ints(*keys)[None]), strict=True):
            assert torch.equal(got, right)

    def test_minus_one_between_keys_is_no_key(self):
        for got, right in zip(self.run(ints(9, -1, 2, -1)[None]), self.run(ints(9, 2)[None]), strict=True):
            assert torch.equal(got, right)

    def test_a_row_without_keys_is_empty(self):
        out, lse = self.run(torch.full((2, 64), -1, dtype=torch.int32))
        assert (out == 0).all() and (lse == -INF).all()

    def test_entries_past_the_count_are_not_read(self):
        absurd = torch.tensor([[3, 5, 10**9, -7], [10**9] * 4], dtype=torch.int32)
        out, lse = self.run(absurd, ints(2, 0))
        right = self.run(torch.tensor([[3, 5], [-1, -1]], dtype=torch.int32))
        assert torch.equal(out, right.out) and torch.equal(lse, right.lse)
        assert (out[1] == 0).all()

    def test_a_slot_given_twice_counts_twice(self):
        once, twice = self.run(ints(4)[None]), self.run(ints(4, 4)[None])
        assert torch.equal(once.out, twice.out)
        require_nearly(twice.lse, once.lse + math.log(2))

    def test_all_slots_of_a_sequence_are_the_dense_result(self):
        rows = torch.randn(21, 12, generator=draw(0))
        cache, table, lens = paged([rows], rope=4)
        q = torch.randn(1, 3, 12, generator=draw(1))
        token = torch.arange(21)
        slots = (table[0].long()[token // 4] * 4 + token % 4).int()[None]
        dense = reference.decode(
            q[..., :8], q[..., 8:], cache, block_table=table, seq_lens=lens, sm_scale=0.4
        )
        sparse = reference.sparse_decode(q[..., :8], q[..., 8:], cache, indices=slots, sm_scale=0.4)
        assert torch.equal(dense.out, sparse.out) and torch.equal(dense.lse, sparse.lse)

    def test_sinks_apply_as_in_the_dense_form(self):
        rows = torch.randn(4, 3, generator=draw(0))
        cache = KVCache.allocate(1, 4, kv_lora_rank=3, qk_rope_head_dim=0, kv_format="fp32")
        cache.write(rows, rows[:, :0], torch.arange(4))
        q, sinks = torch.randn(1, 2, 3, generator=draw(1)), torch.tensor([0.5, -INF])
        indices = ints(0, 1, 2, 3)[None]
        plain_out, lse = reference.sparse_decode(q, q[..., :0], cache, indices=indices, sm_scale=1.0)
        out, _ = reference.sparse_decode(q, q[..., :0], cache, indices=indices, sm_scale=1.0, sinks=sinks)
        assert torch.equal(out, reference.apply_sinks(plain_out, lse, sinks))
        assert torch.equal(out[:, 1], plain_out[:, 1])


class TestPrefill:
    H, P, R, L, V = 3, 4, 2, 6, 5
    NEW, CONTEXT = (4, 0, 3, 1), (5, 3, 0, 9)

    def setup_method(self):
        rand = draw(0)
        self.latents = [
            torch.randn(n + c, self.L + self.R, generator=rand)
            for n, c in zip(self.NEW, self.CONTEXT, strict=True)
        ]
        total = sum(self.NEW)
        self.q = torch.randn(total, self.H, self.P + self.R, generator=rand)
        self.w_uk = torch.randn(self.H, self.P, self.L, generator=rand)
        self.w_uv = torch.randn(self.H, self.L, self.V, generator=rand)
        self.indptr = ints(0, *torch.tensor(self.NEW).cumsum(0).tolist())

    def new_rows(self) -> Tensor:
        return torch.cat([x[c:] for x, c in zip(self.latents, self.CONTEXT, strict=True)])

    def call(self, new: Tensor, **options: object) -> AttentionOutput:
        return reference.prefill(
            self.q[..., : self.P],
            self.q[..., self.P :],
            new[:, : self.L],
            new[:, self.L :],
            self.w_uk,
            self.w_uv,
            qo_indptr=self.indptr,
            sm_scale=0.3,
            **options,
        )

    def prefill(self, seq_lens: Tensor | None = None, **options: object) -> AttentionOutput:
        cache, table, _ = paged([x[:c] for x, c in zip(self.latents, self.CONTEXT, strict=True)], rope=self.R)
        seq_lens = ints(*map(len, self.latents)) if seq_lens is None else seq_lens
        return self.call(self.new_rows(), cache=cache, block_table=table, seq_lens=seq_lens, **options)

    def absorbed(self, causal: bool = True) -> AttentionOutput:
        """The same through a cache that holds all tokens."""
        cache, table, lens = paged(self.latents, rope=self.R)
        out, lse = reference.decode(
            absorb_q(self.q[..., : self.P].double(), self.w_uk.double()),
            self.q[..., self.P :],
            cache,
            block_table=table,
            seq_lens=lens,
            qo_indptr=self.indptr,
            sm_scale=0.3,
            causal=causal,
        )
        return AttentionOutput(project_v(out, self.w_uv.double()), lse)

    def eager(self, causal: bool = True) -> list[AttentionOutput]:
        """Plain fp64 runs of the decompressed form, row by row and head by head."""
        rows = []
        for b, (latent, context) in enumerate(zip(self.latents, self.CONTEXT, strict=True)):
            for t, row in enumerate(range(int(self.indptr[b]), int(self.indptr[b + 1]))):
                seen = latent[: context + t + 1].double() if causal else latent.double()
                latents, rope = seen[:, : self.L], seen[:, self.L :]
                for q, w_uk, w_uv in zip(self.q[row], self.w_uk.double(), self.w_uv.double(), strict=True):
                    keys = torch.cat((latents @ w_uk.T, rope), -1)
                    rows.append(plain(q[None, None], keys, latents @ w_uv, 0.3))
        shape = len(self.q), self.H
        return [
            AttentionOutput(
                torch.stack([run.out for run in runs]).reshape(*shape, self.V),
                torch.stack([run.lse for run in runs]).reshape(shape),
            )
            for runs in zip(*rows, strict=True)
        ]

    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("chunk", [None, 1, 2, 5, 100], ids="chunk {}".format)
    def test_context_in_chunks_of_any_size_is_the_whole_sequence(self, chunk, causal):
        eager = self.eager(causal)
        require_same(self.prefill(context_chunk=chunk, causal=causal), eager[0], eager[1:])

    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
    def test_it_is_the_absorbed_decode_over_a_cache_of_all_tokens(self, causal):
        require_same(self.absorbed(causal), self.prefill(causal=causal), self.eager(causal))

    def test_without_a_cache_there_is_no_context(self):
        new = self.new_rows()
        got = self.call(new)
        # The third sequence has no context, so it must not change.
        assert torch.equal(got.out[4:7], self.prefill().out[4:7])
        # The first new token of a sequence sees itself alone: its own value.
        first = torch.einsum("l,hlv->hv", new[0, : self.L].double(), self.w_uv.double())
        other = self.w_uv.double().mT @ new[0, : self.L].double()
        judge_tensor("out", got.out[0], first, other).require_pass()

    def test_rows_past_the_last_sequence_are_empty(self):
        whole = self.prefill()
        self.indptr = ints(0, 4, 4, 4, 4)
        out, lse = self.prefill(seq_lens=ints(9, 3, 0, 9), sinks=torch.full((self.H,), -INF))
        assert (out[4:] == 0).all() and (lse[4:] == -INF).all()
        assert torch.equal(out[:4], whole.out[:4]) and torch.equal(lse[:4], whole.lse[:4])

    def test_sinks_come_once_after_the_chunks(self):
        sinks = torch.tensor([0.5, -INF, INF])
        without, got = self.prefill(context_chunk=2), self.prefill(context_chunk=2, sinks=sinks)
        assert torch.equal(got.out, reference.apply_sinks(without.out, without.lse, sinks))
        assert torch.equal(got.lse, without.lse)

    def test_a_cache_needs_its_table_and_lengths(self):
        cache, _, _ = paged([torch.ones(1, 8)], rope=2)
        with pytest.raises(InvalidInput, match=r"block_table got None.*seq_lens got None"):
            self.call(self.new_rows(), cache=cache)

    def test_a_sequence_is_at_least_as_long_as_its_new_tokens(self):
        with pytest.raises(InvalidInput, match="seq_lens got 2 at 2; needs at least 3, its new tokens"):
            self.prefill(seq_lens=ints(9, 3, 2, 10))


@pytest.mark.parametrize(
    "dims",
    [(512, 128, 64, 128), (512, 192, 64, 256), (256, 64, 32, 64), (512, 256, 0, 256), (128, 32, 32, 16)],
    ids="L{0[0]} P{0[1]} R{0[2]} V{0[3]}".format,
)
def test_absorbed_and_decompressed_are_one(dims):
    latent, nope, rope, value = dims
    rand, heads, keys = draw(latent + nope), 2, 17
    q = torch.randn(1, heads, nope + rope, generator=rand).double()
    rows = torch.randn(keys, latent + rope, generator=rand)
    w_uk = (torch.randn(heads, nope, latent, generator=rand) * latent**-0.5).double()
    w_uv = (torch.randn(heads, latent, value, generator=rand) * latent**-0.5).double()
    scale = (nope + rope) ** -0.5
    cache, table, lens = paged([rows], rope=rope, block_size=8)
    expanded = reference.prefill(
        q[..., :nope],
        q[..., nope:],
        rows[-1:, :latent],
        rows[-1:, latent:],
        w_uk,
        w_uv,
        qo_indptr=ints(0, 1),
        sm_scale=scale,
        cache=cache,
        block_table=table,
        seq_lens=lens,
    )
    ql_nope = absorb_q(q[..., :nope], w_uk)
    out, lse = reference.decode(
        ql_nope, q[..., nope:], cache, block_table=table, seq_lens=lens, sm_scale=scale
    )
    absorbed = AttentionOutput(project_v(out, w_uv), lse)
    eager = [
        AttentionOutput(project_v(e.out, w_uv), e.lse)
        for e in plain(torch.cat((ql_nope, q[..., nope:]), -1), rows, rows[:, :latent], scale)
    ]
    require_same(absorbed, expanded, eager)


class TestIndexer:
    def cache(self, keys: list[Tensor]) -> tuple[KVCache, Tensor, Tensor]:
        return paged(keys, rope=0, block_size=2)

    def test_logits_computed_by_hand(self):
        cache, table, lens = self.cache([torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])])
        q = torch.tensor([[[1.0, 1.0], [2.0, -1.0]]])
        weights = torch.tensor([[0.5, -3.0]])
        # relu of the first head: 1, 2, 0; of the second: 2, 0, 0.
        (logits,) = reference.index_logits(q, weights, cache, block_table=table, seq_lens=lens)
        assert logits.tolist() == [0.5 - 6.0, 1.0, 0.0]

    def test_each_row_scores_the_keys_that_it_sees(self):
        cache, table, lens = self.cache([torch.ones(5, 2), torch.ones(1, 2), torch.ones(2, 2)])
        logits = reference.index_logits(
            torch.ones(7, 1, 2),
            torch.ones(7, 1),
            cache,
            block_table=table,
            seq_lens=lens,
            qo_indptr=ints(0, 3, 5, 6),
        )
        assert [len(x) for x in logits] == [3, 4, 5, 0, 1, 2, 0]

    def topk(self, logits: list[float], topk: int) -> list[int]:
        """Rank these logits: one head has their positive part, another takes off their negative part."""
        cache, table, lens = self.cache([torch.tensor(logits)[:, None]])
        q, weights = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1.0, -1.0]])
        return reference.index_topk(q, weights, cache, block_table=table, seq_lens=lens, topk=topk)[
            0
        ].tolist()

    def test_larger_logits_come_first(self):
        assert self.topk([1.0, 3.0, -2.0, 2.0], 3) == [1, 3, 0]

    def test_of_equal_logits_the_earlier_token_comes_first(self):
        assert self.topk([1.0, 2.0, 1.0, 2.0, 2.0, 0.0, -0.0], 6) == [1, 3, 4, 0, 2, 5]

    def test_nan_ranks_below_minus_infinity(self):
        assert self.topk([NAN, -INF, 1.0, NAN, -INF], 5) == [2, 1, 4, 0, 3]

    def test_minus_one_fills_a_row_that_sees_too_few(self):
        assert self.topk([1.0, 2.0], 4) == [1, 0, -1, -1]

    def test_a_row_that_sees_nothing_is_all_minus_one(self):
        cache, table, _ = self.cache([torch.ones(2, 2)])
        got = reference.index_topk(
            torch.ones(2, 1, 2),
            torch.ones(2, 1),
            cache,
            block_table=table,
            seq_lens=ints(0),
            qo_indptr=ints(0, 1),
            topk=3,
        )
        assert got.dtype == torch.int32 and got.tolist() == [[-1] * 3] * 2

    def test_ids_count_from_the_start_of_the_sequence(self):
        cache, table, lens = self.cache([torch.ones(3, 1), torch.tensor([[1.0], [5.0], [2.0]])])
        got = reference.index_topk(
            torch.ones(2, 1, 1), torch.ones(2, 1), cache, block_table=table, seq_lens=lens, topk=2
        )
        assert got.tolist() == [[0, 1], [1, 2]]


class TestWriteCache:
    LATENT, ROPE = 128, 2

    def cache(self, kv_format: str, scale: float = 0.37) -> KVCache:
        row = KV_FORMATS[kv_format]
        return KVCache.allocate(
            2,
            64,
            kv_lora_rank=self.LATENT,
            qk_rope_head_dim=0 if row.block_flat else self.ROPE,
            kv_format=kv_format,
            scale=scale if row.scaled else None,
        )

    def values(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        rand = draw(7)
        kv_c = torch.randn(20, self.LATENT, generator=rand) * torch.logspace(-8, 6, 20)[:, None]
        kv_c[0] = 0.0
        kv_c[3, :4] = torch.tensor([NAN, INF, -INF, -0.0])
        return kv_c, torch.randn(20, cache.qk_rope_head_dim, generator=rand)

    @pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power of two"])
    @pytest.mark.parametrize("kv_format", KV_FORMATS)
    def test_it_is_what_a_cache_gives_back(self, kv_format, power_of_two):
        cache = self.cache(kv_format)
        kv_c, k_pe = self.values(cache)
        slots = torch.randperm(128, generator=draw(1))[:20]
        slots[[2, 11]] = -1
        expected = reference.write_cache(kv_c, k_pe, cache, slots, power_of_two=power_of_two)
        cache.write(kv_c, k_pe, slots, power_of_two=power_of_two)
        kept = slots != -1
        got = torch.full_like(expected, NAN)
        got[kept] = cache.read(slots[kept], dtype=torch.float64)
        assert expected[~kept].isnan().all()
        judge_written(got, expected, torch.cat((kv_c, k_pe), -1)).require_pass()

    @pytest.mark.parametrize("kv_format", KV_FORMATS)
    def test_no_tokens_give_no_rows(self, kv_format):
        cache = self.cache(kv_format)
        nothing = torch.ones(0, self.LATENT), torch.ones(0, cache.qk_rope_head_dim)
        rows = reference.write_cache(*nothing, cache, torch.zeros(0, dtype=torch.int64))
        assert rows.shape == (0, self.LATENT + cache.qk_rope_head_dim)

    def test_writing_is_left_to_the_cache(self):
        cache = self.cache("fp32")
        reference.write_cache(*self.values(cache), cache, torch.arange(20))
        assert (cache.data == 0).all()

    @pytest.mark.parametrize("kv_format", ["fp8_e4m3fn", "fp8_e4m3fnuz"])
    def test_fp8_rounds_as_the_type_is_defined(self, kv_format):
        """All 256 codes stay; between neighbours the nearer, of two the even code; past the end the end."""
        cache = KVCache.allocate(1, 1, kv_lora_rank=1, qk_rope_head_dim=0, kv_format=kv_format, scale=1.0)

        def rounded(x: Tensor) -> Tensor:
            slots = torch.zeros(len(x), dtype=torch.int64)
            return reference.write_cache(x[:, None], x.new_zeros(len(x), 0), cache, slots)[:, 0]

        codes = torch.arange(256, dtype=torch.uint8).view(KV_FORMATS[kv_format].value_dtype).float()
        assert torch.equal(rounded(codes).nan_to_num(nan=-1e9), codes.double().nan_to_num(nan=-1e9))
        up = codes[:127][codes[:127].isfinite()].double()
        lower, upper = up[:-1], up[1:]
        middle = (lower + upper) / 2
        even = torch.where(torch.arange(len(lower)) % 2 == 0, lower, upper)
        assert torch.equal(rounded(middle.float()), even) and torch.equal(rounded(-middle.float()), -even)
        assert torch.equal(rounded((lower + (upper - lower) * 0.4375).float()), lower)
        assert torch.equal(rounded((lower + (upper - lower) * 0.5625).float()), upper)
        end = torch.finfo(KV_FORMATS[kv_format].value_dtype).max
        assert rounded(torch.tensor([1e30, INF, -INF, end * 1.1])).tolist() == [end, end, -end, end]


class TestMerge:
    def test_parts_of_a_sequence_make_the_whole(self):
        rows = torch.randn(30, 6, generator=draw(0))
        q = torch.randn(1, 3, 6, generator=draw(1))
        eager = plain(q, rows, rows, 0.5)
        for cuts in ((30,), (1, 29), (7, 0, 23), (10, 10, 10)):
            parts = []
            for part in torch.split(rows, cuts):
                cache, table, lens = paged([part], rope=0)
                parts.append(
                    reference.decode(q, q[..., :0], cache, block_table=table, seq_lens=lens, sm_scale=0.5)
                )
            require_same(reference.merge(parts), eager[0], eager[1:])

    def test_an_empty_part_is_not_read(self):
        part = AttentionOutput(torch.ones(1, 1, 2), torch.zeros(1, 1))
        empty = AttentionOutput(torch.full((1, 1, 2), NAN), torch.full((1, 1), -INF))
        merged = reference.merge([empty, part, empty])
        assert (merged.out == 1).all() and merged.lse.item() == 0
        nothing = reference.merge([empty, empty])
        assert (nothing.out == 0).all() and nothing.lse.item() == -INF
