"""Small inputs on which the field's MLA kernels failed in public, with their numbers, through our functions.

Each class names the threads. D4, units of the lse, is in test_merge; D10, context parallelism, in
test_distributed.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import anymla
from anymla import InvalidInput, KVCache, machine_named, reference
from anymla.contract import AttentionOutput
from anymla.kv_cache import KV_FORMATS
from anymla.problem import Problem
from anymla.verification import eager
from anymla.verification.faults import Int32Offset, Kernel
from anymla.verification.inputs import Inputs, decode_inputs, sparse_inputs
from anymla.verification.judge import judge
from anymla.verification.needles import Widths

WIDTHS = Widths(num_heads=16)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(call: Inputs) -> AttentionOutput:
    """The public function on a call, into outputs full of NaN."""
    out = torch.full(call.shape, torch.nan, dtype=call.tensors[0].dtype)
    lse = torch.full(call.shape[:2], torch.nan)
    function = {"decode": anymla.decode, "sparse_decode": anymla.sparse_decode}[call.op]
    return function(*call.tensors, **call.options, return_lse=True, out=out, lse=lse, backend="cpu")


def require_right(call: Inputs, got: AttentionOutput) -> None:
    """Hold a result against the fp64 definition."""
    right = getattr(reference, call.op)(*call.tensors, **call.options)
    judge(got, right, *getattr(eager, call.op)(*call.tensors, **call.options)).require_pass()


def same_bits(one: AttentionOutput, other: AttentionOutput) -> bool:
    return torch.equal(one.out, other.out) and torch.equal(one.lse, other.lse)


def is_empty(got: AttentionOutput, row: int) -> bool:
    return bool((got.out[row] == 0).all() and (got.lse[row] == -torch.inf).all())


def verdict(name: str, problem: Problem, machine: str) -> str:
    """What a backend says of a problem."""
    verdicts = anymla.explain(problem, machine_named(machine))
    return str(next(v for v in verdicts if v.backend.name == name))


class TestD1EmptyPaddedRow:
    """vllm#57094: rows of length 0 in a padded batch came out as 0/0 and spread NaN to every request."""

    @pytest.mark.parametrize("lens", [(5, 7, 3, 0), (0, 0)], ids=str)
    @pytest.mark.parametrize("sinks", ["none", "near", "infinite"])
    def test_it_is_zero_and_minus_infinity_and_spoils_no_other_row(self, lens, sinks):
        call = decode_inputs(WIDTHS, lens, block_size=16, sinks=sinks)
        for row in (row for row, n in enumerate(lens) if n == 0):
            call.options["block_table"][row] = 0
        got = run(call)
        assert not got.out.isnan().any() and not got.lse.isnan().any()
        assert all(is_empty(got, row) for row, n in enumerate(lens) if n == 0)
        require_right(call, got)


class TestD2DirtyTailOfLastPage:
    """flashinfer#941: a weight of zero times a NaN in the unused tail of the last page."""

    @pytest.mark.parametrize(
        ("kv_format", "dirt"),
        [
            ("bf16", torch.nan),
            ("bf16", torch.inf),
            ("fp8_e4m3fn", 0x7F),
            ("fp8_e4m3fnuz", 0x80),
            ("fp8_ds_mla", 0x7F),
        ],
        ids=str,
    )
    def test_slots_13_to_15_of_13_tokens_change_no_bit(self, kv_format, dirt):
        def with_tail(value: float) -> AttentionOutput:
            call = decode_inputs(WIDTHS, (13,), block_size=4, kv_format=kv_format)
            last = int(call.options["block_table"][0, 3])
            call.cache.storage[last, 1:] = value
            return run(call)

        dirty, clean = with_tail(dirt), with_tail(0)
        assert same_bits(dirty, clean)
        require_right(decode_inputs(WIDTHS, (13,), block_size=4, kv_format=kv_format), dirty)


class TestD3LeadingMaskedChunk:
    """vllm#48364: if the first 16 top-k entries are all -1, the row is NaN for ever."""

    named = (9, 2, 30, 7, 1)

    @staticmethod
    def with_indices(indices: Tensor) -> Inputs:
        call = sparse_inputs(WIDTHS, 40, 64, 1, sinks="near")
        return replace(call, options={**call.options, "indices": indices, "counts": None})

    @pytest.mark.parametrize("leading", [0, 16, 32])
    def test_a_row_attends_to_its_five_keys_wherever_they_begin(self, leading):
        call = sparse_inputs(WIDTHS, 40, 64, 1)
        live = (
            call.cache.read(torch.arange(call.cache.num_blocks * 16)).isfinite().all(-1).nonzero().flatten()
        )
        five = live[list(self.named)].int()
        indices = torch.full((1, 64), -1, dtype=torch.int32)
        indices[0, leading : leading + 5] = five
        padded, bare = self.with_indices(indices), self.with_indices(five[None])
        got = run(padded)
        require_right(padded, got)
        require_right(bare, got)

    def test_a_row_of_nothing_but_minus_one_is_empty(self):
        assert is_empty(run(self.with_indices(torch.full((1, 64), -1, dtype=torch.int32))), 0)


