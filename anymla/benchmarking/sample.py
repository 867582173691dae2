"""A sample of a call's rows, judged: each becomes a sequence of its own over a copy of what it sees.

So a call of any size is verified on the CPU against the fp64 definition, without the rest of its cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anymla import reference
from anymla.contract import AttentionOutput
from anymla.kv_cache import KVCache
from anymla.verification import eager
from anymla.verification.batches import spans
from anymla.verification.checks import judge_ids
from anymla.verification.inputs import Inputs
from anymla.verification.judge import Judgement, judge, judge_written

CPU = torch.device("cpu")
VERIFIED_FLOPS = 6e9
"""Work of the fp64 definition in one verification, about."""
FEWEST_ROWS, MOST_ROWS = 3, 64
MOST_HEADS = 16


@dataclass(frozen=True)
class Verified:
    """What was judged.

    Attributes:
        judgement: Of the rows and heads looked at.
        rows: How many query tokens, or tokens written.
        heads: How many heads of each; 0 where there are none.
    """

    judgement: Judgement
    rows: int
    heads: int


def verified(call: Inputs, got: Any) -> Verified:
    """Judge a result, or as much of it as VERIFIED_FLOPS allow.

    Args:
        call: What was run, on its device.
        got: AttentionOutput or ids; None for a write, which is read back.

    Returns:
        The judgement, and of what it is.
    """
    if call.op == "index_topk":
        return _ids(call, got)
    if call.op == "write_cache":
        return _written(call)
    heads = _some(call.shape[1], MOST_HEADS)
    seen = _Seen(call)
    rows = spread(call.num_rows, _affordable(call, seen))
    part = (_decompressed if call.op == "prefill" else _absorbed)(call, seen, rows, heads)
    exact = getattr(reference, part.op)(*part.tensors, **part.options)
    # Loops refine the budget of the lse only, unless sums are in fp32.
    cheap = got.lse is None and got.out.dtype != torch.float32
    runs = getattr(eager, part.op)(*part.tensors, **part.options, **({"loops": 0} if cheap else {}))
    lse = None if got.lse is None else got.lse[rows][:, heads].cpu()
    return Verified(
        judge(AttentionOutput(got.out[rows][:, heads].cpu(), lse), exact, *runs), len(rows), len(heads)
    )


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` of the numbers below `count`, evenly spread, the first and the last among them."""
    if wanted >= count:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})


