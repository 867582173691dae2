"""Problem: the facts of a call, without its tensors."""

from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral

OPS = ("decode", "sparse_decode", "prefill", "write_cache", "index_topk")
"""Every operation, in the order in which the documentation introduces them."""


class Feature(Enum):
    """An option of a call that a backend must offer by name; the default of every backend is no."""

    LSE = "lse"
    SINKS = "sinks"
    MULTI_TOKEN = "more than one query token a sequence"
    NON_CAUSAL = "non-causal"
    BATCH_INVARIANT = "batch invariance"
    CACHED_CONTEXT = "a cached context"
    GRAPH = "graph capture"
    DEVICE_LENGTHS = "lengths that only the device knows"

    def __str__(self) -> str:
        return self.value


FP8_NAMES = ("fp8_e4m3fn", "fp8_e4m3fnuz")

DTYPE_NAMES = ("fp32", "bf16", "fp16", *FP8_NAMES)

KV_FORMAT_NAMES = (
    "bf16",
    "fp16",
    "fp32",
    "fp8_e4m3fn",
    "fp8_e4m3fnuz",
    "fp8_ds_mla",
    "fp8_ds_mla_fnuz",
    "index_k",
    "index_k_fnuz",
)

FOREIGN_FORMAT_NAMES = ("index_k_shuffled", "index_k_shuffled_fnuz")
"""Layouts that one library alone reads: opened and converted everywhere, run by its backend only."""

FORMAT_NAMES = (*KV_FORMAT_NAMES, *FOREIGN_FORMAT_NAMES)
"""Every format."""

COUNTS = {
    "num_heads": 1,
    "kv_lora_rank": 1,
    "block_size": 1,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 0,
    "v_head_dim": 0,
    "q_len": 0,
    "topk": 0,
}
"""The facts of a problem that are counts, and the least that each may be."""

_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "e4m3fn": "fp8_e4m3fn",
    "e4m3fnuz": "fp8_e4m3fnuz",
}
_FLAVOURED = {"fp8": "fp8_{}", "fp8_e4m3": "fp8_{}"}


def canonical_name(name: str, fp8_flavour: str = "e4m3fn") -> str:
    """The one spelling of a dtype or KV format; an unknown name comes back as it is.

    Args:
        name: Any spelling in use, such as "bfloat16", "fp8" or "fp8_e4m3".
        fp8_flavour: What a bare "fp8" means: "e4m3fn" or "e4m3fnuz", a fact of the chip.
    """
    name = name.lower().removeprefix("torch.")
    return _FLAVOURED[name].format(fp8_flavour) if name in _FLAVOURED else _ALIASES.get(name, name)


def count_of(value: object) -> int | None:
    """The int that an integer of any library is; None for all else, True and False too."""
    if type(value) is int:  # the usual one, ten times faster than asking an abstract class
        return value
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Problem:
    """What is asked of a backend. Each field is a fact; `Backend` has the rule of the same name.

    Counts may be integers of any library; they are kept as int.

    Attributes:
        op: One of OPS.
        q_dtype: Dtype name of the queries (of the latent for write_cache). With an fp8 a decode may be given
            queries in it, with a scale; others, and those of a prefill, have 16 bits, which it may round.
        kv_format: Name of a row of KV_FORMATS.
        num_heads: Local query heads, unpadded (index heads for index_topk, 1 for write_cache).
        kv_lora_rank: Width L of the latent (width of an index key for index_topk).
        qk_rope_head_dim: Width R of the RoPE part, 0 for rope-free models.
        qk_nope_head_dim: Width P of a decompressed key without RoPE; prefill only, else 0.
        v_head_dim: Width V of a decompressed value; prefill only, else 0.
        block_size: Tokens a page; 1 where nothing is paged.
        q_len: The most query tokens of any one sequence.
        topk: Keys a query token, for sparse_decode and index_topk, else 0.
        features: What the call needs beyond the plain operation.
    """

    op: str
    q_dtype: str
    kv_format: str
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    block_size: int = 1
    q_len: int = 1
    topk: int = 0
    features: frozenset[Feature] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if type(value) is not int and (count := count_of(value)) is not None:
                object.__setattr__(self, name, count)
