"""The tensors of every operation, checked once: shapes, dtypes, devices, and values where no sync is needed.

T query tokens, B sequences, H heads, L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim,
V = v_head_dim, S new tokens of latent, K indices a query token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from anymla.arguments import check_count as check_count
from anymla.arguments import check_flags as check_flags
from anymla.arguments import number_of, shown
from anymla.errors import Reasons
from anymla.kv_cache import KVCache
from anymla.problem import canonical_name
from anymla.tensors import check_tensor as check_tensor
from anymla.tensors import on_host as on_host
from anymla.tensors import word

Q_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of latents, and of queries without a scale."""

FP8_Q_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
"""Dtypes of queries that have one: q_scale in a decode, a part of the weight in an indexer."""

ABSORBED_Q_DTYPES = INDEX_Q_DTYPES = (*Q_DTYPES, *FP8_Q_DTYPES)
"""Dtypes of the queries of decodes, and of index queries."""


class AttentionOutput(NamedTuple):
    """What every attention returns, in these units and no others.

    Attributes:
        out: [T, H, L] latent output (decode) or [T, H, V] (prefill), dtype of the queries; of queries in
            fp8 bf16, or that of the caller's `out`. 0 for a row that attends to nothing.
        lse: [T, H] fp32, natural log, sinks excluded, -inf for a row that attends to nothing.
            None unless asked for.
    """

    out: Tensor
    lse: Tensor | None


@dataclass(frozen=True)
class Batch:
    """The sequences of one step.

    Row t of a sequence's q_len query tokens sees its first seq_len - q_len + 1 + t keys.

    Attributes:
        block_table: [B, max_blocks] int32 page ids; entries past a sequence's last page are never read.
        seq_lens: [B] int32 tokens in the cache, those of this step included.
        qo_indptr: [B + 1] int32, starts at 0, does not decrease.
        block_size: Tokens a page.
        causal: False lets every row see all seq_len keys.
        num_tokens: T. Rows from qo_indptr[-1] on belong to no sequence and come out empty.
        max_q_len: No sequence has more query tokens.
        max_seq_len: No sequence is longer.
        seq_lens_host: seq_lens as integers, or None where only the device knows them.
        qo_indptr_host: qo_indptr as integers, or None where only the device knows them.
    """

    block_table: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor
    block_size: int
    causal: bool
    num_tokens: int
    max_q_len: int
    max_seq_len: int
    seq_lens_host: tuple[int, ...] | None
    qo_indptr_host: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        *,
        seq_lens: Tensor,
        block_table: Tensor | None = None,
        qo_indptr: Tensor | None = None,
        block_size: int = 1,
        num_blocks: int | None = None,
        causal: bool = True,
        num_tokens: int | None = None,
        max_q_len: int | None = None,
        max_seq_len: int | None = None,
        seq_lens_host: Sequence[int] | None = None,
        qo_indptr_host: Sequence[int] | None = None,
        new_tokens_are_cached: bool = True,
        check: bool = False,
    ) -> "Batch":
        """Describe one step.

        Values are looked at where the host has them: CPU tensors, or the `_host` integers beside device
        tensors. A device tensor is read back only with `check=True`.

        Args:
            seq_lens: [B] int32 tokens, those of this step included.
            block_table: [B, max_blocks] int32 page ids. None: nothing is cached.
            qo_indptr: [B + 1] int32 query token offsets. None: one token a sequence.
            block_size: Tokens a page.
            num_blocks: Pages of the cache; with it, page ids are checked where the host sees them.
            causal: False lets every row see all seq_len keys.
            num_tokens: T, at least qo_indptr[-1]; rows past that come out empty. None: qo_indptr[-1].
            max_q_len: A bound, needed only where the host cannot see qo_indptr.
            max_seq_len: The bound for later updates of a plan. None: the longest of this step.
            seq_lens_host: seq_lens as integers, for tensors on a device: planning never syncs.
            qo_indptr_host: qo_indptr as integers, likewise.
            new_tokens_are_cached: False for a prefill, whose new tokens need no page.
            check: Read device tensors back to check their values; this syncs.

        Returns:
            The batch. B = 0 is a batch of no sequences.

        Raises:
            InvalidInput: with everything that is wrong.
        """
        reasons = Reasons("batch")
        batch = check_batch(
            reasons,
            block_table=block_table,
            seq_lens=seq_lens,
            qo_indptr=qo_indptr,
            block_size=block_size,
            num_blocks=num_blocks,
            causal=causal,
            num_tokens=num_tokens,
            max_q_len=max_q_len,
            max_seq_len=max_seq_len,
            seq_lens_host=seq_lens_host,
            qo_indptr_host=qo_indptr_host,
            new_tokens_are_cached=new_tokens_are_cached,
            check=check,
        )
        reasons.raise_if_any()
        assert batch is not None
        return batch

    @property
    def num_seqs(self) -> int:
        """B."""
        return self.seq_lens.shape[0]

    @property
    def context_lens_host(self) -> tuple[int, ...] | None:
        """Tokens before those of this step, a sequence, or None where only the device knows them."""
        if self.seq_lens_host is None or self.qo_indptr_host is None:
            return None
        return tuple(
            n - (b - a) for n, (a, b) in zip(self.seq_lens_host, pairwise(self.qo_indptr_host), strict=True)
        )

    @property
    def may_have_context(self) -> bool:
        """Whether a sequence has tokens before those of this step, or might, as far as the host knows."""
        contexts = self.context_lens_host
        return self.block_table.shape[1] > 0 if contexts is None else any(contexts)


