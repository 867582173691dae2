"""Which attention modules are MLA, and which are grouped-query and thereby MLA too.

H heads, L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim, V = v_head_dim, S tokens.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anymla import latent, select
from anymla.errors import Reasons
from anymla.hardware.probe import Machine
from anymla.kv_formats import KV_FORMATS
from anymla.problem import Problem

LATENT = (
    "AXK1Attention",
    "AXK2Attention",
    "BailingHybridAttention",
    "DeepseekV2Attention",
    "DeepseekV32Attention",
    "DeepseekV3Attention",
    "Dots3NoteTextAttention",
    "Glm4MoeLiteAttention",
    "Glm5NextTextAttention",
    "GlmMoeDsaAttention",
    "HYV4Attention",
    "HYV4VLAttention",
    "KimiLinearAttention",
    "LongcatFlashMLA",
    "MiniCPM3Attention",
    "Mistral4Attention",
    "MistralLarge4TextAttention",
    "YoutuAttention",
)
"""Classes that cache one latent a token and expand it in `expand_kv`; Kimi-K2 has DeepseekV3Attention."""

GROUPED = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Attention classes that cache rotated keys and values of num_key_value_heads heads."""


@dataclass
class Settings:
    """What `attach` was asked for, shared by all attention modules of a model.

    Attributes:
        kv_format: Name of a row of KV_FORMATS.
        block_size: Tokens a page.
        backend: A registry name, or "auto": who decodes.
        machine: Of the device that the weights are on.
        prefill_threshold: New tokens of a sequence from which the decompressed form is used; None: never.
        num_blocks: Pages of a cache; None lets it grow between steps.
        k_scale: [1] fp32 for an fp8 cache with one scale; None calibrates it at each layer's first tokens.
        index_format: Name of a row of KV_FORMATS for index keys; None: indexers keep, score and choose by
            themselves.
        index_power_of_two: The scales of index keys and queries are powers of two.
        calls: How often each form ran, a layer each time: "absorbed", "decompressed" and "sparse", and
            "indexed" for a choice.
        selectors: The up-projections of grouped-query modules; those of equal widths share one pair.
    """

    kv_format: str
    block_size: int
    backend: str
    machine: Machine
    prefill_threshold: int | None
    num_blocks: int | None
    k_scale: Tensor | None
    index_format: str | None = None
    index_power_of_two: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    selectors: dict[tuple[int, int, int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )

    def asked(self, problem: Problem) -> str:
        """Who is asked for what is not decoding: `backend` if it takes this problem, else the first to."""
        if self.backend == "auto":
            return "auto"
        verdicts = select.explain(problem, self.machine)
        takers = [verdict.backend.name for verdict in verdicts if verdict.accepted]
        return self.backend if self.backend in takers else "auto"


@dataclass
class LatentSite:
    """One MLA attention module: its widths, and the way between its tensors and ours.

    Attributes:
        module: The attention module.
        settings: Of the attachment.
        kept: [B, q] bool, the new tokens that are not hidden, from models that give their attention no more.
    """

    module: Any
    settings: Settings
    kept: Tensor | None = None
    stored_width: int = field(init=False)

    def __post_init__(self) -> None:
        module = self.module
        self.kv_lora_rank, self.qk_rope_head_dim = module.kv_lora_rank, module.qk_rope_head_dim
        self.qk_nope_head_dim, self.v_head_dim = module.qk_nope_head_dim, module.v_head_dim
        self.stored_width = self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def topk(self) -> int:
        """The most keys of a query token, 0 where there is no indexer, not of another layer either."""
        module = self.module
        chooses = getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False)
        return int(module.config.index_topk) if chooses else 0

    @property
    def most_chosen(self) -> int:
        """The most keys of a sparse decode: a choice of pools brings the tokens after the last whole one."""
        after = max(self.pool_size, 1) - 1 if self.chooses_all else 0
        return self.topk + after if self.topk else 0

    @property
    def indexer(self) -> Any:
        """Its own indexer, or None."""
        return getattr(self.module, "indexer", None)

    @property
    def scores(self) -> bool:
        """Whether it has an indexer whose keys are in our pages."""
        return self.indexer is not None and self.settings.index_format is not None

    @property
    def pool_size(self) -> int:
        """Tokens that share an index key, here or where the choice comes from; 0 where each has its own."""
        return int(getattr(self.module.config, "index_kpool", 0))

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes of one token in our pages of index keys, and of the states that pools are made of."""
        if not self.scores:
            return 0 if self.indexer is None else self.stock_index_bytes_per_token
        key = KV_FORMATS[str(self.settings.index_format)].bytes_per_token(self.indexer.head_dim, 0)
        return -(-key // self.pool_size) + 2 * self._index_key_bytes if self.pool_size else key

    @property
    def stock_index_bytes_per_token(self) -> int:
        """Bytes of one token in the model's own cache of index keys; pools keep two states and a mark."""
        if self.indexer is None:
            return 0
        marked = 2 * self._index_key_bytes + self.weight.element_size()
        return marked if self.pool_size else self._index_key_bytes

    @property
    def _index_key_bytes(self) -> int:
        return int(self.indexer.head_dim * self.weight.element_size())

    @property
    def chooses_all(self) -> bool:
        """Whether a choice of as many keys as there are is all of them; one of pools may lack the rest."""
        return bool(getattr(self.module.config, "index_kpool_always_select_tail", True))

    @property
    def owns_tokens(self) -> bool:
        """Whether it caches its own latents; else it reads those of an earlier layer."""
        return not getattr(self.module, "is_kv_shared_layer", False)

    @property
    def has_sinks(self) -> bool:
        """Whether each head has a learned sink."""
        return getattr(self.module, "sinks", None) is not None

    @property
    def weight(self) -> Tensor:
        """A weight whose dtype and device are those of this module's latents."""
        weight: Tensor = self.module.kv_b_proj.weight
        return weight

    @property
    def num_heads(self) -> int:
        """H of this rank."""
        return int(self.weight.shape[0] // (self.qk_nope_head_dim + self.v_head_dim))

    def up_projections(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """w_uk [H, P, L] and w_uv [H, L, V], views of the weight as it is now."""
        heads = self.weight.detach().view(num_heads, -1, self.kv_lora_rank)
        w_uk, w_uv = torch.split(heads, [self.qk_nope_head_dim, self.v_head_dim], dim=1)
        return w_uk, w_uv.transpose(1, 2)

    def new_tokens(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """kv_c [S, L] and k_pe [S, R] of states [B, 1, q, L] and [B, 1, q, R]."""
        return key[:, 0].flatten(0, 1), value[:, 0].flatten(0, 1)

    def split_query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """q_nope [T, H, P] and q_pe [T, H, R] of queries [T, H, P + R]."""
        q_nope, q_pe = torch.split(query, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return q_nope, q_pe

    def absorb(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """ql_nope [T, H, L] and q_pe [T, H, R] of queries [T, H, P + R]."""
        q_nope, q_pe = self.split_query(query)
        return latent.absorb_q(q_nope, self.up_projections(query.shape[1])[0]), q_pe

    def project(self, out: Tensor) -> Tensor:
        """[T, H, V] of a latent output [T, H, L]."""
        return latent.project_v(out, self.up_projections(out.shape[1])[1])

    def check(self, reasons: Reasons, name: str) -> None:
        """Note why this module's expansion is not the plain one of MLA; it is run, not believed."""
        proj = self.module.kv_b_proj
        # A subclass may quantise or adapt: then the bare weight is not the projection.
        if not reasons.need(type(proj) is nn.Linear, f"{name}.kv_b_proj", type(proj).__name__, "nn.Linear"):
            return
        rows, head = self.weight.shape[0], self.qk_nope_head_dim + self.v_head_dim
        whole = reasons.need(rows % head == 0, f"{name}.kv_b_proj", f"{rows} rows", f"a multiple of {head}")
        whole &= reasons.need(proj.bias is None, f"{name}.kv_b_proj", "a bias", "none")
        if not whole or self.weight.is_meta:
            return
        seeded = torch.Generator().manual_seed(0)
        with torch.no_grad():
            tokens = torch.randn(1, 1, 2, self.stored_width, generator=seeded).to(self.weight)
            kv_c, k_pe = torch.split(tokens, [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            keys, values = self.module.expand_kv(kv_c, k_pe)
            plain = nn.functional.linear(kv_c[0, 0], self.weight).view(-1, self.num_heads, head)
            widths = [self.qk_nope_head_dim, self.v_head_dim]
            k_nope, v = torch.split(plain.transpose(0, 1), widths, dim=-1)
            expected = torch.cat((k_nope, k_pe[0].expand(self.num_heads, -1, -1)), dim=-1)
            same = torch.equal(keys[0], expected) and torch.equal(values[0], v)
        reasons.need(
            same, f"{name}.expand_kv", "another expansion", "[k_nope; v] = kv_b_proj(c), k = [k_nope; k_pe]"
        )

    def check_indexer(self, reasons: Reasons) -> None:
        """Note index keys that do not fit their format, or pools that do not fit a page."""
        row, size, page = (
            KV_FORMATS.get(str(self.settings.index_format)),
            self.pool_size,
            self.settings.block_size,
        )
        if row is not None and (refusal := row.refusal(self.indexer.head_dim, 0)):
            reasons.found.append(refusal)
        fits = not size or page % size == 0
        reasons.need(fits, "block_size", page, f"a multiple of {size}, the tokens that share an index key")


@dataclass
class GroupedSite:
    """One grouped-query attention module, which is MLA with the latent [keys | values]: L = 2·G·d, R = 0.

    Attributes:
        module: The attention module.
        settings: Of the attachment.
    """

    module: Any
    settings: Settings
    stored_width: int = field(init=False)
    topk: ClassVar[int] = 0
    most_chosen: ClassVar[int] = 0
    pool_size: ClassVar[int] = 0
    scores: ClassVar[bool] = False
    index_bytes_per_token: ClassVar[int] = 0
    stock_index_bytes_per_token: ClassVar[int] = 0
    chooses_all: ClassVar[bool] = True
    kept: ClassVar[Tensor | None] = None
    owns_tokens: ClassVar[bool] = True
    has_sinks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        module = self.module
        self.head_dim = module.head_dim
        self.num_kv_heads = module.k_proj.out_features // module.head_dim
        self.num_heads = module.q_proj.out_features // module.head_dim
        self.kv_lora_rank, self.qk_rope_head_dim = 2 * self.num_kv_heads * self.head_dim, 0
        self.qk_nope_head_dim = self.v_head_dim = self.head_dim
        self.stored_width = self.kv_lora_rank

    @property
    def weight(self) -> Tensor:
        """A weight whose dtype and device are those of this module's keys."""
        weight: Tensor = self.module.o_proj.weight
        return weight

    def up_projections(self, num_heads: int) -> tuple[Tensor, Tensor]:
        """w_uk [H, d, L] and w_uv [H, L, d] that pick each head's block."""
        known, like = self.settings.selectors, self.weight
        key = num_heads, self.num_kv_heads, self.head_dim, like.dtype, like.device
        if key not in known:
            known[key] = latent.block_selectors(*key[:3], dtype=like.dtype, device=like.device)
        return known[key]

    def new_tokens(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """kv_c [S, L] and k_pe [S, 0] of states [B, G, q, d]."""
        k, v = (states.transpose(1, 2).flatten(0, 1) for states in (key, value))
        return latent.gqa_latent(k, v), k.new_empty(k.shape[0], 0)

    def split_query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """q_nope [T, H, d] and q_pe [T, H, 0] of queries [T, H, d]."""
        return query, query[..., :0]

    def absorb(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """ql_nope [T, H, L] and q_pe [T, H, 0] of queries [T, H, d]."""
        return latent.absorb_gqa(query, self.num_kv_heads), query[..., :0]

    def project(self, out: Tensor) -> Tensor:
        """[T, H, d] of a latent output [T, H, L]."""
        return latent.project_gqa(out, self.num_kv_heads)

    def check(self, reasons: Reasons, name: str) -> None:
        """Note heads that do not group, and a window that would be ignored."""
        heads, groups = self.num_heads, self.num_kv_heads
        reasons.need(
            groups > 0 and heads % groups == 0,
            f"{name}.k_proj",
            f"{groups} heads",
            f"a divisor of {heads}, the heads",
        )
        window = getattr(self.module, "sliding_window", None)
        reasons.need(
            window is None, f"{name}.sliding_window", window, "None: every key is kept and attended to"
        )


Site = LatentSite | GroupedSite


def is_windowed(module: Any) -> bool:
    """Whether a latent attention keeps only its last keys; such layers stay with the model's own."""
    return type(module).__name__ in LATENT and getattr(module, "sliding_window", None) is not None


def site_of(module: Any, settings: Settings) -> Site | None:
    """The site of an attention module that we serve, or None."""
    kind = type(module).__name__
    if kind in LATENT:
        return LatentSite(module, settings)
    return GroupedSite(module, settings) if kind in GROUPED else None


def break_even_tokens(site: Site) -> int | None:
    """New tokens of a sequence from which decompressing each key once is less work than absorbing each query.

    A key costs L·(P + V) multiplications a head to decompress; a query then saves 2L - P - V at each key.
    None: it never pays, because the latent is not wider than the heads.
    """
    heads = site.qk_nope_head_dim + site.v_head_dim
    saved = 2 * site.kv_lora_rank - heads
    return -(-site.kv_lora_rank * heads // saved) if saved > 0 else None
