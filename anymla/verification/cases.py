"""The matrix: cases generated from the rows of BACKENDS and MODELS.

What a row offers is run and judged, what no row of the backend offers must be refused, and a batch must give
each sequence the result that it has in another order, or alone. A new row brings its own cases.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any

import torch

from anymla import select
from anymla.backends import BACKENDS, Backend
from anymla.hardware.probe import Machine
from anymla.hardware.quirks import QUIRKS
from anymla.kv_cache import KV_FORMATS
from anymla.models import MODELS
from anymla.problem import DTYPE_NAMES, FP8_NAMES, KV_FORMAT_NAMES, OPS, Feature, Problem
from anymla.verification.inputs import (
    SINKS,
    Inputs,
    decode_inputs,
    index_inputs,
    prefill_inputs,
    sparse_inputs,
    write_inputs,
)
from anymla.verification.memory import POISONS
from anymla.verification.needles import Widths

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INDEX_DTYPES = {
    **DTYPES,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}
"""Those of absorbed and of index queries."""

WORK = 150_000_000
"""Products of a case, at most about: some tenths of a second for the fp64 reference."""

MOST_CHOSEN = 4096
"""Indices of a query token, each of another key: more than the 2048 of the models."""

MOST_LONG = 128
"""Heads × query tokens of an indexer, at most, that ranks thousands of keys."""

FP8_QUERIES = ("decode", "sparse_decode", "index_topk")
"""Operations whose queries may come in fp8."""

_FEATURES = (Feature.LSE, Feature.SINKS, Feature.NON_CAUSAL)

AXES: Mapping[str, tuple[Any, ...]] = {
    "q_dtype": DTYPE_NAMES,
    "kv_format": KV_FORMAT_NAMES,
    "num_heads": (1, 2, 3, 4, 7, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 256),
    "widths": ((512, 64), (512, 0), (256, 64), (256, 32), (128, 32), (64, 96)),
    "index_widths": ((128, 0), (64, 0)),
    "decompressed": ((128, 128), (192, 256), (64, 64), (256, 256)),
    "block_size": (1, 2, 3, 16, 32, 48, 64, 128, 256, 480),
    "q_len": (1, 2, 3, 4, 5, 6, 7, 8, 17),
    "topk": (1, 5, 33, 64, 128, 192, 512, 2048),
    "features": tuple(frozenset(c) for n in range(len(_FEATURES) + 1) for c in combinations(_FEATURES, n)),
}
"""What is tried of each fact, or pair of facts that belong together."""

BEYOND: Mapping[str, tuple[Any, ...]] = {
    "q_dtype": DTYPE_NAMES,
    "kv_format": KV_FORMAT_NAMES,
    "num_heads": (1, 8, 12, 24, 48, 1025),
    "kv_lora_rank": (64, 128, 256, 1024),
    "qk_rope_head_dim": (0, 32, 256),
    "block_size": (1, 16, 48, 64, 480),
    "q_len": (2, 5, 8, 17),
    "features": tuple(frozenset({feature}) for feature in Feature),
}
"""What is asked of each fact alone; what no row offers must be refused."""

COUNTS = {
    "decode": (20, 150),
    "sparse_decode": (18, 80),
    "prefill": (12, 60),
    "write_cache": (18, 80),
    "index_topk": (18, 80),
}
"""Cases that each row gives to each operation, quick and full."""


@dataclass(frozen=True)
class Case:
    """One thing to verify.

    Attributes:
        check: "right": the result is judged. "refusal": it must be refused. "batch": the sequences in another
            order give the same. "alone": in any batch, they give the same bits.
        problem: What is asked.
        sm_scale: Of the attention.
        seq_lens: Tokens of each sequence (of the context, for prefill; of the whole cache, for a sparse
            decode); None for a prefill without a cache.
        q_lens: Query tokens of each sequence; None is one each, of a sparse decode four in all.
        sinks: One of SINKS.
        poison: One of POISONS.
        views: Whether tensors are views with odd strides.
        exact: For index_topk, whether logits are exact in fp32.
        ties: For index_topk, whether most of them tie.
        seed: Of everything drawn.
        fact: Of a refusal, the fact that is not offered.
        model: The model that asks, if one does.
    """

    check: str
    problem: Problem
    sm_scale: float = 1.0
    seq_lens: tuple[int, ...] | None = ()
    q_lens: tuple[int, ...] | None = None
    sinks: str = "none"
    poison: str = "nan"
    views: bool = False
    exact: bool = True
    ties: bool = False
    seed: int = 0
    fact: str = ""
    model: str = ""

    @property
    def id(self) -> str:
        """A name to read: operation, dtypes, sizes, traps."""
        p = self.problem
        words = [self.check, p.op, *([self.model] if self.model else []), p.q_dtype, p.kv_format]
        words += [f"h{p.num_heads}", f"{p.kv_lora_rank}x{p.qk_rope_head_dim}"]
        words += [f"{p.qk_nope_head_dim}to{p.v_head_dim}"] if p.op == "prefill" else []
        words += [f"page{p.block_size}", f"q{p.q_len}"] + ([f"top{p.topk}"] if p.topk else [])
        words += ["+".join(sorted(f.name.lower() for f in p.features))] if p.features else []
        words += [f"no_{self.fact}"] if self.fact else []
        traps = [self.poison, *(["views"] if self.views else []), *(["ties"] if self.ties else [])]
        words += [*traps, str(self.seed)] if not self.fact else []
        return "-".join(words)

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        """The tensors of the call, made where they are wanted."""
        with torch.device(device):
            return self._inputs()

    def _inputs(self) -> Inputs:
        p = self.problem
        hostile: dict[str, Any] = {
            "seed": self.seed,
            "q_dtype": INDEX_DTYPES[p.q_dtype],
            "kv_format": p.kv_format,
            "block_size": p.block_size,
            "views": self.views,
        }
        if p.op == "write_cache":
            return write_inputs(p.kv_lora_rank, p.qk_rope_head_dim, sum(self.seq_lens or ()), **hostile)
        if p.op == "index_topk":
            poison = "nan" if self.poison == "needle" else self.poison
            return index_inputs(
                p.num_heads,
                p.kv_lora_rank,
                self.seq_lens or (),
                self.q_lens,
                p.topk,
                exact=self.exact,
                ties=self.ties,
                poison=poison,
                **hostile,
            )
        widths = Widths(
            p.num_heads,
            p.kv_lora_rank,
            p.qk_rope_head_dim,
            p.qk_nope_head_dim,
            p.v_head_dim,
            self.sm_scale,
        )
        hostile |= {"sinks": self.sinks, "poison": self.poison}
        if p.op == "sparse_decode":
            tokens = 4 if self.q_lens is None else sum(self.q_lens)
            return sparse_inputs(widths, max(self.seq_lens or (2,)), p.topk, tokens, **hostile)
        hostile["causal"] = Feature.NON_CAUSAL not in p.features
        if p.op == "decode":
            return decode_inputs(widths, self.seq_lens or (), self.q_lens, **hostile)
        return prefill_inputs(widths, self.seq_lens, self.q_lens or (), **hostile)


def cases(backend: str, machine: Machine, *, quick: bool = False) -> tuple[Case, ...]:
    """All cases of a backend on a machine.

    Args:
        backend: The name of rows of BACKENDS.
        machine: Where it runs.
        quick: Only a part, each value of each fact at least once where that is cheap.

    Returns:
        The cases, those of one operation together; the same every time.
    """
    rows = [row for row in BACKENDS if row.name == backend]
    able = [row for row in rows if row.built and row.arch.accepts(machine.arch)]
    found: list[Case] = []
    for op in OPS:
        for row in able:
            if row.op.accepts(op):
                found += _drawn(row, op, _count(row, op, quick))
        found += _of_models(op, quick)
        if op != "write_cache":
            again = [case for case in found if case.problem.op == op][:: 4 if quick else 5]
            found += [_in_other_batches(case, number) for number, case in enumerate(again)]
        if op == "sparse_decode" and not quick:
            found += _of_many_keys(machine.fp8_flavour)
    judged = (case for case in found if _fits(case))
    sorted_out = (case if offered(case.problem, backend, machine) else _refused(case) for case in judged)
    return tuple({case.id: case for case in chain(sorted_out, _beyond(able, backend, machine))}.values())


def offered(problem: Problem, backend: str, machine: Machine) -> bool:
    """Whether a row of the backend offers a problem on this machine; no quirk and no manifest objects."""
    rows = [row for row in BACKENDS if row.name == backend and row.built and row.arch.accepts(machine.arch)]
    packages = dict(machine.packages)
    quirks = [q for q in QUIRKS if q.refuse and q.applies(problem, backend, machine.arch, packages)]
    able = [row for row in rows if _accepts(row, problem)]
    return not quirks and any(not select.weighed(row, problem, machine).reasons for row in able)


def _accepts(row: Backend, problem: Problem) -> bool:
    return all(getattr(row, fact).accepts(getattr(problem, fact)) for fact in Problem.__dataclass_fields__)


def _count(row: Backend, op: str, quick: bool) -> int:
    """Cases of a row; a quarter if it is for absorbed queries in fp8 alone, for another row has the rest."""
    count = COUNTS[op][0 if quick else 1]
    return count if op == "index_topk" or any(map(row.q_dtype.accepts, DTYPES)) else count // 4


class _Deck:
    """The values of an axis in random order, each once before any comes again."""

    def __init__(self, rng: random.Random, values: Sequence[Any]) -> None:
        self.rng, self.values, self.left = rng, values, list[Any]()

    def deal(self) -> Any:
        """The next value."""
        if not self.left:
            self.left = self.rng.sample(self.values, len(self.values))
        return self.left.pop()


def _drawn(row: Backend, op: str, count: int) -> Iterator[Case]:
    """Cases that mix the values that a row offers."""
    rng = random.Random(f"{row.name} {op}")

    def offers(axis: str, *facts: str) -> _Deck:
        rules = [getattr(row, fact) for fact in facts or (axis,)]
        tried = [(v if facts else (v,), v) for v in AXES[axis]]
        return _Deck(
            rng, [v for parts, v in tried if all(r.accepts(x) for r, x in zip(rules, parts, strict=True))]
        )

    wide = "index_widths" if op == "index_topk" else "widths"
    plain = ("kv_format", "num_heads", "block_size", "q_len", "topk", "features")
    decks = {axis: offers(axis) for axis in plain}
    # A prefill and a write take nothing in fp8, whatever a kernel may round it to.
    names = [name for name in INDEX_DTYPES if op in FP8_QUERIES or not name.startswith("fp8")]
    decks["q_dtype"] = _Deck(rng, [name for name in names if row.q_dtype.accepts(name)])
    decks["widths"] = offers(wide, "kv_lora_rank", "qk_rope_head_dim")
    decks["decompressed"] = offers("decompressed", "qk_nope_head_dim", "v_head_dim")
    # A row may be of something that no axis has.
    for seed in range(count if all(deck.values for deck in decks.values()) else 0):
        facts = {axis: deck.deal() for axis, deck in decks.items()}
        rank, rope = facts.pop("widths")
        nope, width_v = facts.pop("decompressed")
        while KV_FORMATS[facts["kv_format"]].refusal(rank, rope):
            rank, rope = decks["widths"].deal()
        if op == "prefill" and seed % 4 == 3:
            facts |= _without_cache(row, facts)
        facts |= {
            "kv_lora_rank": rank,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": nope,
            "v_head_dim": width_v,
        }
        yield _case(rng, _meaningful(Problem(op, **facts)), seed)


def _without_cache(row: Backend, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a prefill without a cache: pages of one token, in the dtype of the queries."""
    plain = row.block_size.accepts(1) and row.kv_format.accepts(facts["q_dtype"])
    return {"block_size": 1, "kv_format": facts["q_dtype"]} if plain else {}


