"""Times other libraries' MLA beside ours: the same call, each judged first, in turns in one run.

    python -m benchmarks.compare --record benchmarks/results
    python -m benchmarks.compare --only 128x16x4096 sparse

A library that cannot be imported is named with what to install, and one that does not take a case says why;
neither is an error. Functions are called by the names of their parameters, so that what is installed may be
of any version that knows them.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from anymla.benchmarking.commands import say
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.run import ceilings, planned, provenance
from anymla.benchmarking.sample import verified
from anymla.benchmarking.suite import Row, rows_of, write_record
from anymla.benchmarking.timing import captured, time_in_turns
from anymla.benchmarking.workloads import DTYPES, Workload
from anymla.contract import AttentionOutput
from anymla.verification.inputs import Inputs

Run = Callable[[], AttentionOutput]
OURS = "anymla"
COMPARED = ("decode", "sparse_decode")
SPLITS = (1, 4, 8, 16, 32)
"""Of vLLM's kernel, whose caller chooses them: the fastest is reported."""
WORKSPACE_BYTES = 128 << 20
PAGE_OF_FLASHMLA = 64


class NotTaken(Exception):
    """Why a library does not take a case."""


@dataclass(frozen=True)
class Peer:
    """Another library.

    Attributes:
        modules: Where it may be, the first that can be imported.
        install: What to install where there is none.
        bind: From its module, a call and its workload to what runs the call, by variant. Raises NotTaken.
    """

    modules: tuple[str, ...]
    install: str
    bind: Callable[[ModuleType, Inputs, Workload], dict[str, Run]]


