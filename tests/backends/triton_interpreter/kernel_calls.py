"""Small cases that go through every value of every axis, and calls of the backend as a plan makes them."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from anymla.backends import triton_mla
from anymla.contract import AttentionOutput, Batch, DecodeArgs, IndexArgs, PrefillArgs, SparseArgs, out_dtypes
from anymla.hardware.probe import Machine
from anymla.kv_cache import KV_FORMATS
from anymla.problem import Feature, Problem
from anymla.verification.cases import INDEX_DTYPES, Case
from anymla.verification.checks import right_answer
from anymla.verification.inputs import SINKS, Inputs, Widths, sparse_inputs
from anymla.verification.judge import judge
from anymla.verification.memory import POISONS

FORMATS = [name for name in KV_FORMATS if not name.startswith("index_k")]
AXES: dict[str, tuple[Any, ...]] = {
    "q_dtype": ("bf16", "fp16", "fp32"),
    "kv_format": tuple(FORMATS),
    "num_heads": (1, 20, 3, 16, 8, 2),
    "widths": ((128, 32), (256, 64), (64, 96), (128, 0)),
    "decompressed": ((64, 64), (192, 256), (128, 128), (40, 24), (64, 48)),
    "block_size": (16, 3, 64, 1),
    "lens": ((130, 0, 33, 65), (1, 64, 17, 100), (0, 3, 128, 15)),
    "q_lens": ((1, 1, 1, 1), (4, 0, 1, 3), (2, 5, 3, 1)),
    "topk": (40, 5, 64),
    "sinks": SINKS,
    "causal": (True, True, False),
    "poison": POISONS,
    "views": (False, True),
}
"""Values of each fact, each dealt once before any comes again, every fact in an order of its own."""

WIDE = {"q_dtype": "bf16", "kv_format": "bf16", "num_heads": 20, "block_size": 64, "views": False}


def machine(arch: str = "gfx90a") -> Machine:
    """A chip with few compute units, so that work is cut in small batches too."""
    return Machine(arch, (), True, "", 3)


def drawn(op: str, count: int) -> Iterator[Case]:
    """So many cases of an operation, and one of the widths of most models."""
    decks = {name: _dealt(f"{op} {name}", values) for name, values in AXES.items()}
    for i in range(count):
        yield _case(op, i, {name: next(deck) for name, deck in decks.items()})
    first = {name: values[0] for name, values in AXES.items()}
    yield _case(op, count, {**first, **WIDE, "widths": (512, 64)})
    yield _case(
        op, count + 1, {**first, **WIDE, "kv_format": "fp8_ds_mla", "widths": (512, 0), "num_heads": 3}
    )


def run(
    call: Inputs, problem: Problem, arch: str = "gfx90a", *, lengths_on_host: bool = True
) -> AttentionOutput:
    """Plan and run one attention call, into outputs full of NaN."""
    options, device = call.options, machine(arch)
    like = call.tensors[0]
    out = torch.full(call.shape, torch.nan, dtype=out_dtypes(like.dtype)[0])
    lse = torch.full(call.shape[:2], torch.nan) if Feature.LSE in problem.features else None
    last, q_scale = (options["sm_scale"], options["sinks"], out, lse), options.get("q_scale")
    if call.op == "sparse_decode":
        plan = triton_mla.plan_sparse_decode(call.num_rows, torch.device("cpu"), problem, device, {})
        args = SparseArgs(*call.tensors, options["indices"], options["counts"], *last, q_scale)
        triton_mla.sparse_decode(args, plan)
        return AttentionOutput(out, lse)
    batch = step(call, problem)
    if not lengths_on_host:
        batch = replace(batch, seq_lens_host=None, qo_indptr_host=None)
    if call.op == "decode":
        triton_mla.decode(
            DecodeArgs(*call.tensors, *last, q_scale), triton_mla.plan_decode(batch, problem, device, {})
        )
    else:
        args = PrefillArgs(*call.tensors, options.get("cache"), *last)
        triton_mla.prefill(args, triton_mla.plan_prefill(batch, problem, device, {}))
    return AttentionOutput(out, lse)


def index_state(
    call: Inputs, arch: str = "gfx90a", *, lengths_on_host: bool = True, max_seq_len: int | None = None
) -> Any:
    """The plan of an index call."""
    (q, _, cache), options = call.tensors, call.options
    batch = Batch.of(
        seq_lens=options["seq_lens"],
        block_table=options["block_table"],
        qo_indptr=options["qo_indptr"],
        block_size=cache.block_size,
        num_tokens=call.num_rows,
        max_seq_len=max_seq_len,
    )
    if not lengths_on_host:
        batch = replace(batch, seq_lens_host=None, qo_indptr_host=None)
    rank, topk = cache.kv_lora_rank, options["topk"]
    problem = Problem("index_topk", "bf16", cache.format.name, q.shape[1], rank, 0, topk=topk)
    return triton_mla.plan_index_topk(batch, problem, machine(arch), {})


def run_index(
    call: Inputs,
    arch: str = "gfx90a",
    *,
    lengths_on_host: bool = True,
    state: Any = None,
    as_slots: bool = False,
) -> Tensor:
    """Plan, unless that is done, and run an index call, into a view full of -7."""
    state = index_state(call, arch, lengths_on_host=lengths_on_host) if state is None else state
    topk = call.options["topk"]
    out = torch.full((call.num_rows, 2 * topk), -7, dtype=torch.int32)[:, ::2]
    triton_mla.index_topk(IndexArgs(*call.tensors, topk, out, as_slots), state)
    return out


def step(call: Inputs, problem: Problem) -> Batch:
    """The step of a decode or prefill."""
    options = call.options
    return Batch.of(
        seq_lens=options["seq_lens"] if "seq_lens" in options else options["qo_indptr"].diff(),
        block_table=options.get("block_table"),
        qo_indptr=options["qo_indptr"],
        block_size=problem.block_size,
        causal=options["causal"],
        num_tokens=call.num_rows,
        new_tokens_are_cached=call.op == "decode",
    )


def require_right(call: Inputs, got: AttentionOutput) -> None:
    """Hold a result against the reference and the eager runs."""
    exact, runs = right_answer(call)
    judge(got, exact, *runs).require_pass()


def inputs(case: Case) -> Inputs:
    """The tensors of a case; a sparse one has a row of each kind, one of count 0 among them."""
    p = case.problem
    if p.op != "sparse_decode":
        return case.inputs()
    widths = Widths(p.num_heads, p.kv_lora_rank, p.qk_rope_head_dim, sm_scale=case.sm_scale)
    return sparse_inputs(
        widths,
        max(case.seq_lens or (0,)),
        p.topk,
        num_tokens=6,
        seed=case.seed,
        q_dtype=INDEX_DTYPES[p.q_dtype],
        kv_format=p.kv_format,
        block_size=p.block_size,
        sinks=case.sinks,
        poison=case.poison,
        views=case.views,
    )


def same_bits(one: AttentionOutput, other: AttentionOutput, rows: Tensor) -> bool:
    """Whether a result has the bits of some rows of another."""
    assert one.lse is not None and other.lse is not None
    return torch.equal(one.out, other.out[rows]) and torch.equal(one.lse, other.lse[rows])


def _dealt(seed: str, values: tuple[Any, ...]) -> Iterator[Any]:
    rng = Random(seed)
    while True:
        yield from rng.sample(values, len(values))


def _case(op: str, seed: int, facts: dict[str, Any]) -> Case:
    kv_format, (rank, rope) = facts["kv_format"], facts["widths"]
    if KV_FORMATS[kv_format].refusal(rank, rope):
        rank, rope = 128, 32
    q_dtype = facts["q_dtype"]
    if q_dtype == "fp32" and kv_format.startswith("fp8"):
        # Products of fp8 keys are not in fp32, which no row of the backend offers either.
        q_dtype = "bf16"
    nope, value = facts["decompressed"] if op == "prefill" else (0, 0)
    if q_dtype == "fp32":
        nope, value = min(nope, 64), min(value, 64)
    q_lens = facts["q_lens"] if op != "sparse_decode" else None
    features = {Feature.LSE} if seed % 4 < 3 else set()
    problem = Problem(
        op,
        q_dtype,
        kv_format,
        facts["num_heads"] if op != "prefill" else min(facts["num_heads"], 3),
        rank,
        rope,
        nope,
        value,
        facts["block_size"],
        q_len=max(q_lens) if q_lens else 1,
        topk=facts["topk"] if op == "sparse_decode" else 0,
        features=frozenset(features | (set() if facts["causal"] or q_lens is None else {Feature.NON_CAUSAL})),
    )
    return Case(
        "right",
        problem,
        sm_scale=float((nope or 128) + rope) ** -0.5,
        seq_lens=facts["lens"],
        q_lens=q_lens,
        sinks=facts["sinks"],
        poison=facts["poison"],
        views=facts["views"],
        seed=seed,
    )
