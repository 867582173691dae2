"""Caches beyond 4 GiB and 2³¹ elements, batches beyond 65,535 rows, tensors beyond 2³¹ elements."""

import math
from functools import partial

import pytest
import torch
from device_calls import DEVICE, far_away, is_offered, judge_rows, judge_some, problem_of

from anymla.kv_cache import KV_FORMATS, KVCache
from anymla.problem import Feature
from anymla.verification.checks import judged, run_call, run_planned
from anymla.verification.checks import planned as planned_call
from anymla.verification.inputs import Inputs, decode_inputs, prefill_inputs, sparse_inputs, write_inputs
from anymla.verification.needles import Widths

MANY = 70_000
"""More than the 65,535 programs that an axis of a grid may have."""

SAMPLE = [0, 1, 2, 32_767, 32_768, 65_534, 65_535, 65_536, 65_537, MANY - 2, MANY - 1]

FORMATS = ("bf16", "fp8_e4m3fn", "fp8_ds_mla")
WIDTHS = Widths(16)
CALLS = {
    "decode": partial(decode_inputs, WIDTHS, (200, 0, 65, 1), (1, 2, 4, 0)),
    "sparse_decode": partial(sparse_inputs, WIDTHS, 300, 128, 5),
    "prefill": partial(prefill_inputs, WIDTHS, (200, 0, 65, 1), (5, 2, 70, 0)),
    "write_cache": partial(write_inputs, 512, 64, 100),
}


def need(condition: bool, what: str) -> None:
    """Skip where the backend does not offer the call."""
    if not condition:
        pytest.skip(f"{what} is not offered here")


def plain(op, tokens, heads, num_blocks, **options):
    """A bf16 call with many rows, drawn on the device: queries, keys, no trap but NaN behind every length."""
    draw = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw, device=DEVICE, dtype=torch.bfloat16)

    cache = KVCache(normal(num_blocks, 4, 576), KV_FORMATS["bf16"], 512, 64)
    # As absorption leaves them: head by head.
    q, q_pe = (normal(heads, tokens, width).transpose(0, 1) for width in (512, 64))
    options = {"sm_scale": 192**-0.5, "sinks": torch.zeros(heads, device=DEVICE), **options}
    return Inputs(op, (q, q_pe, cache), options, tokens, tuple(q.shape))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("op", CALLS)
def test_pages_may_lie_beyond_4_gib_and_two_thousand_million_elements(backend, op, kv_format):
    with torch.device(DEVICE):
        near = CALLS[op](kv_format=kv_format, block_size=64)
    if op != "write_cache":
        problem = problem_of(near, q_len=1 if op == "sparse_decode" else near.num_rows)
        need(is_offered(problem, backend), f"{op} of {kv_format}")
    page_bytes = near.cache.data[0].numel() * near.cache.data.itemsize
    far = far_away(near, near.cache.num_blocks + math.ceil(2**32 / page_bytes))
    assert far.cache.data[: -near.cache.num_blocks].numel() >= 2**31
    judged(near, far, lambda call: run_call(call, backend)).require_pass()
    if op != "write_cache":
        one, other = (run_call(call, backend) for call in (near, far))
        assert torch.equal(one.out, other.out) and torch.equal(one.lse, other.lse)


@pytest.mark.parametrize("heads", [4, 128])
def test_a_decode_may_have_many_sequences(backend, heads):
    """With 128 heads, queries and outputs have more than 2³¹ elements as well, between heads too."""
    lens = torch.randint(0, 9, (MANY,), dtype=torch.int32, device=DEVICE)
    lens[SAMPLE] = torch.tensor([0, 1, 8, 4, 5, 3, 8, 0, 7, 1, 6], dtype=torch.int32, device=DEVICE)
    table = torch.randperm(2 * MANY, device=DEVICE).int().view(MANY, 2)
    call = plain(
        "decode", MANY, heads, 2 * MANY, block_table=table, seq_lens=lens, qo_indptr=None, causal=True
    )
    need(is_offered(problem_of(call, Feature.LSE), backend), "decode")
    got = run_call(call, backend)
    judge_some(call, got, SAMPLE).require_pass()
    assert torch.equal((got.lse == -torch.inf).all(-1), lens == 0)
    assert bool(got.out.isfinite().all())


