"""Every launch row of every kernel, executed: whatever row a plan would choose, it is given only this one.

A row is tried in the forms that make other code of it: formats, pages that hold a block of keys and pages
that do not, sparse indices, caches whose pages lie more than 4 GiB apart.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import LAUNCH, Launch, launch_rows
from anymla.hardware.probe import Machine
from anymla.kv_cache import KVCache
from anymla.problem import Feature, Problem
from anymla.verification.amdgcn.driver import Emulator, Launched
from anymla.verification.audit.capture import KERNELS, Specialisation
from anymla.verification.cases import Case
from anymla.verification.checks import judged, planned, run_call, run_planned
from anymla.verification.inputs import Inputs
from anymla.verification.judge import Judgement, wrong

FAR_BYTES = 5 << 30
"""Memory of a cache whose last pages are out of reach of 32 bits. Only its pages are ever touched."""

RAGGED = (100, 0, 33, 64), (1, 1, 4, 2)
"""Tokens and query tokens of the sequences."""

LONG = 4200
"""Tokens that a batch-invariant line cuts into two pieces."""

WIDTHS: Mapping[int, tuple[int, int, int]] = {
    192: (128, 64, 128),
    256: (192, 64, 256),
    512: (512, 0, 512),
    640: (512, 64, 512),
}
"""Of a row of prefill, by the widest that it takes: widths of keys without RoPE, RoPE and values."""

ATTENTION = frozenset((Feature.LSE, Feature.SINKS, Feature.MULTI_TOKEN))
INVARIANT = frozenset((Feature.LSE, Feature.BATCH_INVARIANT, Feature.MULTI_TOKEN))
DECODE = Problem("decode", "bf16", "bf16", 20, 512, 64, block_size=64, q_len=4, features=ATTENTION)


@dataclass(frozen=True)
class Form:
    """A call for a launch row.

    Attributes:
        problem: Its facts.
        seq_lens, q_lens: As of a `Case`.
        far: Whether the pages of its cache lie more than 4 GiB apart.
        ties: As of a `Case`.
    """

    problem: Problem
    seq_lens: tuple[int, ...] | None = RAGGED[0]
    q_lens: tuple[int, ...] | None = RAGGED[1]
    far: bool = False
    ties: bool = False


@dataclass(frozen=True)
class RowCase:
    """A launch row and a call that is to take it.

    Attributes:
        kernel: Name in LAUNCH.
        row: One of its rows.
        case: The call.
        far: As of a `Form`.
    """

    kernel: str
    row: Launch
    case: Case
    far: bool = False

    @property
    def id(self) -> str:
        """A name to read, of the row and the call."""
        return f"{row_named(self.kernel, self.row)}: {self.case.id}{'-over 4 GiB' if self.far else ''}"


def row_named(kernel: str, row: Launch | None) -> str:
    """A launch row with its kernel, in a few words."""
    # The calls of the audit import Triton.
    from anymla.verification.audit.run import in_short

    return f"{kernel} {in_short(row)}" if row else kernel


def row_names(arch: str, op: str = "") -> list[str]:
    """All launch rows of a chip, or those that have calls of one operation."""
    pairs = ((kernel, row) for kernel in _kernels() for row in launch_rows(kernel, arch))
    return [row_named(*pair) for pair in pairs if not op or _forms(*pair, arch, op)]


def row_cases(machine: Machine, op: str = "", *, quick: bool = False) -> Iterator[RowCase]:
    """Calls for every launch row of a chip.

    Args:
        machine: The chip.
        op: One of OPS: only its calls. Empty: all.
        quick: Only one call a row.
    """
    for kernel in _kernels():
        for row in launch_rows(kernel, machine.arch):
            forms = _forms(kernel, row, machine.arch, op)
            for seed, form in enumerate(forms[:1] if quick else forms):
                lens = form.seq_lens, form.q_lens
                case = Case("right", form.problem, 0.07, *lens, "near", ties=form.ties, seed=seed)
                yield RowCase(kernel, row, case, form.far)


def _forms(kernel: str, row: Launch, arch: str, op: str) -> list[Form]:
    """The forms of a launch row, of one operation or of all; none of a kernel that is not in FORMS."""
    flavour = ARCHES[arch].fp8_flavour.removeprefix("e4m3")
    forms = FORMS[kernel](row, flavour) if kernel in FORMS else ()
    return [form for form in forms if op in ("", form.problem.op)]


def check_row(wanted: RowCase, backend: str, machine: Machine, emulator: Emulator) -> Judgement:
    """Execute a call with its launch row alone to choose from, and judge it; a crash is a finding.

    Args:
        wanted: The row and the call.
        backend: Whose kernels.
        machine: The emulated chip.
        emulator: Of that chip. One order of the waves is enough for memory that is too large to copy.
    """
    orders, problem = emulator.orders, wanted.case.problem
    emulator.launches.clear()

    def run(near: Inputs) -> Any:
        call = far_apart(near) if wanted.far else near
        attends = problem.op in ("decode", "sparse_decode", "prefill")
        if attends:
            plan = planned(call, problem, backend)
            result = run_planned(call, plan, return_lse=Feature.LSE in problem.features)
        else:
            result = run_call(call, backend)
        if wanted.far:
            near.cache.storage.copy_(call.cache.storage)
        return result

    with mock.patch.dict(LAUNCH, {(wanted.kernel, machine.arch): (wanted.row,)}):
        try:
            emulator.orders = orders[:1] if wanted.far else orders
            call = wanted.case.inputs()
            found = judged(call, call, run)
            taken = rows_taken(emulator.launches, machine.arch)
        except Exception as error:  # what a kernel raises is not ours to foresee
            return wrong(f"{type(error).__name__}: {error}")
        finally:
            emulator.orders = orders
    name = row_named(wanted.kernel, wanted.row)
    return found if name in taken else wrong(f"launches got {', '.join(sorted(taken))}; need {name}")


def rows_taken(launches: Iterable[Launched], arch: str) -> set[str]:
    """The launch rows of what was executed, in a few words; kernels without rows by their name."""
    found = set()
    for launched in launches:
        source, kernel = launched.source, KERNELS.get(launched.kernel, launched.kernel)
        options = {"num_warps": launched.num_warps, "num_stages": launched.num_stages}
        made = Specialisation(kernel, source.fn, source.signature, source.constants, source.attrs, options)
        found.add(row_named(kernel, made.row(arch)))
    return found


def far_apart(call: Inputs) -> Inputs:
    """The call with its cache in pages that are spread over FAR_BYTES."""
    near = call.cache.storage
    pages, page, width = near.shape
    whole = torch.empty(FAR_BYTES // near.itemsize, dtype=near.dtype)
    # A page starts where a tensor might, and the last one ends inside.
    step = (len(whole) - page * width) // max(pages - 1, 1) // 256 * 256
    placed = whole.as_strided((pages, page, width), (step, width, 1))
    placed.copy_(near)
    cache: KVCache = replace(call.cache, data=placed.view(call.cache.format.dtype))
    if call.op == "prefill":
        return replace(call, options={**call.options, "cache": cache})
    return replace(call, tensors=(*call.tensors[:2], cache, *call.tensors[3:]))


def _kernels() -> Sequence[str]:
    return list(dict.fromkeys(kernel for kernel, _ in LAUNCH))


def _flavours(own: str) -> tuple[str, str, str, str]:
    """fp8 caches and rows of 656 bytes, of the chip's own flavour and of the other."""
    other = "fnuz" if own == "fn" else "fn"
    tiled = {"fn": "fp8_ds_mla", "fnuz": "fp8_ds_mla_fnuz"}
    return f"fp8_e4m3{own}", f"fp8_e4m3{other}", tiled[own], tiled[other]


