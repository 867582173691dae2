"""The field's classic bugs as wrong kernels: one small right kernel, and classes that override one step of
it.

The right kernel does what a GPU kernel does: it pads the heads, addresses pages by element offsets, splits
each row's keys, keeps weights in the call's dtype and sums in fp32, merges the parts, and applies the sinks
once at the end.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from anymla import reference
from anymla.contract import AttentionOutput
from anymla.kv_cache import KV_FORMATS, KVCache
from anymla.verification import eager
from anymla.verification.inputs import Inputs, decode_inputs, sparse_inputs
from anymla.verification.judge import Judgement, judge
from anymla.verification.needles import Widths

LENGTHS = (17, 128, 1024, 8192)
"""Cached tokens at which every fault must be caught."""

WIDTHS = Widths(num_heads=8)
BLOCK_SIZE = 16
LOG2_E = math.log2(math.e)


class Kernel:
    """Attention as a GPU kernel computes it. A fault overrides one method.

    Attributes:
        name: What is wrong, in a few words.
        source: Where the field met it.
        inputs: The key of INPUTS at which it is tried.
        shows_in: "out", and then the judge must see it without an lse; or "lse".
    """

    name: ClassVar[str] = "right kernel"
    source: ClassVar[str] = ""
    inputs: ClassVar[str] = "decode"
    shows_in: ClassVar[str] = "out"
    splits: ClassVar[int] = 3
    padded_heads: ClassVar[int] = 16

    def run(self, call: Inputs) -> AttentionOutput:
        """Out in the dtype of the queries, of those in fp8 in bf16, and lse in fp32."""
        ql_nope, q_pe, cache = call.tensors
        heads, rank = ql_nope.shape[1:]
        scale = self.scale(call) * self.q_scale(call)
        q = self.pad(torch.cat((ql_nope, q_pe), -1))
        q = q.bfloat16() if q.dtype.itemsize == 1 else q
        out = torch.full((*q.shape[:2], rank), torch.nan)
        lse = torch.full(q.shape[:2], torch.nan)
        for row, slots in enumerate(self.rows(call)):
            keys = self.read(cache, slots)
            found = self.merge([self.part(q[row], k, scale, rank) for k in self.split(keys)])
            out[row], lse[row] = found.out, _lse(found)
        out, lse = self.unpad(out, heads), self.unpad(lse, heads)
        return AttentionOutput(self.finish(out, lse, call).to(q.dtype), self.shown(lse, call))

    def scale(self, call: Inputs) -> float:
        """What multiplies q·k."""
        return float(call.options["sm_scale"])

    def q_scale(self, call: Inputs) -> float:
        """What multiplies queries in fp8, as part of the scale of their scores."""
        return float(call.options.get("q_scale", 1.0))

    def pad(self, q: Tensor) -> Tensor:
        """Queries of the kernel's number of heads."""
        return q.repeat_interleave(self.padded_heads // q.shape[1], 1)

    def unpad(self, padded: Tensor, heads: int) -> Tensor:
        """The heads of the call, out of those of the kernel."""
        return padded[:, :: self.padded_heads // heads]

    def rows(self, call: Inputs) -> list[Tensor]:
        """The slots that each query token attends to."""
        if call.op == "sparse_decode":
            counts = call.options["counts"].tolist()
            return [self.named(row, n) for row, n in zip(call.options["indices"].long(), counts, strict=True)]
        lens, indptr = call.options["seq_lens"].tolist(), call.options["qo_indptr"].tolist()
        table, size = call.options["block_table"], call.cache.block_size
        found = [torch.zeros(0, dtype=torch.int64)] * call.num_rows
        for b, n in enumerate(lens):
            q_len = indptr[b + 1] - indptr[b]
            for t in range(q_len):
                tokens = torch.arange(self.length(n, q_len, t, size))
                found[indptr[b] + t] = self.page(table, b, tokens // size) * size + tokens % size
        return found

    def named(self, row: Tensor, count: int) -> Tensor:
        """The slots of one row of sparse indices."""
        row = row[:count]
        return row[row >= 0]

    def length(self, seq_len: int, q_len: int, t: int, block_size: int) -> int:
        """Keys that row t of a sequence sees."""
        return max(0, seq_len - q_len + 1 + t)

    def page(self, table: Tensor, sequence: int, blocks: Tensor) -> Tensor:
        """Page ids of some blocks of a sequence; a table row ends in traps, which are not pages."""
        last = table.shape[1] - 3
        return table[sequence].long()[blocks.clamp(max=max(last, 0))]

    def read(self, cache: KVCache, slots: Tensor) -> Tensor:
        """Keys [n, L + R] in fp32."""
        return cache.read(self.address(cache, slots))

    def address(self, cache: KVCache, slots: Tensor) -> Tensor:
        """Slots by way of offsets into a cache so large that half of our pages lie beyond 2^31 elements."""
        stride = cache.block_size * cache.width
        base = 2**31 // stride - cache.num_blocks // 2
        offset = (base + slots // cache.block_size) * stride + slots % cache.block_size * cache.width
        token = self.offset(offset) // cache.width - base * cache.block_size
        return token % (cache.num_blocks * cache.block_size)

    def offset(self, exact: Tensor) -> Tensor:
        """An element offset as the kernel's integers hold it."""
        return exact

    def split(self, keys: Tensor) -> Sequence[Tensor]:
        """The keys of each split; some splits may be empty."""
        return [*keys.tensor_split(self.splits), keys[:0]]

    def part(self, q: Tensor, keys: Tensor, scale: float, rank: int) -> AttentionOutput:
        """One split's out [H, L] and lse [H]."""
        scores = q.float() @ keys.T * scale
        if not len(keys):
            return AttentionOutput(torch.zeros(len(q), rank), torch.full((len(q),), -torch.inf))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total = weights.sum(-1)
        out = weights.to(q.dtype).float() @ keys[:, :rank] / total[:, None]
        return AttentionOutput(out, self.lse(scores.amax(-1), total))

    def lse(self, top: Tensor, total: Tensor) -> Tensor:
        """The lse of one split, from its largest score and its sum of weights."""
        return top + total.log()

    def merge(self, parts: Sequence[AttentionOutput]) -> AttentionOutput:
        """All splits as one."""
        outs, lses = torch.stack([p.out for p in parts]), torch.stack([_lse(p) for p in parts])
        top = lses.amax(0)
        if bool((top == -torch.inf).all()):
            return AttentionOutput(torch.zeros_like(outs[0]), top)
        weights = (lses - top).exp()
        total = weights.sum(0)
        return AttentionOutput((weights[..., None] * outs).sum(0) / total[:, None], top + total.log())

    def finish(self, out: Tensor, lse: Tensor, call: Inputs) -> Tensor:
        """Out with the sinks in it."""
        sinks = call.options["sinks"]
        return out if sinks is None else out * torch.sigmoid(lse - sinks)[..., None]

    def shown(self, lse: Tensor, call: Inputs) -> Tensor:
        """The lse that is returned."""
        return lse


class Base2Merge(Kernel):
    name, source = "base-2 lse in the merge", "vllm#43919, sgl#35045"

    def lse(self, top: Tensor, total: Tensor) -> Tensor:
        return super().lse(top, total) * LOG2_E


class Base2Lse(Kernel):
    name, source, shows_in = "base-2 lse returned", "flashinfer#4485", "lse"

    def shown(self, lse: Tensor, call: Inputs) -> Tensor:
        return lse * LOG2_E


class AbsorbedScale(Kernel):
    name, source = "sm_scale from the absorbed width 576", "aiter/mla.py, its default scale"

    def scale(self, call: Inputs) -> float:
        return float(call.cache.width**-0.5)


class UnmaskedTail(Kernel):
    name, source = "tail of the last page not masked", "flashinfer#941"

    def length(self, seq_len: int, q_len: int, t: int, block_size: int) -> int:
        return -(-super().length(seq_len, q_len, t, block_size) // block_size) * block_size


class MaskedScoreOnly(Kernel):
    name, source, inputs = (
        "tail masked in the scores but not in the values",
        "flashinfer#941, vllm#57716",
        "nan",
    )

    def read(self, cache: KVCache, slots: Tensor) -> Tensor:
        tail = cache.read(slots[-1:] // cache.block_size * cache.block_size + cache.block_size - 1)
        keys = super().read(cache, slots)
        # A weight of zero times NaN.
        return keys + 0 * tail if len(keys) else keys


class LastTokenDropped(Kernel):
    name, source = "last token dropped", "vllm#45227"

    def length(self, seq_len: int, q_len: int, t: int, block_size: int) -> int:
        return max(0, super().length(seq_len, q_len, t, block_size) - 1)


class OneTokenTooMany(Kernel):
    name, source = "one token too many", "vllm#31282"

    def length(self, seq_len: int, q_len: int, t: int, block_size: int) -> int:
        return super().length(seq_len, q_len, t, block_size) + (seq_len > 0)


class CausalOffByOne(Kernel):
    name, source = "causal mask off by one with several query tokens", "tokenspeed#364, aiter#5679"

    def length(self, seq_len: int, q_len: int, t: int, block_size: int) -> int:
        return min(seq_len, super().length(seq_len, q_len, t, block_size) + 1)


class CausalIgnored(Kernel):
    name, source = "causal mask ignored", "AMD-Ecosystem/flashinfer#296"

    def length(self, seq_len: int, q_len: int, t: int, block_size: int) -> int:
        return seq_len


class RowsAllEqual(Kernel):
    name, source = "query rows of a sequence all equal its first", "aiter#2720"

    def finish(self, out: Tensor, lse: Tensor, call: Inputs) -> Tensor:
        out = super().finish(out, lse, call)
        indptr = call.options["qo_indptr"].tolist()
        for first, last in pairwise(indptr):
            out[first:last] = out[first : first + 1]
        return out


class SinkPerSplit(Kernel):
    name, source = "sink applied in each split", "vLLM 0.33.0 refuses sinks with context parallelism for it"

    def finish(self, out: Tensor, lse: Tensor, call: Inputs) -> Tensor:
        sinks = call.options["sinks"]
        return super().finish(
            out, lse, replace(call, options={**call.options, "sinks": sinks + math.log(self.splits)})
        )


class SinkDropped(Kernel):
    name, source = "sink dropped", "vLLM 0.33.0, HY-V4 without a backend for sinks"

    def finish(self, out: Tensor, lse: Tensor, call: Inputs) -> Tensor:
        return out


class SinkInLse(Kernel):
    name, source, shows_in = "sink included in the lse", "vLLM 0.33.0, ROCm sparse backend", "lse"

    def shown(self, lse: Tensor, call: Inputs) -> Tensor:
        return torch.logaddexp(lse, call.options["sinks"].expand_as(lse))


class PlusInfinity(Kernel):
    name, source, shows_in = "lse of +inf for an empty row", "FlashMLA; AITER mla_reduce_v1", "lse"

    def shown(self, lse: Tensor, call: Inputs) -> Tensor:
        return lse.masked_fill(lse == -torch.inf, torch.inf)


class EmptyRowNaN(Kernel):
    name, source = "0 / 0 for an empty row", "vllm#57094"

    def merge(self, parts: Sequence[AttentionOutput]) -> AttentionOutput:
        out, lse = super().merge(parts)
        return AttentionOutput(out / (_lse(AttentionOutput(out, lse)) > -torch.inf)[:, None], lse)


class Int32Offset(Kernel):
    name, source = "int32 page offset", "vllm#47671, tokenspeed#501, aiter#4474"

    def offset(self, exact: Tensor) -> Tensor:
        return (exact + 2**31) % 2**32 - 2**31


class PagesInOrder(Kernel):
    name, source = "page ids taken for block numbers", "flashinfer#3219"

    def page(self, table: Tensor, sequence: int, blocks: Tensor) -> Tensor:
        return blocks


class RopeIgnored(Kernel):
    name, source = "RoPE part ignored", "vllm#53963"

    def read(self, cache: KVCache, slots: Tensor) -> Tensor:
        keys = super().read(cache, slots)
        keys[:, cache.kv_lora_rank :] = 0
        return keys


class WrongUnpad(Kernel):
    name, source = (
        "interleaved head padding undone by taking the first heads",
        "vLLM 0.33.0, ROCm AITER decode",
    )

    def unpad(self, padded: Tensor, heads: int) -> Tensor:
        return padded[:, :heads]


class LseInBf16(Kernel):
    name, source, shows_in = "lse rounded to bf16", "vLLM 0.33.0, TRITON_MLA", "lse"

    def shown(self, lse: Tensor, call: Inputs) -> Tensor:
        return lse.bfloat16().float()


class FnuzReadAsFn(Kernel):
    name, source, inputs = "e4m3fnuz read as e4m3fn", "arXiv 2206.02915 read as OCP", "fnuz"

    def read(self, cache: KVCache, slots: Tensor) -> Tensor:
        other = KV_FORMATS["fp8_e4m3fn"]
        return super().read(replace(cache, data=cache.data.view(other.dtype), format=other), slots)


class ScaleIgnored(Kernel):
    name, source, inputs = "scale of the cache taken as 1", "sgl#39083", "fnuz"

    def read(self, cache: KVCache, slots: Tensor) -> Tensor:
        assert cache.scale is not None
        return super().read(replace(cache, scale=torch.ones_like(cache.scale)), slots)


class QueryScaleForgotten(Kernel):
    name, inputs = "scale of the queries taken as 1", "fp8 queries"

    def q_scale(self, call: Inputs) -> float:
        return 1.0


class MinusOneIsSlotZero(Kernel):
    name, source, inputs = "index -1 read as slot 0", "vLLM 0.33.0, ROCm sparse index remap", "sparse"

    def named(self, row: Tensor, count: int) -> Tensor:
        return row[:count].clamp(min=0)


class CountsIgnored(Kernel):
    name, source, inputs = "counts ignored", "sgl#39083", "sparse"

    def named(self, row: Tensor, count: int) -> Tensor:
        return row[row >= 0]


class LeadingMaskedChunk(Kernel):
    name, source, inputs = "NaN after a first chunk of -1", "vllm#48364", "sparse"

    def rows(self, call: Inputs) -> list[Tensor]:
        self.spoilt = [bool((row[:16] == -1).all()) for row in call.options["indices"]]
        return super().rows(call)

    def finish(self, out: Tensor, lse: Tensor, call: Inputs) -> Tensor:
        out = super().finish(out, lse, call)
        out[self.spoilt] = torch.nan
        return out


class DuplicatesDropped(Kernel):
    name, inputs = "a slot named twice counted once", "sparse"

    def named(self, row: Tensor, count: int) -> Tensor:
        return torch.tensor(sorted(set(super().named(row, count).tolist())), dtype=torch.int64)


FAULTS: tuple[type[Kernel], ...] = tuple(Kernel.__subclasses__())
"""Every wrong kernel."""


def _decode(length: int, *, poison: str = "needle", **dtypes: Any) -> Inputs:
    lens, asked = (length, length - 1, 0, length), (1, 4, 1, 2)
    return decode_inputs(WIDTHS, lens, asked, seed=length, block_size=BLOCK_SIZE, poison=poison, **dtypes)


def _sparse(length: int) -> Inputs:
    return sparse_inputs(
        WIDTHS, length, max(64, length // 4), 5, block_size=BLOCK_SIZE, seed=length, poison="needle"
    )


INPUTS = {
    "decode": _decode,
    "nan": lambda length: _decode(length, poison="nan"),
    "fnuz": lambda length: _decode(length, kv_format="fp8_e4m3fnuz"),
    "fp8 queries": lambda length: _decode(length, q_dtype=torch.float8_e4m3fn, kv_format="fp8_e4m3fn"),
    "sparse": _sparse,
}
"""What a kernel is tried at, by name: cached tokens to a call."""


class Trial:
    """One call with its reference and eager runs, at which kernels are tried."""

    def __init__(self, inputs: str, length: int) -> None:
        self.call = INPUTS[inputs](length)
        self.reference = getattr(reference, self.call.op)(*self.call.tensors, **self.call.options)
        self.eager = getattr(eager, self.call.op)(*self.call.tensors, **self.call.options)

    def judge(self, kernel: Kernel) -> Judgement:
        """Judge a kernel; without its lse if its fault shows in out."""
        got = kernel.run(self.call)
        if kernel.shows_in == "out" and type(kernel) is not Kernel:
            got = AttentionOutput(got.out, None)
        return judge(got, self.reference, *self.eager)


@lru_cache(maxsize=len(INPUTS) * len(LENGTHS))
def trial(inputs: str, length: int) -> Trial:
    """The call of these inputs at a length, made once."""
    return Trial(inputs, length)


def caught(fault: type[Kernel], lengths: Sequence[int] = LENGTHS) -> Judgement:
    """Whether the judge catches a fault at every length: passed if it does.

    Args:
        fault: One of FAULTS.
        lengths: Cached tokens.

    Returns:
        Its share is the smallest share of the budget at which it was caught, inverted, so that above 1 is a
        miss.
    """
    shares = {length: trial(fault.inputs, length).judge(fault()).share for length in lengths}
    missed = [f"uses {share:.3g} of the budget at {n} tokens" for n, share in shares.items() if share <= 1]
    least = min(shares.values())
    share = 1 / least if least else math.inf
    return Judgement(share, f"caught at {least:.3g} times the budget", tuple(missed))


def _lse(part: AttentionOutput) -> Tensor:
    assert part.lse is not None
    return part.lse