@dataclass(frozen=True)
class DecodeArgs:
    """A checked dense decode. The backend fills `out`, and `lse` if it is there; fp8 queries have a scale."""

    ql_nope: Tensor
    q_pe: Tensor
    cache: KVCache
    sm_scale: float
    sinks: Tensor | None
    out: Tensor
    lse: Tensor | None
    q_scale: Tensor | None = None


@dataclass(frozen=True)
class SparseArgs:
    """A checked sparse decode over `indices` [T, K] int32 slots, of which the first `counts`[t] count."""

    ql_nope: Tensor
    q_pe: Tensor
    cache: KVCache
    indices: Tensor
    counts: Tensor | None
    sm_scale: float
    sinks: Tensor | None
    out: Tensor
    lse: Tensor | None
    q_scale: Tensor | None = None


@dataclass(frozen=True)
class PrefillArgs:
    """A checked prefill: new tokens from `kv_c` and `k_pe`, earlier ones from `cache`, if there are any."""

    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    w_uk: Tensor
    w_uv: Tensor
    cache: KVCache | None
    sm_scale: float
    sinks: Tensor | None
    out: Tensor
    lse: Tensor | None


@dataclass(frozen=True)
class WriteArgs:
    """A checked cache write of S tokens; slot -1 is skipped, scales in a row may have to be powers of two."""

    kv_c: Tensor
    k_pe: Tensor
    cache: KVCache
    slot_mapping: Tensor
    power_of_two: bool = False


@dataclass(frozen=True)
class IndexArgs:
    """A checked top-k over paged index keys.

    The backend fills `indices` [T, K] with tokens of the row's sequence, or with their slots in the pages of
    the block table if `as_slots`.
    """

    q: Tensor
    weights: Tensor
    cache: KVCache
    topk: int
    indices: Tensor
    as_slots: bool = False


def check_offsets(reasons: Reasons, offsets: Sequence[int], num_tokens: int | None = None) -> None:
    """Note offsets of query tokens that do not start at 0, that decrease, or that end past the tokens."""
    reasons.need(offsets[0] == 0, "qo_indptr", f"first value {offsets[0]}", "0")
    worst = min(range(1, len(offsets)), key=lambda i: offsets[i] - offsets[i - 1], default=0)
    shrinks = f"{offsets[worst]} after {offsets[worst - 1]} at {worst}"
    grows = offsets[worst] >= offsets[max(worst - 1, 0)]
    reasons.need(grows, "qo_indptr", shrinks, "values that do not decrease")
    last, most = f"last value {offsets[-1]}", f"at most {num_tokens}, the query tokens"
    reasons.need(num_tokens is None or offsets[-1] <= num_tokens, "qo_indptr", last, most)


def check_scale(reasons: Reasons, sm_scale: object) -> None:
    """Note a softmax scale that is not a positive finite number."""
    good = 0 < number_of(sm_scale) < math.inf
    reasons.need(good, "sm_scale", shown(sm_scale), "a positive finite number, such as Model.sm_scale")


