"""Checks: a case run through the public functions, its result judged, the memory around it looked after."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla import api, plans, reference, select
from anymla.contract import AttentionOutput, Batch, out_dtypes
from anymla.errors import NoBackend
from anymla.hardware.probe import Machine
from anymla.planned import DecodePlan, Plan, PrefillPlan, SparsePlan
from anymla.problem import Feature, Problem
from anymla.verification import eager
from anymla.verification.batches import num_sequences, take
from anymla.verification.cases import Case
from anymla.verification.inputs import Inputs
from anymla.verification.judge import Judgement, judge, judge_topk, judge_written, together, wrong


def check_case(case: Case, backend: str, machine: Machine, device: torch.device) -> Judgement:
    """Verify one case; a crash is a finding like a wrong number."""
    check = {"refusal": _refusal, "right": _right, "batch": _batch, "alone": _alone}[case.check]
    try:
        return check(case, backend, machine, device)
    except Exception as error:  # what a kernel raises is not ours to foresee
        return wrong(f"{type(error).__name__}: {error}")


def run_call(
    call: Inputs, backend: str, *, return_lse: bool = True, views: bool = False, given: bool = True
) -> Any:
    """Make a call through `api`, into outputs full of NaN.

    Args:
        call: On the device of the backend.
        backend: A name in BACKENDS.
        return_lse: Whether to ask for the lse.
        views: Give outputs that are views into wider ones.
        given: Whether to give outputs at all.

    Returns:
        AttentionOutput, ids, or None for a write.
    """
    options = dict(call.options)
    if call.op == "write_cache":
        return api.write_cache(*call.tensors, backend=backend)
    if call.op == "index_topk":
        out = _outputs(call.shape, torch.int32, call.tensors[0].device, views) if given else None
        return api.index_topk(*call.tensors, **options, out=out, backend=backend)
    if call.op == "prefill":
        options["kv_cache"] = options.pop("cache", None)
    options |= outputs_of(call, return_lse, views) if given else {"return_lse": return_lse}
    got: AttentionOutput = getattr(api, call.op)(*call.tensors, **options, backend=backend)
    return got


def outputs_of(call: Inputs, return_lse: bool, views: bool = False) -> dict[str, Any]:
    """The arguments that give an attention call its outputs, full of NaN."""
    like = call.tensors[0]
    lse = _outputs(call.shape[:2], torch.float32, like.device, views) if return_lse else None
    out = _outputs(call.shape, out_dtypes(like.dtype)[0], like.device, views)
    return {"return_lse": return_lse, "out": out, "lse": lse}


def planned(call: Inputs, problem: Problem, backend: str, **bounds: int) -> Plan:
    """The plan of an attention call.

    Args:
        call: On the device of the backend.
        problem: Its facts; topk is a bound.
        backend: A name in BACKENDS.
        bounds: max_q_len and max_seq_len of a decode or prefill, if they are not those of this call.
    """
    options, device = call.options, call.tensors[0].device
    facts: dict[str, Any] = {
        "num_heads": problem.num_heads,
        "kv_lora_rank": problem.kv_lora_rank,
        "qk_rope_head_dim": problem.qk_rope_head_dim,
        "q_dtype": call.tensors[0].dtype,
        "kv_format": problem.kv_format,
        "sinks": options["sinks"] is not None,
        "return_lse": Feature.LSE in problem.features,
        "batch_invariant": Feature.BATCH_INVARIANT in problem.features,
        "backend": backend,
    }
    if call.op == "sparse_decode":
        return plans.plan_sparse_decode(
            call.num_rows, topk=problem.topk, block_size=problem.block_size, device=device, **facts
        )
    batch = batch_of(call, problem, **bounds)
    if call.op == "decode":
        return plans.plan_decode(batch, **facts)
    facts |= {"qk_nope_head_dim": problem.qk_nope_head_dim, "v_head_dim": problem.v_head_dim}
    return plans.plan_prefill(batch, **facts)


def batch_of(call: Inputs, problem: Problem, **bounds: int) -> Batch:
    """The step of a decode or prefill, its lengths known to the host; see `planned`."""
    options = call.options
    cached = call.op == "decode" or "cache" in options
    return Batch.of(
        seq_lens=options["seq_lens"] if cached else options["qo_indptr"].diff(),
        block_table=options.get("block_table"),
        qo_indptr=options["qo_indptr"],
        block_size=problem.block_size,
        causal=options["causal"],
        num_tokens=call.num_rows,
        new_tokens_are_cached=call.op == "decode",
        check=True,
        max_q_len=bounds.get("max_q_len"),
        max_seq_len=bounds.get("max_seq_len"),
    )


def run_planned(call: Inputs, plan: Plan, **outputs: Any) -> AttentionOutput:
    """Run an attention call by its plan; `outputs` are those of `outputs_of`, or return_lse alone."""
    options = call.options
    step: dict[str, Any] = {"sm_scale": options["sm_scale"], "sinks": options["sinks"], **outputs}
    if "q_scale" in options:
        step["q_scale"] = options["q_scale"]
    if isinstance(plan, SparsePlan):
        return plan.run(*call.tensors, indices=options["indices"], counts=options["counts"], **step)
    if isinstance(plan, PrefillPlan):
        return plan.run(*call.tensors, kv_cache=options.get("cache"), **step)
    assert isinstance(plan, DecodePlan)
    return plan.run(*call.tensors, **step)


def right_answer(call: Inputs) -> tuple[AttentionOutput, tuple[AttentionOutput, ...]]:
    """The reference and the eager runs of an attention call."""
    exact = getattr(reference, call.op)(*call.tensors, **call.options)
    assert exact.lse is not None
    loops = eager.loops_for(exact.lse)
    return exact, getattr(eager, call.op)(*call.tensors, **call.options, loops=loops)


def judge_ids(call: Inputs, ids: Tensor) -> Judgement:
    """Judge what an indexer chose for a call."""
    seen = {name: value for name, value in call.options.items() if name != "topk"}
    return judge_topk(
        ids,
        reference.index_topk(*call.tensors, **call.options),
        reference.index_logits(*call.tensors, **seen),
        eager.index_logits(*call.tensors, **seen),
    )


def judged(call: Inputs, here: Inputs, run: Callable[[Inputs], Any]) -> Judgement:
    """Make a call and judge what it returns, and what it did to the memory of the cache.

    Args:
        call: Where the right answer is to be worked out.
        here: The same call on the device of the backend.
        run: Makes it; its result is that of `run_call`.
    """
    cache = here.cache if call.op != "prefill" or "cache" in here.options else None
    before = torch.zeros(0) if cache is None else _memory(cache.data).clone()
    if call.op == "write_cache":
        return _written(call, here, before, run)
    answer = None if call.op == "index_topk" else right_answer(call)
    got = run(here)
    found = judge_ids(call, got) if answer is None else judge(got, answer[0], *answer[1])
    if cache is not None and not torch.equal(_memory(cache.data), before):
        return together(found, wrong("the cache was written to"))
    return found


def _right(case: Case, backend: str, machine: Machine, device: torch.device) -> Judgement:
    def run(here: Inputs) -> Any:
        return run_call(here, backend, return_lse=Feature.LSE in case.problem.features, views=case.views)

    call = case.inputs(device)
    return judged(call, call, run)


def _written(call: Inputs, here: Inputs, before: Tensor, run: Callable[[Inputs], Any]) -> Judgement:
    """Judge a cache write: the rows written, and all memory around them."""
    kv_c, k_pe, cache, slots = here.tensors
    kept = slots >= 0
    old = cache.gather(slots[kept]).clone()
    run(here)
    expected = reference.write_cache(*call.tensors)[kept.cpu()]
    given = torch.cat((kv_c, k_pe), -1)[kept]
    found = judge_written(cache.read(slots[kept], dtype=torch.float64), expected, given)
    cache.scatter(old, slots[kept])
    if not torch.equal(_memory(cache.data), before):
        return together(found, wrong("memory of other slots was written to"))
    return found


def _refusal(case: Case, backend: str, machine: Machine, device: torch.device) -> Judgement:
    try:
        select.choose(case.problem, machine, backend)
    except NoBackend as refusal:
        reasons = str(refusal)
        named = case.fact == "row" or case.fact in reasons
        return Judgement(0.0, reasons) if named else wrong(f"refusal got {reasons!r}; needs {case.fact}")
    return wrong(f"problem got accepted; needs a refusal: no row of {backend} offers it")


def _batch(case: Case, backend: str, machine: Machine, device: torch.device) -> Judgement:
    call = case.inputs(device)
    order = list(range(num_sequences(call)))
    call, _ = take(call, [*order[1::2], *order[::2]])
    got = run_call(call, backend, return_lse=Feature.LSE in case.problem.features)
    if call.op == "index_topk":
        return judge_ids(call, got)
    exact, runs = right_answer(call)
    return judge(got, exact, *runs)


def _alone(case: Case, backend: str, machine: Machine, device: torch.device) -> Judgement:
    call = case.inputs(device)
    whole = run_planned(call, planned(call, case.problem, backend), return_lse=True)
    order = list(range(num_sequences(call)))
    parts = ([*order[1::2], *order[::2]], *([s] for s in order))
    return together(*(same_bits(call, whole, sequences, case.problem, backend) for sequences in parts))


def same_bits(
    call: Inputs, whole: AttentionOutput, sequences: list[int], problem: Problem, backend: str, **bounds: int
) -> Judgement:
    """Whether some of a call's sequences, as a batch of their own, give the bits that they have in the whole.

    Args:
        call: The whole batch.
        whole: What it gave.
        sequences: Which, in any order.
        problem: Facts of both plans.
        backend: A name in BACKENDS.
        bounds: See `planned`.
    """
    part, rows = take(call, sequences)
    plan = planned(part, problem, backend, **bounds)
    got = run_planned(part, plan, return_lse=whole.lse is not None)
    for name, one, other in zip(("out", "lse"), got, whole, strict=True):
        if one is not None and other is not None and not torch.equal(_bits(one), _bits(other[rows])):
            return wrong(f"{name} of sequences {sequences} differs in bits from that in the whole batch")
    return Judgement(0.0, "every bit")


def _outputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, views: bool) -> Tensor:
    """Memory full of NaN, or of -7."""
    fill = torch.nan if dtype.is_floating_point else -7
    wide = torch.full((*shape[:-1], shape[-1] + (3 if views else 0)), fill, dtype=dtype, device=device)
    return wide[..., : shape[-1]]


def _memory(t: Tensor) -> Tensor:
    """All bytes that a tensor's memory has."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int16)
