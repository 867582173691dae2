"""Calls that make a chip compile every kernel in every launch row, in every form that changes its code.

Caches are in pages of 64, 16 and 1 token, below and above 2 GiB (AMD addresses them differently); widths are
those of MODELS.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product

import torch

from anymla.contract import Batch, DecodeArgs, IndexArgs, PrefillArgs, SparseArgs, WriteArgs, out_dtypes
from anymla.hardware.probe import Machine
from anymla.kv_cache import KV_FORMATS, KVCache
from anymla.problem import FP8_NAMES, Feature, Problem
from anymla.verification.audit.capture import BACKEND

triton_mla = import_module(BACKEND)
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}
NUM_SEQS, SEQ_LEN, TOPK = 8, 4096, 2048
INDEX_LEN = 32
"""Times topk, the length of a sequence that is chosen from: one piece for few, several levels for many."""
FAR_BYTES = (2 << 30) + (1 << 20)
"""A cache whose last byte is out of reach of a signed 32-bit offset. Its memory is never touched."""
ATTENTION = frozenset((Feature.LSE, Feature.SINKS))
FLOATS = ("bf16", "fp16")
FP8 = (*FP8_NAMES, "fp8_ds_mla", "fp8_ds_mla_fnuz")


@dataclass(frozen=True)
class Call:
    """One call of the backend.

    Attributes:
        problem: Its facts.
        far: Whether its cache is larger than 2 GiB.
        context: Cached tokens of a prefill, a sequence.
        counted: Whether a sparse decode has counts.
        aligned: Whether the block table's rows start at multiples of 16 elements.
        skewed: Whether the cache's rows lie a byte further apart than they are wide.
        num_seqs: Sequences; for write_cache tokens.
        seq_len: Tokens of a sequence in the cache, of a decode.
    """

    problem: Problem
    far: bool = False
    context: int = 0
    counted: bool = True
    aligned: bool = True
    skewed: bool = False
    num_seqs: int = NUM_SEQS
    seq_len: int = SEQ_LEN

    def __str__(self) -> str:
        p = self.problem
        widths = f"{p.kv_lora_rank}/{p.qk_rope_head_dim}"
        if p.op == "prefill":
            widths += f" {p.qk_nope_head_dim}/{p.v_head_dim}"
        words = [p.op, p.q_dtype, p.kv_format, widths, f"{p.num_heads}×{p.q_len}", f"page {p.block_size}"]
        words += ["over 2 GiB"] if self.far else []
        words += ["skewed"] if self.skewed else []
        words += [f"context {self.context}"] if self.context else []
        words += ["batch-invariant"] if Feature.BATCH_INVARIANT in p.features else []
        return " ".join(words)

    def run(self, machine: Machine) -> None:
        """Plan and launch, on memory that is not looked at."""
        {
            "decode": self._decode,
            "sparse_decode": self._sparse,
            "prefill": self._prefill,
            "index_topk": self._index,
            "write_cache": self._write,
        }[self.problem.op](machine)

    def _decode(self, machine: Machine) -> None:
        p = self.problem
        tokens = self.num_seqs * p.q_len
        plan = triton_mla.plan_decode(self._batch(self.seq_len, cached=True), p, machine, {})
        ql_nope, q_pe = self._queries(tokens)
        args = DecodeArgs(ql_nope, q_pe, self._cache(), *self._rest(tokens), q_scale=self._q_scale())
        triton_mla.decode(args, plan)

    def _sparse(self, machine: Machine) -> None:
        p = self.problem
        plan = triton_mla.plan_sparse_decode(self.num_seqs, torch.device("cpu"), p, machine, {})
        indices = torch.empty(self.num_seqs, p.topk, dtype=torch.int32)
        counts = torch.empty(self.num_seqs, dtype=torch.int32) if self.counted else None
        ql_nope, q_pe = self._queries(self.num_seqs)
        rest, q_scale = self._rest(self.num_seqs), self._q_scale()
        args = SparseArgs(ql_nope, q_pe, self._cache(), indices, counts, *rest, q_scale=q_scale)
        triton_mla.sparse_decode(args, plan)

    def _prefill(self, machine: Machine) -> None:
        p = self.problem
        tokens, dtype = self.num_seqs * p.q_len, DTYPES[p.q_dtype]
        heads, rank, rope = p.num_heads, p.kv_lora_rank, p.qk_rope_head_dim
        batch = self._batch(self.context + p.q_len, cached=False)
        # Only the device knows the lengths: latents are then decompressed by our kernel, not by a library.
        batch = replace(batch, seq_lens_host=None, qo_indptr_host=None)
        args = PrefillArgs(
            torch.empty(tokens, heads, p.qk_nope_head_dim, dtype=dtype),
            torch.empty(tokens, heads, rope, dtype=dtype),
            torch.empty(tokens, rank, dtype=dtype),
            torch.empty(tokens, rope, dtype=dtype),
            torch.empty(heads, p.qk_nope_head_dim, rank, dtype=dtype),
            torch.empty(heads, rank, p.v_head_dim, dtype=dtype),
            self._cache() if self.context else None,
            *self._rest(tokens, p.v_head_dim),
        )
        triton_mla.prefill(args, triton_mla.plan_prefill(batch, p, machine, {}))

    def _index(self, machine: Machine) -> None:
        p, tokens = self.problem, self.num_seqs * self.problem.q_len
        plan = triton_mla.plan_index_topk(self._batch(INDEX_LEN * p.topk, cached=True), p, machine, {})
        q = torch.empty(tokens, p.num_heads, p.kv_lora_rank).to(DTYPES[p.q_dtype])
        weights, indices = torch.empty(tokens, p.num_heads), torch.empty(tokens, p.topk, dtype=torch.int32)
        triton_mla.index_topk(IndexArgs(q, weights, self._cache(), p.topk, indices), plan)

    def _write(self, machine: Machine) -> None:
        p, dtype = self.problem, DTYPES[self.problem.q_dtype]
        kv_c = torch.empty(self.num_seqs, p.kv_lora_rank, dtype=dtype)
        k_pe = torch.empty(self.num_seqs, p.qk_rope_head_dim, dtype=dtype)
        slots = torch.empty(self.num_seqs, dtype=torch.int64)
        triton_mla.write_cache(WriteArgs(kv_c, k_pe, self._cache(), slots))

    def _batch(self, seq_len: int, *, cached: bool) -> Batch:
        p = self.problem
        pages = -(-seq_len // p.block_size) if cached or self.context else 0
        return Batch.of(
            seq_lens=torch.full((self.num_seqs,), seq_len, dtype=torch.int32),
            block_table=torch.zeros(self.num_seqs, pages + (0 if self.aligned else 1), dtype=torch.int32),
            qo_indptr=torch.arange(0, (self.num_seqs + 1) * p.q_len, p.q_len, dtype=torch.int32),
            block_size=p.block_size,
            causal=Feature.NON_CAUSAL not in p.features,
            new_tokens_are_cached=cached,
        )

    def _cache(self) -> KVCache:
        p, row = self.problem, KV_FORMATS[self.problem.kv_format]
        page = p.block_size, row.row_width(p.kv_lora_rank, p.qk_rope_head_dim)
        page_bytes = page[0] * page[1] * row.dtype.itemsize
        pages = -(-FAR_BYTES // page_bytes) if self.far else 16
        data = torch.empty(pages, page[0], page[1] + self.skewed, dtype=row.storage_dtype).view(row.dtype)
        data = data[..., : page[1]]
        scale = torch.empty(1) if row.scaled else None
        return KVCache(data, row, p.kv_lora_rank, p.qk_rope_head_dim, scale)

    def _queries(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        p, dtype = self.problem, DTYPES[self.problem.q_dtype]
        ql_nope = torch.empty(tokens, p.num_heads, p.kv_lora_rank, dtype=dtype)
        return ql_nope, torch.empty(tokens, p.num_heads, p.qk_rope_head_dim, dtype=dtype)

    def _q_scale(self) -> torch.Tensor | None:
        return torch.empty(1) if self.problem.q_dtype.startswith("fp8") else None

    def _rest(
        self, tokens: int, width: int | None = None
    ) -> tuple[float, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """Scale, sinks, out and lse."""
        p = self.problem
        dtype = out_dtypes(DTYPES[p.q_dtype])[0]
        out = torch.empty(tokens, p.num_heads, width or p.kv_lora_rank, dtype=dtype)
        lse = torch.empty(tokens, p.num_heads) if Feature.LSE in p.features else None
        sinks = torch.empty(p.num_heads) if Feature.SINKS in p.features else None
        return 0.1, sinks, out, lse


def _of_other_widths(usual: Problem, fp8: str) -> Iterator[Call]:
    """Decodes of widths that the kernels placed by hand do not take, even and uneven."""
    for rank, rope in ((512, 96), (448, 64), (384, 64), (448, 128), (512, 6), (500, 128), (300, 64)):
        for heads in (16, 128):
            yield Call(replace(usual, kv_lora_rank=rank, qk_rope_head_dim=rope, num_heads=heads))
        yield Call(replace(usual, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_format=fp8))
    yield Call(replace(usual, kv_lora_rank=512, qk_rope_head_dim=8, block_size=16))


def calls(machine: Machine) -> Iterator[Call]:
    """All calls, those that a server makes most often first."""
    native = machine.fp8_flavour.removeprefix("e4m3")
    fp8, tiled = f"fp8_e4m3{native}", "fp8_ds_mla" + ("_fnuz" if native == "fnuz" else "")
    usual = Problem("decode", "bf16", "bf16", 16, 512, 64, block_size=64, features=ATTENTION)
    sparse = replace(usual, op="sparse_decode", topk=TOPK)
    for heads in (16, 32, 64, 128):
        yield Call(replace(usual, num_heads=heads))
        yield Call(replace(usual, num_heads=heads, kv_format=fp8))
        yield Call(replace(sparse, num_heads=heads, kv_format=tiled))
    yield Call(replace(usual, q_dtype="fp16", kv_format="fp16"))
    for kv_format in FP8:
        yield Call(replace(usual, kv_format=kv_format))
        yield Call(replace(sparse, kv_format=kv_format))
    for block_size in (16, 1):
        for kv_format in ("bf16", fp8):
            yield Call(replace(usual, block_size=block_size, kv_format=kv_format))
    for heads in (16, 128):
        yield Call(replace(sparse, num_heads=heads), counted=False)
        for kv_format in ("bf16", fp8, tiled):
            yield Call(replace(usual, num_heads=heads, kv_format=kv_format), far=True)
            yield Call(replace(sparse, num_heads=heads, kv_format=kv_format), far=True)
    yield Call(replace(usual, q_len=4), aligned=False)
    yield Call(replace(usual, num_heads=20, q_len=2, features=frozenset((Feature.NON_CAUSAL,))))
    yield Call(replace(usual, features=frozenset((Feature.LSE, Feature.BATCH_INVARIANT))))
    for rank, rope in ((256, 32), (128, 32), (512, 0)):
        for heads in (16, 64):
            yield Call(replace(usual, kv_lora_rank=rank, qk_rope_head_dim=rope, num_heads=heads))
    if machine.arch == "sm90":
        yield from _of_other_widths(usual, fp8)
        for heads in (16, 128):
            yield Call(replace(usual, num_heads=heads, kv_format=fp8), skewed=True)
            yield Call(replace(usual, num_heads=heads, kv_format=tiled, kv_lora_rank=256))

    for kv_format, heads in product(FP8[:2], (16, 128)):
        asked = {"num_heads": heads, "kv_format": kv_format, "q_dtype": kv_format}
        yield Call(replace(usual, **asked))
        yield Call(replace(sparse, **asked))
    narrow = replace(usual, q_dtype=fp8, kv_format=fp8, kv_lora_rank=256, qk_rope_head_dim=0, block_size=16)
    yield Call(narrow)
    yield Call(replace(usual, q_dtype=fp8, kv_format=fp8), far=True)

    prefill = replace(usual, op="prefill", qk_nope_head_dim=128, v_head_dim=128)
    # Those of the models, and the widest that is offered.
    widest = (512, 64, 512)
    for nope, rope, value in (
        (128, 64, 128),
        (192, 64, 256),
        (64, 32, 64),
        (256, 0, 256),
        (512, 0, 512),
        widest,
    ):
        for q_len in (32, 1024):
            widths = replace(prefill, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
            yield Call(replace(widths, q_len=q_len), context=192)
    yield Call(replace(prefill, q_len=1024))
    yield Call(replace(prefill, q_len=1024, q_dtype="fp16", kv_format="fp16"), context=192)
    yield Call(replace(prefill, q_len=1024, features=frozenset((Feature.NON_CAUSAL,))))
    for kv_format in (*FP8, "bf16"):
        yield Call(replace(prefill, q_len=64, kv_format=kv_format, block_size=16), context=192)
        yield Call(replace(prefill, q_len=64, kv_format=kv_format), context=192, far=True)

    index = replace(usual, op="index_topk", kv_lora_rank=128, qk_rope_head_dim=0, topk=TOPK)
    index = replace(index, features=frozenset())
    keys = "index_k" + ("_fnuz" if native == "fnuz" else "")
    # Those of the models: one query token, some, and a prefill.
    for heads, q_len in product((16, 32, 64), (1, 4, 256)):
        many = replace(index, num_heads=heads, q_len=q_len)
        yield Call(replace(many, kv_format=keys, q_dtype=fp8))
        yield Call(replace(many, kv_format=keys, topk=128))
    yield Call(replace(index, num_heads=64, kv_format=keys, topk=2 * TOPK))
    for kv_format in ("index_k", "index_k_fnuz", "bf16"):
        for q_dtype in ("bf16", "fp16", *FP8_NAMES):
            yield Call(replace(index, num_heads=64, kv_format=kv_format, q_dtype=q_dtype))
        yield Call(replace(index, num_heads=64, kv_format=kv_format), far=True)
    for kv_format in ("index_k", "index_k_fnuz"):
        yield Call(replace(index, op="write_cache", num_heads=1, kv_format=kv_format, topk=0))

    for kv_format in (*FLOATS, *FP8):
        write = Problem("write_cache", "bf16", kv_format, 1, 512, 64, block_size=64)
        yield Call(write)
        yield Call(write, far=True)