def parameters(function: Callable[..., Any]) -> set[str]:
    """The names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def called(function: Callable[..., Any], offered: Mapping[str, Any], needed: Sequence[str] = ()) -> Any:
    """Call a function with those of the values offered that it has parameters for.

    Args:
        function: Of any version of a library.
        offered: Values by parameter name; several names may stand for one value.
        needed: Names without which the call would mean something else.

    Returns:
        What it returns.

    Raises:
        NotTaken: it has a parameter without default that nothing is offered for, or lacks one that is needed.
    """
    known = inspect.signature(function).parameters
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    open_ = [n for n, p in known.items() if p.kind in plain and p.default is p.empty and n not in offered]
    lacking = [name for name in needed if name not in known]
    name = getattr(function, "__qualname__", str(function))
    if open_:
        raise NotTaken(f"{name} asks for {', '.join(open_)}, which is not known here")
    if lacking:
        raise NotTaken(f"{name} has no {', '.join(lacking)}")
    return function(**{name: value for name, value in offered.items() if name in known})


@dataclass(frozen=True)
class Facts:
    """A call as other libraries describe it.

    Attributes:
        q: [T, H, L + R].
        table: [B, max_blocks] int32 without traps: entries past a sequence are 0.
        lens: [B] int32.
        q_len: Query tokens of each sequence.
    """

    q: Tensor
    table: Tensor
    lens: Tensor
    q_len: int

    @classmethod
    def of(cls, call: Inputs, work: Workload) -> "Facts":
        """The facts of a decode."""
        size = call.cache.block_size
        table, lens = call.options["block_table"], call.options["seq_lens"]
        used = torch.arange(table.shape[1], device=table.device) * size < lens[:, None]
        return cls(torch.cat(call.tensors[:2], -1), torch.where(used, table, 0), lens, work.problem.q_len)


def flashmla(module: ModuleType, call: Inputs, work: Workload) -> dict[str, Run]:
    """FlashMLA: dense decode of bf16 and fp16, sparse decode of 656-byte rows, sparse prefill of bf16."""
    p, cache = work.problem, call.cache
    plain = p.kv_format == p.q_dtype
    if p.op == "sparse_decode" and plain:
        return {"": _flashmla_prefill(module, call)}
    if p.op == "decode" and not plain:
        raise NotTaken(f"no dense decode from {p.kv_format}")
    if p.op == "sparse_decode" and p.kv_format != "fp8_ds_mla":
        raise NotTaken(f"no sparse decode from {p.kv_format}")
    if cache.block_size != PAGE_OF_FLASHMLA:
        raise NotTaken(f"pages of {cache.block_size} tokens; it has {PAGE_OF_FLASHMLA}")
    sequences, heads = work.batch, p.num_heads
    per_key = {"num_heads_per_head_k": p.q_len * heads, "num_q_tokens_per_head_k": p.q_len * heads}
    offered: dict[str, Any] = {
        "q": torch.cat(call.tensors[:2], -1).view(sequences, p.q_len, heads, -1),
        "k_cache": (cache.data if plain else cache.data.view(torch.float8_e4m3fn)).unsqueeze(2),
        "head_dim_v": p.kv_lora_rank,
        "softmax_scale": work.sm_scale,
        "num_splits": None,
    }
    known: dict[str, Any] = {**per_key, "num_heads_k": 1, "num_heads_q": heads}
    if p.op == "decode":
        facts = Facts.of(call, work)
        offered |= {"block_table": facts.table, "cache_seqlens": facts.lens, "causal": True}
    else:
        # Lengths and pages are in the indices; older versions ask for both all the same.
        lens = torch.tensor(work.lens, dtype=torch.int32, device=cache.device)
        table = torch.zeros(sequences, 1, dtype=torch.int32, device=cache.device)
        indices = call.options["indices"].view(sequences, p.q_len, -1)
        offered |= {"block_table": table, "cache_seqlens": lens, "causal": False}
        offered |= {"indices": indices, "is_fp8_kvcache": True}
        known |= {"is_fp8_kvcache": True, "topk": p.topk}
    metadata, splits = called(module.get_mla_metadata, known | {"cache_seqlens": offered["cache_seqlens"]})
    offered |= {"tile_scheduler_metadata": metadata, "num_splits": splits}
    needed = ("indices",) if p.op == "sparse_decode" else ()

    def run() -> AttentionOutput:
        out, _ = called(module.flash_mla_with_kvcache, offered, needed)
        return AttentionOutput(out.reshape(call.shape), None)

    return {"": run}


def _flashmla_prefill(module: ModuleType, call: Inputs) -> Run:
    function = getattr(module, "flash_mla_sparse_fwd", None)
    if function is None:
        raise NotTaken("no sparse prefill")
    cache = call.cache
    offered = {
        "q": torch.cat(call.tensors[:2], -1),
        "kv": cache.data.view(-1, 1, cache.width),
        "indices": call.options["indices"].unsqueeze(1),
        "sm_scale": call.options["sm_scale"],
        "d_v": cache.kv_lora_rank,
    }
    return lambda: AttentionOutput(called(function, offered)[0], None)


def flashinfer(module: ModuleType, call: Inputs, work: Workload) -> dict[str, Run]:
    """FlashInfer's planned MLA: dense decode, planned once."""
    p, cache, rank = work.problem, call.cache, call.cache.kv_lora_rank
    if p.op != "decode" or p.kv_format != p.q_dtype:
        raise NotTaken(f"its planned MLA has no {p.op} from {p.kv_format} here")
    facts = Facts.of(call, work)
    device, size = facts.table.device, cache.block_size
    counts = (facts.lens + size - 1) // size
    used = torch.arange(facts.table.shape[1], device=device) < counts[:, None]
    csr: dict[str, Any] = {
        "qo_indptr": torch.arange(work.batch + 1, dtype=torch.int32, device=device) * p.q_len,
        "kv_indptr": torch.cat((counts.new_zeros(1), counts.cumsum(0))).int(),
        "kv_indices": facts.table[used],
        "kv_len_arr": facts.lens,
    }
    wrapper = module.BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    )
    if "qo_indptr" not in parameters(wrapper.plan):
        layouts = {"query_layout": "split", "kv_cache_layout": "split"}
        csr = {"metadata": called(module.MLAPlanMetadata.csr, csr), **layouts}
    dtype = DTYPES[p.q_dtype]
    called(
        wrapper.plan,
        {
            **csr,
            "num_heads": p.num_heads,
            "head_dim_ckv": rank,
            "head_dim_kpe": p.qk_rope_head_dim,
            "page_size": size,
            "causal": True,
            "sm_scale": work.sm_scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        },
    )
    query, keys = call.tensors[:2], (cache.data[..., :rank], cache.data[..., rank:])
    given: dict[str, Any] = {"out": torch.empty_like(query[0]), "return_lse": False}
    if "query" in parameters(wrapper.run):
        given |= {"query": query, "kv_cache": keys}
    else:
        given |= {"q_nope": query[0], "q_pe": query[1], "ckv_cache": keys[0], "kpe_cache": keys[1]}
    return {"": lambda: AttentionOutput(called(wrapper.run, given), None)}


