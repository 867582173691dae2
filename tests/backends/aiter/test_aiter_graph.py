"""What may be captured in a graph: planned before, updated between replays, never waiting for the device."""

from dataclasses import replace

import cases
import pytest
import torch
from cases import Case
from double import AiterDouble
from double_index import IndexDouble
from double_prefill import PrefillDouble
from graph import Graph, Waited
from torch import Tensor

from anymla import reference
from anymla.backends import BACKENDS
from anymla.backends.aiter_mla import decode, operations, prefill
from anymla.contract import AttentionOutput, Batch, DecodeArgs, PrefillArgs, SparseArgs
from anymla.errors import InvalidInput
from anymla.hardware.probe import Machine
from anymla.planned import DecodePlan
from anymla.plans import decode_plan, features, plan_index_topk, sparse_plan
from anymla.problem import Feature, Problem
from anymla.verification import eager
from anymla.verification.judge import judge

KINDS = {
    "a workgroup a row": Case("HEAD", "gfx942", 16, "bf16", 3, True, False, "ragged"),
    "persistent, folded": Case("HEAD", "gfx942", 48, "bf16", 2, False, False, "ragged"),
    "persistent, with an lse": Case("HEAD", "gfx950", 48, "bf16", 2, True, True, "ragged"),
    "padded": Case("HEAD", "gfx950", 12, "bf16", 1, True, True, "ragged"),
}


