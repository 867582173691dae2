"""Calls for a GPU: far from the start of a cache, with many rows, and in buffers that never move."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anymla.backends import BACKENDS
from anymla.contract import AttentionOutput, Batch
from anymla.hardware.probe import this_machine
from anymla.kv_cache import KV_FORMATS, KVCache
from anymla.problem import Feature, Problem, canonical_name
from anymla.verification.batches import take
from anymla.verification.cases import offered
from anymla.verification.checks import right_answer
from anymla.verification.inputs import Inputs
from anymla.verification.judge import Judgement, judge
from anymla.verification.memory import ABSURD_PAGES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MACHINE = this_machine(DEVICE)
BACKENDS_HERE = [
    name for name in dict.fromkeys(row.name for row in BACKENDS)
    if any(row.name == name and row.built and row.arch.accepts(MACHINE.arch) for row in BACKENDS)
]  # fmt: skip


def problem_of(call: Inputs, *features: Feature, q_len: int = 1) -> Problem:
    """The facts of a call, with features beyond those that its tensors show."""
    like, sparse, prefill = call.tensors[0], call.op == "sparse_decode", call.op == "prefill"
    cache = None if prefill and "cache" not in call.options else call.cache
    rank = (call.tensors[2] if prefill else like).shape[-1]
    rope = call.tensors[3 if prefill else 1].shape[-1]
    found = {*features, *([Feature.MULTI_TOKEN] if q_len > 1 else [])}
    found |= {Feature.SINKS} if call.options["sinks"] is not None else set()
    found |= set() if call.options.get("causal", True) else {Feature.NON_CAUSAL}
    dtype = canonical_name(str(like.dtype))
    return Problem(
        call.op,
        dtype,
        dtype if cache is None else cache.format.name,
        like.shape[1],
        rank,
        rope,
        like.shape[-1] if prefill else 0,
        call.shape[-1] if prefill else 0,
        1 if cache is None else cache.block_size,
        q_len,
        call.options["indices"].shape[1] if sparse else 0,
        frozenset(found),
    )


def is_offered(problem: Problem, backend: str) -> bool:
    """Whether the backend offers it on this GPU."""
    return offered(problem, backend, MACHINE)


def far_away(call: Inputs, num_blocks: int) -> Inputs:
    """The call with its pages at the end of a cache of so many, all others full of what must not be read."""
    near = call.cache
    data = torch.empty((num_blocks, *near.data.shape[1:]), dtype=near.storage.dtype, device=near.device)
    data.fill_(torch.nan if data.is_floating_point() else 0x7F)
    step = num_blocks - near.num_blocks
    data[step:] = near.storage
    far = KVCache(
        data.view(near.format.dtype), near.format, near.kv_lora_rank, near.qk_rope_head_dim, near.scale
    )
    options, tensors = dict(call.options), list(call.tensors)
    if "block_table" in options:
        table = options["block_table"]
        own = (table >= 0) & (table < near.num_blocks)
        options["block_table"] = torch.where(own, table + step, table)
    if "indices" in options:
        slots = options["indices"]
        options["indices"] = torch.where(slots >= 0, slots + step * near.block_size, slots)
    if call.op == "write_cache":
        slots = tensors[3]
        tensors[3] = torch.where(slots >= 0, slots + step * near.block_size, slots)
    if call.op == "prefill":
        options["cache"] = far
    else:
        tensors[2] = far
    return replace(call, tensors=tuple(tensors), options=options)


def judge_some(call: Inputs, got: AttentionOutput, sequences: list[int]) -> Judgement:
    """Judge the rows of some sequences of a call that is too large to be worked out in fp64."""
    part, rows = take(call, sequences)
    exact, runs = right_answer(part)
    lse = None if got.lse is None else got.lse[rows]
    return judge(AttentionOutput(got.out[rows], lse), exact, *runs)


def judge_rows(call: Inputs, got: AttentionOutput, rows: list[int]) -> Judgement:
    """Judge some rows of a causal prefill whose sequences are too long to be worked out in fp64.

    Such a row is that of a sequence which ends with it, all its tokens before it in a cache.
    """
    q_nope, q_pe, kv_c, k_pe, w_uk, w_uv = call.tensors
    indptr = call.options["qo_indptr"].tolist()
    keys, tables, lens = list[Tensor](), list[Tensor](), list[int]()
    for row in rows:
        seq = max(s for s, first in enumerate(indptr) if first <= row)
        first, latents = indptr[seq], torch.cat((kv_c, k_pe), -1)[indptr[seq] : row + 1]
        if "cache" in call.options:
            cache, pages = call.options["cache"], call.options["block_table"][seq].long()
            context = int(call.options["seq_lens"][seq]) - (indptr[seq + 1] - first)
            token = torch.arange(context, device=pages.device)
            slots = pages[token // cache.block_size] * cache.block_size + token % cache.block_size
            latents = torch.cat((cache.read(slots, dtype=latents.dtype), latents))
        tables.append(torch.arange(len(latents), dtype=torch.int32, device=DEVICE) + sum(lens))
        keys.append(latents)
        lens.append(len(latents))
    widest = max(lens)
    table = torch.stack([torch.nn.functional.pad(t, (0, widest - len(t))) for t in tables])
    all_rows = torch.tensor(rows, device=DEVICE)
    options = {
        **call.options,
        "qo_indptr": torch.arange(len(rows) + 1, dtype=torch.int32, device=DEVICE),
        "cache": KVCache(torch.cat(keys)[:, None], KV_FORMATS["bf16"], kv_c.shape[1], k_pe.shape[1]),
        "block_table": table,
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=DEVICE),
    }
    tensors = (q_nope[all_rows], q_pe[all_rows], kv_c[all_rows], k_pe[all_rows], w_uk, w_uv)
    alone = Inputs("prefill", tensors, options, len(rows), (len(rows), *call.shape[1:]))
    exact, runs = right_answer(alone)
    lse = None if got.lse is None else got.lse[all_rows]
    return judge(AttentionOutput(got.out[all_rows], lse), exact, *runs)


class Buffers:
    """Tensors of one address each, into which one call after another is put, as a server does for a graph.

    Attributes:
        call: Over the buffers.
        rows: Query tokens of the call put in last; rows past them are to come out empty.
    """

    def __init__(self, calls: list[Inputs]) -> None:
        like = calls[0]
        tokens = max(call.num_rows for call in calls)
        blocks = max(call.cache.num_blocks for call in calls)
        q, q_pe, cache = like.tensors
        data = torch.zeros((blocks, *cache.data.shape[1:]), dtype=cache.storage.dtype, device=q.device)
        scale = None if cache.scale is None else cache.scale.clone()
        kept = replace(cache, data=data.view(cache.format.dtype), scale=scale)
        options = dict(like.options)
        for name, value in options.items():
            if isinstance(value, Tensor):
                options[name] = torch.empty_like(value)
        if "block_table" in options:
            columns = max(call.options["block_table"].shape[1] for call in calls)
            shape = (like.options["block_table"].shape[0], columns)
            options["block_table"] = torch.empty(shape, dtype=torch.int32, device=q.device)
        else:
            options["indices"] = torch.empty(
                (tokens, like.options["indices"].shape[1]), dtype=torch.int32, device=q.device
            )
            options["counts"] = torch.empty(tokens, dtype=torch.int32, device=q.device)
        tensors = (q.new_empty(tokens, *q.shape[1:]), q_pe.new_empty(tokens, *q_pe.shape[1:]), kept)
        self.call = replace(
            like, tensors=tensors, options=options, num_rows=tokens, shape=(tokens, *like.shape[1:])
        )
        self.rows = 0

    def put(self, call: Inputs) -> None:
        """Copy a call into the buffers; what it does not fill is hostile."""
        self.rows = call.num_rows
        q, q_pe, cache = self.call.tensors
        for buffer, value in zip((q, q_pe), call.tensors[:2], strict=True):
            buffer.fill_(torch.nan)
            buffer[: self.rows] = value
        storage = cache.storage
        storage.fill_(torch.nan if storage.is_floating_point() else 0x7F)
        storage[: call.cache.num_blocks] = call.cache.storage
        if cache.scale is not None:
            cache.scale.copy_(call.cache.scale)
        for name, value in call.options.items():
            buffer = self.call.options[name]
            if not isinstance(value, Tensor):
                continue
            if name == "block_table":
                buffer.fill_(ABSURD_PAGES[0])
                buffer[:, : value.shape[1]] = value
            elif name in ("indices", "counts"):
                buffer.fill_(0)
                buffer[: len(value)] = value
            else:
                buffer.copy_(value)

    def step(self, max_seq_len: int, max_q_len: int) -> Batch:
        """The step that the buffers hold, with bounds; no length is read back."""
        options = self.call.options
        return Batch.of(
            seq_lens=options["seq_lens"],
            block_table=options["block_table"],
            qo_indptr=options["qo_indptr"],
            block_size=self.call.cache.block_size,
            causal=options.get("causal", True),
            num_tokens=self.call.num_rows,
            max_q_len=max_q_len,
            max_seq_len=max_seq_len,
        )


def graph_of(work: Callable[[], object]) -> "torch.cuda.CUDAGraph":
    """A captured graph of `work`, which runs once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def addresses(value: Any) -> dict[str, int]:
    """Where the tensors of a plan's state are."""
    return {name: t.data_ptr() for name, t in vars(value).items() if isinstance(t, Tensor)}