def vllm_triton(module: ModuleType, call: Inputs, work: Workload) -> dict[str, Run]:
    """vLLM's Triton MLA: dense decode, each token of a verify block as a sequence of its own."""
    p, cache = work.problem, call.cache
    if p.op != "decode" or cache.format.tile:
        raise NotTaken(f"no {p.op} from {p.kv_format}")
    facts, tokens = Facts.of(call, work), work.num_tokens
    keys = cache.data.unsqueeze(2)
    ahead = torch.arange(1 - p.q_len, 1, dtype=torch.int32, device=facts.lens.device)
    offered: dict[str, Any] = {
        "q": facts.q,
        "k_buffer": keys,
        "v_buffer": keys[..., : p.kv_lora_rank],
        "o": torch.empty(call.shape, dtype=facts.q.dtype, device=facts.q.device),
        "lse": torch.empty(call.shape[:2], device=facts.q.device),
        "req_to_token": facts.table.repeat_interleave(p.q_len, 0),
        "b_seq_len": (facts.lens[:, None] + ahead).flatten(),
        "sm_scale": work.sm_scale,
        "page_size": cache.block_size,
    }
    needed: tuple[str, ...] = ()
    if cache.scale is not None:
        offered |= {"k_scale": cache.scale, "v_scale": cache.scale}
        needed = ("k_scale",)

    def split(count: int) -> Run:
        shape = (tokens, p.num_heads, count, p.kv_lora_rank + 1)
        parts = torch.empty(shape, dtype=torch.float32, device=facts.q.device)
        more = {"attn_logits": parts, "num_kv_splits": count}

        def run() -> AttentionOutput:
            called(module.decode_attention_fwd, offered | more, needed)
            return AttentionOutput(offered["o"], None)

        return run

    return {f"{count} splits": split(count) for count in SPLITS}


PEERS: Mapping[str, Peer] = {
    "FlashMLA": Peer(
        ("flash_mla", "vllm.v1.attention.ops.flashmla"),
        "FlashMLA from source, at a commit that has the chip: github.com/deepseek-ai/FlashMLA",
        flashmla,
    ),
    "FlashInfer": Peer(("flashinfer.mla",), "pip install flashinfer-python", flashinfer),
    "vLLM Triton": Peer(
        ("vllm.v1.attention.ops.triton_decode_attention", "vllm.attention.ops.triton_decode_attention"),
        "pip install vllm",
        vllm_triton,
    ),
}


