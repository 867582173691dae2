"""Absorption, and grouped-query models as MLA."""

import pytest
import torch
from torch import Tensor

from anymla import reference
from anymla.contract import AttentionOutput
from anymla.errors import InvalidInput
from anymla.kv_cache import KVCache
from anymla.latent import (
    absorb_gqa,
    absorb_q,
    block_selectors,
    gqa_latent,
    project_gqa,
    project_v,
    split_kv_b,
)
from anymla.verification.judge import judge_tensor

GROUPS = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (4, 4, 8), (6, 1, 8), (1, 1, 4), (8, 2, 16)],
    ids=["9:3x64", "4:4x8", "6:1x8", "1:1x4", "8:2x16"],
)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestAbsorption:
    @DTYPES
    def test_each_head_goes_through_its_own_projection(self, dtype):
        q, w_uk = draw(5, 3, 8).to(dtype), draw(3, 8, 16, seed=1).to(dtype)
        out, w_uv = draw(5, 3, 16).to(dtype), draw(3, 16, 4, seed=2).to(dtype)
        for got, x, w in ((absorb_q(q, w_uk), q, w_uk), (project_v(out, w_uv), out, w_uv)):
            right = torch.stack([x[:, h].double() @ w[h].double() for h in range(3)], 1)
            eager = torch.einsum("tha,hab->thb", x, w), torch.stack([x[:, h] @ w[h] for h in range(3)], 1)
            assert got.dtype == dtype and got.shape == right.shape
            judge_tensor("projection", got, right, *eager).require_pass()

    def test_the_score_is_that_of_the_decompressed_key(self):
        # Small integers, so that both orders of the product are exact.
        rand = torch.Generator().manual_seed(0)
        q, w_uk, latent = (
            torch.randint(-4, 5, shape, generator=rand).float() for shape in ((2, 3, 8), (3, 8, 16), (7, 16))
        )
        absorbed = absorb_q(q, w_uk) @ latent.T
        expanded = torch.einsum("thp,hpn->thn", q, w_uk @ latent.T)
        assert torch.equal(absorbed, expanded)

    def test_no_tokens(self):
        assert absorb_q(torch.ones(0, 3, 8), torch.ones(3, 8, 16)).shape == (0, 3, 16)
        assert project_v(torch.ones(0, 3, 16), torch.ones(3, 16, 4)).shape == (0, 3, 4)

    def test_all_reasons_are_named_at_once(self):
        with pytest.raises(InvalidInput) as error:
            absorb_q(torch.ones(2, 3, 8), torch.ones(3, 7, 16).half())
        assert error.value.reasons == (
            "w_uk got shape (3, 7, 16); needs (3, 8, any), H, P from q_nope",
            "w_uk got dtype float16; needs float32",
        )
        with pytest.raises(
            InvalidInput, match=r"w_uv got shape \(2, 16, 4\); needs \(3, 16, any\), H, L from out"
        ):
            project_v(torch.ones(2, 3, 16), torch.ones(2, 16, 4))


class TestSplitKvB:
    def test_each_heads_key_rows_stand_before_its_value_rows(self):
        heads, nope, value, latent = 3, 4, 5, 6
        weight = draw(heads * (nope + value), latent)
        w_uk, w_uv = split_kv_b(weight, heads, nope, value)
        assert w_uk.shape == (heads, nope, latent) and w_uv.shape == (heads, latent, value)
        for h in range(heads):
            own = weight[h * (nope + value) : (h + 1) * (nope + value)]
            assert torch.equal(w_uk[h], own[:nope]) and torch.equal(w_uv[h], own[nope:].T)

    def test_the_halves_are_contiguous_and_of_the_weights_dtype(self):
        for half in split_kv_b(draw(18, 6).bfloat16().t().contiguous().t(), 2, 4, 5):
            assert half.is_contiguous() and half.dtype == torch.bfloat16

    def test_it_is_what_the_linear_layer_computes(self):
        weight, latent = draw(2 * 9, 6).double(), draw(5, 6, seed=1).double()
        w_uk, w_uv = split_kv_b(weight, 2, 4, 5)
        keys, values = (latent @ weight.T).view(5, 2, 9).split([4, 5], -1)
        judge_tensor("keys", torch.einsum("nl,hpl->nhp", latent, w_uk), keys).require_pass()
        judge_tensor("values", torch.einsum("nl,hlv->nhv", latent, w_uv), values).require_pass()

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (
                (2, 4, 4),
                r"weight got shape \(18, 6\); needs \(16, any\), num_heads \* \(qk_nope",
            ),
            ((0, 4, 5), "num_heads got 0; needs at least 1"),
            ((2, 9, 0), "v_head_dim got 0; needs at least 1"),
        ],
        ids=["rows", "no heads", "no values"],
    )
    def test_a_weight_that_does_not_fit_is_refused(self, arguments, reason):
        with pytest.raises(InvalidInput, match=reason):
            split_kv_b(torch.ones(18, 6), *arguments)