@pytest.mark.parametrize("heads", [4, 128])
def test_a_sparse_decode_may_have_many_query_tokens(backend, heads):
    indices = torch.randint(-1, 4 * 1000, (MANY, 20), dtype=torch.int32, device=DEVICE)
    counts = torch.randint(0, 21, (MANY,), dtype=torch.int32, device=DEVICE)
    indices[65_536] = -1
    call = plain("sparse_decode", MANY, heads, 1000, indices=indices, counts=counts)
    need(is_offered(problem_of(call, Feature.LSE), backend), "sparse decode")
    got = run_call(call, backend)
    judge_some(call, got, SAMPLE).require_pass()
    used = (indices >= 0) & (torch.arange(20, device=DEVICE) < counts[:, None])
    assert torch.equal((got.lse == -torch.inf).all(-1), ~used.any(-1))
    assert bool(got.out.isfinite().all())


def test_many_tokens_may_be_written(backend):
    with torch.device(DEVICE):
        call = write_inputs(512, 64, MANY, kv_format="fp8_ds_mla", block_size=64)
    judged(call, call, lambda call: run_call(call, backend)).require_pass()


def test_a_prefill_may_have_many_sequences(backend):
    lens = torch.full((MANY // 35,), 35)
    indptr = torch.cat((torch.zeros(1), lens.cumsum(0))).int().to(DEVICE)
    call = new_tokens(MANY, 2, qo_indptr=indptr)
    need(is_offered(problem_of(call, Feature.LSE, q_len=MANY), backend), "prefill")
    judge_some(call, run_call(call, backend), [0, 1, 1871, 1872, 1873, MANY // 35 - 1]).require_pass()


def test_a_prefill_may_be_one_sequence_of_many_tokens(backend):
    call = new_tokens(MANY, 2, qo_indptr=torch.tensor([0, MANY], dtype=torch.int32, device=DEVICE))
    need(is_offered(problem_of(call, Feature.LSE, q_len=MANY), backend), "prefill")
    judge_rows(call, run_call(call, backend), [0, 127, 128, 65_535, 65_536, MANY - 1]).require_pass()


@pytest.mark.parametrize("planned", [False, True], ids=["api", "planned"])
def test_a_prefill_may_take_many_passes(backend, planned):
    """Keys and values of 128 heads and all these tokens are gigabytes, of which few are there at a time."""
    contexts, q_lens = (20_000, 0, 5_000), (9_000, 130, 1)
    tokens = sum(q_lens)
    call = new_tokens(
        tokens,
        128,
        qo_indptr=torch.tensor([0, 9_000, 9_130, 9_131], dtype=torch.int32, device=DEVICE),
        cache=KVCache(torch.randn(400, 64, 576, device=DEVICE).bfloat16(), KV_FORMATS["bf16"], 512, 64),
        block_table=torch.randperm(400, device=DEVICE).int().as_strided((3, 313), (43, 1)),
        seq_lens=torch.tensor(contexts, device=DEVICE).int() + torch.tensor(q_lens, device=DEVICE).int(),
    )
    problem = problem_of(call, Feature.LSE, q_len=9_000)
    need(is_offered(problem, backend), "prefill")
    if planned:
        got = run_planned(call, planned_call(call, problem, backend), return_lse=True)
    else:
        got = run_call(call, backend)
    judge_rows(call, got, [0, 4_095, 8_999, 9_000, 9_129, 9_130]).require_pass()
    assert bool(got.out.isfinite().all())


def new_tokens(tokens, heads, **options):
    """A bf16 prefill without context, drawn on the device."""
    draw = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=draw, device=DEVICE) * scale).bfloat16()

    tensors = (
        normal(tokens, heads, 128),
        normal(tokens, heads, 64),
        normal(tokens, 512),
        normal(tokens, 64),
        normal(heads, 128, 512, scale=512**-0.5),
        normal(heads, 512, 128, scale=512**-0.5),
    )
    options = {"sm_scale": 192**-0.5, "causal": True, "sinks": torch.zeros(heads, device=DEVICE), **options}
    return Inputs("prefill", tensors, options, tokens, (tokens, heads, 128))