def check_place(reasons: Reasons, name: str, cache: KVCache, device: torch.device) -> None:
    """Note a cache that is not on the device of the queries."""
    here = f"{device}, that of the queries"
    reasons.need(cache.device == device, name, f"device {cache.device}", here)


def check_sinks(reasons: Reasons, sinks: Tensor | None, num_heads: int, device: torch.device) -> None:
    """Note sinks that are not [H] fp32 on the device of the queries."""
    if sinks is not None:
        like = (num_heads,), (torch.float32,), device, "H from the queries"
        check_tensor(reasons, "sinks", sinks, *like, packed=True)


def check_batch(
    reasons: Reasons,
    *,
    block_table: Tensor | None,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    block_size: int,
    num_blocks: int | None = None,
    causal: bool = True,
    num_tokens: int | None = None,
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    seq_lens_host: Sequence[int] | None = None,
    qo_indptr_host: Sequence[int] | None = None,
    new_tokens_are_cached: bool = True,
    check: bool = False,
) -> Batch | None:
    """The batch, or None and every reason; the arguments are those of `Batch.of`."""
    before = len(reasons.found)
    block_size = check_count(reasons, "block_size", block_size)
    bounds = num_blocks, num_tokens, max_q_len, max_seq_len
    names = "num_blocks", "num_tokens", "max_q_len", "max_seq_len"
    num_blocks, num_tokens, max_q_len, max_seq_len = (
        None if n is None else check_count(reasons, name, n, 0) for name, n in zip(names, bounds, strict=True)
    )
    check_flags(reasons, causal=causal, new_tokens_are_cached=new_tokens_are_cached, check=check)
    if len(reasons.found) > before:
        return None
    if not check_tensor(reasons, "seq_lens", seq_lens, (None,), (torch.int32,), packed=True):
        return None
    num_seqs, device = seq_lens.shape[0], seq_lens.device
    if block_table is None:
        block_table = torch.empty((num_seqs, 0), dtype=torch.int32, device=device)
    table_fits = check_tensor(
        reasons, "block_table", block_table, (num_seqs, None), (torch.int32,), origin="B from seq_lens"
    )
    if table_fits:
        here = f"{device}, that of seq_lens"
        reasons.need(block_table.device == device, "block_table", f"device {block_table.device}", here)
    if qo_indptr is None:
        reasons.need(qo_indptr_host is None, "qo_indptr", None, "a tensor: qo_indptr_host is given")
        qo_indptr_host = range(num_seqs + 1)
        qo_indptr = _one_each(num_seqs, device)
    else:
        like = (num_seqs + 1,), (torch.int32,), device, "B + 1 from seq_lens"
        if not check_tensor(reasons, "qo_indptr", qo_indptr, *like, packed=True):
            return None
    if not table_fits:
        return None

    lens = _host_values(reasons, "seq_lens_host", seq_lens, seq_lens_host, check)
    indptr = _host_values(reasons, "qo_indptr_host", qo_indptr, qo_indptr_host, check)
    for name, values, size in (("seq_lens_host", lens, num_seqs), ("qo_indptr_host", indptr, num_seqs + 1)):
        right = values is None or len(values) == size
        if not reasons.need(right, name, f"{len(values or ())} values", f"{size}"):
            return None

    capacity = block_table.shape[1] * block_size
    if indptr is not None:
        check_offsets(reasons, indptr, num_tokens)
        q_lens = [b - a for a, b in pairwise(indptr)]
        longest_q = max(q_lens, default=0)
        num_tokens = indptr[-1] if num_tokens is None else num_tokens
        max_q_len = longest_q if max_q_len is None else max_q_len
        reasons.need(longest_q <= max_q_len, "max_q_len", max_q_len, f"at least {longest_q}, from qo_indptr")
    else:
        needs = "a number, or qo_indptr_host: qo_indptr is on a device"
        for name, bound in (("num_tokens", num_tokens), ("max_q_len", max_q_len)):
            reasons.need(bound is not None, name, None, needs)
    if lens is not None and indptr is not None:
        news = [0] * num_seqs if new_tokens_are_cached else q_lens
        wrong = next((i for i, n in enumerate(lens) if not news[i] <= n <= capacity + news[i]), None)
        if wrong is not None:
            needs = f"{news[wrong]} to {capacity + news[wrong]}, the pages of block_table"
            needs += "" if new_tokens_are_cached else " and the new tokens"
            reasons.need(False, "seq_lens", f"{lens[wrong]} at {wrong}", needs)
    if lens is not None:
        longest = max(lens, default=0)
        max_seq_len = longest if max_seq_len is None else max_seq_len
        reasons.need(longest <= max_seq_len, "max_seq_len", max_seq_len, f"at least {longest}, from seq_lens")
    max_seq_len = capacity if max_seq_len is None else max_seq_len
    if len(reasons.found) > before:
        return None
    assert num_tokens is not None and max_q_len is not None
    batch = Batch(
        block_table=block_table,
        seq_lens=seq_lens,
        qo_indptr=qo_indptr,
        block_size=block_size,
        causal=causal,
        num_tokens=num_tokens,
        max_q_len=max(max_q_len, 1),
        max_seq_len=max_seq_len,
        seq_lens_host=lens,
        qo_indptr_host=indptr,
    )
    cached = lens if new_tokens_are_cached else batch.context_lens_host
    if cached is not None and num_blocks is not None and (on_host(block_table) or check):
        _check_pages(reasons, block_table.cpu(), cached, block_size, num_blocks)
    return batch if len(reasons.found) == before else None


