"""KV_FORMATS: how one token lies in a paged cache; and the cache: write, read, convert, calibrate, tag.

L = kv_lora_rank, R = qk_rope_head_dim, S new tokens. A slot is page * block_size + position in the page.
A stored fp8 value is x / scale in fp32, clamped to the largest finite value and rounded to nearest, ties to even:
±inf saturates, NaN stays NaN. bf16, fp16 and fp32 parts are IEEE casts and keep ±inf. A scale in a row is the
largest magnitude that it covers over the largest stored value, NaN left out.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anymla.errors import Reasons
from anymla.problem import KV_FORMAT_NAMES, canonical_name

_FN, _FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
_FP8 = (_FN, _FNUZ)
_FP32 = torch.finfo(torch.float32)

# An e4m3 byte, sign-extended to int16, times 128, without bit 14, is an fp16 that is this many times too small.
_FP16_RATIO = {_FN: 256.0, _FNUZ: 128.0}

_CHUNK = 1 << 19
"""Values that are converted at a time: large enough to hide the calls, small enough for the second-level cache."""


@dataclass(frozen=True)
class KVFormat:
    """One way to store a token. A row of KV_FORMATS.

    Attributes:
        name: Key of KV_FORMATS, one of problem.KV_FORMAT_NAMES.
        dtype: Element of KVCache.data; uint8 where a row mixes kinds.
        value_dtype: Element of the stored latent.
        scaled: One fp32 scale for the whole cache is required.
        source: Where the layout is defined.
        tile: Latent values that share a scale in the row, -1 for all L of them, 0 for no scale in the row.
        block_flat: A page holds the values of all its tokens, then the scales of all its tokens.
    """

    name: str
    dtype: torch.dtype
    value_dtype: torch.dtype
    scaled: bool
    source: str
    tile: int = 0
    block_flat: bool = False

    @property
    def largest(self) -> float:
        """The largest finite stored value."""
        return torch.finfo(self.value_dtype).max

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype under which rows are moved: uint8 for one-byte elements, because few operations take float8."""
        return torch.uint8 if self.dtype in _FP8 else self.dtype

    def num_tiles(self, kv_lora_rank: int) -> int:
        """Scales in one row."""
        if not self.tile:
            return 0
        return 1 if self.tile < 0 else kv_lora_rank // self.tile

    def row_width(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Elements in the last axis of the cache."""
        if not self.tile:
            return kv_lora_rank + qk_rope_head_dim
        return kv_lora_rank + 4 * self.num_tiles(kv_lora_rank) + 2 * qk_rope_head_dim

    def bytes_per_token(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Cache bytes of one token, such as 1152 for bf16 at 512/64."""
        return self.row_width(kv_lora_rank, qk_rope_head_dim) * self.dtype.itemsize

    def dequant_scratch(self, num_tokens: int, kv_lora_rank: int, qk_rope_head_dim: int) -> "DequantScratch":
        """CPU memory to dequantise so many tokens in; of width 0 where none is needed."""
        fp8 = kv_lora_rank if self.tile else kv_lora_rank + qk_rope_head_dim if self.scaled else 0
        bits = torch.empty((num_tokens, fp8), dtype=torch.int16)
        tiles = self.num_tiles(kv_lora_rank)
        return DequantScratch(bits, torch.empty((num_tokens, tiles), dtype=torch.float32))

    def refusal(self, kv_lora_rank: int, qk_rope_head_dim: int) -> str | None:
        """Why this format cannot store rows of these widths, or None if it can."""
        reasons = []
        if kv_lora_rank < 1:
            reasons.append(f"kv_lora_rank got {kv_lora_rank}; needs at least 1")
        if qk_rope_head_dim < 0:
            reasons.append(f"qk_rope_head_dim got {qk_rope_head_dim}; needs at least 0")
        if self.tile > 0 and kv_lora_rank % self.tile:
            reasons.append(
                f"kv_lora_rank got {kv_lora_rank}; needs a multiple of {self.tile} for {self.name}"
            )
        if self.tile > 0 and qk_rope_head_dim % 2:
            # 4-byte alignment of every row's scales
            reasons.append(f"qk_rope_head_dim got {qk_rope_head_dim}; needs an even number for {self.name}")
        if self.block_flat and kv_lora_rank % 4:
            reasons.append(f"kv_lora_rank got {kv_lora_rank}; needs a multiple of 4 for {self.name}")
        if self.block_flat and qk_rope_head_dim:
            reasons.append(f"qk_rope_head_dim got {qk_rope_head_dim}; needs 0 for {self.name}")
        return "; ".join(reasons) or None


def _plain(name: str, dtype: torch.dtype, source: str) -> KVFormat:
    return KVFormat(name, dtype, dtype, dtype in _FP8, source)


_DS_MLA = (
    "vLLM csrc/cache_kernels.cu, concat_and_cache_ds_mla; FlashMLA README, FP8 KV cache of DeepSeek-V3.2"
)
_INDEX_K = "vLLM csrc/cache_kernels.cu, indexer_k_quant_and_cache; DeepGEMM fp8_paged_mqa_logits"
_OCP = "OCP 8-bit Floating Point Specification (OFP8) 1.0; one scale as in vLLM's kv_cache_dtype fp8"
_AMD_FP8 = "arXiv 2206.02915, as in AMD CDNA 3 (gfx942); one scale as in vLLM's kv_cache_dtype fp8"

KV_FORMATS = {
    row.name: row
    for row in (
        _plain("bf16", torch.bfloat16, "vLLM csrc/cache_kernels.cu, concat_and_cache_mla"),
        _plain("fp16", torch.float16, "vLLM csrc/cache_kernels.cu, concat_and_cache_mla"),
        _plain("fp32", torch.float32, "vLLM csrc/cache_kernels.cu, concat_and_cache_mla"),
        _plain("fp8_e4m3fn", _FN, _OCP),
        _plain("fp8_e4m3fnuz", _FNUZ, _AMD_FP8),
        KVFormat("fp8_ds_mla", torch.uint8, _FN, False, _DS_MLA, tile=128),
        KVFormat("fp8_ds_mla_fnuz", torch.uint8, _FNUZ, False, _DS_MLA, tile=128),
        KVFormat("index_k", torch.uint8, _FN, False, _INDEX_K, tile=-1, block_flat=True),
        KVFormat("index_k_fnuz", torch.uint8, _FNUZ, False, _INDEX_K, tile=-1, block_flat=True),
    )
}
"""Every format, by name."""

assert tuple(KV_FORMATS) == KV_FORMAT_NAMES

_OF_DTYPE = {row.dtype: name for name, row in KV_FORMATS.items() if row.dtype != torch.uint8}


class DequantScratch(NamedTuple):
    """Memory that `KVCache.dequantise` works in, so that it allocates nothing that grows with the tokens.

    Attributes:
        bits: [n, values of a token in fp8] int16.
        scales: [n, tiles] fp32.
    """

    bits: Tensor
    scales: Tensor

    def first(self, num_tokens: int) -> "DequantScratch":
        """That of the first tokens, a view."""
        return DequantScratch(self.bits[:num_tokens], self.scales[:num_tokens])


@dataclass(frozen=True, eq=False)
class KVCache:
    """A paged cache that knows its format. Make one with `allocate` or `open_cache`, which check it.

    Attributes:
        data: [num_blocks, block_size, row_width], format.dtype, contiguous in the last axis. Written in place.
        format: The row of KV_FORMATS by which `data` is read and written.
        kv_lora_rank: L.
        qk_rope_head_dim: R.
        scale: [1] fp32, multiplies stored values; None unless format.scaled.
    """

    data: Tensor
    format: KVFormat
    kv_lora_rank: int
    qk_rope_head_dim: int
    scale: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.data.device

    @property
    def num_blocks(self) -> int:
        """Pages."""
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens a page."""
        return self.data.shape[1]

    @property
    def width(self) -> int:
        """L + R, values of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token."""
        return self.format.bytes_per_token(self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def tag(self) -> str:
        """What the bytes mean, for whoever receives them: `anymla-kv/1 fp8_e4m3fnuz L=512 R=64 block=64`."""
        return str(Tag(self.format.name, self.kv_lora_rank, self.qk_rope_head_dim, self.block_size))

    @property
    def storage(self) -> Tensor:
        """`data` under format.storage_dtype: the same memory, with a dtype that every indexing operation takes."""
        return self.data.view(self.format.storage_dtype)

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        *,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        kv_format: str,
        scale: Tensor | float | None = None,
        device: torch.device | str | None = None,
    ) -> "KVCache":
        """A new cache of zeros.

        Args:
            num_blocks: Pages.
            block_size: Tokens a page, from 1.
            kv_lora_rank: L.
            qk_rope_head_dim: R, may be 0.
            kv_format: Name of a row of KV_FORMATS.
            scale: [1] fp32 or a number; needed by the formats with one scale, such as from `calibrate_scale`.
            device: Of the pages; torch's default if None.

        Returns:
            The cache; with num_blocks 0 it has no slot.

        Raises:
            InvalidInput: with every reason.
        """
        reasons = Reasons("KVCache.allocate")
        reasons.need(num_blocks >= 0, "num_blocks", num_blocks, "at least 0")
        reasons.need(block_size >= 1, "block_size", block_size, "at least 1")
        row = _row_named(reasons, "kv_format", kv_format)
        if row is not None and (refusal := row.refusal(kv_lora_rank, qk_rope_head_dim)):
            reasons.found.append(refusal)
        if row is None or reasons.found:
            reasons.raise_if_any()
        assert row is not None
        shape = num_blocks, block_size, row.row_width(kv_lora_rank, qk_rope_head_dim)
        data = torch.zeros(shape, dtype=row.storage_dtype, device=device).view(row.dtype)
        scale = _checked_scale(reasons, row, scale, data.device, check=False)
        reasons.raise_if_any()
        return cls(data, row, kv_lora_rank, qk_rope_head_dim, scale)

    def encode(self, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        """The stored rows of new tokens.

        Args:
            kv_c: [S, L] float.
            k_pe: [S, R] float.

        Returns:
            [S, row_width] of format.storage_dtype, token by token (also for the block-flat formats).
        """
        row, width = self.format, self.kv_lora_rank
        if not row.tile and not row.scaled:
            return torch.cat([kv_c.to(row.dtype), k_pe.to(row.dtype)], dim=-1)
        if row.scaled:
            assert self.scale is not None
            values = torch.cat([kv_c.float(), k_pe.float()], dim=-1)
            return _to_fp8(values.div_(self.scale), row.value_dtype)
        tiles = kv_c.float().unflatten(1, (row.num_tiles(width), -1))
        scales = _tile_scales(tiles, row.value_dtype)
        raw = torch.empty(
            (kv_c.shape[0], row.row_width(width, self.qk_rope_head_dim)),
            dtype=torch.uint8,
            device=kv_c.device,
        )
        raw[:, :width] = _to_fp8(tiles / scales, row.value_dtype).flatten(1)
        raw[:, width : width + 4 * scales.shape[1]] = scales.squeeze(-1).view(torch.uint8)
        raw[:, width + 4 * scales.shape[1] :] = k_pe.to(torch.bfloat16).contiguous().view(torch.uint8)
        return raw

    def write(self, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store new tokens in place; slot -1 is skipped, no other slot may occur twice.

        On a device this syncs once, to leave out the skipped tokens; backends bring kernels that do not.

        Args:
            kv_c: [S, L] float.
            k_pe: [S, R] float.
            slot_mapping: [S] int64.
        """
        keep = slot_mapping >= 0
        if not keep.all():
            kv_c, k_pe, slot_mapping = kv_c[keep], k_pe[keep], slot_mapping[keep]
        if not slot_mapping.numel():
            return
        self.scatter(self.encode(kv_c, k_pe), slot_mapping)

    def scatter(self, raw: Tensor, slots: Tensor) -> None:
        """Put stored rows [S, row_width] into slots [S] int64, none of them -1."""
        slots = slots.to(torch.int64)
        page, position = slots // self.block_size, slots % self.block_size
        if self.format.block_flat:
            values, scales = _split_flat(self.storage, self.kv_lora_rank)
            values[page, position] = raw[:, : self.kv_lora_rank]
            scales[page, position] = raw[:, self.kv_lora_rank :]
        else:
            self.storage[page, position] = raw

    def gather(self, slots: Tensor) -> Tensor:
        """Stored rows [N, row_width] of slots [N], token by token; only these slots are read. -1 is not a slot."""
        slots = slots.to(torch.int64)
        page, position = slots // self.block_size, slots % self.block_size
        if self.format.block_flat:
            values, scales = _split_flat(self.storage, self.kv_lora_rank)
            return torch.cat([values[page, position], scales[page, position]], dim=-1)
        return self.storage[page, position]

    def dequantise(self, raw: Tensor, out: Tensor, scratch: DequantScratch | None = None) -> None:
        """Write the values of stored rows into `out`.

        Args:
            raw: [n, row_width], token by token as `gather` gives them, format.storage_dtype or format.dtype.
            out: [n, L + R] fp32 or fp64; fp64 is exact.
            scratch: From `format.dequant_scratch`, of n tokens, used on the CPU. None: it is allocated.
        """
        row, width = self.format, self.kv_lora_rank
        if not row.tile:
            if not row.scaled:
                out.copy_(raw)
                return
            assert self.scale is not None
            _fp8_values(raw.view(torch.uint8), row.value_dtype, self.scale, out, scratch)
            return
        tiles = row.num_tiles(width)
        _fp8_values(
            raw[:, :width].unflatten(1, (tiles, -1)),
            row.value_dtype,
            raw[:, width : width + 4 * tiles].view(torch.float32).unsqueeze(-1),
            out[:, :width].unflatten(1, (tiles, -1)),
            scratch,
        )
        if self.qk_rope_head_dim:
            out[:, width:] = raw[:, width + 4 * tiles :].view(torch.bfloat16)

    def dequantise_pages(self, pages: Tensor, out: Tensor, scratch: DequantScratch | None = None) -> None:
        """Write the values of whole pages into `out`.

        Args:
            pages: [p, block_size, row_width], such as `storage.index_select(0, ids)`.
            out: [p, block_size, L + R] fp32 or fp64.
            scratch: Likewise, of p * block_size tokens.
        """
        if self.format.block_flat:
            values, scales = _split_flat(pages.view(torch.uint8), self.kv_lora_rank)
            _fp8_values(values, self.format.value_dtype, scales.view(torch.float32), out, scratch)
        else:
            self.dequantise(pages.flatten(0, 1), out.view(-1, self.width), scratch)

    def read(self, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of some tokens.

        Args:
            slots: [N] integers, any order, none of them -1.
            dtype: Of the result; float64 is exact, narrower ones are rounded from fp32.

        Returns:
            [N, L + R]; [0, L + R] for no slots.
        """
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.empty((slots.shape[0], self.width), dtype=exact, device=self.device)
        self.dequantise(self.gather(slots), out)
        return out.to(dtype)


@dataclass(frozen=True)
class Tag:
    """What a cache's bytes mean, without the cache.

    Attributes:
        kv_format: Name of a row of KV_FORMATS.
        kv_lora_rank: L.
        qk_rope_head_dim: R.
        block_size: Tokens a page.
    """

    kv_format: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    block_size: int

    def __str__(self) -> str:
        return f"anymla-kv/1 {self.kv_format} L={self.kv_lora_rank} R={self.qk_rope_head_dim} block={self.block_size}"

    @classmethod
    def parse(cls, text: str) -> "Tag | None":
        """Read a tag, or None if this is not one that we wrote."""
        match = re.fullmatch(r"anymla-kv/1 (\w+) L=(\d+) R=(\d+) block=(\d+)", text)
        return cls(match[1], int(match[2]), int(match[3]), int(match[4])) if match else None


def check_cache(
    reasons: Reasons,
    data: Tensor | KVCache,
    *,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    kv_format: str | None = None,
    scale: Tensor | float | None = None,
    tag: str | None = None,
    convert_to: str | None = None,
    check: bool = False,
) -> KVCache | None:
    """`open_cache` that notes refusals instead of raising; None if something was noted."""
    before = len(reasons.found)
    if isinstance(data, KVCache):
        if scale is not None:
            reasons.need(False, "scale", "a value", "None: the cache carries its own")
        scale, tag, data = data.scale, data.tag if tag is None else tag, data.data
    if not reasons.need(
        isinstance(data, Tensor), "kv_cache", type(data).__name__, "a torch.Tensor or KVCache"
    ):
        return None
    row = _format_of(reasons, data, kv_format, tag, convert_to, (kv_lora_rank, qk_rope_head_dim))
    target = _row_named(reasons, "convert_to", convert_to) if convert_to is not None else None
    if row is None or len(reasons.found) > before:
        return None
    if refusal := row.refusal(kv_lora_rank, qk_rope_head_dim):
        reasons.found.append(refusal)
        return None
    _check_layout(reasons, data, row, kv_lora_rank, qk_rope_head_dim)
    scale = _checked_scale(reasons, row, scale, data.device, check=check)
    if len(reasons.found) > before:
        return None
    cache = KVCache(data.view(row.dtype), row, kv_lora_rank, qk_rope_head_dim, scale)
    if target is None or target is row:
        return cache
    if _check_conversion(reasons, cache, target, None):
        return convert(cache, target.name)
    return None


def open_cache(
    data: Tensor | KVCache,
    *,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    kv_format: str | None = None,
    scale: Tensor | float | None = None,
    tag: str | None = None,
    convert_to: str | None = None,
    check: bool = False,
) -> KVCache:
    """Describe pages that exist, or refuse them; the bytes are never read as another format than their own.

    Args:
        data: [num_blocks, block_size, row_width], contiguous in the last axis; pages may lie apart. A KVCache is
            held against the other arguments.
        kv_lora_rank: L.
        qk_rope_head_dim: R.
        kv_format: The format of `data`. None takes it from `tag`, else from the dtype. uint8 data of an fp8 format
            needs one of the two.
        scale: [1] fp32 or a number, for the formats with one scale.
        tag: `KVCache.tag` of whoever wrote the pages. It is believed; what contradicts it is refused.
        convert_to: A format to convert to by value. The result owns new memory unless it is in that format already.
        check: Look at the values of a device scale too; this syncs.

    Returns:
        The cache, over the same memory unless converted.

    Raises:
        InvalidInput: with every reason.
    """
    reasons = Reasons("open_cache")
    cache = check_cache(
        reasons,
        data,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        kv_format=kv_format,
        scale=scale,
        tag=tag,
        convert_to=convert_to,
        check=check,
    )
    reasons.raise_if_any()
    assert cache is not None
    return cache


def convert(cache: KVCache, kv_format: str, *, scale: Tensor | float | None = None) -> KVCache:
    """A copy of a cache in another format, by value.

    From e4m3fn to e4m3fnuz every scale doubles and every finite value is kept exactly; back, scales stay and only
    values below 2^-6 of the scale are rounded. Everything else goes through fp32.

    Args:
        cache: What to convert; unused slots are converted too.
        kv_format: Name of a row of KV_FORMATS.
        scale: [1] fp32 or a number. Needed by a format with one scale unless `cache` has one scale as well.

    Returns:
        A new cache with the same pages. Not a copy, but `cache` itself, if there is nothing to convert.

    Raises:
        InvalidInput: The format is unknown, cannot hold these widths, or lacks a scale.
    """
    reasons = Reasons("convert")
    target = _row_named(reasons, "kv_format", kv_format)
    if target is None or not _check_conversion(reasons, cache, target, scale):
        reasons.raise_if_any()
    assert target is not None
    source, width = cache.format, cache.kv_lora_rank
    if target is source and scale is None:
        return cache
    twin = (
        scale is None
        and source.tile == target.tile
        and source.value_dtype in _FP8
        and target.value_dtype in _FP8
    )
    factor = 2.0 if source.value_dtype == _FN else 1.0
    if twin and target.scaled:
        assert cache.scale is not None
        scale = cache.scale * factor
    result = KVCache.allocate(
        cache.num_blocks,
        cache.block_size,
        kv_lora_rank=width,
        qk_rope_head_dim=cache.qk_rope_head_dim,
        kv_format=target.name,
        scale=scale,
        device=cache.device,
    )
    slots = torch.arange(cache.num_blocks * cache.block_size, device=cache.device)
    for part in slots.split(max(1, _CHUNK // cache.width)):
        if twin:
            raw = cache.gather(part)
            values = cache.width if target.scaled else width
            fp8 = raw[:, :values].contiguous().view(source.value_dtype).float()
            raw[:, :values] = _to_fp8(fp8 * (1 / factor), target.value_dtype)
            if target.tile:
                end = width + 4 * target.num_tiles(width)
                raw[:, width:end] = (raw[:, width:end].contiguous().view(torch.float32) * factor).view(
                    torch.uint8
                )
            result.scatter(raw, part)
        else:
            rows = cache.read(part)
            result.scatter(result.encode(rows[:, :width], rows[:, width:]), part)
    return result


def calibrate_scale(kv_c: Tensor, k_pe: Tensor, kv_format: str, *, margin: float = 1.0) -> Tensor:
    """The smallest scale at which neither the latent nor the RoPE part saturates.

    Looks at every value, so it syncs on a device.

    Args:
        kv_c: [..., L] float, such as the latents of a calibration text.
        k_pe: [..., R] float, rotated.
        kv_format: A format with one scale: fp8_e4m3fn or fp8_e4m3fnuz.
        margin: At least 1; 2 leaves room for values twice as large.

    Returns:
        [1] fp32 on the device of kv_c; 1 if there is no value but zeros.

    Raises:
        InvalidInput: A value is NaN or infinite, or the format has no such scale.
    """
    reasons = Reasons("calibrate_scale")
    row = _row_named(reasons, "kv_format", kv_format)
    if row is not None:
        scaled = " or ".join(name for name, other in KV_FORMATS.items() if other.scaled)
        reasons.need(row.scaled, "kv_format", row.name, f"a format with one scale: {scaled}")
    reasons.need(math.isfinite(margin) and margin >= 1, "margin", margin, "a finite number, at least 1")
    largest = torch.zeros((), dtype=torch.float32, device=kv_c.device)
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        if tensor.numel():
            amax = tensor.abs().amax().to(largest)
            reasons.need(
                bool(amax.isfinite()), name, f"a largest magnitude of {amax.item()}", "finite values"
            )
            largest = torch.maximum(largest, amax)
    reasons.raise_if_any()
    assert row is not None
    found = (largest * margin / row.largest).clamp(min=_FP32.tiny)
    return torch.where(largest > 0, found, 1.0).reshape(1)


def _row_named(reasons: Reasons, argument: str, name: str) -> KVFormat | None:
    row = KV_FORMATS.get(canonical_name(name)) if name.lower() not in ("fp8", "fp8_e4m3") else None
    reasons.need(row is not None, argument, repr(name), f"one of {', '.join(KV_FORMATS)}")
    return row


def _format_of(
    reasons: Reasons,
    data: Tensor,
    kv_format: str | None,
    tag: str | None,
    convert_to: str | None,
    dims: tuple[int, int],
) -> KVFormat | None:
    """The format of `data` by its tag, else by name, else by dtype; what contradicts the tag is noted."""
    if kv_format is not None and kv_format.lower() in ("fp8", "fp8_e4m3") and data.dtype in _FP8:
        kv_format = _OF_DTYPE[data.dtype]
    named = _row_named(reasons, "kv_format", kv_format) if kv_format is not None else None
    if kv_format is not None and named is None:
        return None
    if tag is None:
        if named is None:
            name = _OF_DTYPE.get(data.dtype)
            got = f"None, with data of {_word(data.dtype)}"
            reasons.need(name is not None, "kv_format", got, f"one of {', '.join(KV_FORMATS)}, or a tag")
            return KV_FORMATS[name] if name is not None else None
        return named
    told = Tag.parse(tag)
    row = KV_FORMATS.get(told.kv_format) if told is not None else None
    if told is None or row is None:
        reasons.need(False, "tag", repr(tag), f"one such as {Tag('fp8_e4m3fn', 512, 64, 64)!s}")
        return None
    if named is not None and named is not row:
        wish = convert_to is not None and canonical_name(convert_to) == named.name
        reasons.need(wish, "kv_format", named.name, f"{row.name}, from the tag, or convert_to={named.name!r}")
    reasons.need(dims[0] == told.kv_lora_rank, "kv_lora_rank", dims[0], f"{told.kv_lora_rank}, from the tag")
    reasons.need(
        dims[1] == told.qk_rope_head_dim,
        "qk_rope_head_dim",
        dims[1],
        f"{told.qk_rope_head_dim}, from the tag",
    )
    if data.dim() == 3:
        size = data.shape[1]
        reasons.need(size == told.block_size, "block_size", size, f"{told.block_size}, from the tag")
    return row


def _check_layout(
    reasons: Reasons, data: Tensor, row: KVFormat, kv_lora_rank: int, qk_rope_head_dim: int
) -> None:
    """Note a dtype, shape or stride that this format cannot have."""
    dtypes = dict.fromkeys((row.dtype, row.storage_dtype))
    needs = " or ".join(map(_word, dtypes)) + f" for {row.name}"
    reasons.need(data.dtype in dtypes, "kv_cache", f"dtype {_word(data.dtype)}", needs)
    width = row.row_width(kv_lora_rank, qk_rope_head_dim)
    fits = data.dim() == 3 and data.shape[1] >= 1 and data.shape[2] == width
    where = f"{row.name} with kv_lora_rank {kv_lora_rank} and qk_rope_head_dim {qk_rope_head_dim}"
    if not reasons.need(
        fits, "kv_cache", f"shape {tuple(data.shape)}", f"(pages, block_size, {width}), from {where}"
    ):
        return
    page, token, element = data.stride()
    reasons.need(element == 1 or width == 1, "kv_cache", f"strides {data.stride()}", "a contiguous last axis")
    size = data.shape[1]
    token = width if size == 1 else token
    apart = token >= width and (data.shape[0] <= 1 or page >= (size - 1) * token + width)
    reasons.need(apart, "kv_cache", f"strides {data.stride()}", "tokens and pages that do not overlap")
    if row.block_flat:
        reasons.need(
            token == width, "kv_cache", f"strides {data.stride()}", f"contiguous pages for {row.name}"
        )
    if row.tile:
        aligned = data.storage_offset() % 4 == 0 and page % 4 == 0 and token % 4 == 0
        reasons.need(
            aligned, "kv_cache", f"strides {data.stride()}", "rows that start at a multiple of 4 bytes"
        )


def _check_conversion(
    reasons: Reasons, cache: KVCache, target: KVFormat, scale: Tensor | float | None
) -> bool:
    """Note why this cache cannot become the target; True if it can."""
    before = len(reasons.found)
    if refusal := target.refusal(cache.kv_lora_rank, cache.qk_rope_head_dim):
        reasons.found.append(refusal)
    if scale is not None or (target.scaled and not cache.format.scaled):
        _checked_scale(reasons, target, scale, cache.device, check=False)
    return len(reasons.found) == before


def _checked_scale(
    reasons: Reasons, row: KVFormat, scale: Tensor | float | None, device: torch.device, *, check: bool
) -> Tensor | None:
    """The scale as [1] fp32, or None and a note; values on a device are looked at only with `check`."""
    if not row.scaled:
        reasons.need(
            scale is None, "scale", _shown_scale(scale), f"None: {row.name} has no scale for the whole cache"
        )
        return None
    needs = f"[1] fp32 on {device}, finite and above 0, for {row.name}; see calibrate_scale"
    if isinstance(scale, int | float):
        scale = torch.tensor([float(scale)], dtype=torch.float32, device=device)
    good = (
        isinstance(scale, Tensor)
        and scale.numel() == 1
        and scale.dim() <= 1
        and scale.dtype == torch.float32
        and scale.device == device
    )
    if not reasons.need(good, "scale", _shown_scale(scale), needs):
        return None
    assert isinstance(scale, Tensor)
    if scale.device.type == "cpu" or (check and scale.device.type != "meta"):
        value = scale.item()
        if not reasons.need(math.isfinite(value) and value > 0, "scale", value, needs):
            return None
    return scale.reshape(1)


def _shown_scale(scale: object) -> str:
    if isinstance(scale, Tensor):
        return f"{list(scale.shape)} {_word(scale.dtype)} on {scale.device}"
    return str(scale)


def _split_flat(pages: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Block-flat pages [p, n, width + 4] uint8 as values [p, n, width] and scale bytes [p, n, 4], both views."""
    count, size, _ = pages.shape
    page = pages.stride(0)
    values = pages.as_strided((count, size, width), (page, width, 1))
    scales = pages.as_strided((count, size, 4), (page, 4, 1), pages.storage_offset() + size * width)
    return values, scales


def _tile_scales(tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, tiles, 1] fp32 scales of [S, tiles, n] values, finite and positive; NaN counts as nothing."""
    largest = torch.finfo(dtype).max
    # The power of two at which the largest stored value is still finite in fp32.
    most = 2.0 ** (127 - math.floor(math.log2(largest)))
    amax = tiles.abs().nan_to_num_(nan=0.0).amax(-1, keepdim=True)
    return (amax / largest).clamp_(_FP32.tiny, most)


def _to_fp8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of the nearest fp8 values, ties to even, saturating; NaN stays NaN. Overwrites `values`."""
    largest = torch.finfo(dtype).max
    return values.clamp_(-largest, largest).to(dtype).view(torch.uint8)


def _fp8_values(
    raw: Tensor, dtype: torch.dtype, scale: Tensor, out: Tensor, scratch: DequantScratch | None
) -> None:
    """out = fp8 bytes `raw` times `scale`, which broadcasts."""
    if raw.device.type != "cpu":
        torch.mul(raw.view(dtype).to(out.dtype), scale.to(out.dtype), out=out)
        return
    bits = torch.empty(raw.shape, dtype=torch.int16) if scratch is None else scratch.bits.view(raw.shape)
    if _has_nan(raw, dtype, bits):
        out.copy_(raw.view(dtype))
        out.mul_(scale.to(out.dtype))
        return
    # torch's own cast of float8 runs one element at a time on CPUs without AVX-512: five times slower than this.
    bits.copy_(raw.view(torch.int8))
    bits.mul_(128).bitwise_and_(-0x4001)
    out.copy_(bits.view(torch.float16))
    if scratch is not None and scale.dim() > 1 and out.dtype == torch.float32:
        out.mul_(torch.mul(scale, _FP16_RATIO[dtype], out=scratch.scales.view(scale.shape)))
    else:
        out.mul_(scale.to(out.dtype) * _FP16_RATIO[dtype])


def _has_nan(raw: Tensor, dtype: torch.dtype, scratch: Tensor) -> bool:
    """Whether one of these fp8 bytes is a NaN; `scratch` has the shape of `raw` and at least its bytes."""
    if not raw.numel():
        return False
    if dtype == _FNUZ:
        return int(raw.view(torch.int8).amin()) == -128
    size = scratch.view(-1).view(torch.uint8)[: raw.numel()].view(raw.shape)
    return int(torch.bitwise_and(raw, 0x7F, out=size).amax()) == 0x7F


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
