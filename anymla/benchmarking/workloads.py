"""Workloads: what is timed, drawn from the rows of MODELS, with the work that it needs at least."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from anymla.errors import InvalidInput, Reasons
from anymla.kv_cache import KV_FORMATS
from anymla.models import model_named
from anymla.problem import OPS, Feature, Problem
from anymla.rules import listed

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}


PARTS = {
    "logits": "logits over the pages",
    "choice": "the choice among them",
    "choice-ties": "the choice among logits that are all 0, as relu leaves them at worst",
    "torch.topk": "torch.topk in the place of the choice, which sorts what it finds",
    "torch.topk-unsorted": "torch.topk that need not sort, as the choice need not",
    "torch.topk-ties": "torch.topk of logits that are all 0",
}
"""What is timed of an indexer alone, in words."""


@dataclass(frozen=True)
class Workload:
    """One call of one operation.

    Attributes:
        model: Name of a row of MODELS.
        tp: Tensor parallel size.
        problem: The facts of the call. Its q_len is that of every sequence, also where each query token has
            keys of its own.
        sm_scale: Of the attention.
        batch: Sequences; for write_cache the tokens written, for an indexer of pools the query tokens.
        context: Tokens, or pools, of a sequence in the cache: those of this call included, except for
            prefill. Of uneven sequences the mean.
        turns: What sequences have in turn instead of `context`, where it is not the same for all.
        part: Of the indexer, what alone is timed: a key of PARTS. Empty: all of the call.
        index: The indexer that chooses the keys of this sparse decode, timed with it. None: they are given.
    """

    model: str
    tp: int
    problem: Problem
    sm_scale: float
    batch: int
    context: int
    turns: tuple[int, ...] = ()
    part: str = ""
    index: "Workload | None" = None

    @property
    def lens(self) -> tuple[int, ...]:
        """Tokens of each sequence in the cache, as `context` counts them."""
        turns = self.turns or (self.context,)
        return tuple(turns[i % len(turns)] for i in range(self.batch))

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
        words += [f"q{p.q_len}"] if p.q_len > 1 else []
        words += [self.part] if self.part else []
        return "-".join([*words, *(["with-index"] if self.index else [])])

    @property
    def num_tokens(self) -> int:
        """Query tokens that belong to a sequence."""
        return self.batch * self.problem.q_len

    @property
    def keys_read(self) -> int:
        """Cached tokens that the call reads, each counted once for each sequence that has it."""
        p = self.problem
        if p.op == "sparse_decode":
            return sum(min(p.q_len * p.topk, n) for n in self.lens)
        return 0 if p.op == "write_cache" else sum(self.lens)

    @property
    def num_bytes(self) -> int:
        """Bytes that have to move: the cached tokens once, queries, new latents, results."""
        p = self.problem
        if self.index is not None:
            return replace(self, index=None).num_bytes + self.index.num_bytes
        if self.part:
            logits = 4 * sum(self.visible(n, t) for n in self.lens for t in range(p.q_len))
            chosen = 4 * self.num_tokens * p.topk
            return logits + (replace(self, part="").num_bytes - chosen if self.part == "logits" else chosen)
        item = DTYPES[p.q_dtype].itemsize
        a_token = KV_FORMATS[p.kv_format].bytes_per_token(p.kv_lora_rank, p.qk_rope_head_dim)
        if p.op == "write_cache":
            return self.batch * ((p.kv_lora_rank + p.qk_rope_head_dim) * item + 8 + a_token)
        cached = self.keys_read * a_token
        if p.op == "index_topk":
            return cached + self.num_tokens * (p.num_heads * (p.kv_lora_rank * item + 4) + p.topk * 4)
        width = p.qk_nope_head_dim or p.kv_lora_rank
        rows = p.num_heads * (width + p.qk_rope_head_dim + (p.v_head_dim or p.kv_lora_rank))
        rows += p.kv_lora_rank + p.qk_rope_head_dim if p.op == "prefill" else 0
        weights = p.num_heads * p.kv_lora_rank * (p.qk_nope_head_dim + p.v_head_dim)
        chosen = 4 * self.num_tokens * p.topk if p.op == "sparse_decode" else 0
        return cached + chosen + (self.num_tokens * rows + weights) * item

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products; masked pairs are not counted."""
        p = self.problem
        if self.index is not None:
            return replace(self, index=None).flops + self.index.flops
        if p.op == "write_cache" or self.part not in ("", "logits"):
            return 0
        pairs = sum(self.visible(n, t) for n in self.lens for t in range(p.q_len)) * p.num_heads
        if p.op == "index_topk":
            return 2 * pairs * p.kv_lora_rank
        if p.op != "prefill":
            return 2 * pairs * (2 * p.kv_lora_rank + p.qk_rope_head_dim)
        heads = p.qk_nope_head_dim + p.v_head_dim
        keys = (sum(self.lens) + self.num_tokens) * p.num_heads
        return 2 * (pairs * (heads + p.qk_rope_head_dim) + keys * p.kv_lora_rank * heads)

    def visible(self, context: int, t: int) -> int:
        """Keys that query token t of a sequence of that context sees."""
        p = self.problem
        if p.op == "sparse_decode":
            return min(p.topk, context)
        return context + t + 1 - (0 if p.op == "prefill" else p.q_len)


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
        op: One of problem.OPS.
        batches: Sequences; for write_cache tokens.
        contexts: Cached tokens of each; for prefill those before the new ones, which may be 0. An indexer of
            pools has that many fewer keys.
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
    reasons.need(op in OPS, "op", op, listed(OPS))
    reasons.need(q_dtype in DTYPES, "dtype", q_dtype, listed(DTYPES))
    reasons.need(kv_format is None or kv_format in KV_FORMATS, "kv", kv_format, listed(KV_FORMATS))
    reasons.need(q_len >= 1, "q_len", q_len, "at least 1")
    reasons.need(block_size >= 1, "block_size", block_size, "at least 1")
    pool = 1
    try:
        row = model_named(model)
        pool = row.index_pool if op == "index_topk" else 1
        problem = row.problem(
            op if op in OPS else "decode",
            tp=tp,
            q_dtype=q_dtype,
            kv_format=kv_format,
            block_size=block_size,
            q_len=q_len,
            topk=topk,
        )
    except InvalidInput as refusal:
        reasons.found.extend(refusal.reasons)
    least = 0 if op == "prefill" else max(q_len, pool)
    for name, values, low in (("batch", batches, 1), ("context", contexts, least)):
        wrong = [value for value in values if value < low]
        reasons.need(not wrong, name, listed(wrong, "and"), f"at least {low}")
    reasons.raise_if_any()
    # Where keys are pools, each query token is a sequence.
    tokens = q_len if pool > 1 else 1
    for batch in batches:
        for context in contexts:
            asked = problem
            if op == "prefill" and context:
                asked = replace(problem, features=problem.features | {Feature.CACHED_CONTEXT})
            yield Workload(model, tp, asked, row.sm_scale, batch * tokens, context // pool)