def plain_gqa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionOutput:
    """Grouped-query attention of one sequence, head by head: q [T, H, d], k and v [S, G, d]."""
    group = q.shape[1] // k.shape[1]
    scores = [scale * (q[:, h] @ k[:, h // group].T) for h in range(q.shape[1])]
    out = torch.stack([s.softmax(-1) @ v[:, h // group] for h, s in enumerate(scores)], 1)
    return AttentionOutput(out, torch.stack([s.logsumexp(-1) for s in scores], 1))


def gqa_as_mla(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionOutput:
    """The same through a paged latent cache; every query token sees every key."""
    latent = gqa_latent(k, v)
    cache = KVCache.allocate(3, 8, kv_lora_rank=latent.shape[1], qk_rope_head_dim=0, kv_format="fp32")
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    token = torch.arange(len(latent))
    cache.write(latent, latent[:, :0], table[0].long()[token // 8] * 8 + token % 8)
    ql_nope = absorb_gqa(q, k.shape[1])
    out, lse = reference.decode(
        ql_nope,
        ql_nope[..., :0],
        cache,
        block_table=table,
        seq_lens=torch.tensor([len(latent)], dtype=torch.int32),
        qo_indptr=torch.tensor([0, len(q)], dtype=torch.int32),
        sm_scale=scale,
        causal=False,
    )
    return AttentionOutput(project_gqa(out, k.shape[1]), lse)


class TestGroupedQueryModels:
    @GROUPS
    def test_as_mla_they_are_the_same_to_the_last_bit_where_arithmetic_is_exact(
        self, heads, kv_heads, head_dim
    ):
        # Query and key meet in one number: four keys a head score 0, the others -1000: weights are 1/4 and 0.
        rand = torch.Generator().manual_seed(heads)
        k = torch.randint(-9, 10, (20, kv_heads, head_dim), generator=rand).float()
        v = torch.randint(-9, 10, (20, kv_heads, head_dim), generator=rand).float()
        for g in range(kv_heads):
            k[:, g, 0] = -1.0
            k[torch.randperm(20, generator=rand)[:4], g, 0] = 0.0
        q = torch.zeros(2, heads, head_dim, dtype=torch.float64)
        q[..., 0] = 1000.0
        got, right = gqa_as_mla(q, k, v, 1.0), plain_gqa(q, k.double(), v.double(), 1.0)
        assert torch.equal(got.out, right.out) and torch.equal(got.lse, right.lse)
        assert len(got.out[0].unique(dim=0)) == kv_heads

    @GROUPS
    def test_as_mla_they_are_the_same_in_fp64(self, heads, kv_heads, head_dim):
        q = draw(3, heads, head_dim).double()
        k, v = draw(20, kv_heads, head_dim, seed=1), draw(20, kv_heads, head_dim, seed=2)
        scale = head_dim**-0.5
        got, right = gqa_as_mla(q, k, v, scale), plain_gqa(q, k.double(), v.double(), scale)
        runs = []
        for seed in range(3):
            rand = torch.Generator().manual_seed(seed)
            token, width = torch.randperm(20, generator=rand), torch.randperm(head_dim, generator=rand)
            out, lse = plain_gqa(q[..., width], k[token][..., width].double(), v[token].double(), scale)
            runs.append(AttentionOutput(out, lse))
        judge_tensor("out", got.out, right.out, *(r.out for r in runs)).require_pass()
        judge_tensor("lse", got.lse, right.lse, *(r.lse for r in runs), by_row=False).require_pass()

    @GROUPS
    @DTYPES
    def test_block_selectors_are_the_projections_of_that_model(self, heads, kv_heads, head_dim, dtype):
        w_uk, w_uv = block_selectors(heads, kv_heads, head_dim, dtype=dtype)
        latent = 2 * kv_heads * head_dim
        assert w_uk.shape == (heads, head_dim, latent) and w_uv.shape == (heads, latent, head_dim)
        assert w_uk.dtype == w_uv.dtype == dtype
        q, out = draw(2, heads, head_dim).to(dtype), draw(2, heads, latent, seed=1).to(dtype)
        assert torch.equal(absorb_q(q, w_uk), absorb_gqa(q, kv_heads))
        assert torch.equal(project_v(out, w_uv), project_gqa(out, kv_heads))

    @GROUPS
    def test_decompressed_latents_are_the_keys_and_values(self, heads, kv_heads, head_dim):
        k, v = draw(5, kv_heads, head_dim, seed=1), draw(5, kv_heads, head_dim, seed=2)
        w_uk, w_uv = block_selectors(heads, kv_heads, head_dim)
        latent = gqa_latent(k, v)
        group = heads // kv_heads
        assert torch.equal(torch.einsum("nl,hpl->nhp", latent, w_uk), k.repeat_interleave(group, 1))
        assert torch.equal(torch.einsum("nl,hlv->nhv", latent, w_uv), v.repeat_interleave(group, 1))

    def test_a_cache_token_is_no_larger_than_a_stock_one(self):
        assert gqa_latent(torch.ones(5, 3, 64), torch.ones(5, 3, 64)).shape == (5, 2 * 3 * 64)

    def test_no_tokens(self):
        assert absorb_gqa(torch.ones(0, 4, 8), 2).shape == (0, 4, 32)
        assert project_gqa(torch.ones(0, 4, 32), 2).shape == (0, 4, 8)

    @pytest.mark.parametrize("kv_heads", [0, -1, 3])
    def test_groups_that_do_not_divide_are_refused(self, kv_heads):
        reason = f"num_kv_heads got {kv_heads}; needs a divisor of 4, the heads"
        with pytest.raises(InvalidInput, match=reason):
            absorb_gqa(torch.ones(1, 4, 8), kv_heads)
        with pytest.raises(InvalidInput, match=reason):
            project_gqa(torch.ones(1, 4, 32), kv_heads)
        with pytest.raises(InvalidInput, match=reason):
            block_selectors(4, kv_heads, 8)

    def test_widths_that_do_not_fit_are_refused(self):
        with pytest.raises(InvalidInput, match="out got width 30; needs a multiple of 4"):
            project_gqa(torch.ones(1, 4, 30), 2)
        with pytest.raises(InvalidInput, match=r"v got shape \(5, 2, 4\); needs \(5, 2, 8\), from k"):
            gqa_latent(torch.ones(5, 2, 8), torch.ones(5, 2, 4))
        with pytest.raises(InvalidInput, match="head_dim got 0; needs at least 1"):
            block_selectors(4, 2, 0)
