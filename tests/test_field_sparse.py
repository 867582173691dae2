"""Small inputs on which the field's indexers and sparse kernels failed in public, through our functions.

D3, a leading run of -1, is in test_field_inputs; models whose indexers rotate in another way are in
integrations/test_transformers_sparse.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import anymla
from anymla import KVCache, machine_named, reference
from anymla.hardware.arches import ARCHES
from anymla.models import MODELS, model_named
from anymla.problem import Feature, Problem
from anymla.verification import eager
from anymla.verification.checks import judge_ids
from anymla.verification.inputs import Widths, index_inputs, sparse_inputs
from anymla.verification.judge import judge, judge_topk

WIDTHS = Widths(num_heads=16)
BUILT = [arch for arch in ARCHES if arch != "gfx1250"]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class TestRecallBeyond128K:
    """mlx-lm#1454: past 128 K tokens the choice was silently the last 2,048."""

    length, page = 150_000, 64
    needles = (0, 1_700, 70_000, 131_071, 149_000)

    @classmethod
    @cache
    def keys(cls) -> KVCache:
        """One latent as narrow as can be, which is its index key as well; five of them are needles."""
        pages = -(-cls.length // cls.page)
        store = KVCache.allocate(pages, cls.page, kv_lora_rank=4, qk_rope_head_dim=0, kv_format="fp32")
        store.data.view(-1, 4)[list(cls.needles)] = torch.tensor([9.0, 0.0, 0.0, 1.0])
        return store

    @pytest.mark.parametrize("topk", [5, 192, 256, 2048])
    def test_needles_are_chosen_and_attended_to_wherever_they_lie(self, topk):
        store = self.keys()
        order = torch.randperm(store.num_blocks, generator=torch.Generator().manual_seed(0))
        scattered = replace(store, data=store.data[order.argsort()])
        table = order.int()[None]
        q, weights = torch.tensor([[[1.0, 0, 0, 0]]]), torch.ones(1, 1)
        step = {"block_table": table, "seq_lens": ints(self.length)}
        chosen = anymla.index_topk(q, weights, scattered, topk=topk, **step)
        assert set(self.needles) <= set(chosen[0].tolist())
        slots = anymla.to_slots(chosen, table, None, self.page)
        absorbed = torch.tensor([[[10.0, 0, 0, 0]]])
        nothing = absorbed[..., :0]
        got = anymla.sparse_decode(absorbed, nothing, scattered, indices=slots, sm_scale=1.0)
        # All of the weight is on the needles, of value 1, for others score 0 against 90.
        assert got.out[0, 0, 3].item() == 1.0


class TestEveryTopk:
    """sgl#33134, flashinfer#4336: kernels for 128, 512, 1,024 and 2,048 keys crashed on 192 and 256."""

    @pytest.mark.parametrize("topk", [1, 3, 64, 128, 192, 255, 256, 257, 512, 1000, 2048, 4096])
    def test_any_number_of_keys_is_chosen_and_attended_to(self, topk):
        call = sparse_inputs(WIDTHS, 300, topk, 2)
        got = anymla.sparse_decode(*call.tensors, **call.options, return_lse=True)
        right = reference.sparse_decode(*call.tensors, **call.options)
        judge(got, right, *eager.sparse_decode(*call.tensors, **call.options)).require_pass()
        index = index_inputs(4, 32, (300, 0, 90), (2, 0, 3), topk)
        ids = anymla.index_topk(*index.tensors, **index.options)
        assert torch.equal(
            ids.sort(1).values, reference.index_topk(*index.tensors, **index.options).sort(1).values
        )

    @pytest.mark.parametrize("arch", BUILT)
    @pytest.mark.parametrize("topk", [1, 192, 256, 4096])
    def test_no_machine_refuses_one(self, arch, topk):
        model, machine = model_named("deepseek-v3.2"), machine_named(arch)
        flavour = "_fnuz" if machine.fp8_flavour == "e4m3fnuz" else ""
        for op, kv_format in (("sparse_decode", "bf16"), ("index_topk", f"index_k{flavour}")):
            problem = model.problem(op, topk=topk, kv_format=kv_format)
            assert any(v.accepted for v in anymla.explain(problem, machine)), (op, topk)


class TestRaggedFp8:
    """sgl#39083: a fixed number of keys a row was assumed where rows were packed, and a scale taken for 1."""

    @pytest.mark.parametrize("kv_format", ["fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_ds_mla", "fp8_ds_mla_fnuz"])
    def test_rows_of_other_lengths_have_their_own_keys_and_scales(self, kv_format):
        call = sparse_inputs(WIDTHS, 200, 90, 10, kv_format=kv_format)
        got = anymla.sparse_decode(*call.tensors, **call.options, return_lse=True)
        right = reference.sparse_decode(*call.tensors, **call.options)
        judge(got, right, *eager.sparse_decode(*call.tensors, **call.options)).require_pass()


class TestShapesOfIndexers:
    """transformers#44103: shapes of an indexer's caches and masks that not every backend took."""

    @pytest.mark.parametrize("q_len", range(1, 9))
    def test_verify_blocks_of_any_length_are_rows_that_see_one_key_more_each(self, q_len):
        call = index_inputs(4, 64, (50, 0, q_len, 9), (q_len, 0, q_len, 1), 6)
        ids = anymla.index_topk(*call.tensors, **call.options)
        seen = {name: value for name, value in call.options.items() if name != "topk"}
        judge_topk(
            ids,
            reference.index_topk(*call.tensors, **call.options),
            reference.index_logits(*call.tensors, **seen),
            eager.index_logits(*call.tensors, **seen),
        ).require_pass()
        # The second sequence begins with its own first token, and each row has as many ids as it has keys.
        counts = (ids >= 0).sum(1)[q_len : 2 * q_len].tolist()
        assert counts == [min(6, t + 1) for t in range(q_len)]

    def test_a_row_of_equal_scores_takes_its_first_keys_the_same_every_time(self):
        q, weights, store, options = TestShapesOfIndexers.ties()
        first = anymla.index_topk(q, weights, store, topk=5, **options)
        assert [sorted(row) for row in first.tolist()] == [[0, 1, 2, 3, 4]] * 2
        assert all(
            torch.equal(first, anymla.index_topk(q, weights, store, topk=5, **options)) for _ in range(3)
        )

    @pytest.mark.parametrize("topk", [5, 2048])
    def test_a_random_indexer_whose_scores_relu_cuts_to_0_chooses_rightly_from_long_rows(self, topk):
        call = index_inputs(2, 64, (9000, 70, 20_000), (2, 1, 3), topk, ties=True)
        judge_ids(call, anymla.index_topk(*call.tensors, **call.options)).require_pass()

    @staticmethod
    def ties() -> tuple[Tensor, Tensor, KVCache, dict[str, Tensor]]:
        """Two rows whose scores relu cuts to 0, one with weights below 0."""
        store = KVCache.allocate(4, 16, kv_lora_rank=8, qk_rope_head_dim=0, kv_format="fp32")
        store.data.fill_(-1.0)
        weights = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
        table = torch.arange(4, dtype=torch.int32).expand(2, -1).contiguous()
        return torch.ones(2, 2, 8), weights, store, {"block_table": table, "seq_lens": ints(60, 60)}


class TestNegativeWeights:
    """A weight below 0 comes after relu: with it before, keys that score nothing would be chosen first."""

    def test_relu_is_of_the_product_alone(self):
        store = KVCache.allocate(1, 4, kv_lora_rank=4, qk_rope_head_dim=0, kv_format="fp32")
        store.data[0, :, 0] = torch.tensor([3.0, -5.0, 1.0, 2.0])
        q, weights = torch.tensor([[[1.0, 0, 0, 0]]]), torch.tensor([[-1.0]])
        step = {"block_table": ints(0)[None], "seq_lens": ints(4)}
        got = anymla.index_topk(q, weights, store, topk=2, **step)
        assert set(got[0].tolist()) == {1, 2}


class TestWholeSteps:
    """sgl#39083, flashinfer#2317: what lay between an indexer and attention was every caller's own."""

    lens, q_lens, table = (
        (200, 0, 30, 6),
        (3, 0, 8, 2),
        torch.randperm(20, generator=torch.Generator().manual_seed(1)),
    )

    def step(self, topk: int, kv_format: str, index_format: str) -> tuple[object, ...]:
        """A step's caches and queries, its tokens written through the same pages."""
        draw = torch.Generator().manual_seed(7)
        tokens = sum(self.lens)
        latents = torch.randn(tokens, 128 + 32, generator=draw).bfloat16()
        keys = torch.randn(tokens, 64, generator=draw).bfloat16()
        rows = sum(self.q_lens)
        queries = torch.randn(rows, 4, 128 + 32, generator=draw).bfloat16()
        asked = torch.randn(rows, 16, 64, generator=draw).bfloat16()
        weights = torch.randn(rows, 16, generator=draw)
        pages = [-(-n // 16) for n in self.lens]
        table = torch.full((4, max(pages)), -9, dtype=torch.int32)
        first = 0
        for b, count in enumerate(pages):
            table[b, :count] = self.table[first : first + count].int()
            first += count
        slots = torch.cat(
            [table[b].long()[t // 16] * 16 + t % 16 for b, t in enumerate(map(torch.arange, self.lens))]
        )
        caches = [
            KVCache.allocate(20, 16, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_format=name)
            for name, rank, rope in ((kv_format, 128, 32), (index_format, 64, 0))
        ]
        anymla.write_cache(latents[:, :128].contiguous(), latents[:, 128:].contiguous(), caches[0], slots)
        anymla.write_cache(keys, keys[:, :0], caches[1], slots, power_of_two=True)
        span = torch.tensor([0, *self.q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        step = {"block_table": table, "seq_lens": ints(*self.lens), "qo_indptr": span}
        if caches[1].format.block_flat:
            asked, weights = anymla.quantise_queries(
                asked, weights, kv_format=index_format, power_of_two=True
            )
        ids = anymla.index_topk(asked, weights, caches[1], topk=topk, **step)
        right = reference.index_topk(asked, weights, caches[1], topk=topk, **step)
        assert torch.equal(ids.sort(1).values, right.sort(1).values)
        indices, counts = anymla.compacted(anymla.to_slots(ids, table, span, 16))
        attention = (queries[..., :128].contiguous(), queries[..., 128:].contiguous(), caches[0])
        return attention, indices, counts, step

    @pytest.mark.parametrize(
        ("kv_format", "index_format"),
        [("bf16", "bf16"), ("fp8_ds_mla", "index_k"), ("fp8_ds_mla_fnuz", "index_k_fnuz")],
    )
    def test_a_ragged_step_attends_to_what_its_indexer_chose(self, kv_format, index_format):
        attention, indices, counts, _ = self.step(20, kv_format, index_format)
        assert counts.tolist() == [20] * 3 + [20] * 8 + [5, 6]
        options = {"indices": indices, "counts": counts, "sm_scale": 0.1, "sinks": torch.zeros(4)}
        got = anymla.sparse_decode(*attention, **options, return_lse=True)
        right = reference.sparse_decode(*attention, **options)
        judge(got, right, *eager.sparse_decode(*attention, **options)).require_pass()

    def test_a_choice_of_as_many_keys_as_there_are_is_dense_attention(self):
        attention, indices, counts, step = self.step(200, "bf16", "bf16")
        options = {"indices": indices, "counts": counts, "sm_scale": 0.1}
        got = anymla.sparse_decode(*attention, **options, return_lse=True)
        right = reference.decode(*attention, **step, sm_scale=0.1)
        judge(got, right, *eager.sparse_decode(*attention, **options)).require_pass()

    @pytest.mark.parametrize("kv_format", ["fp32", "index_k", "index_k_fnuz"])
    def test_gathered_keys_are_a_cache_with_a_page_a_sequence(self, kv_format):
        call = index_inputs(4, 64, (90, 0, 40), (30, 0, 40), 12, kv_format=kv_format)
        q, weights, paged = call.tensors
        table, lens = call.options["block_table"].long(), call.options["seq_lens"].tolist()
        gathered = KVCache.allocate(3, 90, kv_lora_rank=64, qk_rope_head_dim=0, kv_format=kv_format)
        for b, length in enumerate(lens):
            token = torch.arange(length)
            slots = table[b][token // paged.block_size] * paged.block_size + token % paged.block_size
            gathered.scatter(paged.gather(slots), b * 90 + token)
        own = {**call.options, "block_table": ints(0, 1, 2)[:, None]}
        expected = anymla.index_topk(*call.tensors, **call.options)
        assert torch.equal(anymla.index_topk(q, weights, gathered, **own), expected)


class TestWhereOthersHaveNoSparsePath:
    """vllm#30644, #31936, #40802, #53963, FlashMLA#110, DeepGEMM#305: no sparse path on sm80, sm89 or sm120,
    no bf16 one on sm90, none for a latent without RoPE."""

    @pytest.mark.parametrize("arch", BUILT)
    @pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.index_topk])
    def test_each_part_of_a_step_is_served(self, name, arch):
        model, machine = MODELS[name], machine_named(arch)
        fnuz = "_fnuz" if machine.fp8_flavour == "e4m3fnuz" else ""
        keys = f"index_k{fnuz}"
        parts = [
            model.problem("index_topk", kv_format=keys, q_len=8),
            model.problem("index_topk", kv_format="bf16"),
            model.problem("sparse_decode", kv_format="bf16", sinks=True, lse=True),
            model.problem("sparse_decode", kv_format="bf16"),
            replace(model.problem("index_topk", kv_format=keys), op="write_cache", num_heads=1, topk=0),
        ]
        if model.qk_rope_head_dim:
            parts.append(model.problem("sparse_decode", kv_format=f"fp8_ds_mla{fnuz}", sinks=True))
        for problem in parts:
            verdicts = anymla.explain(problem, machine)
            assert any(v.accepted for v in verdicts), [str(v) for v in verdicts]

    @pytest.mark.parametrize("arch", ARCHES)
    @pytest.mark.parametrize("name", MODELS)
    def test_sinks_are_answered_for_every_operation_and_dropped_by_none(self, name, arch):
        """HY-V4 ran without its sinks, with a warning, where no backend had them."""
        model, machine = MODELS[name], machine_named(arch)
        for op in ("decode", "sparse_decode", "prefill"):
            for q_len in (1, 4) if op != "sparse_decode" else (1,):
                problem = model.problem(op, q_len=q_len, sinks=True, lse=True)
                assert Feature.SINKS in problem.features
                verdicts = anymla.explain(problem, machine)
                assert any(v.accepted for v in verdicts) == (arch in BUILT), [str(v) for v in verdicts]
                assert all(v.accepted or v.reasons for v in verdicts)

    @pytest.mark.parametrize("arch", ARCHES)
    def test_a_backend_without_sinks_refuses_them_by_name(self, arch):
        problem = Problem(
            "prefill",
            "bf16",
            "fp8_e4m3fn",
            16,
            512,
            64,
            128,
            128,
            q_len=64,
            features=frozenset({Feature.SINKS}),
        )
        said = [str(v) for v in anymla.explain(problem, machine_named(arch)) if v.backend.name == "aiter"]
        assert all("features lacks sinks" in words for words in said)