def _meaningful(problem: Problem) -> Problem:
    """The problem without the facts that its operation does not have."""
    op, features = problem.op, problem.features
    features -= {Feature.NON_CAUSAL} if op == "sparse_decode" else set()
    features = features if op in ("decode", "prefill", "sparse_decode") else frozenset()
    if op == "prefill" and (problem.block_size, problem.kv_format) != (1, problem.q_dtype):
        features |= {Feature.CACHED_CONTEXT}
    has_rows = op in ("decode", "prefill", "index_topk")
    if has_rows and problem.q_len > 1:
        features |= {Feature.MULTI_TOKEN}
    return replace(
        problem,
        features=features,
        num_heads=1 if op == "write_cache" else problem.num_heads,
        q_len=problem.q_len if has_rows else 1,
        topk=problem.topk if op in ("sparse_decode", "index_topk") else 0,
        qk_nope_head_dim=problem.qk_nope_head_dim if op == "prefill" else 0,
        v_head_dim=problem.v_head_dim if op == "prefill" else 0,
    )


def _case(
    rng: random.Random, problem: Problem, seed: int, sm_scale: float | None = None, model: str = ""
) -> Case:
    """A case of a problem, its lengths at the edges of pages."""
    nope = problem.qk_nope_head_dim or 128
    seq_lens, q_lens = _lengths(rng, problem)
    if problem.op == "index_topk" and seed % 2 == 0 and problem.num_heads * problem.q_len <= MOST_LONG:
        # So long that kernels leave out most of a row before they choose.
        seq_lens = (seq_lens[0] + 8300 + 1000 * (seed % 5), *seq_lens[1:])
    cacheless = problem.op == "prefill" and Feature.CACHED_CONTEXT not in problem.features
    return Case(
        "right",
        problem,
        sm_scale=(nope + problem.qk_rope_head_dim) ** -0.5 if sm_scale is None else sm_scale,
        seq_lens=None if cacheless else seq_lens,
        q_lens=q_lens,
        sinks=SINKS[1 + seed % 2] if Feature.SINKS in problem.features else "none",
        poison=POISONS[seed % len(POISONS)],
        views=seed % 2 == 1,
        exact=seed % 3 > 0,
        ties=problem.op == "index_topk" and seed % 4 == 2,
        seed=seed,
        model=model,
    )