class TestD5HeadCounts:
    """aiter#548, #726, #4412, #4727, vllm#35641: head counts after a split that kernels did not have."""

    @pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("heads", [1, 4, 8, 12, 20, 24, 32, 48, 64, 96, 128])
    def test_every_head_is_right(self, heads, q_dtype):
        call = decode_inputs(replace(WIDTHS, num_heads=heads), (33, 70), q_dtype=q_dtype)
        require_right(call, run(call))

    @pytest.mark.parametrize(
        ("heads", "padded"), [(1, 8), (4, 8), (12, 16), (20, 32), (24, 32), (48, 48), (96, 96), (128, 128)]
    )
    def test_explain_says_what_a_backend_pads_to(self, heads, padded):
        problem = Problem("decode", "bf16", "bf16", heads, 512, 64, block_size=1)
        said = verdict("aiter", problem, "gfx942")
        assert (f"{heads} heads padded to {padded}" in said) == (heads != padded), said

    def test_no_heads_are_refused(self):
        call = decode_inputs(WIDTHS, (33, 70), sinks="none")
        ql_nope, q_pe, kv_cache = call.tensors
        with pytest.raises(InvalidInput, match="num_heads got 0; needs at least 1"):
            anymla.decode(ql_nope[:, :0], q_pe[:, :0], kv_cache, **call.options)


class TestD6Pages:
    """aiter#2996, flashinfer#3219, #4347, #1341: page sizes ignored, pages misread, strides assumed."""

    lens = (65, 130)

    @staticmethod
    @cache
    def content() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys that do not depend on how they are paged."""
        draw = torch.Generator().manual_seed(6)
        q = torch.randn(2, 16, 576, generator=draw).bfloat16()
        keys = torch.randn(195, 576, generator=draw).bfloat16()
        return q[..., :512].contiguous(), q[..., 512:].contiguous(), keys[:, :512], keys[:, 512:]

    def paged(self, page: int, table: list[list[int]], stride: int = 1) -> AttentionOutput:
        """The result with these page ids, every `stride`-th page of the memory being one of ours."""
        ql_nope, q_pe, kv_c, k_pe = self.content()
        used = max(map(max, table)) + 1
        whole = torch.full((used * stride, page, 576), torch.nan, dtype=torch.bfloat16)
        data = whole[::stride]
        kv_cache = KVCache(data, KV_FORMATS["bf16"], 512, 64)
        width = max(map(len, table))
        block_table = torch.tensor([[*row, *[-7] * (width - len(row))] for row in table], dtype=torch.int32)
        tokens = [torch.arange(n) for n in self.lens]
        rows = [block_table[b].long()[t // page] * page + t % page for b, t in enumerate(tokens)]
        kv_cache.write(kv_c, k_pe, torch.cat(rows))
        options = {
            "block_table": block_table,
            "seq_lens": ints(*self.lens),
            "sm_scale": 192**-0.5,
            "sinks": None,
        }
        call = Inputs("decode", (ql_nope, q_pe, data), options, 2, (2, 16, 512))
        got = run(call)
        require_right(replace(call, tensors=(ql_nope, q_pe, kv_cache)), got)
        return got

    def scattered(self, page: int, seed: int) -> list[list[int]]:
        needs = [-(-n // page) for n in self.lens]
        ids = torch.randperm(sum(needs) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        return [ids[: needs[0]], ids[needs[0] : sum(needs)]]

    @pytest.mark.parametrize("page", [1, 16, 32, 64, 128, 256])
    def test_physical_page_ids_and_strides_change_no_bit(self, page):
        first = self.paged(page, self.scattered(page, 0))
        assert same_bits(first, self.paged(page, self.scattered(page, 1)))
        assert same_bits(first, self.paged(page, self.scattered(page, 2), stride=3))

    def test_the_pages_of_the_report_are_read_in_their_order(self):
        assert same_bits(self.paged(64, [[7, 2], [5, 0, 3]]), self.paged(64, [[0, 1], [2, 3, 4]]))

    def test_page_sizes_give_the_same_bits(self):
        assert all(
            same_bits(self.paged(64, self.scattered(64, 0)), self.paged(page, self.scattered(page, 0)))
            for page in (1, 16, 32, 128, 256)
        )

    def test_a_size_that_a_backend_lacks_is_refused_by_name(self):
        problem = Problem("decode", "bf16", "bf16", 64, 512, 64, block_size=32)
        assert "block_size got 32; needs 64" in verdict("hopper", problem, "sm90")


class TestD7RowsOfAVerifyBlock:
    """aiter#2720, #5679: with several query tokens a sequence, all rows equalled the first."""

    @pytest.mark.parametrize("q_len", range(1, 9))
    def test_row_i_is_the_mean_of_the_keys_that_it_sees(self, q_len):
        kv_cache = KVCache.allocate(4, 16, kv_lora_rank=512, qk_rope_head_dim=64, kv_format="fp32")
        kv_c = torch.zeros(64, 512)
        kv_c[:, 0] = torch.arange(64)
        kv_cache.write(kv_c, torch.zeros(64, 64), torch.arange(64))
        options = {
            "block_table": ints(0, 1, 2, 3)[None],
            "seq_lens": ints(64),
            "qo_indptr": ints(0, q_len),
            "sm_scale": 192**-0.5,
        }
        q = torch.zeros(q_len, 16, 512), torch.zeros(q_len, 16, 64)
        call = Inputs("decode", (*q, kv_cache), options, q_len, (q_len, 16, 512))
        got = run(call)
        seen = 64 - q_len + torch.arange(q_len) + 1
        right = torch.zeros(q_len, 16, 512, dtype=torch.float64)
        right[..., 0] = ((seen - 1) / 2)[:, None]
        lse = seen.double().log()[:, None].expand(-1, 16)
        judge(got, AttentionOutput(right, lse), *eager.decode(*call.tensors, **options)).require_pass()
        assert len(got.out[:, 0, 0].unique()) == q_len
        if q_len == 3:
            assert right[:, 0, 0].tolist() == [30.5, 31.0, 31.5]


