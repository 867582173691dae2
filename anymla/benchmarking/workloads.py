"""Workloads: what is timed, drawn from the rows of MODELS, with the work that it needs at least."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from anymla.errors import InvalidInput, Reasons
from anymla.indices import to_slots
from anymla.kv_cache import KV_FORMATS
from anymla.models import model_named
from anymla.problem import Feature, Problem
from anymla.rules import listed
from anymla.verification.inputs import Inputs, decode_inputs, index_inputs, prefill_inputs
from anymla.verification.needles import Widths

TIMED_OPS = ("decode", "sparse_decode", "prefill", "index_topk")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """One call of one operation, the same lengths for every sequence.

    Attributes:
        model: Name of a row of MODELS.
        tp: Tensor parallel size.
        problem: The facts of the call.
        sm_scale: Of the attention.
        batch: Sequences.
        context: Tokens in the cache: those of this call included, except for prefill.
    """

    model: str
    tp: int
    problem: Problem
    sm_scale: float
    batch: int
    context: int

    @property
    def id(self) -> str:
        """A name to read."""
        p = self.problem
        words = [
            self.model,
            f"tp{self.tp}",
            p.op,
            p.q_dtype,
            p.kv_format,
            f"b{self.batch}",
            f"c{self.context}",
        ]
        return "-".join([*words, *([f"q{p.q_len}"] if p.q_len > 1 else [])])

    @property
    def num_tokens(self) -> int:
        """Query tokens that belong to a sequence."""
        return self.batch * self.problem.q_len

    @property
    def keys_read(self) -> int:
        """Cached tokens that the call reads, each counted once for each sequence that has it."""
        p = self.problem
        if p.op == "sparse_decode":
            return self.num_tokens * min(p.topk, self.context)
        return self.batch * self.context

    @property
    def num_bytes(self) -> int:
        """Bytes that have to move: the cached tokens once, queries, new latents, results."""
        p = self.problem
        item = DTYPES[p.q_dtype].itemsize
        cached = self.keys_read * KV_FORMATS[p.kv_format].bytes_per_token(p.kv_lora_rank, p.qk_rope_head_dim)
        if p.op == "index_topk":
            return cached + self.num_tokens * (p.num_heads * (p.kv_lora_rank * item + 4) + p.topk * 4)
        width = p.qk_nope_head_dim or p.kv_lora_rank
        rows = p.num_heads * (width + p.qk_rope_head_dim + (p.v_head_dim or p.kv_lora_rank))
        rows += p.kv_lora_rank + p.qk_rope_head_dim if p.op == "prefill" else 0
        weights = p.num_heads * p.kv_lora_rank * (p.qk_nope_head_dim + p.v_head_dim)
        return cached + (self.num_tokens * rows + weights) * item

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products; masked pairs are not counted."""
        p = self.problem
        pairs = self.batch * sum(self._visible(t) for t in range(p.q_len)) * p.num_heads
        if p.op == "index_topk":
            return 2 * pairs * p.kv_lora_rank
        if p.op != "prefill":
            return 2 * pairs * (2 * p.kv_lora_rank + p.qk_rope_head_dim)
        heads = p.qk_nope_head_dim + p.v_head_dim
        keys = self.batch * (self.context + p.q_len) * p.num_heads
        return 2 * (pairs * (heads + p.qk_rope_head_dim) + keys * p.kv_lora_rank * heads)

    def _visible(self, t: int) -> int:
        """Keys that query token t of a sequence sees."""
        p = self.problem
        if p.op == "sparse_decode":
            return min(p.topk, self.context)
        return self.context + t + 1 - (0 if p.op == "prefill" else p.q_len)

    def inputs(self, seed: int = 0) -> Inputs:
        """The tensors of the call, with needles on the last keys and NaN where nothing may be read."""
        p = self.problem
        widths = Widths(
            p.num_heads, p.kv_lora_rank, p.qk_rope_head_dim, p.qk_nope_head_dim, p.v_head_dim, self.sm_scale
        )
        lens, asked = [self.context] * self.batch, [p.q_len] * self.batch
        memory = {
            "seed": seed,
            "q_dtype": DTYPES[p.q_dtype],
            "kv_format": p.kv_format,
            "block_size": p.block_size,
        }
        if p.op == "index_topk":
            return index_inputs(
                p.num_heads,
                p.kv_lora_rank,
                lens,
                None if p.q_len == 1 else asked,
                p.topk,
                exact=False,
                **memory,  # type: ignore[arg-type]
            )
        sinks = "near" if Feature.SINKS in p.features else "none"
        if p.op == "prefill":
            contexts = lens if self.context else None
            return prefill_inputs(widths, contexts, asked, sinks=sinks, **memory)  # type: ignore[arg-type]
        call = decode_inputs(
            widths,
            lens,
            None if p.q_len == 1 else asked,
            sinks=sinks,
            **memory,  # type: ignore[arg-type]
        )
        return self._sparse(call, seed) if p.op == "sparse_decode" else call

    def _sparse(self, call: Inputs, seed: int) -> Inputs:
        """The decode call over chosen tokens, the last one always among them."""
        draw = torch.Generator().manual_seed(seed)
        chosen = min(self.problem.topk, self.context)
        ids = torch.stack([torch.randperm(self.context - 1, generator=draw) for _ in range(self.batch)])
        ids = torch.cat((torch.full((self.batch, 1), self.context - 1), ids), 1)[:, :chosen].to(torch.int32)
        slots = to_slots(ids, call.options["block_table"], None, self.problem.block_size)
        options = {
            "indices": slots,
            "counts": None,
            "sm_scale": self.sm_scale,
            "sinks": call.options["sinks"],
        }
        return replace(call, op="sparse_decode", options=options)


