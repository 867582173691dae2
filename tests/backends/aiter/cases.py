"""The product of releases, chips, heads, dtypes, query tokens and lengths; how one case is run and judged."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import pytest
import torch
from double import AiterDouble
from torch import Tensor

from anymla.backends.aiter_mla import facts, operands
from anymla.contract import AttentionOutput, Batch
from anymla.errors import NoBackend
from anymla.hardware.probe import Machine
from anymla.kv_cache import KVCache
from anymla.merging import apply_sinks
from anymla.models import MODELS
from anymla.plans import decode_plan, features, sparse_plan
from anymla.problem import Feature, Problem
from anymla.verification.eager import loops_for
from anymla.verification.judge import judge

UNITS = 64
"""Compute units of the chip that is planned for: enough that short sequences are split."""
SM_SCALE = 0.07
SLOTS = 192
LENGTHS = {
    "one key": (1,),
    "ragged": (33, 1, 17),
    "with empty": (0, 70, 0, 16),
    "a tail of one": (65, 129),
    "shorter than the query": (2, 9, 3),
    "all empty": (0, 0),
    "many": (5, 4, 3, 2, 1, 6) * 6,
}
"""Keys of each sequence."""
ORDERS = [torch.randperm(576, generator=torch.Generator().manual_seed(seed)) for seed in range(40)]
"""Orders in which a kernel might sum the products of a logit; of a few values more are needed."""
COLUMNS = slice(0, 512, 16)
"""Columns that are judged: what can go wrong here goes wrong in a whole row."""
KINDS = {
    "bf16": ("bf16", "bf16"),
    "fp8 cache": ("bf16", "fp8"),
    "fp8": ("fp8", "fp8"),
}
ASKED = ((False, False), (True, False), (False, True), (True, True))
"""Whether an lse is asked for, and whether there are sinks."""


@dataclass(frozen=True)
class Case:
    """One element of the product."""

    release: str
    arch: str
    heads: int
    kind: str
    q_len: int
    lse: bool
    sinks: bool
    lengths: str
    op: str = "decode"

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


def releases() -> tuple[str, ...]:
    """Every recorded release, those too old to run a kernel included."""
    return facts.releases()


def head_counts() -> list[int]:
    """Local heads of every model at every tensor parallel size up to 16."""
    sizes = (1, 2, 4, 8, 16)
    return sorted(
        {model.num_heads // tp for model in MODELS.values() for tp in sizes if model.num_heads % tp == 0}
    )


def lengths_for(q_len: int) -> list[str]:
    """Names of LENGTHS; many sequences only of one token, where AITER has a gate for them."""
    return [name for name in LENGTHS if q_len == 1 or name != "many"]


def product(of: Sequence[str] | None = None) -> Iterator[Case]:
    """All of it, or that of some releases."""
    for release in of or releases():
        for arch in ("gfx942", "gfx950"):
            for heads in head_counts():
                for kind in KINDS:
                    for q_len in range(1, 9):
                        for lse, sinks in ASKED:
                            for lengths in lengths_for(q_len):
                                yield Case(release, arch, heads, kind, q_len, lse, sinks, lengths)
                    for lengths in LENGTHS:
                        for lse, sinks in ASKED:
                            yield Case(release, arch, heads, kind, 1, lse, sinks, lengths, "sparse_decode")


def sample(count: int, seed: int = 0) -> list[Case]:
    """Cases drawn from the product, half of them from releases and heads at random, none twice."""
    rng, found = random.Random(seed), dict[Case, None]()
    heads, names = head_counts(), [r for r in releases() if facts.recorded_dispatch(r)]
    while len(found) < count:
        op = rng.choice(("decode", "decode", "decode", "sparse_decode"))
        q_len = 1 if op == "sparse_decode" else rng.choice((1, 1, 2, 3, 4, 5, 6, 7, 8))
        found[
            Case(
                release=rng.choice(names),
                arch=rng.choice(("gfx942", "gfx950")),
                heads=rng.choice(heads),
                kind=rng.choice(list(KINDS)),
                q_len=q_len,
                lse=rng.random() < 0.4,
                sinks=rng.random() < 0.4,
                lengths=rng.choice(lengths_for(q_len)),
                op=op,
            )
        ] = None
    return list(found)


def problem_of(case: Case) -> Problem:
    """What is asked."""
    flavour = "e4m3fnuz" if case.arch == "gfx942" else "e4m3fn"
    q, kv = (f"fp8_{flavour}" if one == "fp8" else one for one in KINDS[case.kind])
    several = {Feature.MULTI_TOKEN} if case.q_len > 1 else set()
    asked = features(None, sinks=case.sinks, return_lse=case.lse) | several
    topk = 40 if case.op == "sparse_decode" else 0
    return Problem(
        case.op, q, kv, case.heads, 512, 64, block_size=8, q_len=case.q_len, topk=topk, features=asked
    )


def machine_of(case: Case) -> Machine:
    """Where it would run, with that release."""
    packages = (("aiter", case.release), ("torch", ""), ("triton", ""))
    return Machine(case.arch, packages, assumed=True, multiprocessors=UNITS)


def run(case: Case, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run one case against the double: "right", or the reason of a refusal; anything else raises."""
    return run_with(AiterDouble(case.release, case.arch, UNITS), case, monkeypatch)