def _attend(row: Launch, own: str) -> Iterator[Form]:
    # The last tile of a sequence is never full.
    usual = replace(DECODE, num_heads=row.block_m + 4)
    sparse = replace(usual, op="sparse_decode", topk=70, q_len=1)
    fp8, foreign, tiled, foreign_tiled = _flavours(own)
    yield Form(usual)
    yield Form(replace(usual, q_dtype="fp16", kv_format="fp16", block_size=16))
    yield Form(replace(usual, block_size=1, qk_rope_head_dim=0, features=ATTENTION | {Feature.NON_CAUSAL}))
    yield Form(replace(usual, kv_lora_rank=256, qk_rope_head_dim=32))
    yield Form(replace(usual, features=INVARIANT))
    yield Form(replace(usual, kv_format=fp8))
    yield Form(replace(usual, kv_format=foreign, block_size=1))
    yield Form(replace(usual, kv_format=tiled))
    yield Form(usual, far=True)
    yield Form(replace(usual, kv_format=fp8, block_size=16), far=True)
    yield Form(replace(sparse, block_size=16), (90,), None)
    yield Form(replace(sparse, kv_format=foreign), (90,), None, far=True)
    yield Form(replace(sparse, kv_format=tiled), (90,), None)
    yield Form(replace(sparse, kv_format=foreign_tiled), (90,), None, far=True)
    yield Form(replace(usual, q_dtype=fp8, kv_format=fp8))
    yield Form(replace(usual, q_dtype=foreign, kv_format=foreign, block_size=16, qk_rope_head_dim=0))
    yield Form(replace(sparse, q_dtype=fp8, kv_format=fp8, block_size=16), (90,), None)


def _combine(row: Launch, own: str) -> Iterator[Form]:
    few = replace(DECODE, num_heads=3, q_len=1)
    yield Form(few, (130,), None)
    yield Form(replace(few, kv_lora_rank=128, features=INVARIANT), (LONG, 5), None)


