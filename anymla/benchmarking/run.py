"""One benchmark: the very call that is timed is verified first; what is wrong has no time."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import anymla
from anymla import api, plans
from anymla.benchmarking.timing import Timing, copy_bandwidth, product_rate, time_in_turns
from anymla.benchmarking.workloads import DTYPES, Workload
from anymla.contract import AttentionOutput, Batch
from anymla.hardware.probe import this_machine
from anymla.problem import Feature
from anymla.verification.batches import moved, num_sequences, spans, take
from anymla.verification.checks import judge_ids, right_answer
from anymla.verification.inputs import Inputs
from anymla.verification.judge import Judgement, judge
from anymla.verification.run import made_with

VERIFIED_FLOPS = 40e9
"""Work of the fp64 reference in one verification, about; of more, some sequences are verified."""


@dataclass(frozen=True)
class Record:
    """A benchmark of one workload.

    Attributes:
        workload: What was run.
        backend: Which backend ran it.
        judgement: Of the result of the call that was timed.
        verified: How many of its sequences were judged.
        timing: None if the result is wrong.
        copy_bandwidth: Bytes a second that a large copy moves here.
        product_rate: Multiplications and additions a second of a large fp32 or, on a GPU, q_dtype product.
    """

    workload: Workload
    backend: str
    judgement: Judgement
    verified: int
    timing: Timing | None
    copy_bandwidth: float
    product_rate: float

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
        share = self.judgement.share
        return {
            "workload": work.id,
            "model": work.model,
            "tp": work.tp,
            "op": p.op,
            "num_heads": p.num_heads,
            "batch": work.batch,
            "context": work.context,
            "q_len": p.q_len,
            "q_dtype": p.q_dtype,
            "kv_format": p.kv_format,
            "block_size": p.block_size,
            "topk": p.topk,
            "backend": self.backend,
            "passed": self.judgement.passed,
            "reasons": list(self.judgement.reasons),
            "share_of_budget": round(share, 4) if share < float("inf") else None,
            "verified_sequences": self.verified,
            **(self.timing.to_dict() if self.timing else {}),
            "num_bytes": work.num_bytes,
            "flops": work.flops,
            "bandwidth_share": self.bandwidth_share,
            "product_share": self.product_share,
        }


def bench(workload: Workload, backend: str, device: torch.device, *, repeats: int = 20) -> Record:
    """Verify a workload, then time it.

    Args:
        workload: What to run.
        backend: A name in BACKENDS, or "auto".
        device: Where.
        repeats: Timed calls.

    Returns:
        The record; without a timing if the result is wrong.

    Raises:
        NoBackend: nothing, or not the named backend, takes the workload.
    """
    call = workload.inputs()
    name, run = planned(moved(call, device), workload, backend)
    judgement, verified = verified_result(call, run(), workload)
    timing = None
    if judgement.passed:
        timing = time_in_turns({"run": run}, device, repeats=repeats)["run"]
    dtype = torch.float32 if device.type == "cpu" else DTYPES[workload.problem.q_dtype]
    return Record(workload, name, judgement, verified, timing, *_best_of(device, dtype))


def planned(call: Inputs, workload: Workload, backend: str) -> tuple[str, Callable[[], Any]]:
    """Plan a call once.

    Args:
        call: On its device.
        workload: What it is a call of.
        backend: A name in BACKENDS, or "auto".

    Returns:
        The name of the backend, and a function that runs the call into the same outputs every time. The
        indexer has no plan: its function plans and runs.

    Raises:
        NoBackend: nothing, or not the named backend, takes the call.
    """
    p, options, like = workload.problem, call.options, call.tensors[0]
    if p.op == "index_topk":
        ids = torch.empty(call.shape, dtype=torch.int32, device=like.device)
        chosen = anymla.explain(p, this_machine(like.device)) if backend == "auto" else ()
        name = next((v.backend.name for v in chosen if v.accepted), backend)
        return name, lambda: api.index_topk(*call.tensors, **options, out=ids, backend=backend)
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
        "out": torch.empty(call.shape, dtype=like.dtype, device=like.device),
        "lse": torch.empty(call.shape[:2], device=like.device) if has_lse else None,
    }
    if p.op == "sparse_decode":
        place = {"topk": p.topk, "block_size": p.block_size, "device": like.device}
        sparse = plans.plan_sparse_decode(call.num_rows, **place, **facts)
        return sparse.backend, lambda: sparse.run(*call.tensors, indices=options["indices"], **step)
    batch = _batch(call, workload)
    if p.op == "decode":
        decode = plans.plan_decode(batch, **facts)
        return decode.backend, lambda: decode.run(*call.tensors, **step)
    facts |= {"qk_nope_head_dim": p.qk_nope_head_dim, "v_head_dim": p.v_head_dim}
    prefill = plans.plan_prefill(batch, **facts)
    return prefill.backend, lambda: prefill.run(*call.tensors, kv_cache=options.get("cache"), **step)


def verified_result(call: Inputs, got: Any, workload: Workload) -> tuple[Judgement, int]:
    """Judge a result, or as many of its sequences as VERIFIED_FLOPS allow, the last ones.

    Args:
        call: On the CPU.
        got: AttentionOutput or ids, on any device.
        workload: What it is a call of.

    Returns:
        The judgement, and how many sequences it is of.
    """
    count = num_sequences(call)
    wanted = max(1, min(count, int(VERIFIED_FLOPS * count / max(workload.flops, 1))))
    sequences = list(range(count - wanted, count))
    part, rows = take(call, sequences)
    if call.op == "index_topk":
        return judge_ids(part, got.cpu()[rows]), wanted
    exact, runs = right_answer(part)
    lse = None if got.lse is None else got.lse.cpu()[rows]
    return judge(AttentionOutput(got.out.cpu()[rows], lse), exact, *runs), wanted


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


def _batch(call: Inputs, workload: Workload) -> Batch:
    options, p = call.options, workload.problem
    cached = p.op == "decode" or "cache" in options
    rows = [len(span) for span in spans(call)]
    before = workload.context if p.op == "prefill" else workload.context - p.q_len
    ends = [0]
    for count in rows:
        ends.append(ends[-1] + count)
    return Batch.of(
        seq_lens=options["seq_lens"] if cached else options["qo_indptr"].diff(),
        block_table=options.get("block_table"),
        qo_indptr=options["qo_indptr"],
        block_size=p.block_size if cached else 1,
        causal=options["causal"],
        num_tokens=call.num_rows,
        seq_lens_host=[before + count for count in rows],
        qo_indptr_host=ends,
        new_tokens_are_cached=p.op == "decode",
    )


@lru_cache(maxsize=8)
def _best_of(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    return copy_bandwidth(device), product_rate(device, dtype)
