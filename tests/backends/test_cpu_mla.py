"""The CPU backend beyond conformance: memory, bitwise invariance, values that are not finite, ties."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import anymla
from anymla import reference
from anymla.backends import cpu_mla
from anymla.backends.cpu_mla import expanded, topk
from anymla.backends.cpu_mla.tiles import TILE
from anymla.kv_cache import KV_FORMATS, KVCache
from anymla.verification import eager, inputs
from anymla.verification.inputs import Inputs, Widths
from anymla.verification.judge import judge, judge_topk

FORMATS = [name for name in KV_FORMATS if not name.startswith("index_k")]
SMALL = Widths(3, 128, 32, 32, 48)
SMALL_BYTES = 8 * TILE
"""One index a key of a tile: nothing that grows with the call is as small."""


class Allocations(TorchDispatchMode):
    """Notes every operation whose result lies in memory that none of its arguments had."""

    def __init__(self) -> None:
        super().__init__()
        self.large: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                size = t.untyped_storage().nbytes()
                if size > SMALL_BYTES:
                    self.large.append((str(func), size))
        return result


def batch_of(case: Inputs, **bounds: int) -> anymla.Batch:
    """The step of a generated call."""
    names = ("block_table", "seq_lens", "qo_indptr", "causal")
    return anymla.Batch.of(
        **{name: case.options[name] for name in names if name in case.options},
        block_size=case.cache.block_size,
        new_tokens_are_cached=case.op != "prefill",
        **{"num_tokens": case.num_rows, **bounds},
    )


def plan_of(case: Inputs, **bounds: int) -> anymla.DecodePlan:
    """A plan for a generated decode, with sinks and an lse."""
    ql_nope, q_pe, cache = case.tensors
    return anymla.plan_decode(
        batch_of(case, **bounds),
        num_heads=ql_nope.shape[1],
        kv_lora_rank=ql_nope.shape[2],
        qk_rope_head_dim=q_pe.shape[2],
        q_dtype=ql_nope.dtype,
        kv_format=cache.format.name,
        sinks=True,
        return_lse=True,
    )


def index_plan_of(case: Inputs, **bounds: int) -> anymla.IndexPlan:
    """A plan for a generated choice of keys."""
    q, _, cache = case.tensors
    return anymla.plan_index_topk(
        batch_of(case, **bounds),
        topk=case.options["topk"],
        index_heads=q.shape[1],
        index_head_dim=q.shape[2],
        q_dtype=q.dtype,
        kv_format=cache.format.name,
    )


def run(plan: Any, case: Inputs, **outputs: Any) -> anymla.AttentionOutput:
    ql_nope, q_pe, cache = case.tensors
    sm_scale, sinks = case.options["sm_scale"], case.options["sinks"]
    return plan.run(ql_nope, q_pe, cache, sm_scale=sm_scale, sinks=sinks, return_lse=True, **outputs)


def called(case: Inputs) -> anymla.AttentionOutput:
    """The public operation on a generated call."""
    options = dict(case.options)
    if case.op == "prefill":
        options["kv_cache"] = options.pop("cache", None)
    result = getattr(anymla, case.op)(*case.tensors, **options, return_lse=True)
    assert isinstance(result, anymla.AttentionOutput)
    return result


def require_right(case: Inputs, got: anymla.AttentionOutput) -> None:
    """Hold a result against the reference and the eager runs."""
    right = getattr(reference, case.op)(*case.tensors, **case.options)
    judge(got, right, *getattr(eager, case.op)(*case.tensors, **case.options)).require_pass()


def require_right_rows(
    rows: slice, got: anymla.AttentionOutput, right: anymla.AttentionOutput, *noise: anymla.AttentionOutput
) -> None:
    """Hold some rows against the reference; the eager runs may be of a call that equals it in these rows."""
    judge(*(anymla.AttentionOutput(out[rows], lse[rows]) for out, lse in (got, right, *noise))).require_pass()


def same_bits(a: anymla.AttentionOutput, b: anymla.AttentionOutput) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None)


def plain_cache(rows: Tensor, kv_lora_rank: int, block_size: int = 16, kv_format: str = "fp32") -> KVCache:
    """A cache of these rows [n, L + R] in order, padded with NaN to whole pages and one page more."""
    blocks = -(-len(rows) // block_size) + 1
    cache = KVCache.allocate(
        blocks,
        block_size,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=rows.shape[1] - kv_lora_rank,
        kv_format=kv_format,
        scale=1.0 if KV_FORMATS[kv_format].scaled else None,
    )
    every = torch.full((blocks * block_size, rows.shape[1]), math.nan)
    every[: len(rows)] = rows
    cache.write(every[:, :kv_lora_rank], every[:, kv_lora_rank:], torch.arange(len(every)))
    return cache


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class TestRight:
    """Across tiles, row blocks and head groups, where a kernel written in blocks goes wrong."""

    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize("views", [False, True], ids=["contiguous", "views"])
    def test_decode_over_several_tiles(self, kv_format: str, views: bool):
        lens = (0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 3)
        case = inputs.decode_inputs(
            SMALL, lens, q_dtype=torch.float32, kv_format=kv_format, block_size=24, views=views
        )
        require_right(case, called(case))

    @pytest.mark.parametrize("num_heads", [1, 2, 7, 16, 40])
    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
    def test_more_query_tokens_than_fit_in_a_block_of_rows(self, num_heads: int, causal: bool):
        lens, asked = (TILE + 9, 5, 3, 0), (2 * TILE // num_heads + 3 if num_heads > 7 else 19, 5, 9, 2)
        case = inputs.decode_inputs(
            Widths(num_heads, 128, 32), lens, asked, q_dtype=torch.float32, kv_format="fp32", causal=causal
        )
        require_right(case, called(case))

    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_sparse_decode_over_several_tiles(self, kv_format: str):
        case = inputs.sparse_inputs(
            SMALL, TILE + 200, TILE + 77, 5, q_dtype=torch.float32, kv_format=kv_format, views=True
        )
        require_right(case, called(case))

    @pytest.mark.parametrize("contexts", [None, (TILE + 1, 0, 3)], ids=["no-context", "context"])
    @pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
    def test_prefill_over_several_tiles_and_groups_of_heads(
        self, contexts: tuple[int, ...] | None, causal: bool
    ):
        widths = Widths(11, 64, 16, 32, 24)
        case = inputs.prefill_inputs(
            widths, contexts, (TILE + 30, 1, 0), q_dtype=torch.float32, kv_format="fp32", causal=causal
        )
        require_right(case, called(case))

    def test_prefill_of_more_tokens_than_one_span(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(expanded, "SPAN", 64)
        monkeypatch.setattr(expanded, "ROWS", 24)
        case = inputs.prefill_inputs(SMALL, (70,), (150,), q_dtype=torch.float32, kv_format="bf16")
        require_right(case, called(case))

    @pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("op", ["decode", "prefill", "sparse_decode"])
    def test_results_have_the_dtype_of_the_queries(self, op: str, q_dtype: torch.dtype):
        case = {
            "decode": lambda: inputs.decode_inputs(SMALL, (40,), (3,), q_dtype=q_dtype),
            "prefill": lambda: inputs.prefill_inputs(SMALL, (40,), (30,), q_dtype=q_dtype),
            "sparse_decode": lambda: inputs.sparse_inputs(SMALL, 90, 33, q_dtype=q_dtype),
        }[op]()
        got = called(case)
        assert got.out.dtype == q_dtype
        require_right(case, got)


class TestMemory:
    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_a_planned_decode_allocates_nothing_that_grows(self, kv_format: str):
        case = inputs.decode_inputs(
            SMALL, (TILE + 70, 40), (3, 1), kv_format=kv_format, q_dtype=torch.float32
        )
        plan, (ql_nope, q_pe, cache) = plan_of(case), case.tensors
        out, lse = torch.empty(case.shape), torch.empty(case.shape[:2])
        args = anymla.contract.DecodeArgs(
            ql_nope, q_pe, cache, case.options["sm_scale"], case.options["sinks"], out, lse
        )
        with Allocations() as seen:
            cpu_mla.decode(args, plan.state)
        assert seen.large == []

    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_a_planned_sparse_decode_allocates_nothing_that_grows(self, kv_format: str):
        case = inputs.sparse_inputs(SMALL, TILE + 200, TILE + 77, 5, kv_format=kv_format, views=True)
        ql_nope, q_pe, cache = case.tensors
        plan = anymla.plan_sparse_decode(
            num_tokens=5,
            num_heads=SMALL.num_heads,
            kv_lora_rank=SMALL.kv_lora_rank,
            qk_rope_head_dim=SMALL.qk_rope_head_dim,
            block_size=cache.block_size,
            topk=TILE + 77,
            q_dtype=ql_nope.dtype,
            kv_format=kv_format,
            sinks=True,
            return_lse=True,
        )
        out, lse = torch.empty(case.shape, dtype=ql_nope.dtype), torch.empty(case.shape[:2])
        args = anymla.contract.SparseArgs(
            ql_nope,
            q_pe,
            cache,
            case.options["indices"],
            case.options["counts"],
            case.options["sm_scale"],
            case.options["sinks"],
            out,
            lse,
        )
        with Allocations() as seen:
            cpu_mla.sparse_decode(args, plan.state)
        assert seen.large == []

    @pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_a_planned_prefill_allocates_nothing_that_grows(self, q_dtype: torch.dtype):
        case = inputs.prefill_inputs(SMALL, (TILE + 5, 3), (300, 7), q_dtype=q_dtype)
        options = case.options
        plan = anymla.plan_prefill(
            batch_of(case),
            num_heads=SMALL.num_heads,
            kv_lora_rank=SMALL.kv_lora_rank,
            qk_rope_head_dim=SMALL.qk_rope_head_dim,
            qk_nope_head_dim=SMALL.qk_nope_head_dim,
            v_head_dim=SMALL.v_head_dim,
            q_dtype=q_dtype,
            kv_format="bf16",
            sinks=True,
            return_lse=True,
        )
        out, lse = torch.empty(case.shape, dtype=q_dtype), torch.empty(case.shape[:2])
        args = anymla.contract.PrefillArgs(
            *case.tensors, case.cache, options["sm_scale"], options["sinks"], out, lse
        )
        with Allocations() as seen:
            cpu_mla.prefill(args, plan.state)
        assert seen.large == []

    @pytest.mark.parametrize("kv_format", ["fp32", "bf16"])
    def test_a_planned_top_k_allocates_nothing_that_grows(self, kv_format: str):
        case = inputs.index_inputs(4, 64, (2 * TILE, 30), (3, 1), TILE + 7, kv_format=kv_format)
        plan, out = index_plan_of(case), torch.empty(case.shape, dtype=torch.int32)
        with Allocations() as seen:
            plan.run(*case.tensors, out=out)
        assert seen.large == []

    def test_the_scratch_of_decode_does_not_grow_with_length(self):
        def scratch(length: int) -> int:
            case = inputs.decode_inputs(SMALL, (length,), kv_format="fp8_ds_mla")
            with Allocations() as seen:
                plan_of(case)
            return sum(size for _, size in seen.large)

        assert scratch(16 * TILE) == scratch(2 * TILE)

    def test_an_update_moves_no_buffer_and_gives_what_a_new_plan_gives(self):
        cases = [
            inputs.decode_inputs(SMALL, lens, asked, seed=seed, q_dtype=torch.float32, kv_format="fp32")
            for seed, (lens, asked) in enumerate(
                [((700, 300), (2, 3)), ((TILE, 4), (3, 1)), ((0, 9), (0, 0))]
            )
        ]
        plan = plan_of(cases[0], max_seq_len=800, max_q_len=4)
        out, lse = torch.empty(cases[0].shape), torch.empty(cases[0].shape[:2])
        for case in cases:
            rows = case.num_rows
            padded = Inputs(
                case.op,
                tuple(
                    torch.cat((t, torch.full((6 - rows, *t.shape[1:]), math.nan))) for t in case.tensors[:2]
                )
                + case.tensors[2:],
                case.options,
                6,
                cases[0].shape,
            )
            with Allocations() as seen:
                plan.update(batch_of(case))
            assert seen.large == []
            run(plan, padded, out=out, lse=lse)
            alone = run(plan_of(case), case)
            assert same_bits(anymla.AttentionOutput(out[:rows], lse[:rows]), alone)
            assert not out[rows:].any() and bool((lse[rows:] == -math.inf).all())


class TestBatchInvariance:
    LENS, ASKED = (TILE + 17, 40, 1, 3 * TILE), (2, 5, 1, 1)

    @pytest.mark.parametrize("kv_format", ["fp32", "bf16", "fp8_e4m3fn", "fp8_ds_mla"])
    @pytest.mark.parametrize("num_heads", [1, 3, 16])
    def test_a_decode_row_is_bitwise_the_same_alone_and_in_a_batch(self, num_heads: int, kv_format: str):
        case = inputs.decode_inputs(
            Widths(num_heads, 128, 32), self.LENS, self.ASKED, q_dtype=torch.float32, kv_format=kv_format
        )
        together = called(case)
        indptr = case.options["qo_indptr"].tolist()
        for b in range(len(self.LENS)):
            rows = slice(indptr[b], indptr[b + 1])
            options = case.options | {
                "block_table": case.options["block_table"][b : b + 1],
                "seq_lens": case.options["seq_lens"][b : b + 1],
                "qo_indptr": ints(0, self.ASKED[b]),
            }
            ql_nope, q_pe, cache = case.tensors
            alone = anymla.decode(
                ql_nope[rows].clone(), q_pe[rows].clone(), cache, **options, return_lse=True
            )
            assert together.lse is not None
            assert same_bits(alone, anymla.AttentionOutput(together.out[rows], together.lse[rows]))

    def test_a_prefill_row_is_bitwise_the_same_alone_and_in_a_batch(self):
        contexts, asked = (TILE + 5, 0, 30), (300, 9, 64)
        case = inputs.prefill_inputs(SMALL, contexts, asked, q_dtype=torch.float32, kv_format="bf16")
        together = called(case)
        assert together.lse is not None
        indptr = case.options["qo_indptr"].tolist()
        for b in range(3):
            rows = slice(indptr[b], indptr[b + 1])
            options = dict(case.options)
            options["kv_cache"] = options.pop("cache")
            options |= {name: options[name][b : b + 1] for name in ("block_table", "seq_lens")}
            options["qo_indptr"] = ints(0, asked[b])
            per_token = [t[rows].clone() for t in case.tensors[:4]]
            alone = anymla.prefill(*per_token, *case.tensors[4:], **options, return_lse=True)
            assert same_bits(alone, anymla.AttentionOutput(together.out[rows], together.lse[rows]))

    def test_a_sparse_row_is_bitwise_the_same_alone_and_in_a_batch(self):
        case = inputs.sparse_inputs(SMALL, TILE + 200, TILE + 30, 5, q_dtype=torch.float32, kv_format="fp32")
        together, (ql_nope, q_pe, cache) = called(case), case.tensors
        assert together.lse is not None
        for t in range(5):
            row = slice(t, t + 1)
            options = case.options | {name: case.options[name][row] for name in ("indices", "counts")}
            alone = anymla.sparse_decode(
                ql_nope[row].clone(), q_pe[row].clone(), cache, **options, return_lse=True
            )
            assert same_bits(alone, anymla.AttentionOutput(together.out[row], together.lse[row]))

    @pytest.mark.parametrize("block_size", [1, 7, 64, 1000])
    def test_pages_of_any_size_in_any_order_give_the_same_bits(self, block_size: int):
        draw = torch.Generator().manual_seed(0)
        rows = torch.randn(TILE + 90, 96, generator=draw)
        q = torch.randn(1, 16, 96, generator=draw)
        results = []
        for size in (16, block_size):
            blocks = -(-len(rows) // size)
            pages = torch.randperm(blocks, generator=draw)
            cache = KVCache.allocate(blocks, size, kv_lora_rank=64, qk_rope_head_dim=32, kv_format="fp32")
            slots = pages.repeat_interleave(size) * size + torch.arange(blocks * size) % size
            cache.write(rows[:, :64], rows[:, 64:], slots[: len(rows)])
            table, lens = pages[None].int(), ints(len(rows))
            results.append(
                anymla.decode(q[..., :64], q[..., 64:], cache, block_table=table, seq_lens=lens, sm_scale=0.1)
            )
        assert same_bits(*results)


class TestNotFinite:
    """What a row sees propagates as softmax arithmetic has it; what it does not see does not exist."""

    @pytest.mark.parametrize("kv_format", ["fp32", "bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_ds_mla"])
    @pytest.mark.parametrize("length", [TILE, TILE + 40], ids=["first-tile", "second-tile"])
    def test_a_nan_key_reaches_the_rows_that_see_it_and_no_other(self, kv_format: str, length: int):
        draw = torch.Generator().manual_seed(1)
        rows = torch.randn(length, 160, generator=draw)
        rows[length - 2, 5] = math.nan
        cache = plain_cache(rows, 128, kv_format=kv_format)
        q = torch.randn(4, 3, 160, generator=draw)
        table = torch.arange(cache.num_blocks, dtype=torch.int32)[None]
        call = {"block_table": table, "seq_lens": ints(length), "qo_indptr": ints(0, 4), "sm_scale": 0.1}
        got = anymla.decode(q[..., :128], q[..., 128:], cache, **call, return_lse=True)
        right = reference.decode(q[..., :128], q[..., 128:], cache, **call)
        assert bool(got.out[2:].isnan().all()) and bool(got.out[:2].isfinite().all())
        # The eager runs carry the NaN to every row, so they run without it.
        rows[length - 2, 5] = 0
        clean = plain_cache(rows, 128, kv_format=kv_format)
        require_right_rows(slice(2), got, right, *eager.decode(q[..., :128], q[..., 128:], clean, **call))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
    @pytest.mark.parametrize("part", ["latent", "rope"])
    def test_what_is_not_finite_in_a_live_key_behaves_as_in_the_reference(self, value: float, part: str):
        draw = torch.Generator().manual_seed(2)
        rows, q = torch.randn(70, 96, generator=draw), torch.randn(5, 3, 96, generator=draw)
        rows[67, 3 if part == "latent" else 70] = value
        cache = plain_cache(rows, 64)
        table = torch.arange(cache.num_blocks, dtype=torch.int32)[None]
        call = {"block_table": table, "seq_lens": ints(70), "qo_indptr": ints(0, 5), "sm_scale": 0.1}
        got = anymla.decode(q[..., :64], q[..., 64:], cache, **call, return_lse=True)
        right = reference.decode(q[..., :64], q[..., 64:], cache, **call)
        judge(got, right, *eager.decode(q[..., :64], q[..., 64:], cache, **call)).require_pass()

    def test_a_row_whose_scores_are_all_minus_infinity_attends_to_nothing(self):
        rows = torch.full((3, 8), -math.inf)
        cache, q = plain_cache(rows, 6), torch.ones(1, 2, 8)
        got = anymla.decode(
            q[..., :6],
            q[..., 6:],
            cache,
            block_table=ints(0)[None],
            seq_lens=ints(3),
            sm_scale=1.0,
            return_lse=True,
        )
        assert got.lse is not None
        assert not got.out.any() and bool((got.lse == -math.inf).all())

    def test_a_nan_token_of_a_prefill_reaches_only_later_tokens(self):
        case = inputs.prefill_inputs(
            SMALL, (40,), (20,), q_dtype=torch.float32, kv_format="fp32", sinks="none"
        )
        noise = eager.prefill(*case.tensors, **case.options)
        case.tensors[2][13, 7] = math.nan
        got = called(case)
        assert bool(got.out[13:20].isnan().all())
        require_right_rows(slice(13), got, reference.prefill(*case.tensors, **case.options), *noise)

    def test_a_nan_query_spoils_its_own_row_only(self):
        case = inputs.decode_inputs(SMALL, (90,), (4,), q_dtype=torch.float32, kv_format="fp32", sinks="none")
        case.tensors[0][1, 2, 3] = math.nan
        got = called(case)
        spoilt = got.out.isnan().any(-1)
        assert spoilt.nonzero().tolist() == [[1, 2]]
        assert bool(got.out[1, 2].isnan().all())

    @pytest.mark.parametrize("sink", [math.inf, -math.inf, 1e30, -1e30], ids=str)
    def test_extreme_sinks_leave_no_nan(self, sink: float):
        case = inputs.decode_inputs(SMALL, (30, 0), q_dtype=torch.float32, kv_format="fp32", sinks="none")
        plain = called(case)
        case.options["sinks"] = torch.full((3,), sink)
        got = called(case)
        assert torch.equal(got.out, plain.out if sink < 0 else torch.zeros_like(plain.out))
        assert got.lse is not None and plain.lse is not None and torch.equal(got.lse, plain.lse)


class TestSparse:
    def test_a_slot_given_twice_counts_twice(self):
        draw = torch.Generator().manual_seed(3)
        rows, q = torch.randn(20, 24, generator=draw), torch.randn(1, 2, 24, generator=draw)
        cache = plain_cache(rows, 16)
        call = {"indices": ints(4, 9, -1, 4, 4)[None], "sm_scale": 1.0}
        got = anymla.sparse_decode(q[..., :16], q[..., 16:], cache, **call, return_lse=True)
        keys = rows[[4, 4, 4, 9]].double()
        scores = q[0].double() @ keys.T
        right = (scores.softmax(-1) @ keys[:, :16])[None], scores.logsumexp(-1)[None]
        noise = eager.sparse_decode(q[..., :16], q[..., 16:], cache, **call)
        judge(got, anymla.AttentionOutput(*right), *noise).require_pass()

    def test_slots_behind_a_count_are_not_read(self):
        rows = torch.randn(20, 24, generator=torch.Generator().manual_seed(4))
        rows[7] = math.nan
        cache, q = plain_cache(rows, 16), torch.ones(2, 2, 24)
        got = anymla.sparse_decode(
            q[..., :16],
            q[..., 16:],
            cache,
            indices=torch.stack((ints(3, 7, 7), ints(-1, -1, 7))),
            counts=ints(1, 2),
            sm_scale=1.0,
            return_lse=True,
        )
        assert got.lse is not None
        assert torch.equal(got.out[0], rows[3, :16].expand(2, 16))
        assert not got.out[1].any() and bool((got.lse[1] == -math.inf).all())


class TestTopk:
    @pytest.mark.parametrize("kv_format", ["fp32", "bf16", "index_k", "index_k_fnuz", "fp8_e4m3fn"])
    @pytest.mark.parametrize("exact", [True, False], ids=["exact", "random"])
    def test_the_largest_logits_over_several_tiles(self, kv_format: str, exact: bool):
        case = inputs.index_inputs(
            8,
            128,
            (TILE + 70, 5, 0, 2 * TILE),
            (3, 2, 1, 70),
            40,
            kv_format=kv_format,
            q_dtype=torch.float32,
            exact=exact,
            block_size=24,
            views=True,
        )
        got = anymla.index_topk(*case.tensors, **case.options)
        options = {name: value for name, value in case.options.items() if name != "topk"}
        judge_topk(
            got,
            reference.index_topk(*case.tensors, **case.options),
            reference.index_logits(*case.tensors, **options),
            eager.index_logits(*case.tensors, **options),
        ).require_pass()

    def topk(self, keys: Tensor, topk: int, weights: Tensor | None = None) -> list[int]:
        cache = plain_cache(keys, keys.shape[1])
        table = torch.arange(cache.num_blocks, dtype=torch.int32)[None]
        q = torch.eye(keys.shape[1])[:1][None]
        weights = torch.ones(1, 1) if weights is None else weights
        got = anymla.index_topk(q, weights, cache, block_table=table, seq_lens=ints(len(keys)), topk=topk)
        return [int(i) for i in got[0]]

    def test_equal_keys_rank_by_token_wherever_they_stand_in_a_tile(self):
        one = torch.randn(1, 64, generator=torch.Generator().manual_seed(5))
        one[0, 0] = 1.3
        assert self.topk(one.repeat(2 * TILE + 11, 1), 2 * TILE + 11) == list(range(2 * TILE + 11))

    def test_both_zeros_are_equal(self):
        keys = torch.zeros(6, 4)
        keys[:, 0] = torch.tensor([-1.0, 1.0, -1.0, 0.0, -2.0, 0.5])
        assert self.topk(keys, 6, -torch.ones(1, 1)) == [0, 2, 3, 4, 5, 1]

    def test_minus_infinity_ranks_above_nan_and_both_above_nothing(self):
        keys = torch.zeros(7, 4)
        keys[:, 0] = torch.tensor([math.nan, math.inf, 1.0, math.nan, math.inf, 3.0, 0.0])
        assert self.topk(keys, 9, -torch.ones(1, 1)) == [6, 2, 5, 1, 4, 0, 3, -1, -1]

    @pytest.mark.parametrize("power_of_two", [False, True], ids=["exact-scales", "power-of-two-scales"])
    @pytest.mark.parametrize("kv_format", ["index_k", "index_k_fnuz"])
    def test_fp8_queries_and_keys_of_verify_blocks(self, kv_format: str, power_of_two: bool):
        case = inputs.index_inputs(5, 64, (90, 8, 33, 0, 70), (1, 8, 2, 0, 5), 12, exact=False)
        q, weights, plain = case.tensors
        cache = KVCache.allocate(
            plain.num_blocks, plain.block_size, kv_lora_rank=64, qk_rope_head_dim=0, kv_format=kv_format
        )
        slots = torch.arange(plain.num_blocks * plain.block_size)
        cache.write(plain.read(slots), torch.empty(len(slots), 0), slots, power_of_two=power_of_two)
        q, weights = anymla.quantise_queries(q, weights, kv_format=kv_format, power_of_two=power_of_two)
        options = {name: value for name, value in case.options.items() if name != "topk"}
        judge_topk(
            anymla.index_topk(q, weights, cache, topk=12, **options),
            reference.index_topk(q, weights, cache, topk=12, **options),
            reference.index_logits(q, weights, cache, **options),
            eager.index_logits(q, weights, cache, **options),
        ).require_pass()

    def test_a_prompt_is_chosen_for_in_parts_where_memory_is_short(self, monkeypatch: pytest.MonkeyPatch):
        case = inputs.index_inputs(2, 32, (300, 40), (200, 9), 20)
        whole = anymla.index_topk(*case.tensors, **case.options)
        monkeypatch.setattr(topk, "RANKS_BYTES", 8 * 300 * 7)
        sizes = []
        rank = topk._rank
        monkeypatch.setattr(topk, "_rank", lambda *a: sizes.append(a[4] - a[3]) or rank(*a))
        assert torch.equal(anymla.index_topk(*case.tensors, **case.options), whole)
        assert max(sizes) == 7 and sum(sizes) == 209

    @pytest.mark.parametrize("count", [1, 4096])
    def test_a_million_tokens_are_chosen_from_in_bounded_memory(self, count: int):
        length = 1_000_000
        draw = torch.Generator().manual_seed(count)
        keys = torch.randint(-3, 4, (length // 64, 64, 1), generator=draw).float()
        q, table = torch.ones(8, 1, 1), torch.arange(length // 64, dtype=torch.int32)[None]
        step = {"block_table": table, "seq_lens": ints(length), "qo_indptr": ints(0, 8), "topk": count}
        with Allocations() as seen:
            got = anymla.index_topk(q, torch.ones(8, 1), keys, **step, kv_format="fp32")
        # torch.topk of one row has an index a value of its own.
        assert max(size for _, size in seen.large) <= topk.RANKS_BYTES
        logits = keys.flatten().relu()
        for row in (0, 7):
            # Equal logits in order of their tokens, which is what a stable sort keeps.
            right = logits[: length - 7 + row].sort(descending=True, stable=True).indices[:count]
            assert torch.equal(got[row].long(), right)

    def test_nothing_is_written_beside_the_rows(self):
        case = inputs.index_inputs(2, 32, (30, 0, 4), (3, 1, 2), 6)
        wide = torch.full((case.num_rows + 2, 9), -7, dtype=torch.int32)
        out = wide[1:-1, 1:7]
        anymla.index_topk(*case.tensors, **case.options, out=out)
        assert torch.equal(out, anymla.index_topk(*case.tensors, **case.options))
        wide[1:-1, 1:7] = -7
        assert bool((wide == -7).all())

    def test_a_plan_serves_layer_after_layer_and_step_after_step_in_the_same_buffers(self):
        steps = [((700, 300), (2, 3)), ((TILE, 4), (3, 1)), ((0, 9), (0, 0)), ((800, 800), (1, 4))]
        cases = [inputs.index_inputs(3, 32, *step, 40, seed=seed) for seed, step in enumerate(steps)]
        plan = index_plan_of(cases[0], max_seq_len=800, max_q_len=4)
        buffers = {name: t.data_ptr() for name, t in vars(plan.state).items() if isinstance(t, Tensor)}
        out = torch.empty(cases[0].shape, dtype=torch.int32)
        for case in cases:
            rows, (q, weights, cache) = case.num_rows, case.tensors
            q = torch.cat((q, q.new_full((6 - rows, *q.shape[1:]), math.nan)))
            weights = torch.cat((weights, weights.new_full((6 - rows, 3), math.nan)))
            with Allocations() as seen:
                plan.update(batch_of(case, num_tokens=6))
            assert seen.large == []
            for layer in (1, -1):
                plan.run(q, layer * weights, cache, out=out)
                alone = anymla.index_topk(q[:rows], layer * weights[:rows], cache, **case.options)
                assert torch.equal(out[:rows], alone) and bool((out[rows:] == -1).all())
        assert buffers == {
            name: t.data_ptr() for name, t in vars(plan.state).items() if isinstance(t, Tensor)
        }

    def test_slots_are_those_of_the_tokens_in_the_pages(self):
        case = inputs.index_inputs(3, 32, (300, 9, 0), (2, 1, 1), 40, block_size=24)
        table, indptr = case.options["block_table"], case.options["qo_indptr"]
        slots = anymla.index_topk(*case.tensors, **case.options, as_slots=True)
        ids = anymla.index_topk(*case.tensors, **case.options)
        assert torch.equal(slots, anymla.to_slots(ids, table, indptr, 24))
        assert torch.equal(index_plan_of(case).run(*case.tensors, as_slots=True), slots)

    def test_logits_far_apart_keep_their_order(self):
        keys = torch.zeros(6, 4)
        keys[:, 0] = torch.tensor([1e-40, 3e38, 1e-45, 1.0, math.inf, 1.0000001])
        assert self.topk(keys, 6) == [4, 1, 5, 3, 0, 2]
