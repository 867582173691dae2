"""The fuzzer: random calls over all that a backend's rows offer, each made from its seed and number alone.

What kernels are compiled for (widths, pages, formats, options, tiles) is drawn once a family; lengths, ragged
structure, heads within a tile, values, poison and indices are drawn anew for each number. So a GPU compiles
some hundreds of kernels, however many numbers are run.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import torch

from anymla.hardware.probe import Machine
from anymla.kv_cache import KV_FORMATS
from anymla.models import MODELS
from anymla.problem import OPS, Feature, Problem
from anymla.verification.batches import moved, num_sequences
from anymla.verification.cases import DTYPES, Case, offered
from anymla.verification.checks import judged, outputs_of, planned, run_call, run_planned, same_bits
from anymla.verification.inputs import Inputs
from anymla.verification.judge import Judgement, together, wrong
from anymla.verification.memory import POISONS

FAMILIES = 180
"""Number n is of family n % FAMILIES."""

ROW_CLASS = 16
"""Heads × query tokens are alike, to a kernel, if they fill as many tiles of this many rows."""

LONGER = 8
"""Times as many keys as others can an indexer have: it must be kept from ranking all of them at once."""

_SHARES = {"decode": 9, "sparse_decode": 6, "prefill": 4, "write_cache": 2, "index_topk": 2}
_MODEL_WIDTHS = sorted(
    {(m.kv_lora_rank, m.qk_rope_head_dim, m.qk_nope_head_dim, m.v_head_dim) for m in MODELS.values()}
)
_PAGES = (1, 1, 16, 16, 64, 64, 64, 2, 3, 5, 7, 32, 48, 100, 128, 256, 480)
_EDGES = tuple(edge + step for edge in (16, 32, 64, 128, 256) for step in (-1, 0, 1))


@dataclass(frozen=True)
class Extent:
    """How large a call may be.

    Attributes:
        heads: The most heads.
        keys: The longest sequence.
        sequences: The most sequences, or query tokens of a sparse decode.
        work: Products, at most about.
    """

    heads: int = 130
    keys: int = 3000
    sequences: int = 13
    work: float = 4e9


GPU, CPU = Extent(), Extent(keys=700, sequences=7, work=8e6)
"""What takes some hundredths of a second there, the reference and all."""


@dataclass(frozen=True)
class Family:
    """What the calls of a family have in common.

    Attributes:
        problem: Facts; num_heads, q_len and topk stand for all that kernels take as alike.
        views: Whether tensors are views with odd strides.
        planned: Whether calls are made through a plan that knows bounds, or through `api`.
        given: Whether outputs are given.
        counted: Whether a sparse call has counts.
        cached: Whether a prefill has a cache.
        lone: Whether there is only one sequence.
    """

    problem: Problem
    views: bool
    planned: bool
    given: bool
    counted: bool
    cached: bool
    lone: bool

    @property
    def has_offsets(self) -> bool:
        """Whether a decode or index call has qo_indptr."""
        return self.problem.q_len > 1


@dataclass(frozen=True)
class Fuzzed:
    """One call of the fuzzer.

    Attributes:
        seed, number: What it is made from.
        family: What it shares with others.
        case: Sizes, lengths and traps.
    """

    seed: int
    number: int
    family: Family
    case: Case

    @property
    def id(self) -> str:
        """A name to read."""
        how = [word for word in ("planned", "given", "counted", "lone") if getattr(self.family, word)]
        lens, q_lens = self.case.seq_lens, self.case.q_lens
        return f"{self.seed}:{self.number} {self.case.id} {'+'.join(how)} lens {lens} q {q_lens}"

    def inputs(self, device: torch.device | str) -> Inputs:
        """The tensors of the call; a sparse one has -1 anywhere, and counts only if its family has."""
        call = self.case.inputs(device)
        if call.op != "sparse_decode":
            return call
        indices, counts = call.options["indices"], call.options["counts"]
        rng = torch.Generator().manual_seed(self.case.seed)
        holes = torch.rand(indices.shape, generator=rng) < torch.rand((len(indices), 1), generator=rng) ** 4
        holes = holes.to(device)
        if not self.family.counted:
            holes |= torch.arange(indices.shape[1], device=device) >= counts[:, None]
            call.options["counts"] = None
        indices.masked_fill_(holes, -1)
        return call

    @property
    def bounds(self) -> dict[str, int]:
        """What a plan of this family is told of lengths."""
        if self.case.problem.op not in ("decode", "prefill"):
            return {}
        return {"max_q_len": self.family.problem.q_len}


def fuzzed(backend: str, machine: Machine, seed: int, number: int, extent: Extent | None = None) -> Fuzzed:
    """The call of a number.

    Args:
        backend: The name of rows of BACKENDS that offer something on the machine.
        machine: Where it runs.
        seed: Of the whole run.
        number: Of the call.
        extent: How large it may be. None: what suits the machine.

    Returns:
        The call; always the same for the same arguments.
    """
    extent = extent or (CPU if machine.arch == "cpu" else GPU)
    family = _family(backend, machine, seed, number % FAMILIES, extent)
    return Fuzzed(seed, number, family, _case(Random(f"case {seed} {number}"), family, extent))


def check(
    call: Fuzzed, backend: str, device: torch.device, right_on: torch.device | None = None
) -> Judgement:
    """Run and judge one call; a crash is a finding like a wrong number.

    Args:
        call: From `fuzzed`.
        backend: The name that it was made for.
        device: Where it runs.
        right_on: Where the right answer is worked out. None: there as well, for a GPU is quick in fp64.
    """
    try:
        return _checked(call, backend, device, right_on or device)
    except Exception as error:  # what a kernel raises is not ours to foresee
        return wrong(f"{type(error).__name__}: {error}")


def _checked(drawn: Fuzzed, backend: str, device: torch.device, right_on: torch.device) -> Judgement:
    family, problem = drawn.family, drawn.case.problem
    features, found = problem.features, list[Judgement]()

    def run(call: Inputs) -> Any:
        if not family.planned:
            return_lse = Feature.LSE in features
            return run_call(call, backend, return_lse=return_lse, views=family.views, given=family.given)
        outputs = outputs_of(call, Feature.LSE in features, family.views)
        if not family.given:
            outputs = {"return_lse": outputs["return_lse"]}
        got = run_planned(call, planned(call, problem, backend, **drawn.bounds), **outputs)
        if Feature.BATCH_INVARIANT in features and num_sequences(call) > 1:
            order = list(range(num_sequences(call)))
            Random(drawn.case.seed).shuffle(order)
            found.append(same_bits(call, got, order[: len(order) // 2 + 1], problem, backend, **drawn.bounds))
        return got

    call = drawn.inputs(right_on)
    return together(judged(call, call if right_on == device else moved(call, device), run), *found)


@lru_cache(maxsize=4 * FAMILIES)
def _family(backend: str, machine: Machine, seed: int, index: int, extent: Extent) -> Family:
    """Draw until the backend offers it and the format can hold it."""
    rng = Random(f"family {backend} {seed} {index}")
    # Each operation has its share of families, whatever is refused most.
    ops = [op for op in OPS for _ in range(_SHARES[op])]
    for _ in range(10):
        op = rng.choice(ops)
        for _ in range(300):
            family = _draw_family(rng, op, extent)
            p = family.problem
            held = KV_FORMATS[p.kv_format].refusal(p.kv_lora_rank, p.qk_rope_head_dim) is None
            if held and offered(p, backend, machine):
                # Of those that can have queries in fp8 a third do.
                alike = replace(p, q_dtype=p.kv_format)
                able = p.op in ("decode", "sparse_decode") and p.kv_format not in DTYPES
                in_fp8 = able and offered(alike, backend, machine) and rng.random() < 1 / 3
                return replace(family, problem=alike) if in_fp8 else family
    raise AssertionError(f"{backend} offers nothing that is drawn on {machine.arch}")


def _draw_family(rng: Random, op: str, extent: Extent) -> Family:
    rank, rope, nope, value = rng.choice(_MODEL_WIDTHS)
    if rng.random() < 0.4:
        rank = rng.choice((16, 40, 64, 100, 128, 256, 384, 500, 512))
        rope = rng.choice((0, 2, 6, 16, 32, 64, 96, 128))
        nope, value = (
            rng.choice((0 if rope else 8, 24, 32, 64, 96, 128, 192, 256)),
            rng.choice((24, 40, 64, 128, 192, 256)),
        )
    if op == "index_topk":
        rank, rope = rng.choice((64, 128)), 0
    q_dtype = rng.choice(("bf16", "bf16", "bf16", "fp16", "fp32"))
    kv_format = rng.choice((q_dtype, q_dtype, "fp8_e4m3fn", "fp8_ds_mla", *KV_FORMATS))
    cached = op != "prefill" or rng.random() < 0.7
    planned = rng.random() < 0.6 and op in ("decode", "sparse_decode", "prefill")
    heads = rng.choice((rng.randint(1, extent.heads), 1, 8, 16, 20, 32, 64, 128))
    q_len = rng.choice((1, 1, 1, 8, rng.randint(2, 8))) if op in ("decode", "index_topk") else 1
    if op == "prefill":
        q_len = rng.choice((8, 70, 160))
    elif q_len > 1 and not planned:
        # Through `api` nobody says how the query tokens are shared out, so their sum is the bound.
        q_len = rng.choice((5, 9, 14))
    asked = {
        Feature.LSE: rng.random() < 0.7,
        Feature.SINKS: rng.random() < 0.5,
        Feature.NON_CAUSAL: op != "sparse_decode" and rng.random() < 0.25,
        Feature.BATCH_INVARIANT: planned and rng.random() < 0.3,
        Feature.CACHED_CONTEXT: op == "prefill" and cached,
    }
    attends = op in ("decode", "sparse_decode", "prefill")
    features = {feature for feature, wanted in asked.items() if wanted and attends}
    problem = Problem(
        op,
        q_dtype,
        kv_format if cached else q_dtype,
        1 if op == "write_cache" else min(heads, extent.heads),
        rank,
        rope,
        nope if op == "prefill" else 0,
        value if op == "prefill" else 0,
        rng.choice(_PAGES) if cached else 1,
        q_len,
        rng.choice((1, 5, 33, 64, 100, 256, 512, 2048, 4096)) if op in ("sparse_decode", "index_topk") else 0,
        frozenset(features | ({Feature.MULTI_TOKEN} if q_len > 1 else set())),
    )
    return Family(
        problem,
        views=rng.random() < 0.4,
        planned=planned,
        given=rng.random() < 0.7,
        counted=rng.random() < 0.6,
        cached=cached,
        lone=rng.random() < 0.08,
    )


def _case(rng: Random, family: Family, extent: Extent) -> Case:
    """Draw what differs within a family."""
    p = family.problem
    heads = rng.choice([h for h in range(1, extent.heads + 1) if _alike(h, p)])
    # Neither one nor a multiple of 16, for which kernels are compiled anew.
    several = [n for n in (2, 2, 3, 3, 4, 5, 7, 13) if n <= extent.sequences]
    seqs = 1 if family.lone else rng.choice(several)
    seq_lens: tuple[int, ...] | None
    q_lens: tuple[int, ...] | None = None
    topk = p.topk
    if p.op == "sparse_decode":
        q_lens = (1,) * seqs
        topk = _topk(rng, p.topk, extent.work / seqs / _products(p, heads, 1))
        seq_lens = (max(2, _length(rng, extent.keys, p.block_size)),)
    elif p.op == "write_cache":
        seq_lens = (_length(rng, 600, p.block_size),)
    else:
        if p.op == "prefill" or family.has_offsets:
            # New tokens are keys as well.
            rows = next(n for n in (160, 70, 8) if n == 8 or n * _products(p, heads, n) * seqs < extent.work)
            q_lens = _q_lens(rng, family, seqs, rows)
        longest = 2 * extent.work / seqs / _products(p, heads, max(1, *q_lens or (1,)))
        longest = int(min(max(longest, 8), extent.keys * (LONGER if p.op == "index_topk" else 1)))
        seq_lens = tuple(_length(rng, longest, p.block_size) for _ in range(seqs))
    if p.op == "index_topk":
        topk = _topk(rng, p.topk, 4096)
    scale = ((p.qk_nope_head_dim or 128) + p.qk_rope_head_dim) ** -0.5 * rng.uniform(0.5, 1.5)
    return Case(
        "right",
        replace(p, num_heads=heads, topk=topk),
        sm_scale=scale,
        seq_lens=seq_lens if family.cached else None,
        q_lens=q_lens,
        sinks=rng.choice(("near", "infinite")) if Feature.SINKS in p.features else "none",
        poison=rng.choice(POISONS),
        views=family.views,
        exact=rng.random() < 0.5,
        seed=rng.getrandbits(31),
        ties=p.op == "index_topk" and rng.random() < 0.5,
    )


def _products(problem: Problem, heads: int, rows: int) -> int:
    """Products for each key of a sequence with so many query tokens."""
    p = problem
    if p.op != "prefill":
        return heads * rows * (2 * p.kv_lora_rank + p.qk_rope_head_dim)
    # Decompressing is dense, and fast for its size.
    attending = rows * (p.qk_nope_head_dim + p.qk_rope_head_dim + p.v_head_dim)
    return heads * (attending + p.kv_lora_rank * (p.qk_nope_head_dim + p.v_head_dim) // 16)


def _alike(heads: int, problem: Problem) -> bool:
    """Whether so many heads are to kernels like those of the problem: tiles, and what divides strides."""
    if problem.op == "write_cache":
        return heads == 1
    one, other = ((h == 1, h % 16 == 0) for h in (heads, problem.num_heads))
    if problem.op == "prefill" or one != other:
        return one == other
    tiles, wanted = (-(-h * problem.q_len // ROW_CLASS) for h in (heads, problem.num_heads))
    return tiles == wanted


def _topk(rng: Random, like: int, most: float) -> int:
    """At most `like` indices, a multiple of 16 if it is one."""
    step = 16 if like % 16 == 0 else 1
    topk = rng.randint(1, max(1, int(min(like, most) / step))) * step
    return topk if step == 16 or topk % 16 else topk - 1


def _q_lens(rng: Random, family: Family, seqs: int, most: int) -> tuple[int, ...]:
    """Query tokens of each sequence; the call has one more, and neither one nor a multiple of 16 in all."""
    bound = min(family.problem.q_len, most)
    if family.problem.op != "prefill" and not family.planned:
        cuts = sorted(rng.randint(0, bound - 1) for _ in range(seqs - 1))
        return tuple(b - a for a, b in zip((0, *cuts), (*cuts, bound - 1), strict=True))
    while True:
        edges = [edge for edge in (0, 1, *_EDGES, bound) if edge <= bound]
        drawn = [rng.choice((rng.randint(0, min(bound, 8)), rng.choice(edges))) for _ in range(seqs)]
        if sum(drawn) and (sum(drawn) + 1) % 16:
            return tuple(drawn)


def _length(rng: Random, longest: int, page: int) -> int:
    """Tokens of a sequence: none, one, at the edge of a tile or page, few, or many."""
    kind = rng.random()
    if kind < 0.2:
        length = rng.choice((0, 1))
    elif kind < 0.5:
        length = rng.choice((*_EDGES, page - 1, page, page + 1, 2 * page, 3 * page + 1))
    else:
        length = rng.randint(2, 200) if kind < 0.85 else rng.randint(2, max(2, longest))
    return max(0, min(length, longest))