def run_with(double: AiterDouble, case: Case, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run one case against a double of its release."""
    lens = LENGTHS[case.lengths]
    problem, machine = problem_of(case), machine_of(case)
    if _has_table(case):
        double.install(monkeypatch)
    sinks = _sinks(case)
    given = {"sm_scale": SM_SCALE, "sinks": sinks, "return_lse": case.lse}
    try:
        if case.op == "decode":
            batch = _batch(lens, case.q_len)
            plan = decode_plan(batch, problem, "aiter", machine)
        else:
            sparse = sparse_plan(len(lens), problem, torch.device("cpu"), "aiter", machine)
    except NoBackend as refusal:
        assert refusal.verdicts[0].reasons  # type: ignore[attr-defined]
        return str(refusal)
    if case.op == "decode":
        ql_nope, q_pe = _queries(case.heads, batch.num_tokens)
        cache = _cache(problem.kv_format, used=_used(batch, lens))
        got = plan.run(ql_nope, q_pe, cache, **given)
    else:
        ql_nope, q_pe = _queries(case.heads, len(lens))
        indices, _, slots = _indices(lens)
        cache = _cache(problem.kv_format, used=sorted({0, *(s for row in slots for s in row)}))
        got = sparse.run(ql_nope, q_pe, cache, indices=indices, **given)
    reference, eager = _expected(replace(case, release="", arch=problem.kv_format))
    judge(AttentionOutput(got.out[..., COLUMNS], got.lse), reference, *eager).require_pass()
    return "right"


def _has_table(case: Case) -> bool:
    return facts.recorded_dispatch(case.release) is not None


def _batch(lens: tuple[int, ...], q_len: int) -> Batch:
    """Sequences on pages of 8 slots, last page first."""
    pages = max(max(-(-n // 8) for n in lens), 1)
    table = torch.zeros(len(lens), pages, dtype=torch.int32)
    free = iter(range(SLOTS // 8 - 1, 0, -1))
    for row, n in enumerate(lens):
        for page in range(-(-n // 8)):
            table[row, page] = next(free, 1)
    indptr = torch.arange(0, (len(lens) + 1) * q_len, q_len, dtype=torch.int32)
    return Batch.of(
        seq_lens=torch.tensor(lens, dtype=torch.int32), block_table=table, qo_indptr=indptr, block_size=8
    )


def _slots(batch: Batch, lens: tuple[int, ...], q_len: int) -> list[list[int]]:
    """Slots of all keys of the sequence of each query token."""
    found = []
    for row, n in enumerate(lens):
        pages = batch.block_table[row].tolist()
        found += [[pages[k // 8] * 8 + k % 8 for k in range(n)]] * q_len
    return found


def _used(batch: Batch, lens: tuple[int, ...]) -> list[int]:
    return sorted({0, *(s for row in _slots(batch, lens, 1) for s in row)})


def _seen(lens: tuple[int, ...], q_len: int) -> list[int]:
    return [max(n - q_len + 1 + t, 0) for n in lens for t in range(q_len)]


def _sinks(case: Case) -> Tensor | None:
    return torch.linspace(-2, 4, case.heads) if case.sinks else None


def _indices(lens: tuple[int, ...]) -> tuple[Tensor, list[int], list[list[int]]]:
    """Up to 40 slots a row, with -1 among them."""
    torch.manual_seed(7)
    indices = torch.full((len(lens), 40), -1, dtype=torch.int32)
    slots = []
    for row, n in enumerate(lens):
        count = min(n, 30)
        chosen = torch.randperm(SLOTS - 1)[:count] + 1
        places = torch.randperm(40)[:count].sort().values
        indices[row, places] = chosen.int()
        slots.append(chosen.tolist())
    return indices, [len(row) for row in slots], slots


@lru_cache(maxsize=64)
def _queries(heads: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads * 1000 + tokens)
    q = torch.randn(tokens, heads, 576, generator=generator).bfloat16()
    return q[..., :512], q[..., 512:]


@lru_cache(maxsize=4)
def _values(kv_format: str) -> KVCache:
    generator = torch.Generator().manual_seed(3)
    scale = None if kv_format == "bf16" else torch.tensor([0.02])
    cache = KVCache.allocate(
        SLOTS // 8, 8, kv_lora_rank=512, qk_rope_head_dim=64, kv_format=kv_format, scale=scale
    )
    rows = torch.randn(SLOTS, 576, generator=generator).bfloat16()
    cache.write(rows[:, :512], rows[:, 512:], torch.arange(SLOTS))
    return cache


def _cache(kv_format: str, used: list[int]) -> KVCache:
    """A cache that has NaN wherever no sequence of the batch has a key, but for slot 0."""
    full = _values(kv_format)
    data = full.data.clone()
    is_unused = torch.ones(SLOTS, dtype=torch.bool)
    is_unused[used] = False
    bytes_ = data.view(torch.uint8).view(SLOTS, -1)
    # 0xFFFF is NaN in bf16, 0xFF in e4m3fn, 0x80 in e4m3fnuz.
    bytes_[is_unused] = 0x80 if "fnuz" in kv_format else 0xFF
    return KVCache(data, full.format, 512, 64, full.scale)


@lru_cache(maxsize=16)
def _expected(case: Case) -> tuple[AttentionOutput, tuple[AttentionOutput, ...]]:
    """The fp64 result of a case over the keys that each row sees, and runs in its own dtypes.

    The queries are those that the kernel is given. No release matters, and of the chip only the cache's
    format, which stands in its place.
    """
    lens, kv_format = LENGTHS[case.lengths], case.arch
    if case.op == "decode":
        batch = _batch(lens, case.q_len)
        q = torch.cat(_queries(case.heads, batch.num_tokens), -1)
        seen, slots = _seen(lens, case.q_len), _slots(batch, lens, case.q_len)
    else:
        q = torch.cat(_queries(case.heads, len(lens)), -1)
        _, seen, slots = _indices(lens)
    cache = _values(kv_format)
    if KINDS[case.kind][0] == "fp8":
        rounded, scale = operands.rounded(q, cache.data.dtype)
        exact = rounded.double() * scale.double()
    else:
        exact = q.double()
    rows = cache.read(torch.arange(SLOTS), torch.float64)
    width = max([*seen, 1])
    keys = torch.zeros(len(seen), width, 576, dtype=torch.float64)
    hidden = torch.ones(len(seen), width, dtype=torch.bool)
    for at, (count, row) in enumerate(zip(seen, slots, strict=True)):
        keys[at, :count], hidden[at, :count] = rows[row[:count]], False
    sinks = _sinks(case)
    reference = _attention(exact, keys, hidden, sinks)
    q32, keys32 = exact.float(), keys.float()
    runs = [_attention(q32, keys32, hidden, sinks), _in_bf16(q32, keys32, hidden, sinks)]
    eager = [AttentionOutput(part.out.bfloat16(), part.lse) for part in runs]
    # The order of a logit's sum shows in the lse; the weights' rounding is most of what shows in out.
    assert reference.lse is not None
    orders = ORDERS[: loops_for(reference.lse)]
    lses = (_scores(q32, keys32, hidden, order).logsumexp(-1) for order in orders)
    eager += [AttentionOutput(eager[0].out, lse) for lse in lses]
    return reference, tuple(eager)


def _attention(q: Tensor, keys: Tensor, hidden: Tensor, sinks: Tensor | None) -> AttentionOutput:
    scores = _scores(q, keys, hidden, None)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    out = weights @ keys[..., COLUMNS]
    if sinks is not None:
        out = apply_sinks(out, lse, sinks.to(lse.dtype))
    return AttentionOutput(out, lse)


def _scores(q: Tensor, keys: Tensor, hidden: Tensor, order: Tensor | None) -> Tensor:
    """Logits; with an order, summed in it by thirds."""
    if order is None:
        scores = q @ keys.mT
    else:
        parts = [q[..., at] @ keys[..., at].mT for at in order.chunk(3)]
        scores = parts[0] + parts[1] + parts[2]
    return (scores * SM_SCALE).masked_fill(hidden[:, None], -math.inf)


def _in_bf16(q: Tensor, keys: Tensor, hidden: Tensor, sinks: Tensor | None) -> AttentionOutput:
    """With weights rounded, as a kernel multiplies them, and the output rounded before sinks."""
    scores = _scores(q, keys, hidden, None)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    out = (weights.bfloat16().float() @ keys[..., COLUMNS]).bfloat16().float()
    if sinks is not None:
        out = apply_sinks(out, lse, sinks)
    return AttentionOutput(out, lse)
