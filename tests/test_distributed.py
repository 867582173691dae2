"""Decode context parallel: tokens are shared out, rows see what they should, results become one."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from anymla import reference
from anymla.contract import AttentionOutput
from anymla.distributed import (
    all_gather_combine,
    combine,
    dcp_local_len,
    dcp_local_row_lens,
    dcp_place,
    dcp_rows,
)
from anymla.errors import InvalidInput
from anymla.kv_cache import KVCache
from anymla.merging import apply_sinks, merge
from anymla.verification.judge import judge_tensor

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4, 8], ids="W{}".format)
INTERLEAVES = pytest.mark.parametrize("interleave", [1, 4, 16], ids="I{}".format)
LATENT, ROPE, HEADS, BLOCK = 6, 2, 3, 4


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class TestWhereTokensLive:
    @WORLDS
    @INTERLEAVES
    def test_every_token_has_one_place_and_places_have_no_gaps(self, world, interleave):
        held: list[list[int]] = [[] for _ in range(world)]
        for n in range(150):
            lens = [dcp_local_len(n, world, rank, interleave) for rank in range(world)]
            assert lens == [len(h) for h in held]
            place = dcp_place(n, world, interleave)
            assert place.rank == n // interleave % world
            assert place.local == len(held[place.rank])
            held[place.rank].append(n)

    def test_ten_tokens_on_four_ranks_row_by_row(self):
        rows = [dcp_local_row_lens(10, 3, 4, rank) for rank in range(4)]
        assert rows == [[2, 3, 3], [2, 2, 3], [2, 2, 2], [2, 2, 2]]

    def test_the_causal_limit_is_not_a_place_on_the_rank(self):
        for rank, wrong in ((0, [1, 2, 3]), (3, [0, 1, 2])):
            held = dcp_local_len(10, 4, rank)
            assert [held - 3 + 1 + t for t in range(3)] == wrong != dcp_local_row_lens(10, 3, 4, rank)

    def test_three_tokens_leave_the_fourth_rank_empty(self):
        assert [dcp_local_len(3, 4, rank) for rank in range(4)] == [1, 1, 1, 0]

    @WORLDS
    @INTERLEAVES
    def test_rows_share_out_the_keys_that_they_see(self, world, interleave):
        for seq_len, q_len in ((0, 0), (0, 2), (1, 1), (3, 5), (40, 8), (65, 1)):
            each = [dcp_local_row_lens(seq_len, q_len, world, rank, interleave) for rank in range(world)]
            assert [sum(row) for row in zip(*each, strict=True)] == [
                max(0, seq_len - q_len + 1 + t) for t in range(q_len)
            ]

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ((-1, 4, 0), "num_tokens got -1; needs at least 0"),
            ((5, 0, 0), "world got 0; needs at least 1"),
            ((5, 4, 4), "rank got 4; needs less than 4, the world"),
            ((5, 4, -1), "rank got -1; needs at least 0"),
            ((5, 4, 0, 0), "interleave got 0; needs at least 1"),
        ],
        ids=str,
    )
    def test_numbers_out_of_range_are_refused(self, arguments, reason):
        with pytest.raises(InvalidInput, match=reason):
            dcp_local_len(*arguments)

    def test_all_reasons_are_named_at_once(self):
        with pytest.raises(InvalidInput) as error:
            dcp_local_row_lens(-1, -2, 0, -3, 0)
        assert len(error.value.reasons) == 5


class TestOneRanksShareOfAStep:
    TABLE = torch.arange(12, dtype=torch.int32).reshape(4, 3)
    LENS, INDPTR = (10, 0, 3, 40), (0, 3, 3, 8, 9)

    @WORLDS
    @INTERLEAVES
    def test_rows_are_sequences_with_their_own_lengths(self, world, interleave):
        for rank in range(world):
            table, lens = dcp_rows(
                self.TABLE,
                ints(*self.LENS),
                ints(*self.INDPTR),
                num_tokens=11,
                world=world,
                rank=rank,
                interleave=interleave,
            )
            assert table.dtype == lens.dtype == torch.int32 and table.shape == (11, 3)
            expected, owner = [], []
            for b, (first, last) in enumerate(pairwise(self.INDPTR)):
                expected += dcp_local_row_lens(self.LENS[b], last - first, world, rank, interleave)
                owner += [b] * (last - first)
            assert lens.tolist() == [*expected, 0, 0]
            assert torch.equal(table[:9], self.TABLE[owner])

    def test_without_offsets_each_sequence_has_one_row(self):
        table, lens = dcp_rows(self.TABLE, ints(*self.LENS), None, num_tokens=4, world=4, rank=1)
        assert torch.equal(table, self.TABLE) and lens.tolist() == [3, 0, 1, 10]

    def test_no_sequences_and_no_tokens(self):
        table, lens = dcp_rows(self.TABLE[:0], ints(), ints(0), num_tokens=2, world=2, rank=0)
        assert table.shape == (2, 3) and lens.tolist() == [0, 0]
        assert dcp_rows(self.TABLE[:0], ints(), None, num_tokens=0, world=2, rank=0).seq_lens.shape == (0,)

    def test_no_value_of_a_device_tensor_is_looked_at(self):
        table, lens, indptr = (t.to("meta") for t in (self.TABLE, ints(*self.LENS), ints(*self.INDPTR)))
        got = dcp_rows(table, lens, indptr, num_tokens=9, world=2, rank=0)
        assert got.block_table.shape == (9, 3) and got.seq_lens.shape == (9,)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"num_tokens": 3, "qo_indptr": None}, "num_tokens got 3; needs 4, B: no qo_indptr"),
            ({"qo_indptr": ints(0, 1)}, r"qo_indptr got shape \(2,\); needs \(5,\), B \+ 1 from seq_lens"),
            ({"qo_indptr": ints(0, 3, 2, 8, 9)}, "needs values that do not decrease"),
            (
                {"block_table": TABLE[:3]},
                r"block_table got shape \(3, 3\); needs \(4, any\), B from seq_lens",
            ),
            ({"seq_lens": torch.ones(4)}, "seq_lens got dtype float32; needs int32"),
            ({"rank": 2}, "rank got 2; needs less than 2, the world"),
        ],
        ids=["tokens", "offsets", "order", "table", "lengths", "rank"],
    )
    def test_what_does_not_fit_is_refused(self, change, reason):
        arguments = {
            "block_table": self.TABLE,
            "seq_lens": ints(*self.LENS),
            "qo_indptr": ints(*self.INDPTR),
            "num_tokens": 9,
            "world": 2,
            "rank": 0,
        }
        with pytest.raises(InvalidInput, match=reason):
            dcp_rows(**(arguments | change))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cached(sequences: list[Tensor]) -> tuple[KVCache, Tensor]:
    """A cache of these rows, and its table; slots without a token hold NaN."""
    pages = max(1, max(-(-len(rows) // BLOCK) for rows in sequences))
    cache = KVCache.allocate(
        len(sequences) * pages, BLOCK, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, kv_format="fp32"
    )
    cache.data.fill_(torch.nan)
    for b, rows in enumerate(sequences):
        cache.write(rows[:, :LATENT], rows[:, LATENT:], b * pages * BLOCK + torch.arange(len(rows)))
    return cache, torch.arange(len(sequences) * pages, dtype=torch.int32).view(-1, pages)


def on_one_rank(
    q: Tensor, sequences: list[Tensor], indptr: Tensor, sinks: Tensor | None = None
) -> AttentionOutput:
    cache, table = cached(sequences)
    return reference.decode(
        q[..., :LATENT],
        q[..., LATENT:],
        cache,
        block_table=table,
        seq_lens=ints(*map(len, sequences)),
        qo_indptr=indptr,
        sm_scale=0.4,
        sinks=sinks,
    )


def on_each_rank(
    q: Tensor, sequences: list[Tensor], indptr: Tensor, world: int, interleave: int
) -> list[AttentionOutput]:
    parts = []
    for rank in range(world):
        own = [
            rows[[i for i in range(len(rows)) if dcp_place(i, world, interleave).rank == rank]]
            for rows in sequences
        ]
        cache, table = cached(own)
        lens = ints(*map(len, sequences))
        rows = dcp_rows(table, lens, indptr, num_tokens=len(q), world=world, rank=rank, interleave=interleave)
        parts.append(
            reference.decode(
                q[..., :LATENT],
                q[..., LATENT:],
                cache,
                block_table=rows.block_table,
                seq_lens=rows.seq_lens,
                sm_scale=0.4,
            )
        )
    return parts


def fp64_runs(q: Tensor, sequences: list[Tensor], indptr: Tensor) -> list[AttentionOutput]:
    """Plain fp64 runs of the single rank, over keys in several orders."""
    runs = []
    for seed in range(4):
        out, lse = torch.zeros(*q.shape[:2], LATENT).double(), torch.full(q.shape[:2], -torch.inf).double()
        for rows, (first, last) in zip(sequences, pairwise(indptr.tolist()), strict=True):
            for t, row in enumerate(range(first, last)):
                seen = rows[: max(0, len(rows) - (last - first) + 1 + t)].double()
                if len(seen):
                    seen = seen[torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed))]
                    scores = 0.4 * (q[row].double() @ seen.T)
                    out[row], lse[row] = scores.softmax(-1) @ seen[:, :LATENT], scores.logsumexp(-1)
        runs.append(AttentionOutput(out, lse))
    return runs


def require_same(got: AttentionOutput, right: AttentionOutput, runs: list[AttentionOutput]) -> None:
    judge_tensor("out", got.out, right.out, *(r.out for r in runs)).require_pass()
    judge_tensor("lse", got.lse, right.lse, *(r.lse for r in runs), by_row=False).require_pass()


class TestCombine:
    @pytest.mark.parametrize("world", [2, 4, 8], ids="W{}".format)
    @INTERLEAVES
    @pytest.mark.parametrize("q_len", [1, 2, 3, 8], ids="q{}".format)
    def test_all_ranks_together_are_one_rank(self, world, interleave, q_len):
        sequences = [draw(n, LATENT + ROPE, seed=n) for n in (10, 3, 0, 1, 70)]
        q = draw(5 * q_len + 2, HEADS, LATENT + ROPE, seed=99)
        indptr = ints(*range(0, 5 * q_len + 1, q_len))
        parts = on_each_rank(q, sequences, indptr, world, interleave)
        runs = fp64_runs(q, sequences, indptr)
        require_same(combine(parts), on_one_rank(q, sequences, indptr), runs)

    def test_a_rank_without_a_token_is_neutral(self):
        sequences, q = [draw(3, LATENT + ROPE)], draw(1, HEADS, LATENT + ROPE, seed=1)
        parts = on_each_rank(q, sequences, ints(0, 1), 4, 1)
        assert (parts[3].lse == -torch.inf).all()
        with_it, without = combine(parts), combine(parts[:3])
        assert torch.equal(with_it.out, without.out) and torch.equal(with_it.lse, without.lse)

    def test_sinks_are_applied_once_after_the_merge(self):
        sequences, q = [draw(10, LATENT + ROPE)], draw(3, HEADS, LATENT + ROPE, seed=1)
        indptr, sinks = ints(0, 3), torch.tensor([1.0, -2.0, -torch.inf], dtype=torch.float64)
        parts = on_each_rank(q, sequences, indptr, 4, 1)
        got, merged = combine(parts, sinks), merge(parts)
        assert torch.equal(got.out, apply_sinks(merged.out, merged.lse, sinks))
        assert torch.equal(got.lse, merged.lse)
        runs = [
            AttentionOutput(r.out * torch.sigmoid(r.lse - sinks)[..., None], r.lse)
            for r in fp64_runs(q, sequences, indptr)
        ]
        require_same(got, on_one_rank(q, sequences, indptr, sinks), runs)

    def test_sinks_on_every_rank_would_count_that_many_times(self):
        # One key a rank, all of weight 1, and a sink of weight 1: out is 4/5; on every rank it would be 1/2.
        parts = [AttentionOutput(torch.ones(1, 1, 1), torch.zeros(1, 1))] * 4
        sink = torch.zeros(1)
        judge_tensor(
            "out", combine(parts, sink).out, torch.tensor([[[0.8]]]).double(), torch.tensor([[[0.8]]])
        ).require_pass()
        assert merge([AttentionOutput(apply_sinks(*p, sink), p.lse) for p in parts]).out.item() == 0.5


def work(rank: int, rendezvous: str, results: str) -> None:
    """One of two ranks: attend its own tokens, gather, combine, write down the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    sequences, q, indptr, sinks = shared_step()
    part = on_each_rank(q, sequences, indptr, 2, 1)[rank]
    part = AttentionOutput(part.out.float(), part.lse.float())
    with_sinks, without = all_gather_combine(part, sinks=sinks), all_gather_combine(part)
    half = all_gather_combine(AttentionOutput(part.out.bfloat16(), part.lse))
    torch.save([tuple(r) for r in (with_sinks, without, half)], f"{results}/{rank}.pt")
    dist.destroy_process_group()


