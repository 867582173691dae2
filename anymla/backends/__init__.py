"""BACKENDS: what each backend accepts, in order of preference; plain data, which imports no backend.

Rows of one name are alternatives of one backend: a call goes to the one that takes it with the least padding.
"""

from dataclasses import dataclass, replace

from anymla.problem import FP8_NAMES, KV_FORMAT_NAMES, OPS, Feature
from anymla.rules import ANY, Between, Rule, offers, one_of, pads_to

NOTHING = offers()
"""The default of every backend: no feature."""

_OF_LATENTS = tuple(name for name in KV_FORMAT_NAMES if not name.startswith("index_k"))


@dataclass(frozen=True)
class Backend:
    """One declaration: where the code is, and a rule for each fact of a Problem, under the fact's name.

    Attributes:
        name: What a caller says to ask for it.
        module: Path of the module that has its functions; imported when first chosen.
        built: False while it is only planned; it then refuses, beside all other reasons.
        arch: Rule for the machine's chip.
        packages: Packages that it imports beyond the base dependencies.
        evidence: How much is known of it on these chips: declared (its rules were read somewhere), contract
            double (run against a double that fails as the real library does), compiled (for the chip, on
            another machine), emulated (compiled, and executed on an emulator of the chip's instructions) or
            verified (run there, against the reference).
        source: What the rules were read from.
        manifest: Path of the module that knows which kernels exist; its `weigh` is asked about each call that
            the rules let pass. "" where the rules say all.
    """

    name: str
    module: str
    built: bool
    arch: Rule
    op: Rule
    q_dtype: Rule
    kv_format: Rule
    num_heads: Rule
    kv_lora_rank: Rule
    qk_rope_head_dim: Rule
    qk_nope_head_dim: Rule = ANY
    v_head_dim: Rule = ANY
    block_size: Rule = ANY
    q_len: Rule = ANY
    topk: Rule = ANY
    features: Rule = NOTHING
    packages: tuple[str, ...] = ()
    evidence: str = "declared"
    source: str = ""
    manifest: str = ""


_HOPPER = Backend(
    "hopper",
    "anymla.backends.hopper_mla",
    built=False,
    arch=one_of("sm90"),
    packages=("triton",),
    op=one_of("decode"),
    q_dtype=one_of("bf16"),
    kv_format=one_of("bf16"),
    num_heads=pads_to(64, 128),
    kv_lora_rank=one_of(512),
    qk_rope_head_dim=one_of(64),
    block_size=one_of(64),
    features=offers(Feature.LSE, Feature.SINKS, Feature.MULTI_TOKEN, Feature.GRAPH),
    source="planned: one Gluon kernel, tiles of 64 query rows by 64 keys",
)