def check_queries(
    reasons: Reasons,
    ql_nope: Tensor,
    q_pe: Tensor,
    cache: KVCache,
    sm_scale: object,
    sinks: Tensor | None,
    num_tokens: int | None,
    num_heads: int | None,
    q_scale: Tensor | None = None,
    check: bool = False,
) -> bool:
    """Note what is wrong with absorbed queries for this cache; True if their shapes can be used further."""
    check_scale(reasons, sm_scale)
    shape, origin = (num_tokens, num_heads, cache.kv_lora_rank), "T from qo_indptr, H, L from the cache"
    if not check_tensor(reasons, "ql_nope", ql_nope, shape, ABSORBED_Q_DTYPES, origin=origin):
        return False
    _check_q_scale(reasons, ql_nope, cache, q_scale, check)
    tokens, heads = ql_nope.shape[:2]
    reasons.need(heads > 0, "num_heads", heads, "at least 1")
    right = check_tensor(
        reasons,
        "q_pe",
        q_pe,
        (tokens, heads, cache.qk_rope_head_dim),
        (ql_nope.dtype,),
        ql_nope.device,
        "T, H from ql_nope, R from the cache",
    )
    check_place(reasons, "kv_cache", cache, ql_nope.device)
    check_sinks(reasons, sinks, heads, ql_nope.device)
    return right


