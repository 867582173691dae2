"""AITER's prefill after a cached context: right against the reference over its double, or refused by name."""

from dataclasses import replace

import pytest
import torch
from double_varlen import VarlenDouble
from test_aiter_graph import Graph
from test_aiter_prefill import machine, problem_of

from anymla import merging, select
from anymla.backends.aiter_mla import bindings, chunked, facts, manifest, operations
from anymla.backends.aiter_mla.provider import recorded_aiter
from anymla.contract import PrefillArgs
from anymla.errors import NoBackend
from anymla.kv_cache import KV_FORMATS
from anymla.planned import PrefillPlan
from anymla.plans import plan_prefill, prefill_plan
from anymla.problem import Feature
from anymla.verification.checks import batch_of, judged, run_planned
from anymla.verification.inputs import Inputs, prefill_inputs
from anymla.verification.needles import Widths

STEPS = {
    "one sequence": ((300,), (9,)),
    "some without a context": ((130, 0, 64, 0, 5), (3, 2, 1, 7, 4)),
    "some without new tokens": ((40, 200, 7, 0), (0, 5, 0, 0)),
    "nothing new": ((9, 4), (0, 0)),
    "many short": ((3, 1, 0, 5) * 3, (1, 2, 1, 3) * 3),
}
"""Cached and new tokens of each sequence."""


def call_of(contexts: tuple[int, ...], q_lens: tuple[int, ...], heads: int = 2, **more: object) -> Inputs:
    """A hostile prefill without sinks."""
    return prefill_inputs(
        Widths(heads), contexts, q_lens, **{"sinks": "none", "q_dtype": torch.bfloat16} | more
    )


def planned(call: Inputs, release: str = "HEAD", **changes: object) -> PrefillPlan:
    """Its plan by AITER, asked for as a server does."""
    cache = call.options["cache"]
    facts_of_call = {
        "num_heads": call.shape[1],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_dtype": torch.float8_e4m3fn,
        "kv_format": cache.format.name,
    }
    problem = replace(problem_of(call.shape[1], 1), block_size=cache.block_size)
    batch = batch_of(call, problem)
    return plan_prefill(batch, **facts_of_call | {"machine": machine(release), "backend": "aiter"} | changes)


def require_right(call: Inputs, release: str = "HEAD") -> None:
    """Run through the plan, and judge as every backend is judged."""

    def run(here: Inputs) -> object:
        return run_planned(here, planned(here, release), return_lse=False)

    judged(call, call, run).require_pass()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> VarlenDouble:
    """The newest AITER on gfx950."""
    return VarlenDouble().install(monkeypatch)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_any_step_is_right(double: VarlenDouble, step: tuple[tuple[int, ...], ...], causal: bool) -> None:
    require_right(call_of(*step, causal=causal))


@pytest.mark.parametrize("kv_format", [name for name in KV_FORMATS if not name.startswith("index_k")])
def test_a_context_may_be_cached_in_any_format_of_latents(double: VarlenDouble, kv_format: str) -> None:
    require_right(call_of((70, 5), (6, 3), kv_format=kv_format, block_size=48, poison="huge"))