class _Seen:
    """Which cached tokens, and how many of the new ones, each row of an attention call sees."""

    def __init__(self, call: Inputs) -> None:
        self._options: dict[str, Any] = call.options
        self._sparse = call.op == "sparse_decode"
        if self._sparse:
            return
        self._spans = spans(call)
        self._sequence = [s for s, span in enumerate(self._spans) for _ in span]
        cached, prefill = "seq_lens" in call.options, call.op == "prefill"
        lens = call.options["seq_lens"].tolist() if cached else [len(span) for span in self._spans]
        before = [n - len(span) for n, span in zip(lens, self._spans, strict=True)]
        self._context = before if prefill else lens
        self._is_new = prefill

    def first_new(self, row: int) -> int:
        """The first row of a row's sequence."""
        return self._spans[self._sequence[row]].start

    def count(self, row: int) -> int:
        """Cached tokens that a row sees; causal."""
        if self._sparse:
            return len(self.slots(row, 1))
        span = self._spans[self._sequence[row]]
        return self._context[self._sequence[row]] - (0 if self._is_new else span.stop - 1 - row)

    def slots(self, row: int, block_size: int) -> Tensor:
        """Their slots, on the device of the call."""
        if self._sparse:
            counts, slots = self._options["counts"], self._options["indices"][row]
            slots = slots if counts is None else slots[: int(counts[row])]
            found: Tensor = slots[slots >= 0].long()
            return found
        pages: Tensor = self._options["block_table"][self._sequence[row]]
        token = torch.arange(self.count(row), device=pages.device)
        return pages[token // block_size].long() * block_size + token % block_size


def _affordable(call: Inputs, seen: _Seen) -> int:
    """How many rows VERIFIED_FLOPS are enough for, if each has MOST_HEADS: their keys are copied whole."""
    last = call.num_rows - 1
    keys = seen.count(last)
    if call.op == "prefill":
        w_uk, w_uv = call.tensors[4:]
        keys += call.num_rows - seen.first_new(last)
        each = w_uk.shape[2] * (w_uk.shape[1] + w_uv.shape[2])
    else:
        each = 2 * call.tensors[0].shape[2] + call.tensors[1].shape[2]
    return min(max(int(VERIFIED_FLOPS / (2 * max(keys, 1) * MOST_HEADS * each)), FEWEST_ROWS), MOST_ROWS)


def _absorbed(call: Inputs, seen: _Seen, rows: Sequence[int], heads: list[int]) -> Inputs:
    """The rows as a sparse decode of everything that they see."""
    cache = call.cache
    slots = [seen.slots(row, cache.block_size) for row in rows]
    queries = [t[rows][:, heads].cpu() for t in call.tensors[:2]]
    options = {
        "indices": _side_by_side([len(s) for s in slots]),
        "sm_scale": call.options["sm_scale"],
        "sinks": _of_heads(call, heads),
    }
    shape = (len(rows), len(heads), call.shape[2])
    return Inputs("sparse_decode", (*queries, copied(cache, torch.cat(slots))), options, len(rows), shape)


def _decompressed(call: Inputs, seen: _Seen, rows: Sequence[int], heads: list[int]) -> Inputs:
    """The rows as sequences with one new token each; all that they see before it is cached in fp32."""
    q_nope, q_pe, kv_c, k_pe, w_uk, w_uv = call.tensors
    rank, rope, earlier = kv_c.shape[1], k_pe.shape[1], []
    for row in rows:
        if seen.count(row):
            cache = copied(call.cache, seen.slots(row, call.cache.block_size))
            earlier.append(cache.read(torch.arange(cache.num_blocks)))
        else:
            earlier.append(torch.zeros(0, rank + rope))
        new = slice(seen.first_new(row), row)
        earlier[-1] = torch.cat((earlier[-1], torch.cat((kv_c[new], k_pe[new]), 1).float().cpu()))
    values = torch.cat(earlier)
    lens = [len(part) for part in earlier]
    widths = {"kv_lora_rank": rank, "qk_rope_head_dim": rope}
    context = KVCache.allocate(max(len(values), 1), 1, kv_format="fp32", **widths)
    context.write(values[:, :rank], values[:, rank:], torch.arange(len(values)))
    options = {
        "qo_indptr": torch.arange(len(rows) + 1, dtype=torch.int32),
        "seq_lens": torch.tensor(lens, dtype=torch.int32) + 1,
        "block_table": _side_by_side(lens),
        "cache": context,
        "sm_scale": call.options["sm_scale"],
        "sinks": _of_heads(call, heads),
    }
    tensors = (
        *(t[rows][:, heads].cpu() for t in (q_nope, q_pe)),
        *(t[rows].cpu() for t in (kv_c, k_pe)),
        *(t[heads].cpu() for t in (w_uk, w_uv)),
    )
    return Inputs("prefill", tensors, options, len(rows), (len(rows), len(heads), call.shape[2]))


def _written(call: Inputs) -> Verified:
    """Judge some of the tokens written, as the cache gives them back."""
    kv_c, k_pe, cache, slots = call.tensors
    rows = spread(call.num_rows, MOST_ROWS)
    stored = copied(cache, slots[rows])
    given = [t[rows].cpu() for t in (kv_c, k_pe)]
    expected = reference.write_cache(given[0], given[1], stored, torch.arange(len(rows)))
    got = stored.read(torch.arange(len(rows)), dtype=torch.float64)
    return Verified(judge_written(got, expected, torch.cat(given, -1)), len(rows), 0)


def _ids(call: Inputs, got: Tensor) -> Verified:
    """Judge what was chosen for some rows, as sequences of their own."""
    q, weights, cache = call.tensors
    seen, last = _Seen(call), call.num_rows - 1
    each = max(seen.count(last), 1) * q.shape[1] * q.shape[2]
    rows = spread(call.num_rows, min(max(int(VERIFIED_FLOPS / (2 * each)), FEWEST_ROWS), MOST_ROWS))
    slots = [seen.slots(row, cache.block_size) for row in rows]
    options = {
        "block_table": _side_by_side([len(s) for s in slots]),
        "seq_lens": torch.tensor([len(s) for s in slots], dtype=torch.int32),
        "qo_indptr": None,
        "topk": call.options["topk"],
    }
    tensors = (q[rows].cpu(), weights[rows].cpu(), copied(cache, torch.cat(slots)))
    part = Inputs("index_topk", tensors, options, len(rows), (len(rows), call.shape[1]))
    return Verified(judge_ids(part, got[rows].cpu()), len(rows), q.shape[1])


def copied(cache: KVCache, slots: Tensor) -> KVCache:
    """A cache on the CPU that holds these slots, one a page, in this order."""
    raw, scale = cache.gather(slots).cpu(), cache.scale
    shape = (len(raw), 1, raw.shape[1])
    data = torch.empty(shape, dtype=raw.dtype).view(cache.format.dtype)
    copy = replace(cache, data=data, scale=None if scale is None else scale.cpu())
    copy.scatter(raw, torch.arange(len(raw)))
    return copy


def _side_by_side(counts: Sequence[int]) -> Tensor:
    """[rows, most] int32: each row numbers its own, one after another; -1 behind them."""
    indices = torch.full((len(counts), max([*counts, 1])), -1, dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        indices[row, :count] = torch.arange(first, first + count)
        first += count
    return indices


def _some(count: int, most: int) -> list[int]:
    """All of the numbers below `count`, or so many drawn from them, in ascending order."""
    return list(range(count)) if count <= most else sorted(random.Random(count).sample(range(count), most))


def _of_heads(call: Inputs, heads: list[int]) -> Tensor | None:
    sinks = call.options.get("sinks")
    return None if sinks is None else sinks[heads].cpu()
