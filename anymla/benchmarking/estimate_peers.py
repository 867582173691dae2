"""PEERS: what others have published of such kernels, in their words; none of it was measured here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What a figure is of, where that was published in full.

    Attributes:
        batch: Sequences.
        heads: Of queries.
        context: Cached tokens of each.
        kv_format: Name of a cache format.
        fp8_products: Whether products are of fp8.
    """

    batch: int
    heads: int
    context: int
    kv_format: str
    fp8_products: bool = False


@dataclass(frozen=True)
class Published:
    """One figure.

    Attributes:
        by: Whose kernel.
        op: The operation.
        part: `Arch.part` of the chips that it is nearest to.
        on: The product that it was published for.
        figure: As published.
        conditions: As published.
        source: Where.
        shape: None where the conditions are not complete.
    """

    by: str
    op: str
    part: str
    on: str
    figure: str
    conditions: str
    source: str
    shape: Shape | None = None


_H200 = "H100 SXM and H200"

PEERS: tuple[Published, ...] = (
    Published(
        "AITER Gluon", "decode", "MI355X", "MI350X", "50.2 µs", "batch 1, 16 heads, 16384 tokens, bf16",
        "ROCm/aiter#3890", Shape(1, 16, 16384, "bf16"),
    ),
    Published(
        "AITER OPUS", "decode", "MI355X", "CDNA4 by its context", "3246 µs, 360 TFLOPS, 5.96 TB/s",
        "batch 128, 32 heads, 131072 tokens, bf16", "ROCm/aiter#5456", Shape(128, 32, 131072, "bf16"),
    ),
    Published(
        "AITER OPUS", "decode", "MI355X", "CDNA4 by its context", "78.2 µs, 467 TFLOPS, 3.95 TB/s",
        "batch 128, 32 heads, 4096 tokens, fp8", "ROCm/aiter#5456",
        Shape(128, 32, 4096, "fp8_e4m3fn", fp8_products=True),
    ),
    Published(
        "AITER assembly, HipKittens", "decode", "MI355X", "MI355X", "1422 and 1315 µs",
        "batch 256, 128 heads, 23333 tokens, fp8 by its code path", "ROCm/aiter#3072",
        Shape(256, 128, 23333, "fp8_e4m3fn", fp8_products=True),
    ),
    Published(
        "AITER assembly, HipKittens", "decode", "MI355X", "MI355X", "29.8 and 26.9 µs",
        "batch 1, 128 heads, 8192 tokens, fp8 by its code path", "ROCm/aiter#3072",
        Shape(1, 128, 8192, "fp8_e4m3fn", fp8_products=True),
    ),
    Published(
        "AITER OPUS", "prefill", "MI355X", "CDNA4 by its context", "1376 TFLOPS",
        "one sequence of 16384 tokens, 16 heads, 192/128 wide, bf16; attention alone", "ROCm/aiter#4205",
    ),
    Published(
        "AITER", "decode", "MI300X", "MI300X", "5.1 to 6.6 times native PyTorch",
        "a tutorial; no time was published", "ROCm/gpuaidev",
    ),
    Published(
        "TileLang", "decode", "MI300X", "MI300X", "up to 1.21 times AITER's assembly, 6.5 times Triton",
        "batch 64 and 128, fp16; plots, no time was published", "tile-ai/tilelang examples/deepseek_mla/amd",
    ),
    Published(
        "vLLM", "index_topk", "MI300X", "MI300X", "5.3 times generic Triton", "32 index heads",
        "vllm-project/vllm#48450",
    ),
    Published(
        "FlashInfer, FlashMLA, TileLang, Triton", "decode", _H200, "H200", "104, 106, 120 and 1660 µs",
        "batch 128, 128 heads, 1151 tokens on average, fp16", "tile-ai/tilelang#1859",
        Shape(128, 128, 1151, "fp16"),
    ),
    Published(
        "FlashMLA", "decode", _H200, "H800", "660 TFLOPS, 3000 GB/s", "batch 128, 4096 to 32768 tokens, bf16",
        "deepseek-ai/FlashMLA README",
    ),
    Published(
        "FlashMLA", "sparse_decode", _H200, "H800", "410 TFLOPS",
        "batch 128, 128 heads, 2 query tokens, top-k 2048, 656-byte rows", "deepseek-ai/FlashMLA README",
    ),
    Published(
        "FlashMLA", "sparse_decode", "B200", "B200", "350 TFLOPS",
        "batch 128, 128 heads, 2 query tokens, top-k 2048, 656-byte rows", "deepseek-ai/FlashMLA README",
    ),
)  # fmt: skip