def shared_step() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    sequences = [draw(n, LATENT + ROPE, seed=n) for n in (10, 1, 0, 7)]
    return (
        sequences,
        draw(9, HEADS, LATENT + ROPE, seed=5),
        ints(0, 3, 4, 5, 8),
        torch.tensor([0.5, -1.0, 2.0]),
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[AttentionOutput]]:
    """What each of two processes got."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder / "rendezvous"), str(folder)), nprocs=2)
    return [[AttentionOutput(*r) for r in torch.load(folder / f"{rank}.pt")] for rank in range(2)]


class TestAcrossProcesses:
    def test_every_rank_gets_the_same_bits(self, results):
        for one, other in zip(*results, strict=True):
            assert torch.equal(one.out, other.out) and torch.equal(one.lse, other.lse)

    def test_they_are_those_of_combine(self, results):
        sequences, q, indptr, sinks = shared_step()
        parts = [
            AttentionOutput(p.out.float(), p.lse.float()) for p in on_each_rank(q, sequences, indptr, 2, 1)
        ]
        halves = [AttentionOutput(p.out.bfloat16(), p.lse) for p in parts]
        for got, right in zip(
            results[0], (combine(parts, sinks), combine(parts), combine(halves)), strict=True
        ):
            assert got.out.dtype == right.out.dtype
            assert torch.equal(got.out, right.out) and torch.equal(got.lse, right.lse)

    def test_a_part_without_lse_is_refused_before_anything_is_sent(self):
        with pytest.raises(InvalidInput, match=r"lse got None; needs .*return_lse=True"):
            all_gather_combine(AttentionOutput(torch.ones(1, 1, 1), None))
