"""One benchmark: the very call that is timed is verified first; what is wrong has no time."""

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from anymla import api, plans, select
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.sample import Verified, verified
from anymla.benchmarking.timing import (
    Timing,
    captured,
    copy_bandwidth,
    host_seconds,
    product_rate,
    time_in_turns,
)
from anymla.benchmarking.workloads import DTYPES, Workload
from anymla.contract import Batch, IndexArgs
from anymla.hardware.arches import ARCHES
from anymla.hardware.probe import this_machine
from anymla.indices import to_slots
from anymla.planned import module_of
from anymla.problem import Feature
from anymla.verification.batches import spans
from anymla.verification.inputs import Inputs
from anymla.verification.judge import Judgement, together, wrong
from anymla.verification.run import made_with
from anymla.verification.scores import judged_choice, planned_choice


@dataclass(frozen=True)
class Planned:
    """A call, ready to run.

    Attributes:
        backend: Which backend runs it.
        run: Runs it into the same outputs every time.
        plan: What `run` runs; None for operations that have no plan.
        timed: What is timed in the place of `run`, which is what is verified; None: that.
        batch: Describes the step anew, by the lengths that the host knows (True) or by bounds alone (False);
            None where that is not how the operation is planned.
        chosen: Judges what the indexer of a sparse step chose, after `run`; None where there is none.
    """

    backend: str
    run: Callable[[], Any]
    plan: Any = None
    batch: Callable[[bool], Batch] | None = None
    timed: Callable[[], Any] | None = None
    chosen: Callable[[], Judgement] | None = None

    @property
    def launch(self) -> dict[str, Any] | None:
        """The launch row of its main kernel, where a backend says so."""
        row = getattr(getattr(self.plan, "state", None), "launch", None)
        return asdict(row) if is_dataclass(row) and not isinstance(row, type) else None


@dataclass(frozen=True)
class Record:
    """A benchmark of one workload.

    Attributes:
        workload: What was run.
        backend: Which backend ran it.
        launch: The launch row of its main kernel, or None.
        verified: Of the result of the call that was timed.
        timing: None if the result is wrong.
        copy_bandwidth: Bytes a second that a large copy moves here.
        product_rate: Multiplications and additions a second of a large fp32 or, on a GPU, q_dtype product.
        planning: Times of planning the step, where that was asked for.
    """

    workload: Workload
    backend: str
    launch: dict[str, Any] | None
    verified: Verified
    timing: Timing | None
    copy_bandwidth: float
    product_rate: float
    planning: dict[str, float] | None = None

    @property
    def passed(self) -> bool:
        """Whether the result is right."""
        return self.verified.judgement.passed

    @property
    def bandwidth_share(self) -> float | None:
        """Bytes that have to move a second, as a share of what a copy moves. None without a time."""
        return self._share(self.workload.num_bytes / self.copy_bandwidth)

    @property
    def product_share(self) -> float | None:
        """Products a second, as a share of what a large product does. None without a time."""
        return self._share(self.workload.flops / self.product_rate)

    def _share(self, least_s: float) -> float | None:
        return None if self.timing is None else round(least_s * 1e6 / self.timing.median_us, 4)

    def to_dict(self) -> dict[str, Any]:
        """The record, flat, without where and when it was made."""
        work, p = self.workload, self.workload.problem
        share = self.verified.judgement.share
        return {
            "workload": work.id,
            "model": work.model,
            "tp": work.tp,
            "op": p.op,
            "num_heads": p.num_heads,
            "batch": work.batch,
            "context": work.context,
            **({"turns": list(work.turns)} if work.turns else {}),
            "q_len": p.q_len,
            "q_dtype": p.q_dtype,
            "kv_format": p.kv_format,
            "block_size": p.block_size,
            "topk": p.topk,
            **({"part": work.part} if work.part else {}),
            "backend": self.backend,
            **({"launch": self.launch} if self.launch else {}),
            "passed": self.passed,
            "reasons": list(self.verified.judgement.reasons),
            "share_of_budget": round(share, 4) if share < float("inf") else None,
            "verified_rows": self.verified.rows,
            "verified_heads": self.verified.heads,
            **(self.timing.to_dict() if self.timing else {}),
            **(self.planning or {}),
            "num_bytes": work.num_bytes,
            "flops": work.flops,
            "bandwidth_share": self.bandwidth_share,
            "product_share": self.product_share,
        }