def _lengths(rng: random.Random, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Tokens and query tokens of four sequences, one of them empty, as long as WORK allows."""
    page, q_len = problem.block_size, problem.q_len
    width = 2 * problem.kv_lora_rank + problem.qk_rope_head_dim
    if problem.op == "prefill":
        # The reference decompresses every key for every row.
        width *= (problem.qk_nope_head_dim + problem.v_head_dim) // 4
    most = max(8, WORK // (problem.num_heads * width * (q_len + 3)))
    edges = {1, page - 1, page, page + 1, 2 * page + 1, 3 * page}
    edges |= {q_len - 1, 17, 100, min(most, 300), 1025}
    long = sorted(edge for edge in edges if 0 < edge <= most)
    lens = [*rng.choices(long, k=2), long[-1 - rng.randrange(min(2, len(long)))], 0]
    rng.shuffle(lens)
    if problem.op == "write_cache":
        return (rng.choice((1, 7, 64)), 5), None
    if problem.op == "sparse_decode":
        return (max(2, min(problem.topk + 9, 300)),), None
    if q_len == 1 and problem.op != "prefill" and rng.random() < 0.5:
        return tuple(lens), None
    asked = [q_len, 1, rng.choice((0, 1)), max(1, q_len // 2)]
    rng.shuffle(asked)
    return tuple(lens), tuple(asked)


def _of_models(op: str, quick: bool) -> Iterator[Case]:
    """Cases of the published models at the tensor parallel sizes in use, each problem once."""
    seen = set()
    for seed, (name, model) in enumerate(MODELS.items()):
        for tp in (8,) if quick else (1, 2, 4, 8, 16):
            indexed = op in ("sparse_decode", "index_topk")
            if tp not in model.tp_sizes or (indexed and not model.index_topk) or op == "write_cache":
                continue
            formats = ("bf16", *FP8_NAMES)
            if op == "index_topk":
                formats = ("index_k", "index_k_fnuz", "bf16")
            problem = model.problem(
                op,
                tp=tp,
                kv_format=formats[(seed + tp) % len(formats)],
                q_len=1 if op == "sparse_decode" else 1 + (seed + tp) % 4,
                lse=tp < 8,
                cached_context=True,
            )
            if (problem, model.sm_scale) not in seen:
                seen.add((problem, model.sm_scale))
                yield _case(random.Random(f"{name} {op} {tp}"), problem, seed, model.sm_scale, name)


def _of_many_keys(fp8_flavour: str) -> Iterator[Case]:
    """Sparse decodes of MOST_CHOSEN keys with sinks and lse, at DeepSeek's widths."""
    tiled = "fp8_ds_mla_fnuz" if fp8_flavour == "e4m3fnuz" else "fp8_ds_mla"
    formats = ("bf16", f"fp8_{fp8_flavour}", tiled)
    for seed, (kv_format, heads) in enumerate(product(formats, (16, 128))):
        features = frozenset({Feature.LSE, Feature.SINKS})
        problem = Problem(
            "sparse_decode", "bf16", kv_format, heads, 512, 64, block_size=64, features=features
        )
        case = _case(random.Random(seed), replace(problem, topk=MOST_CHOSEN), seed)
        yield replace(case, seq_lens=(MOST_CHOSEN + 300,))


def _in_other_batches(case: Case, number: int) -> Case:
    """The case as a check of its batch, by turns of its order and of its bits."""
    if case.problem.op == "index_topk" or number % 2:
        return replace(case, check="batch")
    features = case.problem.features | {Feature.BATCH_INVARIANT, Feature.LSE}
    return replace(case, check="alone", problem=replace(case.problem, features=features))


def _refused(case: Case) -> Case:
    return replace(case, check="refusal", fact="row")


def _beyond(able: Iterable[Backend], backend: str, machine: Machine) -> Iterator[Case]:
    """Problems that a row would take but for one fact, and that no row takes."""
    rows = tuple(able)
    for row in rows:
        for op in OPS:
            base = next((c.problem for c in _drawn(row, op, 1)), None) if row.op.accepts(op) else None
            for fact, values in BEYOND.items() if base is not None else ():
                for value in values:
                    assert base is not None
                    problem = replace(base, **{fact: value})
                    if not getattr(row, fact).accepts(value) and not offered(problem, backend, machine):
                        # What another row has is refused for more than this fact.
                        elsewhere = any(
                            one.op.accepts(op) and getattr(one, fact).accepts(value) for one in rows
                        )
                        yield Case("refusal", problem, fact="row" if elsewhere else fact)


def _fits(case: Case) -> bool:
    """Whether the format of a case can hold its widths; a model may ask for one that cannot."""
    p = case.problem
    return KV_FORMATS[p.kv_format].refusal(p.kv_lora_rank, p.qk_rope_head_dim) is None