def out_dtypes(q_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What `out` may be for these queries, and what it is unless given first."""
    return (torch.bfloat16, torch.float16) if q_dtype in FP8_Q_DTYPES else (q_dtype,)


def check_index_queries(
    reasons: Reasons,
    q: Tensor,
    weights: Tensor,
    cache: KVCache,
    num_tokens: int | None,
    num_heads: int | None,
) -> bool:
    """Note what is wrong with index queries for these keys; True if their shapes can be used further."""
    shape, origin = (num_tokens, num_heads, cache.kv_lora_rank), "T from qo_indptr, D from the index cache"
    if not check_tensor(reasons, "q", q, shape, INDEX_Q_DTYPES, origin=origin):
        return False
    tokens, heads = q.shape[:2]
    reasons.need(heads > 0, "num_heads", heads, "at least 1")
    origin = "T, H from q"
    right = check_tensor(reasons, "weights", weights, (tokens, heads), (torch.float32,), q.device, origin)
    check_place(reasons, "index_cache", cache, q.device)
    return right


def check_indices(
    reasons: Reasons,
    indices: Tensor,
    counts: Tensor | None,
    cache: KVCache,
    num_tokens: int,
    device: torch.device,
    check: bool,
) -> None:
    """Note slots or counts out of range; a slot of -1 is no key."""
    right = check_tensor(
        reasons, "indices", indices, (num_tokens, None), (torch.int32,), device, "T from the queries"
    )
    if counts is not None:
        like = (num_tokens,), (torch.int32,), device, "T from the queries"
        right &= check_tensor(reasons, "counts", counts, *like, packed=True)
    if not right or not (on_host(indices, counts) or check) or not indices.numel():
        return
    slots = cache.num_blocks * cache.block_size
    low, high = (int(x) for x in torch.aminmax(indices))
    reasons.need(low >= -1, "indices", low, "-1 (no key) or a slot")
    reasons.need(high < slots, "indices", high, f"less than {slots}, the slots of the cache")
    if counts is not None:
        low, high = (int(x) for x in torch.aminmax(counts))
        most = indices.shape[1]
        reasons.need(low >= 0 and high <= most, "counts", f"{low} to {high}", f"0 to {most}")


def check_slots(reasons: Reasons, slot_mapping: Tensor, cache: KVCache, num_tokens: int, check: bool) -> None:
    """Note slots to write that are out of range or given twice; -1 is skipped."""
    right = check_tensor(
        reasons, "slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), cache.device, "S from kv_c"
    )
    if not right or not (on_host(slot_mapping) or check) or not num_tokens:
        return
    slots = cache.num_blocks * cache.block_size
    low, high = (int(x) for x in torch.aminmax(slot_mapping))
    reasons.need(low >= -1, "slot_mapping", low, "-1 (skip) or a slot")
    reasons.need(high < slots, "slot_mapping", high, f"less than {slots}, the slots of the cache")
    written = slot_mapping[slot_mapping >= 0]
    twice = written.numel() - torch.unique(written).numel()
    reasons.need(twice == 0, "slot_mapping", f"{twice} slots twice", "each slot once")


def _check_pages(
    reasons: Reasons, table: Tensor, lens: Sequence[int], block_size: int, num_blocks: int
) -> None:
    used = torch.arange(table.shape[1])[None, :] * block_size < torch.tensor(lens, dtype=torch.int64)[:, None]
    wrong = (used & ((table < 0) | (table >= num_blocks))).nonzero()
    if wrong.numel():
        b, i = wrong[0].tolist()
        reasons.need(
            False,
            "block_table",
            f"{int(table[b, i])} at [{b}, {i}]",
            f"0 to {num_blocks - 1}, the pages of the cache",
        )


def _check_q_scale(
    reasons: Reasons, ql_nope: Tensor, cache: KVCache, q_scale: Tensor | None, check: bool
) -> None:
    """Note a scale without queries in fp8, or those without a scale or over a cache that is unlike them."""
    if ql_nope.dtype not in FP8_Q_DTYPES:
        needs = f"None: queries in {word(ql_nope.dtype)} have no scale"
        reasons.need(q_scale is None, "q_scale", "a tensor", needs)
        return
    like = canonical_name(str(ql_nope.dtype))
    needs = f"{like}, as the queries have it"
    reasons.need(cache.format.name == like, "kv_cache", f"format {cache.format.name}", needs)
    if q_scale is None:
        reasons.need(False, "q_scale", None, f"[1] fp32, what multiplies queries in {like}")
    elif check_tensor(reasons, "q_scale", q_scale, (1,), (torch.float32,), ql_nope.device) and (
        on_host(q_scale) or (check and q_scale.device.type != "meta")
    ):
        value = q_scale.item()
        reasons.need(0 < value < math.inf, "q_scale", value, "a positive finite number")


def _one_each(num_seqs: int, device: torch.device) -> Tensor:
    """Offsets of one query token a sequence; on a GPU always the same tensor, which graphs capture."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        # During a capture nothing is computed yet, and on a CPU there are no graphs.
        return torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    return _kept_one_each(num_seqs, device)


@cache
def _kept_one_each(num_seqs: int, device: torch.device) -> Tensor:
    return torch.arange(num_seqs + 1, dtype=torch.int32, device=device)


def _host_values(
    reasons: Reasons, name: str, tensor: Tensor, given: Sequence[int] | None, check: bool
) -> tuple[int, ...] | None:
    """The integers that the host knows; None where it knows none, or was given something else."""
    if given is None:
        return tuple(tensor.tolist()) if on_host(tensor) or (check and tensor.device.type != "meta") else None
    try:
        if not isinstance(given, Tensor):
            return tuple(map(index, given))
        # Of a tensor on a device not even a value may be asked for.
        if on_host(given) and given.layout == torch.strided:
            return tuple(map(index, given.tolist()))
    except TypeError:
        pass
    reasons.need(False, name, shown(given), "integers that the host knows, or None")
    return None
