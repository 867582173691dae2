"""CUDA graphs: planned once, captured once, replayed with other lengths, pages and values."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from device_calls import DEVICE, Buffers, addresses, graph_of, is_offered, problem_of

from anymla.contract import AttentionOutput
from anymla.indices import to_slots
from anymla.plans import plan_decode, plan_index_topk, plan_prefill, plan_sparse_decode
from anymla.problem import Feature, Problem
from anymla.verification.checks import (
    batch_of,
    judge_ids,
    judged,
    outputs_of,
    right_answer,
    run_call,
    run_planned,
)
from anymla.verification.inputs import (
    decode_inputs,
    index_inputs,
    prefill_inputs,
    sparse_inputs,
    write_inputs,
)
from anymla.verification.judge import judge
from anymla.verification.needles import Widths

STEPS = (
    ((200, 65, 1, 2000, 64, 17), (4, 1, 2, 3, 4, 4)),
    ((1, 0, 4096, 3, 0, 130), (1, 0, 4, 1, 0, 3)),
    ((0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0)),
    ((900, 900, 900, 900, 900, 900), (4, 4, 4, 4, 4, 4)),
)
"""Lengths and query tokens of one step after another."""

KINDS = {
    "plain": {"sinks": "none", "return_lse": False},
    "sinks-lse": {"sinks": "near", "return_lse": True},
    "invariant": {"sinks": "infinite", "return_lse": True, "batch_invariant": True},
}
FORMATS = ("bf16", "fp8_e4m3fn", "fp8_ds_mla")


class Captured:
    """A plan, the call in buffers, outputs, and the graph of `run`, with the update in it or before it."""

    def __init__(self, calls, kind, backend, *, update_inside=False):
        options = {**KINDS[kind]}
        options.pop("sinks")
        self.return_lse = options["return_lse"]
        self.buffers = Buffers(calls)
        call = self.buffers.call
        features = [Feature.LSE] * self.return_lse
        features += [Feature.BATCH_INVARIANT] * options.get("batch_invariant", False)
        problem = problem_of(call, *features, q_len=4 if call.options.get("qo_indptr") is not None else 1)
        if not is_offered(problem, backend):
            pytest.skip(f"{problem} is not offered here")
        widths = {
            "num_heads": problem.num_heads,
            "kv_lora_rank": problem.kv_lora_rank,
            "qk_rope_head_dim": problem.qk_rope_head_dim,
            "q_dtype": call.tensors[0].dtype,
            "kv_format": problem.kv_format,
            "sinks": call.options["sinks"] is not None,
            "backend": backend,
            **options,
        }
        self.buffers.put(calls[0])
        self.is_sparse = call.op == "sparse_decode"
        if self.is_sparse:
            block_size, topk = problem.block_size, problem.topk
            self.plan = plan_sparse_decode(
                call.num_rows, topk=topk, block_size=block_size, device=call.tensors[0].device, **widths
            )
        else:
            self.step = partial(self.buffers.step, max_seq_len=4096, max_q_len=problem.q_len)
            self.plan = plan_decode(self.step(), **widths)
        self.out = torch.full(call.shape, torch.nan, dtype=call.tensors[0].dtype, device=DEVICE)
        self.lse = torch.full(call.shape[:2], torch.nan, device=DEVICE) if self.return_lse else None
        self.update_inside = update_inside
        self.graph = graph_of(self.work)

    def work(self):
        """What is captured."""
        if self.update_inside:
            self.plan.update(self.step())
        self.run(self.out, self.lse)

    def run(self, out, lse):
        """Run the plan over the buffers."""
        call = self.buffers.call
        options = {"sm_scale": call.options["sm_scale"], "sinks": call.options["sinks"]}
        if self.is_sparse:
            options |= {"indices": call.options["indices"], "counts": call.options["counts"]}
        self.plan.run(*call.tensors, **options, return_lse=self.return_lse, out=out, lse=lse)

    def replayed(self, call):
        """The outputs of another call, by the graph."""
        self.buffers.put(call)
        self.out.fill_(torch.nan)
        if self.lse is not None:
            self.lse.fill_(torch.nan)
        if not self.is_sparse and not self.update_inside:
            self.plan.update(self.step())
        self.graph.replay()
        torch.cuda.synchronize()
        return AttentionOutput(self.out, self.lse)

    def require_right(self, call):
        """Hold a replay against the definition, and its bits against the plan run without a graph."""
        got = self.replayed(call)
        exact, runs = right_answer(call)
        rows = call.num_rows
        lse = None if got.lse is None else got.lse[:rows]
        judge(AttentionOutput(got.out[:rows], lse), exact, *runs).require_pass()
        if not self.is_sparse:
            assert bool((got.out[rows:] == 0).all())
            assert got.lse is None or bool((got.lse[rows:] == -torch.inf).all())
        out = torch.full_like(got.out, torch.nan)
        eager_lse = None if got.lse is None else torch.full_like(got.lse, torch.nan)
        self.run(out, eager_lse)
        assert torch.equal(out[:rows], got.out[:rows])
        assert eager_lse is None or torch.equal(eager_lse[:rows], lse)


class CapturedIndex:
    """The plan of an indexer, the call in buffers, its choice, and the graph of `run`."""

    def __init__(self, calls, backend, *, as_slots=False, update_inside=False):
        self.buffers, self.as_slots = Buffers(calls), as_slots
        call = self.buffers.call
        q, _, cache = call.tensors
        topk, kv_format, facts = call.options["topk"], cache.format.name, (q.shape[1], cache.kv_lora_rank)
        problem = Problem(
            "index_topk",
            "bf16",
            kv_format,
            *facts,
            qk_rope_head_dim=0,
            block_size=cache.block_size,
            q_len=4,
            topk=topk,
            features=frozenset({Feature.MULTI_TOKEN}),
        )
        if not is_offered(problem, backend):
            pytest.skip(f"{problem} is not offered here")
        self.buffers.put(calls[0])
        self.step = partial(self.buffers.step, max_seq_len=4096, max_q_len=4)
        self.plan = plan_index_topk(
            self.step(),
            topk=topk,
            index_heads=facts[0],
            index_head_dim=facts[1],
            q_dtype=q.dtype,
            kv_format=kv_format,
            backend=backend,
        )
        self.out = torch.full(call.shape, -7, dtype=torch.int32, device=DEVICE)
        self.update_inside = update_inside
        self.graph = graph_of(self.work)

    def work(self):
        """What is captured."""
        if self.update_inside:
            self.plan.update(self.step())
        self.plan.run(*self.buffers.call.tensors, as_slots=self.as_slots, out=self.out)

    def require_right(self, call):
        """Hold a replay against the definition; what belongs to no sequence has chosen nothing."""
        self.buffers.put(call)
        self.out.fill_(-7)
        if not self.update_inside:
            self.plan.update(self.step())
        self.graph.replay()
        rows, ids = call.num_rows, self.out
        if self.as_slots:
            table, indptr = call.options["block_table"], call.options["qo_indptr"]
            ids = run_call(call, self.plan.backend)
            slots = to_slots(ids, table, indptr, call.cache.block_size)
            assert torch.equal(self.out[:rows].sort(1).values, slots.sort(1).values)
        judge_ids(call, ids[:rows]).require_pass()
        assert bool((self.out[rows:] == -1).all())


def index_calls(kv_format):
    """The steps as choices of 40 keys."""
    with torch.device(DEVICE):
        return [
            index_inputs(16, 128, lens, q_lens, 40, seed=seed, kv_format=kv_format, block_size=64)
            for seed, (lens, q_lens) in enumerate(STEPS)
        ]


def tensors_of(call):
    """All that a prefill reads beside its lengths, those of the cache by their bytes."""
    cache, options = call.cache, (call.options["block_table"], call.options["sinks"])
    return [one for one in (*call.tensors, cache.storage, cache.scale, *options) if one is not None]


def dense_calls(kind, kv_format, heads=16, *, verify=False):
    """The steps as decodes."""
    hostile = {"kv_format": kv_format, "block_size": 64, "sinks": KINDS[kind]["sinks"]}
    with torch.device(DEVICE):
        return [
            decode_inputs(Widths(heads), lens, q_lens if verify else None, seed=seed, **hostile)
            for seed, (lens, q_lens) in enumerate(STEPS)
        ]


def sparse_calls(kind, kv_format, heads=16):
    """Sparse decodes of as many query tokens, whose indices and counts differ."""
    hostile = {"kv_format": kv_format, "block_size": 64, "sinks": KINDS[kind]["sinks"]}
    with torch.device(DEVICE):
        return [
            sparse_inputs(Widths(heads), length, 320, 11, seed=length, **hostile)
            for length in (300, 2000, 9, 700)
        ]


@pytest.mark.parametrize("update_inside", [False, True], ids=["update-before", "update-captured"])
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("verify", [False, True], ids=["decode", "verify-block"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_graph_is_right_for_every_step(backend, kind, verify, kv_format, update_inside):
    calls = dense_calls(kind, kv_format, verify=verify)
    captured = Captured(calls, kind, backend, update_inside=update_inside)
    for call in (*calls, *calls[::-1]):
        captured.require_right(call)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sparse_graph_is_right_for_every_step(backend, kind, kv_format):
    calls = sparse_calls(kind, kv_format, heads=128)
    captured = Captured(calls, kind, backend)
    for call in (*calls, *calls[::-1]):
        captured.require_right(call)


@pytest.mark.parametrize("update_inside", [False, True], ids=["update-before", "update-captured"])
@pytest.mark.parametrize("as_slots", [False, True], ids=["ids", "slots"])
@pytest.mark.parametrize("kv_format", ["index_k", "bf16"])
def test_a_graph_of_an_indexer_is_right_for_every_step(backend, kv_format, as_slots, update_inside):
    calls = index_calls(kv_format)
    captured = CapturedIndex(calls, backend, as_slots=as_slots, update_inside=update_inside)
    for call in (*calls, *calls[::-1]):
        captured.require_right(call)


@pytest.mark.parametrize("planned_in", ["bf16", "fp8"])
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_a_prefill_is_right_for_other_values_of_its_step(backend, kind, kv_format, planned_in):
    hostile = {"kv_format": kv_format, "block_size": 64, "sinks": KINDS[kind]["sinks"]}
    with torch.device(DEVICE):
        calls = [
            prefill_inputs(Widths(16, 512, 64, 128, 128), (300, 0, 64), (5, 0, 70), seed=seed, **hostile)
            for seed in range(3)
        ]
    held, *others = calls
    problem = problem_of(held, Feature.LSE, Feature.CACHED_CONTEXT, Feature.GRAPH, q_len=70)
    if not is_offered(problem, backend):
        pytest.skip(f"{problem} is not offered here")
    plan = plan_prefill(
        batch_of(held, problem),
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        q_dtype=torch.float8_e4m3fn if planned_in == "fp8" else torch.bfloat16,
        kv_format=kv_format,
        sinks=held.options["sinks"] is not None,
        return_lse=True,
        batch_invariant=kind == "invariant",
        backend=backend,
    )
    outputs = outputs_of(held, return_lse=True)
    graph = graph_of(lambda: run_planned(held, plan, **outputs))
    for call in others:
        for buffer, value in zip(tensors_of(held), tensors_of(call), strict=True):
            buffer.copy_(value)
        for output in (outputs["out"], outputs["lse"]):
            output.fill_(torch.nan)
        graph.replay()
        exact, runs = right_answer(call)
        judge(AttentionOutput(outputs["out"], outputs["lse"]), exact, *runs).require_pass()


def test_an_indexer_neither_waits_for_the_device_nor_moves_anything(backend):
    calls = index_calls("index_k")
    captured = CapturedIndex(calls, backend)
    captured.buffers.put(calls[1])
    before = addresses(captured.plan.state), torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # First, for the plan's own lengths name pages that this step does not have.
        captured.plan.update(captured.step())
        captured.work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (addresses(captured.plan.state), torch.cuda.memory_stats()["allocation.all.allocated"]) == before


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_captured_cache_write_goes_where_the_slots_say_at_its_replay(backend, kv_format):
    with torch.device(DEVICE):
        calls = [write_inputs(512, 64, 50, kv_format=kv_format, seed=seed) for seed in range(3)]
    buffers = calls[0]
    # In slots that nothing else needs: what is captured is also run, once.
    warm = replace(buffers, tensors=(*buffers.tensors[:3], torch.full_like(buffers.tensors[3], -1)))
    run_call(warm, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_call(buffers, backend)

    def replayed(_):
        graph.replay()

    for call in calls:
        for buffer, value in zip(
            (*buffers.tensors[:2], buffers.tensors[3]), (*call.tensors[:2], call.tensors[3]), strict=True
        ):
            buffer.copy_(value)
        judged(buffers, buffers, replayed).require_pass()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
class TestRun:
    """What a server relies on while a graph exists."""

    def captured(self, backend, sparse, kind):
        calls = sparse_calls(kind, "bf16") if sparse else dense_calls(kind, "bf16", verify=True)
        return Captured(calls, kind, backend), calls

    def test_it_neither_allocates_nor_waits_for_the_device(self, backend, sparse, kind):
        captured, _ = self.captured(backend, sparse, kind)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                captured.run(captured.out, captured.lse)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

    def test_an_update_neither_waits_nor_moves_anything(self, backend, sparse, kind):
        if sparse:
            pytest.skip("a sparse plan has no update: its indices and counts are arguments")
        captured, calls = self.captured(backend, sparse, kind)
        before = addresses(captured.plan.state)
        captured.buffers.put(calls[1])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            captured.plan.update(captured.step())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert before and addresses(captured.plan.state) == before