def _prefill(row: Launch, own: str) -> Iterator[Form]:
    nope, rope, value = WIDTHS[row.widest]
    usual = replace(DECODE, op="prefill", num_heads=2, block_size=16, q_len=row.block_m + 6)
    usual = replace(usual, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
    lens = (70, 0, 33), (row.block_m + 6, 40, 1)
    yield Form(usual, *lens)
    yield Form(replace(usual, features=ATTENTION | {Feature.NON_CAUSAL}), *lens)
    yield Form(replace(usual, q_dtype="fp16", kv_format="fp16"), None, lens[1])


def _expand(row: Launch, own: str) -> Iterator[Form]:
    usual = replace(DECODE, op="prefill", num_heads=2, block_size=16, q_len=40, features=INVARIANT)
    yield Form(replace(usual, qk_nope_head_dim=128, v_head_dim=128), (row.block_m + 6, 0), (3, 40))
    wide = replace(usual, q_dtype="fp16", kv_format="fp16", qk_nope_head_dim=192, v_head_dim=256)
    yield Form(wide, (20, 0), (3, 40))


def _gather(row: Launch, own: str) -> Iterator[Form]:
    usual = replace(DECODE, op="prefill", num_heads=1, qk_nope_head_dim=64, v_head_dim=64)
    lens = (70, 0, 33), (3, 4, 1)
    fp8, foreign, tiled, foreign_tiled = _flavours(own)
    yield Form(usual, *lens)
    yield Form(replace(usual, q_dtype="fp16", kv_format="fp16", block_size=1), *lens)
    yield Form(replace(usual, kv_format=fp8, block_size=16), *lens)
    yield Form(replace(usual, kv_format=foreign, block_size=1, qk_rope_head_dim=0), *lens)
    yield Form(replace(usual, kv_format=tiled), *lens)
    yield Form(replace(usual, kv_format=foreign_tiled, block_size=16), *lens)
    yield Form(usual, *lens, far=True)
    yield Form(replace(usual, kv_format=tiled), *lens, far=True)


def _index(heads: int, q_dtype: str, kv_format: str, **facts: Any) -> Problem:
    return Problem("index_topk", q_dtype, kv_format, heads, 128, 0, block_size=64, topk=33, **facts)


def _index_logits(row: Launch, own: str) -> Iterator[Form]:
    keys, foreign = ("index_k_fnuz", "index_k") if own == "fnuz" else ("index_k", "index_k_fnuz")
    fp8, other, _, _ = _flavours(own)
    yield Form(_index(64, fp8, keys, q_len=4))
    yield Form(_index(20, "bf16", foreign, q_len=4))
    yield Form(_index(16, other, keys, q_len=4))
    yield Form(_index(32, other, foreign, q_len=4))
    yield Form(_index(20, "fp16", "bf16", q_len=4))
    yield Form(_index(64, fp8, keys, q_len=4), far=True)


def _narrow(row: Launch, own: str) -> Iterator[Form]:
    yield Form(_index(16, "bf16", "bf16"), (row.block_n + 300,), None)
    # More ties than there is room for.
    yield Form(_index(16, "bf16", "bf16", q_len=4), (row.block_n + 300,), (4,), ties=True)


def _choose(row: Launch, own: str) -> Iterator[Form]:
    yield Form(_index(16, "bf16", "bf16", q_len=4))
    # Two pieces, of which the second level chooses.
    yield Form(_index(16, "bf16", "bf16"), (row.block_n + 300,), None)
    yield Form(_index(16, "bf16", "bf16", q_len=4), (row.block_n + 300,), (4,), ties=True)


def _cache_write(row: Launch, own: str) -> Iterator[Form]:
    fp8, foreign, tiled, foreign_tiled = _flavours(own)
    usual = Problem("write_cache", "bf16", "bf16", 1, 512, 64, block_size=16)
    for kv_format in ("bf16", "fp16", fp8, foreign, tiled, foreign_tiled):
        yield Form(replace(usual, kv_format=kv_format), (13, 5), None)
    for kv_format in ("index_k", "index_k_fnuz"):
        keys = replace(usual, kv_format=kv_format, kv_lora_rank=128, qk_rope_head_dim=0)
        yield Form(keys, (13, 5), None)
    for kv_format in ("bf16", fp8, tiled):
        yield Form(replace(usual, kv_format=kv_format), (13, 5), None, far=True)


FORMS: Mapping[str, Callable[[Launch, str], Iterator[Form]]] = {
    "attend": _attend,
    "combine": _combine,
    "prefill": _prefill,
    "expand": _expand,
    "gather": _gather,
    "index_logits": _index_logits,
    "narrow": _narrow,
    "choose": _choose,
    "cache_write": _cache_write,
}
"""The forms of each kernel that has launch rows, the usual one first."""