# Which heads, tokens and modes have a kernel is a matter of AITER's release, so its manifest says it.
_AITER = Backend(
    "aiter",
    "anymla.backends.aiter_mla.operations",
    built=True,
    arch=one_of("gfx942", "gfx950"),
    packages=("aiter",),
    op=one_of("decode", "sparse_decode"),
    q_dtype=one_of("bf16"),
    kv_format=one_of("bf16"),
    num_heads=Between(1, 128),
    kv_lora_rank=one_of(512),
    qk_rope_head_dim=one_of(64),
    features=offers(Feature.LSE, Feature.SINKS, Feature.MULTI_TOKEN, Feature.NON_CAUSAL, Feature.GRAPH),
    evidence="contract double",
    source="AITER hsa/*/mla tables and the code that looks up in them, at every tag from 0.1.10.post1",
    manifest="anymla.backends.aiter_mla.manifest",
)
# With queries in fp8 its kernels round them; a caller has to ask for that.
_AITER_FNUZ = replace(
    _AITER,
    arch=one_of("gfx942"),
    q_dtype=one_of("bf16", "fp8_e4m3fnuz"),
    kv_format=one_of("fp8_e4m3fnuz"),
)
_AITER_FN = replace(
    _AITER, arch=one_of("gfx950"), q_dtype=one_of("bf16", "fp8_e4m3fn"), kv_format=one_of("fp8_e4m3fn")
)
# It rounds queries, keys and values to fp8, so a caller has to ask for that; it gives no lse. After a cached
# context its attention in 16 bits serves the same plan, by chunks: that gives one to merge them by.
_AITER_PREFILL = replace(
    _AITER,
    arch=one_of("gfx950"),
    op=one_of("prefill"),
    q_dtype=one_of("fp8_e4m3fn"),
    kv_format=one_of(*_OF_LATENTS),
    qk_nope_head_dim=one_of(128),
    v_head_dim=one_of(128),
    features=offers(Feature.MULTI_TOKEN, Feature.NON_CAUSAL, Feature.CACHED_CONTEXT),
    source="AITER mla_prefill_ps_asm_fwd and mla_reduce_v1, from 0.1.10.post1: one kernel a mask, 192/128; "
    "flash_attn_varlen_func, as vLLM 0.33 calls it for chunks of a context",
)
# Index queries have their scales in the weights, so those in bf16 would be rounded: see quantise_queries.
# Each query token is a row of its own that reads all keys, which is no way to do a prefill.
_AITER_INDEX = replace(
    _AITER,
    op=one_of("index_topk"),
    arch=one_of("gfx942"),
    q_dtype=one_of("fp8_e4m3fnuz"),
    kv_format=one_of("index_k_fnuz"),
    num_heads=pads_to(32, 64),
    kv_lora_rank=one_of(128),
    qk_rope_head_dim=one_of(0),
    q_len=Between(1, 8),
    topk=Between(1, 4096),
    features=offers(Feature.MULTI_TOKEN, Feature.GRAPH),
    source="AITER deepgemm_fp8_paged_mqa_logits and its stage1 at e4048607: heads and widths of its tests",
)
_AITER_INDEX_SHUFFLED = replace(
    _AITER_INDEX,
    kv_format=one_of("index_k_shuffled_fnuz"),
    block_size=one_of(64, 16, 32, 128, 256),
    q_len=ANY,
)
_AITER_WRITE = replace(
    _AITER,
    op=one_of("write_cache"),
    num_heads=ANY,
    features=NOTHING,
    source="AITER cache_kernels.cu at e4048607, concat_and_cache_mla; of NaN in fp8 it makes a number",
)
_AITER_INDEX_WRITE = replace(
    _AITER_WRITE,
    arch=one_of("gfx942"),
    kv_format=one_of("index_k_fnuz", "index_k_shuffled_fnuz"),
    kv_lora_rank=one_of(128),
    qk_rope_head_dim=one_of(0),
    source="AITER cache_kernels.cu at e4048607, indexer_k_quant_and_cache",
)