def imported(peers: Mapping[str, Peer]) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The modules of the peers that are here, and why the others are not."""
    here, missing = {}, {}
    for name, peer in peers.items():
        reasons = []
        for path in peer.modules:
            try:
                here[name] = import_module(path)
                break
            except Exception as error:  # a library may fail to load in any way
                reasons.append(f"{path}: {type(error).__name__}: {error}")
        else:
            missing[name] = f"{'; '.join(reasons)}. To install: {peer.install}"
    return here, missing


def compared(row: Row, here: Mapping[str, ModuleType], device: torch.device, repeats: int) -> dict[str, Any]:
    """One case: ours and every peer's, each judged, then timed in turns.

    By library its time, also as share of the ceiling that is nearer, or why it has none.
    """
    work = row.work
    call = drawn_inputs(work, device)
    reasons: dict[str, str] = {}
    replays: dict[tuple[str, str], Callable[[], object]] = {}
    for name in (OURS, *here):
        try:
            variants = (
                {"": planned(call, work, "auto").run}
                if name == OURS
                else PEERS[name].bind(here[name], call, work)
            )
            for variant, run in variants.items():
                verified(call, run()).judgement.require_pass()
                replays[name, variant] = captured(run, device)
        except Exception as error:  # NotTaken, a wrong result, or what a library raises: no time for it
            reasons[name] = _reason(error)
    times = time_in_turns(
        {"\n".join(key): replay for key, replay in replays.items()}, device, repeats=repeats
    )
    copy, product = ceilings(device)
    floor = max(work.num_bytes / copy, work.flops / product) * 1e6
    found: dict[str, Any] = {"case": row.name, "workload": work.id}
    for name in (OURS, *here):
        own = {v: times[f"{n}\n{v}"] for n, v in replays if n == name}
        if name in reasons or not own:
            found[name] = {"reason": reasons.get(name, "no variant")}
            continue
        variant, timing = min(own.items(), key=lambda item: item[1].median_us)
        share = round(floor / timing.median_us, 4)
        found[name] = {"variant": variant, **timing.to_dict(), "share_of_ceiling": share}
    return found


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())[:300]
    return words if isinstance(error, NotTaken) else f"{type(error).__name__}: {words}"


def line(case: Mapping[str, Any]) -> str:
    """A case for the eye: times, and how many times as long as ours each peer takes."""
    ours = case[OURS].get("median_us")
    words = []
    for name, figures in case.items():
        if name in ("case", "workload"):
            continue
        if "median_us" not in figures:
            words.append(f"{name} - ({figures['reason'][:120]})")
            continue
        times = f", {figures['median_us'] / ours:.2f} x" if ours and name != OURS else ""
        words.append(f"{name} {figures['median_us']:.1f} us ({figures['share_of_ceiling']:.0%}{times})")
    return f"{case['case']}: {'; '.join(words)}"


def versions(here: Mapping[str, ModuleType]) -> dict[str, str]:
    """The version of each library that is here, as it or its package says."""
    found = {}
    for name, module in here.items():
        package = module.__name__.partition(".")[0]
        try:
            found[name] = version(package.replace("_", "-"))
        except PackageNotFoundError:
            found[name] = str(getattr(sys.modules.get(package), "__version__", "unknown"))
    return found


def main(given: list[str] | None = None) -> int:
    """Compare, print, record; 1 if a result of ours is wrong, whatever the others do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write FOLDER/<arch>/compare.json")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="parts of names of cases")
    parser.add_argument("--suite", default="targets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit", default="", help="where this is not a checkout")
    asked = parser.parse_args(given)
    device = torch.device(asked.device)
    rows = [row for row in rows_of(asked.suite, device, asked.only) if row.work.problem.op in COMPARED]
    here, missing = imported(PEERS)
    for name, reason in missing.items():
        say(f"{name} is not here: {reason}")
    cases = []
    for row in rows:
        cases.append(compared(row, here, device, asked.repeats))
        say(line(cases[-1]))
    if asked.record:
        made, (copy, product) = provenance(device), ceilings(device)
        record = {
            "suite": "compare",
            **made,
            "commit": made["commit"] or asked.commit,
            "libraries": versions(here),
            "missing": missing,
            "copy_bytes_a_second": copy,
            "product_flop_a_second": product,
            "cases": cases,
        }
        say(str(write_record(record, asked.record)))
    return int(any("median_us" not in case[OURS] for case in cases))


if __name__ == "__main__":
    raise SystemExit(main())
