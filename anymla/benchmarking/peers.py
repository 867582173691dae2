"""PEERS: other libraries' MLA, each called by the names of its parameters.

So what is installed may be of any version that knows them. What is bound allocates and plans as the library
would before its first layer; what it runs is one layer.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from anymla.benchmarking.workloads import DTYPES, Workload
from anymla.contract import AttentionOutput
from anymla.verification.inputs import Inputs

Run = Callable[[], AttentionOutput]
Variants = Mapping[str, Callable[[], Run]]
"""Ways to run a call, by name: each allocates and plans, and gives what runs it."""

WORKSPACE_BYTES = 128 << 20
PAGE_OF_FLASHMLA = 64
KEYS_OF_A_SPLIT = 512
"""Of vLLM, which rounds the number of splits up to a power of two."""
BACKENDS_OF_FLASHINFER = ("auto", "fa2")
"""Its own choice, and what it had before there was one for the chip."""


class NotTaken(Exception):
    """Why a library does not take a case."""


@dataclass(frozen=True)
class Peer:
    """Another library.

    Attributes:
        modules: Where it may be, the first that can be imported.
        install: What to install where there is none.
        bind: From its module, a call and its workload to the ways to run it. Raises NotTaken.
    """

    modules: tuple[str, ...]
    install: str
    bind: Callable[[ModuleType, Inputs, Workload], Variants]


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


def flashmla(module: ModuleType, call: Inputs, work: Workload) -> Variants:
    """FlashMLA: dense decode of bf16 and fp16, sparse decode of 656-byte rows, sparse prefill of bf16."""
    p, cache = work.problem, call.cache
    plain = p.kv_format == p.q_dtype
    if p.op == "sparse_decode" and plain:
        return {"": lambda: _flashmla_prefill(module, call)}
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
    needed = ("indices",) if p.op == "sparse_decode" else ()

    def planned() -> Run:
        metadata, splits = called(
            module.get_mla_metadata, known | {"cache_seqlens": offered["cache_seqlens"]}
        )
        values = offered | {"tile_scheduler_metadata": metadata, "num_splits": splits}

        def run() -> AttentionOutput:
            out, _ = called(module.flash_mla_with_kvcache, values, needed)
            return AttentionOutput(out.reshape(call.shape), None)

        return run

    return {"": planned}


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


def flashinfer(module: ModuleType, call: Inputs, work: Workload) -> Variants:
    """FlashInfer's planned MLA: dense decode of bf16, fp16 and fp8 with one scale, planned once."""
    p, cache, rank = work.problem, call.cache, call.cache.kv_lora_rank
    if p.op != "decode" or cache.format.tile:
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
    metadata = getattr(module, "MLAPlanMetadata", None)
    if metadata is not None:
        layouts = {"query_layout": "split", "kv_cache_layout": "split"}
        csr = {"metadata": called(metadata.csr, csr), **layouts}
    step = {
        **csr,
        "num_heads": p.num_heads,
        "head_dim_ckv": rank,
        "head_dim_kpe": p.qk_rope_head_dim,
        "page_size": size,
        "causal": True,
        "sm_scale": work.sm_scale,
        "q_data_type": DTYPES[p.q_dtype],
        "kv_data_type": cache.data.dtype,
    }
    query, keys = call.tensors[:2], (cache.data[..., :rank], cache.data[..., rank:])
    given: dict[str, Any] = {"out": torch.empty_like(query[0]), "return_lse": False}
    needed: dict[str, tuple[str, ...]] = {"plan": (), "run": ()}
    if cache.scale is not None:
        scale = float(cache.scale)
        needed = {"plan": ("scale_mode",), "run": ("ckv_scale", "kpe_scale")}
        step["scale_mode"] = "kv-per-tensor"
        given |= {"ckv_scale": scale, "kpe_scale": scale}

    def planned_by(**chosen: str) -> Run:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = module.BatchMLAPagedAttentionWrapper(workspace, **chosen)
        called(wrapper.plan, step, needed["plan"])
        if "query" in parameters(wrapper.run):
            values = given | {"query": query, "kv_cache": keys}
        else:
            parts = {"q_nope": query[0], "q_pe": query[1], "ckv_cache": keys[0], "kpe_cache": keys[1]}
            values = given | parts
        return lambda: AttentionOutput(called(wrapper.run, values, needed["run"]), None)

    if "backend" not in parameters(module.BatchMLAPagedAttentionWrapper):
        return {"": planned_by}
    return {name: partial(planned_by, backend=name) for name in BACKENDS_OF_FLASHINFER}


def vllm_triton(module: ModuleType, call: Inputs, work: Workload) -> Variants:
    """vLLM's Triton MLA: dense decode, each token of a verify block as a sequence of its own."""
    p, cache = work.problem, call.cache
    if p.op != "decode" or cache.format.tile:
        raise NotTaken(f"no {p.op} from {p.kv_format}")
    facts, tokens = Facts.of(call, work), work.num_tokens
    device, keys = facts.q.device, cache.data.unsqueeze(2)
    ahead = torch.arange(1 - p.q_len, 1, dtype=torch.int32, device=device)
    # Without a scale it makes one in every call, which no graph can hold.
    scale = torch.ones(1, device=device) if cache.scale is None else cache.scale
    offered: dict[str, Any] = {
        "q": facts.q,
        "k_buffer": keys,
        "v_buffer": keys[..., : p.kv_lora_rank],
        "o": torch.empty(call.shape, dtype=facts.q.dtype, device=device),
        "lse": torch.empty(call.shape[:2], device=device),
        "req_to_token": facts.table.repeat_interleave(p.q_len, 0),
        "b_seq_len": (facts.lens[:, None] + ahead).flatten(),
        "sm_scale": work.sm_scale,
        "page_size": cache.block_size,
        "k_scale": scale,
        "v_scale": scale,
        "is_mla": True,
    }
    needed = () if cache.scale is None else ("k_scale",)

    def split(count: int) -> Run:
        shape = (tokens, p.num_heads, count, p.kv_lora_rank + 1)
        parts = torch.empty(shape, dtype=torch.float32, device=device)
        more = {"attn_logits": parts, "num_kv_splits": count}

        def run() -> AttentionOutput:
            called(module.decode_attention_fwd, offered | more, needed)
            return AttentionOutput(offered["o"], None)

        return run

    return {f"{count} splits": partial(split, count) for count in splits_of_vllm(max(work.lens))}


def splits_of_vllm(longest: int) -> list[int]:
    """Of a sequence so long: as many as vLLM chooses, a quarter of them, and one."""
    own = 1 << (max(1, longest // KEYS_OF_A_SPLIT) - 1).bit_length()
    return sorted({1, max(1, own // 4), own})


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


def versions(here: Mapping[str, ModuleType]) -> dict[str, str]:
    """Module and version of each library that is here, as its package or it says."""
    found = {}
    for name, module in here.items():
        package = module.__name__.partition(".")[0]
        try:
            release = version(package.replace("_", "-"))
        except PackageNotFoundError:
            release = str(getattr(sys.modules.get(package), "__version__", "unknown"))
        found[name] = f"{module.__name__} {release}"
    return found