def step(lens: tuple[int, ...], q_len: int, tokens: int) -> Batch:
    """Sequences of q_len tokens, or of one each where `tokens` allows no more, on pages of 8."""
    table = torch.zeros(len(lens), 12, dtype=torch.int32)
    page = cases.SLOTS // 8
    for row, n in enumerate(lens):
        for at in range(-(-n // 8)):
            page -= 1
            table[row, at] = page
    indptr = torch.arange(0, (len(lens) + 1) * q_len, q_len, dtype=torch.int32)
    return Batch.of(
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=table,
        qo_indptr=indptr,
        block_size=8,
        num_tokens=tokens,
        max_seq_len=96,
    )


class Captured:
    """A planned decode, its memory, and a graph of one call."""

    def __init__(self, case: Case, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
        AiterDouble(case.release, case.arch, cases.UNITS).install(monkeypatch)
        self.case, problem = case, cases.problem_of(case)
        self.plan: DecodePlan = decode_plan(batch, problem, "aiter", cases.machine_of(case))
        self.q = [q.clone() for q in cases._queries(case.heads, batch.num_tokens)]
        self.sinks = torch.linspace(-2, 3, case.heads) if case.sinks else None
        out = torch.full_like(self.q[0], torch.nan)
        lse = torch.full(out.shape[:2], torch.nan) if case.lse else None
        self.args = DecodeArgs(*self.q, cases._values("bf16"), cases.SM_SCALE, self.sinks, out, lse)
        self.graph = Graph()
        self.plan.state.calls = self.graph.calls(self.plan.state.calls)
        with monkeypatch.context() as patch:
            patch.setattr(decode, "is_captured", lambda out: True)
            with self.graph:
                operations.decode(self.args, self.plan.state)

    def require_right(self, batch: Batch) -> None:
        """Judge what the memory of the outputs holds now."""
        given = {
            "block_table": batch.block_table,
            "seq_lens": batch.seq_lens,
            "qo_indptr": batch.qo_indptr,
            "sm_scale": cases.SM_SCALE,
            "sinks": self.sinks,
        }
        exact = reference.decode(*self.q, self.args.cache, **given)
        got = AttentionOutput(self.args.out, self.args.lse)
        judge(got, exact, *eager.decode(*self.q, self.args.cache, **given)).require_pass()


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_a_replay_takes_new_lengths_pages_and_values_in_the_memory_of_the_capture(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 2 * case.q_len
    captured = Captured(case, step((65, 70), case.q_len, tokens), monkeypatch)
    captured.require_right(step((65, 70), case.q_len, tokens))
    for lens in ((80, 9), (5, 96), (33, 64)):
        batch = step(lens, case.q_len, tokens)
        for q in captured.q:
            q.copy_(torch.randn_like(q.float()))
        captured.plan.update(batch)
        captured.args.out.fill_(torch.nan)
        captured.graph.replay()
        captured.require_right(batch)


@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_an_update_between_replays_waits_for_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Captured(case, step((65, 70), case.q_len, 2 * case.q_len), monkeypatch)
    batch = step((80, 9), case.q_len, 2 * case.q_len)
    with captured.graph:
        captured.plan.update(batch)
    assert captured.graph.nodes


def test_a_capture_fixes_how_many_tokens_a_row_has(monkeypatch: pytest.MonkeyPatch) -> None:
    case = KINDS["a workgroup a row"]
    captured = Captured(case, step((65, 70), 3, 6), monkeypatch)
    assert captured.plan.state.captured
    with pytest.raises(InvalidInput, match="needs 3 for every sequence, as captured; plan again"):
        captured.plan.update(step((65, 70), 2, 6))
    captured.plan.update(step((65, 71), 3, 6))


def test_a_sparse_step_replays_with_other_slots_and_plans_inside_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("HEAD", "gfx942", 48, "bf16", 1, False, False, "ragged", "sparse_decode")
    double = AiterDouble(case.release, case.arch, cases.UNITS).install(monkeypatch)
    plan = sparse_plan(3, cases.problem_of(case), torch.device("cpu"), "aiter", cases.machine_of(case))
    q, cache = cases._queries(48, 3), cases._values("bf16")
    indices, out = torch.full((3, 40), -1, dtype=torch.int32), torch.full((3, 48, 512), torch.nan).bfloat16()
    args, graph = SparseArgs(*q, cache, indices, None, cases.SM_SCALE, None, out, None), Graph()
    plan.state.calls = graph.calls(plan.state.calls)
    with graph:
        operations.sparse_decode(args, plan.state)
    for seed in range(3):
        torch.manual_seed(seed)
        indices.copy_(torch.randint(-1, cases.SLOTS, (3, 40)))
        indices[seed] = -1
        out.fill_(torch.nan)
        graph.replay()
        given = {"indices": indices, "sm_scale": cases.SM_SCALE}
        exact = reference.sparse_decode(*q, cache, **given)
        judge(AttentionOutput(out, None), exact, *eager.sparse_decode(*q, cache, **given)).require_pass()
    assert double.plans == 4


def test_an_indexer_replays_with_other_lengths_pages_queries_and_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from test_aiter_index import call_of, machine

    IndexDouble("HEAD", "gfx942").install(monkeypatch)
    tensors, options = call_of("gfx942", (70, 3), (2, 1), 1, False, 32)
    bounds = {"num_tokens": 4, "max_q_len": 4, "max_seq_len": 70}
    plan = plan_index_topk(
        Batch.of(**options, **bounds),
        topk=6,
        index_heads=32,
        index_head_dim=128,
        q_dtype=torch.float8_e4m3fnuz,
        kv_format="index_k_fnuz",
        backend="aiter",
        machine=machine(),
    )
    graph, chosen = Graph(), torch.full((4, 6), -7, dtype=torch.int32)
    plan.state.call = graph.calls({"logits": plan.state.call})["logits"]
    with graph:
        plan.run(*tensors, out=chosen)
    for lens, q_lens in (((70, 3), (2, 1)), ((1, 41), (0, 4)), ((66, 0), (1, 0))):
        options["seq_lens"].copy_(torch.tensor(lens))
        options["qo_indptr"][1:] = torch.tensor(q_lens).cumsum(0)
        batch = Batch.of(**options, **bounds)
        with Graph():
            plan.update(batch)
        chosen.fill_(-7)
        graph.replay()
        right = reference.index_topk(*tensors, **options, topk=6)
        assert torch.equal(chosen.sort(1).values, right.sort(1).values)
        tensors[1].neg_()
        options["block_table"].copy_(options["block_table"].flip(0))


def test_a_prefill_is_planned_on_the_host_and_its_layers_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    PrefillDouble("HEAD", "gfx950", 64).install(monkeypatch)
    indptr = torch.tensor([0, 40, 49], dtype=torch.int32)
    batch = Batch.of(seq_lens=indptr.diff(), qo_indptr=indptr, new_tokens_are_cached=False)
    asked = Problem("prefill", "fp8_e4m3fn", "bf16", 16, 512, 64, 128, 128, features=features(batch))
    where = Machine("gfx950", (("aiter", "HEAD"),), assumed=True, multiprocessors=64)
    state = prefill.plan_prefill(batch, asked, where, {})
    graph = Graph()
    state = replace(state, calls=graph.calls(state.calls))
    shapes = ((49, 16, 128), (49, 16, 64), (49, 512), (49, 64), (16, 128, 512), (16, 512, 128))
    tensors = [torch.randn(shape).bfloat16() for shape in shapes]
    out = torch.full((49, 16, 128), torch.nan, dtype=torch.bfloat16)
    with graph:
        operations.prefill(PrefillArgs(*tensors, None, 0.1, None, out, None), state)
    assert out.isfinite().all()
    first = out.clone()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, first)


def test_only_what_can_be_updated_in_place_is_offered_to_graphs() -> None:
    offered = {
        op: row.features.accepts(frozenset({Feature.GRAPH}))
        for row in BACKENDS
        if row.name == "aiter"
        for op in ("decode", "sparse_decode", "prefill", "write_cache", "index_topk")
        if row.op.accepts(op)
    }
    assert offered == {
        "decode": True,
        "sparse_decode": True,
        "prefill": False,
        "index_topk": True,
        "write_cache": False,
    }


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        Tensor.tolist,
        lambda t: t.unique(),
    ],
    ids=["item", "nonzero", "a mask", "tolist", "unique"],
)
def test_a_wait_is_caught(wait) -> None:
    with pytest.raises(Waited), Graph():
        wait(torch.ones(3))