def test_the_line_of_contexts_is_cut_wherever_it_is_full(
    double: VarlenDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(*STEPS["some without a context"])
    whole = planned(call).state
    assert [chunk.keys for chunk in whole.chunks] == [slice(0, 199)]
    a_key = chunked.BYTES_A_VALUE * (128 + 64 + 128)
    for most in (1 << 7, 64, 23):
        monkeypatch.setattr(chunked, "EXPANDED_BYTES", most * a_key * 2)
        double.keys.clear()
        state = planned(call).state
        assert state.lanes == 2 or most < 64
        spans = [chunk.keys for chunk in state.chunks]
        assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
        assert (spans[0].start, spans[-1].stop) == (0, 199)
        require_right(call)
        assert max(double.keys) <= most * 2 // state.lanes


def test_only_rows_of_the_sequences_of_a_chunk_are_attended(
    double: VarlenDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_key = chunked.BYTES_A_VALUE * (128 + 64 + 128)
    monkeypatch.setattr(chunked, "EXPANDED_BYTES", 100 * a_key * 2)
    require_right(call_of((100, 100, 100), (3, 4, 0)))
    assert (double.keys, double.rows) == ([7, 100, 100], [7, 3, 4])


def test_heads_that_do_not_fit_together_run_one_group_after_another(
    double: VarlenDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "EXPANDED_BYTES", 2 * 2 * chunked.BYTES_A_VALUE * 320 * 40)
    require_right(call_of((50,), (40,), heads=5))
    assert double.heads[::2] == [2, 2, 1]


def releases() -> list[str]:
    """The first of those whose function takes the same, and that have a table."""
    known = [name for name in facts.releases() if facts.recorded_kernels(name, "gfx950")]
    first = {facts.recorded_parameters("flash_attn_varlen_func", name): name for name in reversed(known)}
    return list(first.values())


@pytest.mark.parametrize("release", releases())
def test_every_release_is_right(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    VarlenDouble(release).install(monkeypatch)
    require_right(call_of((20, 0), (2, 3)), release)


def test_neither_a_plan_nor_a_layer_waits(double: VarlenDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of values on the host a merge looks whether they are +inf.
    monkeypatch.setattr(merging, "on_host", lambda *tensors: False)
    call = call_of(*STEPS["some without a context"])
    plan, scale = planned(call), call.options["sm_scale"]
    with Graph():
        chunked.plan_chunked(plan.batch, plan.problem, machine(), {})
    graph, out = Graph(), torch.full(call.shape, torch.nan, dtype=torch.bfloat16)
    state = replace(plan.state, call=graph.calls({"one": plan.state.call})["one"])
    with graph:
        args = PrefillArgs(*call.tensors, call.options["cache"], scale, None, out, None)
        operations.prefill(args, state)
    assert out.isfinite().all()


def test_lengths_that_only_the_device_knows_are_refused_when_planning(double: VarlenDouble) -> None:
    call = call_of((30,), (4,))
    batch = replace(planned(call).batch, seq_lens_host=None)
    with pytest.raises(NoBackend, match="aiter: features lacks lengths that only the device knows"):
        prefill_plan(batch, problem_of(2, 4), "aiter", machine())


REFUSED = {
    "bf16, which is served by triton": ({"q_dtype": torch.bfloat16}, "q_dtype got bf16; needs fp8_e4m3fn"),
    "an lse": ({"return_lse": True}, "lacks lse"),
    "sinks": ({"sinks": True}, "lacks sinks"),
    "keys of an indexer": ({"kv_format": "index_k"}, "kv_format got index_k; needs"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_do_is_refused_with_a_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(NoBackend, match=reason):
        planned(call_of((30,), (4,)), **changes)


def test_an_attention_with_another_lse_is_refused() -> None:
    asked, aiter = problem_of(16, 4, Feature.CACHED_CONTEXT), recorded_aiter("HEAD", "gfx950")
    assert not manifest._prefill(asked, aiter).reasons
    here = manifest._prefill(asked, replace(aiter, environment=(("ENABLE_CK", "0"),)))
    assert here.reasons == (
        "aiter HEAD has ENABLE_CK=0, and with it another attention, whose lse lies otherwise",
    )
    assert manifest._called(asked) == bindings.CHUNKED


def test_explain_says_that_a_context_is_attended_to_in_more_bits_than_asked() -> None:
    choice = select.choose(problem_of(16, 4, Feature.CACHED_CONTEXT), machine())
    assert (choice.backend.name, choice.backend.evidence) == ("aiter", "contract double")
    assert choice.knobs == {"finite_tokens": 1, "operand_bits": 16}
    assert select.choose(problem_of(16, 4), machine()).knobs == {"finite_tokens": 1}