def bench(
    workload: Workload,
    backend: str,
    device: torch.device,
    *,
    repeats: int = 20,
    planning: bool = False,
    call: Inputs | None = None,
) -> Record:
    """Verify a workload, then time it, on a GPU as a captured graph.

    Args:
        workload: What to run.
        backend: A name in BACKENDS, or "auto".
        device: Where.
        repeats: Timed calls.
        planning: Time the planning of the step as well.
        call: Its tensors, where they are there already. None: they are drawn.

    Returns:
        The record; without a timing if the result is wrong.

    Raises:
        NoBackend: nothing, or not the named backend, takes the workload.
    """
    call = drawn_inputs(workload, device) if call is None else call
    ready = planned(call, workload, backend)
    if planning and ready.batch is not None:
        ready.plan.update(ready.batch(True))
    found = verified(call, ready.run())
    if ready.chosen is not None:
        found = replace(found, judgement=together(found.judgement, ready.chosen()))
    if workload.part.startswith("choice"):
        # What is drawn has hardly a tie.
        kernels, topk = module_of(ready.plan.choice), workload.problem.topk
        hard = judged_choice(kernels, this_machine(device), device, max(workload.lens), topk)
        found = replace(found, judgement=together(found.judgement, hard))
    timing = times = None
    if found.judgement.passed:
        timing = time_in_turns({"run": captured(ready.timed or ready.run, device)}, device, repeats=repeats)[
            "run"
        ]
        times = planning_times(ready, device, repeats) if planning else None
    best = ceilings(device, workload.problem.q_dtype)
    return Record(workload, ready.backend, ready.launch, found, timing, *best, planning=times)


def planning_times(ready: Planned, device: torch.device, repeats: int) -> dict[str, float]:
    """Microseconds that a new step takes before its first layer: on the host, and on the device beside it.

    Args:
        ready: A decode or an indexer.
        device: Where it runs.
        repeats: Of each.

    Returns:
        plan_host_us of `plan.update`; batch_host_us and batch_bounds_us of `Batch.of` before it, with every
        length checked on the host and with bounds alone; plan_device_us of what the update leaves to the
        device, 0 on a CPU.
    """
    describe = ready.batch
    assert describe is not None
    batch, update = describe(True), ready.plan.update
    found = {
        "plan_host_us": host_seconds(lambda: update(batch), device).median_us,
        "batch_host_us": host_seconds(lambda: describe(True), device).median_us,
        "batch_bounds_us": host_seconds(lambda: describe(False), device).median_us,
        "plan_device_us": 0.0,
    }
    if device.type != "cpu":
        replay = captured(lambda: update(batch), device)
        found["plan_device_us"] = time_in_turns({"": replay}, device, repeats=repeats)[""].median_us
    return {name: round(value, 2) for name, value in found.items()}


def planned(call: Inputs, workload: Workload, backend: str) -> Planned:
    """Plan a call once.

    Args:
        call: On its device.
        workload: What it is a call of.
        backend: A name in BACKENDS, or "auto".

    Returns:
        What runs it. The cache write has no plan: it is planned and run every time.

    Raises:
        NoBackend: nothing, or not the named backend, takes the call.
    """
    p, options, like = workload.problem, call.options, call.tensors[0]
    if workload.index is not None:
        return _with_index(call, workload, backend)
    if p.op == "write_cache":
        name = select.choose(p, this_machine(like.device), backend).backend.name
        return Planned(name, lambda: api.write_cache(*call.tensors, backend=backend))
    if p.op == "index_topk":
        return _indexer(call, workload, backend)
    has_lse = Feature.LSE in p.features
    facts: dict[str, Any] = {
        "num_heads": p.num_heads,
        "kv_lora_rank": p.kv_lora_rank,
        "qk_rope_head_dim": p.qk_rope_head_dim,
        "q_dtype": like.dtype,
        "kv_format": p.kv_format,
        "sinks": options["sinks"] is not None,
        "return_lse": has_lse,
        "backend": backend,
    }
    step: dict[str, Any] = {
        "sm_scale": options["sm_scale"],
        "sinks": options["sinks"],
        "return_lse": has_lse,
        "out": torch.full(call.shape, torch.nan, dtype=like.dtype, device=like.device),
        "lse": torch.full(call.shape[:2], torch.nan, device=like.device) if has_lse else None,
    }
    if p.op == "sparse_decode":
        place = {"topk": p.topk, "block_size": p.block_size, "device": like.device}
        sparse = plans.plan_sparse_decode(call.num_rows, **place, **facts)
        step["indices"] = options["indices"]
        return Planned(sparse.backend, lambda: sparse.run(*call.tensors, **step), sparse)
    describe = _describer(call, workload)
    if p.op == "decode":
        decode = plans.plan_decode(describe(True), **facts)
        return Planned(decode.backend, lambda: decode.run(*call.tensors, **step), decode, describe)
    facts |= {"qk_nope_head_dim": p.qk_nope_head_dim, "v_head_dim": p.v_head_dim}
    prefill = plans.plan_prefill(describe(True), **facts)
    step["kv_cache"] = options.get("cache")
    return Planned(prefill.backend, lambda: prefill.run(*call.tensors, **step), prefill)