_TRITON = Backend(
    "triton",
    "anymla.backends.triton_mla",
    built=True,
    arch=one_of("sm90"),
    packages=("triton",),
    op=one_of(*(op for op in OPS if op != "index_topk")),
    q_dtype=one_of("bf16", "fp16"),
    kv_format=one_of(*(name for name in _OF_LATENTS if name != "fp32")),
    num_heads=Between(1, 1024),
    kv_lora_rank=Between(1, 512),
    qk_rope_head_dim=Between(0, 128),
    qk_nope_head_dim=Between(0, 512),
    v_head_dim=Between(0, 512),
    features=offers(*Feature),
    evidence="verified",
    source="masked tiles, so heads and widths need no padding",
)
_TRITON_EMULATED = replace(
    _TRITON,
    arch=one_of("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
    evidence="emulated",
    source="the same kernels, compiled for the chip in every launch row (docs/audit.md) and executed on an "
    "emulator (docs/emulator.md), not on hardware",
)
_TRITON_COMPILED = replace(
    _TRITON,
    arch=one_of("sm80", "sm86", "sm89", "sm100", "sm120"),
    evidence="compiled",
    source="the same kernels, compiled for the chip in every launch row (docs/audit.md), not run there",
)
_TRITON_CHIPS = (_TRITON, _TRITON_EMULATED, _TRITON_COMPILED)
_TRITON_PLANNED = replace(
    _TRITON,
    built=False,
    arch=one_of("gfx1250"),
    evidence="declared",
    source="planned: the same kernels, once a Triton that compiles them there is the oldest supported",
)

_TRITON_INDEX = replace(
    _TRITON,
    op=one_of("index_topk"),
    q_dtype=one_of("bf16", "fp16", *FP8_NAMES),
    kv_format=one_of("index_k", "index_k_fnuz", "bf16", "fp16"),
    num_heads=Between(1, 128),
    kv_lora_rank=Between(1, 128),
    qk_rope_head_dim=one_of(0),
    topk=Between(1, 4096),
    features=offers(Feature.MULTI_TOKEN, Feature.GRAPH),
    source="a tile holds all index heads of a query token; a choice holds a piece of at least twice topk",
)
_TRITON_INDEX_WRITE = replace(
    _TRITON,
    op=one_of("write_cache"),
    kv_format=one_of("index_k", "index_k_fnuz"),
    qk_rope_head_dim=one_of(0),
)

_CPU = Backend(
    "cpu",
    "anymla.backends.cpu_mla",
    built=True,
    arch=one_of("cpu"),
    op=one_of(*(op for op in OPS if op != "index_topk")),
    q_dtype=one_of("fp32", "bf16", "fp16"),
    kv_format=one_of(*KV_FORMAT_NAMES),
    num_heads=Between(1, 1024),
    kv_lora_rank=ANY,
    qk_rope_head_dim=ANY,
    features=offers(*(feature for feature in Feature if feature is not Feature.GRAPH)),
    evidence="verified",
    source="torch on the CPU: fp32 accumulation in blocks of keys, any width",
)

# Queries in fp8 meet a cache of the same values, each with its scale. A prefill in fp8 may be rounded to it;
# here it is not, but this stands behind AITER's.
_FP8_QUERIES = (
    *(
        replace(row, op=one_of("decode", "sparse_decode"), q_dtype=one_of(fp8), kv_format=one_of(fp8))
        for row in (*_TRITON_CHIPS, _CPU)
        for fp8 in FP8_NAMES
    ),
    *(replace(row, op=one_of("prefill"), q_dtype=one_of(*FP8_NAMES)) for row in (*_TRITON_CHIPS, _CPU)),
)

BACKENDS: tuple[Backend, ...] = (
    _HOPPER,
    replace(
        _HOPPER,
        op=one_of("sparse_decode"),
        kv_format=one_of("bf16", "fp8_ds_mla"),
        block_size=ANY,
        source="planned: the same kernel behind a gather of slots",
    ),
    _AITER,
    _AITER_FNUZ,
    _AITER_FN,
    _AITER_PREFILL,
    _AITER_INDEX,
    _AITER_INDEX_SHUFFLED,
    *(
        replace(row, arch=one_of("gfx950"), q_dtype=one_of("fp8_e4m3fn"), kv_format=one_of(kv_format))
        for row, kv_format in ((_AITER_INDEX, "index_k"), (_AITER_INDEX_SHUFFLED, "index_k_shuffled"))
    ),
    _AITER_WRITE,
    _AITER_INDEX_WRITE,
    replace(_AITER_INDEX_WRITE, arch=one_of("gfx950"), kv_format=one_of("index_k", "index_k_shuffled")),
    _TRITON,
    _TRITON_EMULATED,
    _TRITON_COMPILED,
    _TRITON_PLANNED,
    *(
        replace(row, arch=chips.arch, evidence=chips.evidence)
        for row in (_TRITON_INDEX, _TRITON_INDEX_WRITE)
        for chips in _TRITON_CHIPS
    ),
    _CPU,
    replace(_CPU, op=one_of("index_topk"), q_dtype=one_of("fp32", "bf16", "fp16", *FP8_NAMES)),
    *_FP8_QUERIES,
)