def workloads(
    model: str,
    *,
    tp: int = 1,
    op: str = "decode",
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (4096,),
    q_len: int = 1,
    q_dtype: str = "bf16",
    kv_format: str | None = None,
    block_size: int = 64,
    topk: int | None = None,
) -> Iterator[Workload]:
    """Every batch with every context, of one operation of one model.

    Args:
        model: Name of a row of MODELS.
        tp: Tensor parallel size.
        op: One of TIMED_OPS.
        batches: Sequences.
        contexts: Cached tokens of each; for prefill those before the new ones, which may be 0.
        q_len: Query tokens of each sequence.
        q_dtype: fp32, bf16 or fp16.
        kv_format: Name of a cache format. None: as q_dtype, for index keys "index_k".
        block_size: Tokens a page.
        topk: Keys a query token of a sparse operation. None: the model's own.

    Returns:
        The workloads, smallest batch first.

    Raises:
        InvalidInput: with every reason.
    """
    reasons = Reasons("bench")
    reasons.need(op in TIMED_OPS, "op", op, listed(TIMED_OPS))
    reasons.need(q_dtype in DTYPES, "dtype", q_dtype, listed(DTYPES))
    reasons.need(kv_format is None or kv_format in KV_FORMATS, "kv", kv_format, listed(KV_FORMATS))
    reasons.need(q_len >= 1, "q_len", q_len, "at least 1")
    reasons.need(block_size >= 1, "block_size", block_size, "at least 1")
    reasons.need(op != "sparse_decode" or q_len == 1, "q_len", q_len, "1: each token has its own keys")
    least = 0 if op == "prefill" else max(q_len, 1)
    for name, values, low in (("batch", batches, 1), ("context", contexts, least)):
        wrong = [value for value in values if value < low]
        reasons.need(not wrong, name, listed(wrong, "and"), f"at least {low}")
    try:
        row = model_named(model)
        problem = row.problem(
            op if op in TIMED_OPS else "decode",
            tp=tp,
            q_dtype=q_dtype,
            kv_format=kv_format,
            block_size=block_size,
            q_len=q_len,
            topk=topk,
        )
    except InvalidInput as refusal:
        reasons.found.extend(refusal.reasons)
    reasons.raise_if_any()
    for batch in batches:
        for context in contexts:
            yield Workload(model, tp, problem, row.sm_scale, batch, context)