def _indexer(call: Inputs, workload: Workload, backend: str) -> Planned:
    """All of the indexer to be verified, and all or a part of it to be timed."""
    (q, weights, cache), p, describe = call.tensors, workload.problem, _describer(call, workload)
    plan = plans.plan_index_topk(
        describe(True),
        topk=p.topk,
        index_heads=p.num_heads,
        index_head_dim=p.kv_lora_rank,
        q_dtype=q.dtype,
        kv_format=p.kv_format,
        backend=backend,
    )
    ids = torch.empty(call.shape, dtype=torch.int32, device=q.device)
    args, module, timed = IndexArgs(q, weights, cache, p.topk, ids), module_of(plan.choice), None
    part, _, of = workload.part.partition("-")
    state, width = plan.state, max(workload.lens)
    if of == "ties":
        scores = torch.zeros((call.num_rows, width), device=q.device)
        counts = torch.full((call.num_rows,), width, dtype=torch.int32, device=q.device)
        args, state = planned_choice(module, this_machine(q.device), scores, counts, p.topk)
    if part == "torch.topk":
        logits = state.logits[: call.num_rows, :width]
        found = torch.topk(logits, p.topk)
        timed = partial(torch.topk, logits, p.topk, sorted=of != "unsorted", out=found)
    elif part:
        timed = partial({"logits": module.index_scores, "choice": module.index_choice}[part], args, state)
    return Planned(plan.backend, lambda: plan.run(q, weights, cache, out=ids), plan, describe, timed)


def _with_index(call: Inputs, workload: Workload, backend: str) -> Planned:
    """Indexer and attention of a step; slots of what is chosen stand where the call has its indices."""
    assert workload.index is not None
    asked = drawn_inputs(workload.index, call.tensors[0].device)
    attend = planned(call, replace(workload, index=None), backend)
    choose = planned(asked, workload.index, backend).plan

    def run() -> Any:
        choose.run(*asked.tensors, as_slots=True, out=call.options["indices"])
        return attend.run()

    def chosen() -> Judgement:
        ids = choose.run(*asked.tensors)
        where = (asked.options["block_table"], asked.options["qo_indptr"], asked.cache.block_size)
        same = torch.equal(to_slots(ids, *where), call.options["indices"])
        found = verified(asked, ids).judgement
        return found if same else together(found, wrong("slots attended to got others than those of the ids"))

    return replace(attend, run=run, chosen=chosen)


def provenance(device: torch.device) -> dict[str, Any]:
    """Where and when a record is made: chip, threads, versions, commit, time, load of the machine."""
    machine = this_machine(device)
    found: dict[str, Any] = {
        "arch": machine.arch,
        "chip": cpu_model() if device.type == "cpu" else machine.device_name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **made_with("torch", "triton", "transformers"),
    }
    if device.type == "cpu":
        return found | {"threads": torch.get_num_threads(), "load_1min": round(os.getloadavg()[0], 2)}
    driver = torch.version.hip or torch.version.cuda
    return found | {"platform": driver, "multiprocessors": machine.multiprocessors}


def cpu_model() -> str:
    """What the processor calls itself, with its family and model where the name is vague."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    name = facts.get("model name", platform.machine())
    return f"{name} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def _describer(call: Inputs, workload: Workload) -> Callable[[bool], Batch]:
    """What describes the step of a call, from the integers that a server has or from bounds."""
    options, p = call.options, workload.problem
    cached = p.op != "prefill" or "cache" in options
    rows = [len(span) for span in spans(call)]
    ends = [0]
    for count in rows:
        ends.append(ends[-1] + count)
    new = p.q_len if p.op == "prefill" else 0
    lens = [n + new for n in workload.lens]
    longest = max(lens)
    seq_lens = options["seq_lens"] if cached else options["qo_indptr"].diff()
    return lambda known: Batch.of(
        seq_lens=seq_lens,
        block_table=options.get("block_table"),
        qo_indptr=options["qo_indptr"],
        block_size=p.block_size if cached else 1,
        causal=options.get("causal", True),
        num_tokens=call.num_rows,
        max_q_len=p.q_len,
        max_seq_len=longest,
        seq_lens_host=lens if known else None,
        qo_indptr_host=ends if known and options["qo_indptr"] is not None else None,
        new_tokens_are_cached=p.op != "prefill",
    )


@lru_cache(maxsize=8)
def ceilings(device: torch.device, q_dtype: str = "bf16") -> tuple[float, float]:
    """Bytes and products a second of a large copy and a large product, measured once a process.

    The product is of q_dtype on a GPU; on a CPU it is of fp32, which many multiply faster than anything else.
    """
    dtype = torch.float32 if device.type == "cpu" else DTYPES[q_dtype]
    if dtype.itemsize == 1 and not ARCHES[this_machine(device).arch].has_fp8:
        dtype = torch.bfloat16
    return _copy_bandwidth(device), product_rate(device, dtype)


@lru_cache(maxsize=8)
def _copy_bandwidth(device: torch.device) -> float:
    return copy_bandwidth(device)
