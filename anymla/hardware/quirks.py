"""QUIRKS: what a chip or a library version gets wrong. Each row refuses or sets one named knob, and cites."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from anymla.hardware.arches import ARCHES
from anymla.problem import FOREIGN_FORMAT_NAMES, FP8_NAMES, KV_FORMAT_NAMES, Feature
from anymla.rules import Between, Rule, asks, one_of


@dataclass(frozen=True, eq=False)
class Quirk:
    """A fault of somebody else's, and what is done about it.

    Attributes:
        backend: Name of the rows of BACKENDS that have it.
        arch: The chips that have it.
        source: Who found it, where.
        when: Rules for fields of the Problem, or of a KernelCall; the quirk applies when all accept.
        refuse: Why such a call is refused; "" where a knob helps.
        knob: The name of what a plan must set; "" where the call is refused.
        value: What it is set to, or the name of the Problem's field that says it.
        package: The package whose version `until` bounds.
        until: The first version without the fault; "" while there is none.
        yields: Whether "auto" takes any other backend that accepts before one that has it: its results of
            finite inputs are not those of our definition, and no knob mends them.
    """

    backend: str
    arch: Rule
    source: str
    when: Mapping[str, Rule] = field(default_factory=dict)
    refuse: str = ""
    knob: str = ""
    value: int | str = 0
    package: str = ""
    until: str = ""
    yields: bool = False

    def is_expired(self, packages: Mapping[str, str]) -> bool:
        """Whether the installed version, "" and "HEAD" being the newest, no longer has the fault."""
        version = packages.get(self.package)
        if not self.until or version is None:
            return False
        return version in ("", "HEAD") or _numbers(version) >= _numbers(self.until)

    def applies(self, facts: object, backend: str, arch: str, packages: Mapping[str, str]) -> bool:
        """Whether a backend has the quirk on that chip for a call with these facts."""
        return (
            self.backend == backend
            and self.arch.accepts(arch)
            and not self.is_expired(packages)
            and all(rule.accepts(getattr(facts, name)) for name, rule in self.when.items())
        )

    def setting(self, facts: object) -> int:
        """What the knob is set to for a call with these facts."""
        return int(getattr(facts, self.value)) if isinstance(self.value, str) else self.value

    def __str__(self) -> str:
        doing = self.refuse or f"sets {self.knob}={self.value}"
        doing += ", so auto prefers another backend" if self.yields else ""
        return f"{doing} (until {self.package} {self.until})" if self.until else doing


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


_FP8_FNUZ = one_of("fp8_e4m3fnuz", "fp8_ds_mla_fnuz", "index_k_fnuz")
_NO_FNUZ = one_of(*(name for name in KV_FORMAT_NAMES if not _FP8_FNUZ.accepts(name)))

_TAKES_FP8 = one_of("decode", "sparse_decode", "index_topk")

_CDNA = one_of("gfx942", "gfx950")
_INDEX_KEYS = ("index_k", "index_k_fnuz", *FOREIGN_FORMAT_NAMES)
_PAGED_INDEX = {
    "op": one_of("index_topk"),
    "kv_format": one_of("index_k", "index_k_fnuz"),
    "block_size": Between(2, 1 << 20),
}
"""Index keys token by token, in pages of several."""

QUIRKS: tuple[Quirk, ...] = (
    *(
        Quirk(
            backend="triton",
            arch=one_of("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"),
            when=when,
            refuse="Triton has no fp8e4b8 on NVIDIA, and reading e4m3fnuz by its bits is not verified there",
            source="Triton 3.6.0 and 3.9.0: CompilationError, compiled for sm_80 to sm_120",
        )
        for when in (
            {"kv_format": _FP8_FNUZ},
            {"q_dtype": one_of("fp8_e4m3fnuz"), "kv_format": _NO_FNUZ, "op": _TAKES_FP8},
        )
    ),
    Quirk(
        backend="triton",
        arch=one_of("gfx1250"),
        refuse="Triton before 3.9 cannot assemble these kernels for gfx1250, and its dot is no WMMA there",
        package="triton",
        until="3.9.0",
        source="Triton 3.6.0: 'amdgpu_user_sgpr_count smaller than implied'; 3.9.0 compiles",
    ),
    Quirk(
        backend="aiter",
        arch=one_of("gfx942"),
        when={
            "op": one_of("decode", "sparse_decode"),
            "kv_format": one_of("bf16"),
            "num_heads": Between(33, 64),
            "features": asks(Feature.LSE, Feature.SINKS),
        },
        refuse="AITER has no bf16 kernel of 64 heads with an lse on gfx942",
        source="AITER hsa/gfx942/mla manifest at e4048607; its lookup aborts, and 128 heads cost double",
    ),
    Quirk(
        backend="aiter",
        arch=one_of("gfx950"),
        when={"op": one_of("prefill")},
        knob="finite_tokens",
        value=1,
        source="emulated: lanes past a tail read the tokens after it, or the first, and 0 times NaN is NaN",
    ),
    Quirk(
        backend="aiter",
        arch=one_of("gfx950"),
        when={"op": one_of("prefill"), "features": asks(Feature.CACHED_CONTEXT)},
        knob="operand_bits",
        value=16,
        source="AITER mla_prefill_ps_asm_fwd gives no lse to merge chunks by, so none of them is in fp8",
    ),
    Quirk(
        backend="triton",
        arch=one_of(*(name for name, chip in ARCHES.items() if chip.vendor != "cpu")),
        when={"op": one_of("prefill"), "q_dtype": one_of(*FP8_NAMES)},
        knob="operand_bits",
        value=16,
        source="triton_mla/mha.py multiplies what it is given: fp8 lets a prefill round and asks for none",
    ),
    Quirk(
        backend="aiter",
        arch=_CDNA,
        when={**_PAGED_INDEX, "num_heads": Between(1, 63)},
        knob="chunk_q",
        value="num_heads",
        source="github.com/ROCm/aiter #2563: ChunkQ 64 divides by zero with fewer index heads",
    ),
    Quirk(
        backend="aiter",
        arch=_CDNA,
        when={"op": one_of("index_topk")},
        knob="max_cache_gib",
        value=2,
        source="github.com/ROCm/aiter #4774: logits of keys beyond 2 GiB were 0; Gluon has 32 bit offsets",
    ),
    Quirk(
        backend="aiter",
        arch=_CDNA,
        when={"op": one_of("index_topk")},
        knob="finite_keys",
        value=1,
        source="AITER pa_mqa_logits.py: of NaN and 0 the larger is 0",
    ),
    Quirk(
        backend="aiter",
        arch=_CDNA,
        when={"op": one_of("write_cache"), "kv_format": one_of(*_INDEX_KEYS)},
        knob="finite_keys",
        value=1,
        source="AITER cache_kernels.cu: of a NaN in fp8 it makes -448",
    ),
    Quirk(
        backend="aiter",
        arch=_CDNA,
        when={"op": one_of("write_cache"), "kv_format": one_of(*_INDEX_KEYS)},
        knob="coarse_tiny_keys",
        value=1,
        yields=True,
        source="AITER cache_kernels.cu: a key whose values are all below 1e-4 gets the scale of 1e-4",
    ),
)


class Weighed(NamedTuple):
    """What a backend with a table of kernels says of a call: why not, or how.

    Attributes:
        reasons: Why no kernel can be run; () where one can.
        quirks: Quirks of the kernel that would be.
        lanes: Heads that it would be given, 0 where there is none.
    """

    reasons: tuple[str, ...]
    quirks: tuple[Quirk, ...] = ()
    lanes: int = 0
