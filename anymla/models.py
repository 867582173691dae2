"""MODELS: one row a model: heads, widths, softmax scale, sinks and index, each with its source."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from anymla.arguments import check_count, check_flags, check_name, shown
from anymla.errors import InvalidInput, Reasons
from anymla.problem import OPS, Feature, Problem, count_of


@dataclass(frozen=True)
class Yarn:
    """The part of a checkpoint's YaRN settings that changes the softmax scale.

    Attributes:
        factor: How many times longer the context is than the one first trained on.
        mscale_all_dim: The checkpoint's value of that name; 0 leaves the scale alone.
    """

    factor: float
    mscale_all_dim: float

    @property
    def mscale(self) -> float:
        """The factor on each of q and k, 1 for a context that is not extended."""
        return 1.0 if self.factor <= 1 else 0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Model:
    """The attention of a published model.

    Attributes:
        num_heads: Query heads, before tensor parallelism.
        q_lora_rank: Width of the query latent, None where queries are projected directly.
        kv_lora_rank: Width L of the latent in the cache.
        qk_nope_head_dim: Width P of a decompressed key without RoPE.
        qk_rope_head_dim: Width R of the shared RoPE key in the cache, 0 for models without.
        v_head_dim: Width V of a decompressed value.
        yarn: Set where the checkpoint's YaRN settings change the softmax scale.
        index_topk: Keys a query token in sparse attention, 0 for dense models.
        index_heads: Heads of the indexer; every tensor parallel rank has all of them.
        index_head_dim: Width of an index key.
        index_pool: Tokens in a row that share an index key; of such pools index_topk / index_pool are chosen.
            Tokens after the last whole pool have no key yet and are attended to unchosen, so a sparse decode
            has up to index_pool - 1 keys more than index_topk.
        sinks: Whether each head has a learned sink logit.
        source: The published configuration that says so.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    yarn: Yarn | None = None
    index_topk: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    index_pool: int = 1
    sinks: bool = False
    source: str = ""

    @property
    def sm_scale(self) -> float:
        """What multiplies q·k: the decompressed key width to the power -1/2, times YaRN's mscale squared."""
        mscale = self.yarn.mscale if self.yarn else 1.0
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * mscale**2)

    @property
    def most_chosen(self) -> int:
        """The most keys of a sparse decode: those chosen, and what comes after the last whole pool."""
        return self.index_topk + self.index_pool - 1 if self.index_topk else 0

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Tensor parallel sizes that divide the heads, ascending."""
        return tuple(n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)

    def local_heads(self, tp: int) -> int:
        """Query heads of one tensor parallel rank; the latent is not split.

        Raises:
            InvalidInput: `tp` does not divide the heads.
        """
        reasons = Reasons("model")
        heads = self._local_heads(reasons, tp)
        reasons.raise_if_any()
        return heads

    def problem(
        self,
        op: str = "decode",
        *,
        tp: int = 1,
        q_dtype: str = "bf16",
        kv_format: str | None = None,
        block_size: int = 64,
        q_len: int = 1,
        topk: int | None = None,
        lse: bool = False,
        sinks: bool | None = None,
        cached_context: bool = False,
    ) -> Problem:
        """The facts of one operation of this model on one tensor parallel rank.

        Args:
            op: One of problem.OPS.
            tp: Tensor parallel size; index heads are not split.
            q_dtype: Dtype name of the queries.
            kv_format: Name of a cache format. None: as q_dtype, for index keys "index_k".
            block_size: Tokens a page. Index keys of pools have pages of the same tokens.
            q_len: The most query tokens of any one sequence. Where keys are pools, each query token is a
                sequence to the indexer: the pools that it sees are not one more than those of the one before.
            topk: Keys a query token of a sparse operation. None: the model's own, for a dense model 2048. Of
                pools an indexer chooses whole ones; a sparse decode has their tokens and those of the last.
            lse: Whether the lse is wanted.
            sinks: Whether there are sinks. None: as the model.
            cached_context: Whether the new tokens of a prefill have earlier ones in the cache.

        Raises:
            InvalidInput: `op` is no operation, `tp` does not divide the heads, a number is no count, a flag
                none, the model has no index, or a page no whole pools.
        """
        reasons = Reasons("model")
        indexed = check_name(reasons, "op", op, OPS) and op == "index_topk"
        have = ", ".join(name for name, model in MODELS.items() if model.index_heads)
        reasons.need(not indexed or self.index_heads > 0, "op", op, f"a model with an index: {have}")
        heads = self._local_heads(reasons, tp)
        tokens, block_size = count_of(block_size), check_count(reasons, "block_size", block_size)
        q_len = check_count(reasons, "q_len", q_len, 0)
        topk = None if topk is None else check_count(reasons, "topk", topk, 0)
        sinks = self.sinks if sinks is None else sinks
        check_flags(reasons, lse=lse, sinks=sinks, cached_context=cached_context)
        pool = self.index_pool if indexed else 1
        needs = f"a multiple of {pool}, the tokens of an index key"
        reasons.need((tokens or 0) % pool == 0, "block_size", tokens, needs)
        reasons.raise_if_any()
        q_len = 1 if pool > 1 else q_len
        attends = op in ("decode", "sparse_decode", "prefill")
        features = set()
        if attends and sinks:
            features.add(Feature.SINKS)
        if attends and lse:
            features.add(Feature.LSE)
        # A query token of sparse_decode has its own indices, so its neighbours do not matter.
        if op in ("decode", "prefill", "index_topk") and q_len > 1:
            features.add(Feature.MULTI_TOKEN)
        if op == "prefill" and cached_context:
            features.add(Feature.CACHED_CONTEXT)
        own = self.index_topk // pool if indexed else self.most_chosen
        return Problem(
            op=op,
            q_dtype=q_dtype,
            kv_format=("index_k" if indexed else q_dtype) if kv_format is None else kv_format,
            num_heads=self.index_heads if indexed else heads if attends else 1,
            kv_lora_rank=self.index_head_dim if indexed else self.kv_lora_rank,
            qk_rope_head_dim=0 if indexed else self.qk_rope_head_dim,
            qk_nope_head_dim=self.qk_nope_head_dim if op == "prefill" else 0,
            v_head_dim=self.v_head_dim if op == "prefill" else 0,
            block_size=block_size // pool,
            q_len=q_len,
            topk=(topk or own or 2048) if op in ("sparse_decode", "index_topk") else 0,
            features=frozenset(features),
        )

    def _local_heads(self, reasons: Reasons, tp: object) -> int:
        """The heads of one rank, noting a tensor parallel size that does not divide them."""
        size, sizes = count_of(tp), ", ".join(map(str, self.tp_sizes))
        reasons.need(size in self.tp_sizes, "tp", shown(tp), f"a divisor of {self.num_heads} heads: {sizes}")
        return self.num_heads // (size or 1)


def model_named(name: str) -> Model:
    """The row of a model, by its name here or by that of its repository.

    Args:
        name: Such as "deepseek-v3", "DeepSeek_V3" or "deepseek-ai/DeepSeek-V3".

    Returns:
        The row.

    Raises:
        InvalidInput: no row has that name; the message lists all.
    """
    key = name.rsplit("/", 1)[-1].lower().replace("_", "-") if isinstance(name, str) else ""
    if key not in MODELS:
        raise InvalidInput("model", [f"model got {shown(name)}; needs one of {', '.join(MODELS)}"])
    return MODELS[key]


_TRANSFORMERS = "transformers 5.24.0, defaults of {}"
_DEEPSEEK_YARN = Yarn(factor=40, mscale_all_dim=1.0)

MODELS: Mapping[str, Model] = {
    "deepseek-v2": Model(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=Yarn(factor=40, mscale_all_dim=0.707),  # DeepSeek-V2.5 has 1.0
        source="deepseek-ai/DeepSeek-V2 config.json",
    ),
    "deepseek-v2-lite": Model(
        num_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=Yarn(factor=40, mscale_all_dim=0.707),
        source="deepseek-ai/DeepSeek-V2-Lite config.json",
    ),
    "deepseek-v3": Model(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=_DEEPSEEK_YARN,
        source="deepseek-ai/DeepSeek-V3 config.json",
    ),
    "deepseek-r1": Model(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=_DEEPSEEK_YARN,
        source="deepseek-ai/DeepSeek-R1 config.json",
    ),
    "deepseek-v3.2": Model(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=_DEEPSEEK_YARN,
        index_topk=2048,
        index_heads=64,
        index_head_dim=128,
        source="deepseek-ai/DeepSeek-V3.2-Exp inference/model.py (rope_factor 40, mscale 1)",
    ),
    # One vector of 512, 64 of it rotated in place, is key and value: to the cache a latent without RoPE part.
    "deepseek-v4-flash": Model(
        num_heads=64,
        q_lora_rank=1024,
        kv_lora_rank=512,
        qk_nope_head_dim=512,
        qk_rope_head_dim=0,
        v_head_dim=512,
        index_topk=512,
        index_heads=64,
        index_head_dim=128,
        sinks=True,
        source=_TRANSFORMERS.format("DeepseekV4Config (head_dim 512)"),
    ),
    "mistral-large-4": Model(
        num_heads=64,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_topk=2048,
        index_heads=32,
        index_head_dim=128,
        source=_TRANSFORMERS.format("MistralLarge4TextConfig (layers without RoPE: 128 and 0)"),
    ),
    "kimi-k2": Model(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=Yarn(factor=32, mscale_all_dim=1.0),
        source="moonshotai/Kimi-K2-Instruct config.json",
    ),
    "kimi-k2-0905": Model(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=Yarn(factor=64, mscale_all_dim=1.0),
        source="moonshotai/Kimi-K2-Instruct-0905 config.json",
    ),
    "kimi-k2.5": Model(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=Yarn(factor=64, mscale_all_dim=1.0),
        source="moonshotai/Kimi-K2.5 config.json",
    ),
    "kimi-k3": Model(
        num_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        source="moonshotai/Kimi-K3 config.json (mla_use_nope: the 64 wide part is not rotated)",
    ),
    "kimi-linear": Model(
        num_heads=32,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        source="moonshotai/Kimi-Linear-48B-A3B-Instruct config.json (mla_use_nope)",
    ),
    "glm-4.7-flash": Model(
        num_heads=20,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        source=_TRANSFORMERS.format("Glm4MoeLiteConfig"),
    ),
    "glm-5": Model(
        num_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        index_topk=2048,
        index_heads=32,
        index_head_dim=128,
        source=_TRANSFORMERS.format("GlmMoeDsaConfig"),
    ),
    "glm-5.1": Model(
        num_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        index_topk=2048,
        index_heads=32,
        index_head_dim=128,
        source=_TRANSFORMERS.format("GlmMoeDsaConfig"),
    ),
    # Its index keys are pools of 16 tokens: 128 of them are chosen, and the tokens of an incomplete last one.
    "glm-5.3-flash": Model(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=256,
        qk_rope_head_dim=0,
        v_head_dim=256,
        index_topk=2048,
        index_heads=32,
        index_head_dim=128,
        index_pool=16,
        source=_TRANSFORMERS.format("Glm5NextTextConfig"),
    ),
    # Not the defaults of transformers' HYV4Config (32 heads, q_lora_rank 1536, 16 index heads).
    "hy-v4": Model(
        num_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        index_topk=2048,
        index_heads=32,
        index_head_dim=128,
        sinks=True,
        source="tencent/Hy4-preview config.json",
    ),
    "longcat-flash": Model(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        source=_TRANSFORMERS.format("LongcatFlashConfig"),
    ),
    "minicpm3": Model(
        num_heads=40,
        q_lora_rank=768,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        source=_TRANSFORMERS.format("MiniCPM3Config"),
    ),
    "a.x-k1": Model(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        source=_TRANSFORMERS.format("AXK1Config (no YaRN; a checkpoint with it has another scale)"),
    ),
    "a.x-k2-light": Model(
        num_heads=32,
        q_lora_rank=384,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        index_topk=2048,
        index_heads=16,
        index_head_dim=128,
        source=_TRANSFORMERS.format("AXK2Config (no YaRN; a checkpoint with it has another scale)"),
    ),
    "ling-3.0-flash": Model(
        num_heads=32,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        source=_TRANSFORMERS.format("BailingHybridConfig"),
    ),
    "openpangu-ultra-moe": Model(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        source="openPangu-Ultra-MoE-718B configuration_openpangu_moe.py, defaults of its config class",
    ),
    "youtu-llm": Model(
        num_heads=16,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        source=_TRANSFORMERS.format("YoutuConfig"),
    ),
    # The layers with full or indexed attention; its sliding-window layers have other widths.
    "dots3-note": Model(
        num_heads=128,
        q_lora_rank=1024,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_topk=2048,
        index_heads=64,
        index_head_dim=128,
        source=_TRANSFORMERS.format("Dots3NoteTextConfig"),
    ),
}