class TestD8Offsets64:
    """vllm#47671, tokenspeed#501, aiter#4474: page id times page stride does not fit 32 bits."""

    page = 480

    def test_the_offset_of_page_7768_is_exact_where_int32_wraps(self):
        offsets = torch.tensor([7767, 7768]) * (self.page * 576)
        assert Kernel().offset(offsets).tolist() == [2147420160, 2147696640]
        assert Int32Offset().offset(offsets).tolist() == [2147420160, -2147270656]

    def test_page_7799_gives_what_page_3_gives(self):
        # 2.2 GB of address space, of which the pages written are touched.
        far = KVCache.allocate(
            7800, self.page, kv_lora_rank=512, qk_rope_head_dim=64, kv_format="fp8_e4m3fn", scale=0.5
        )
        near = replace(far, data=far.data[:8])
        draw = torch.Generator().manual_seed(8)
        keys = torch.randn(450, 576, generator=draw).bfloat16()
        q = torch.randn(1, 16, 576, generator=draw).bfloat16()
        results = []
        for kv_cache, page in ((near, 3), (far, 7799)):
            slots = torch.arange(450) + page * self.page
            anymla.write_cache(keys[:, :512], keys[:, 512:], kv_cache, slots)
            options = {"block_table": ints(page)[None], "seq_lens": ints(450), "sm_scale": 192**-0.5}
            call = Inputs("decode", (q[..., :512], q[..., 512:], kv_cache), options, 1, (1, 16, 512))
            results.append(run(call))
            require_right(call, results[-1])
            sparse = replace(
                call, op="sparse_decode", options={"indices": slots.int()[None], "sm_scale": 192**-0.5}
            )
            results.append(run(sparse))
        assert same_bits(results[0], results[2])
        assert same_bits(results[1], results[3])


class TestD12OtherGeometries:
    """vllm#53963, #56314, #52189: narrower rows read past the allocation by kernels with 576 baked in."""

    @pytest.mark.parametrize(("rank", "rope"), [(512, 0), (256, 64), (512, 64), (64, 96)])
    @pytest.mark.parametrize("page", [9, 3], ids=["one-page", "three-pages"])
    def test_nothing_is_read_past_the_last_row(self, rank, rope, page):
        draw = torch.Generator().manual_seed(12)
        keys = torch.randn(9, rank + rope, generator=draw).bfloat16()
        q = torch.randn(1, 8, rank + rope, generator=draw).bfloat16()
        results = []
        for slack in (0, 700):
            whole = torch.full((9 * (rank + rope) + 2 * slack,), torch.nan, dtype=torch.bfloat16)
            data = whole[slack : len(whole) - slack].view(9 // page, page, rank + rope)
            data.view(9, -1).copy_(keys)
            options = {
                "block_table": torch.arange(9 // page, dtype=torch.int32)[None],
                "seq_lens": ints(9),
                "sm_scale": (128 + rope) ** -0.5,
            }
            call = Inputs("decode", (q[..., :rank], q[..., rank:], data), options, 1, (1, 8, rank))
            results.append(run(call))
            kv_cache = KVCache(data, KV_FORMATS["bf16"], rank, rope)
            require_right(replace(call, tensors=(*call.tensors[:2], kv_cache)), results[-1])
        assert same_bits(*results)

    @pytest.mark.parametrize("backend", ["hopper", "aiter"])
    @pytest.mark.parametrize(
        ("rank", "rope", "said"),
        [(512, 0, "qk_rope_head_dim got 0; needs 64"), (256, 64, "kv_lora_rank got 256; needs 512")],
    )
    def test_a_backend_with_a_fixed_row_refuses_the_width(self, backend, rank, rope, said):
        problem = Problem("decode", "bf16", "bf16", 64, rank, rope, block_size=64)
        machine = {"hopper": "sm90", "aiter": "gfx942"}[backend]
        assert said in verdict(backend, problem, machine)
