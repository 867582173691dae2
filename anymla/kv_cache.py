"""KVCache: a paged cache that knows its format; write, read, convert, calibrate, open what others wrote.

L = kv_lora_rank, R = qk_rope_head_dim, S new tokens. A slot is page * block_size + position in the page.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anymla import fp8
from anymla.arguments import check_count, check_device, check_flags, number_of, shown
from anymla.errors import Reasons
from anymla.kv_formats import FOREIGN_FORMATS, NAME_OF_DTYPE, SHUFFLE, row_named
from anymla.kv_formats import KV_FORMATS as KV_FORMATS
from anymla.kv_formats import DequantScratch as DequantScratch
from anymla.kv_formats import KVFormat as KVFormat
from anymla.kv_formats import Tag as Tag
from anymla.problem import count_of
from anymla.tensors import check_tensor, word

_FP32 = torch.finfo(torch.float32)

_CONVERTED_AT_ONCE = 1 << 19
"""Values: enough to hide the cost of the calls, few enough for the second-level cache."""

_CALIBRATED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of the latents that a scale is calibrated for."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """A paged cache that knows its format. Make one with `allocate` or `open_cache`, which check it.

    Attributes:
        data: [num_blocks, block_size, row_width], format.dtype, the last axis contiguous. Written in place.
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
        """`data` as format.storage_dtype: the same memory, in a dtype that every indexing operation takes."""
        return self.data.view(self.format.storage_dtype)

    @classmethod
    def allocate(
        cls, num_blocks: int, block_size: int, *, kv_lora_rank: int, qk_rope_head_dim: int, kv_format: str,
        scale: Tensor | float | None = None, device: torch.device | str | None = None
    ) -> "KVCache":  # fmt: skip
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
        num_blocks = check_count(reasons, "num_blocks", num_blocks, 0)
        tokens, block_size = count_of(block_size), check_count(reasons, "block_size", block_size)
        row = row_named(reasons, "kv_format", kv_format)
        target = check_device(reasons, device)
        if row is not None and target is not None:
            scale = _checked_scale(reasons, row, scale, target, check=False)
        widths = _checked_widths(reasons, row, kv_lora_rank, qk_rope_head_dim, tokens)
        reasons.raise_if_any()
        assert row is not None and not isinstance(scale, float)
        shape = num_blocks, block_size, row.row_width(*widths)
        data = torch.zeros(shape, dtype=row.storage_dtype, device=target).view(row.dtype)
        return cls(data, row, *widths, scale)

    def write(self, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor, *, power_of_two: bool = False) -> None:
        """Store new tokens in place; slot -1 is skipped, no other slot may occur twice.

        On a device this syncs once, to leave out the skipped tokens; backends bring kernels that do not.
        Nothing is checked, since a backend writes by it what `anymla.write_cache` has checked.

        Args:
            kv_c: [S, L] float.
            k_pe: [S, R] float.
            slot_mapping: [S] int64.
            power_of_two: See `encode`.
        """
        kv_c, k_pe, keep = kv_c.detach(), k_pe.detach(), slot_mapping >= 0
        if not keep.all():
            kv_c, k_pe, slot_mapping = kv_c[keep], k_pe[keep], slot_mapping[keep]
        if slot_mapping.numel():
            self.scatter(self.encode(kv_c, k_pe, power_of_two=power_of_two), slot_mapping)

    def read(self, slots: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of some tokens.

        Args:
            slots: [N] integers in any order, none of them -1; not read back, so not checked.
            dtype: Of the result; float64 is exact, narrower ones are rounded from fp32.

        Returns:
            [N, L + R]; [0, L + R] for no slots.

        Raises:
            InvalidInput: slots are no [N] integers on the device of the pages, or dtype is none of floats.
        """
        reasons = Reasons("KVCache.read")
        if check_tensor(reasons, "slots", slots, (None,), (torch.int64, torch.int32)):
            needs = f"{self.device}, that of the cache"
            reasons.need(slots.device == self.device, "slots", f"device {slots.device}", needs)
        floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        reasons.need(floats, "dtype", shown(dtype), "a floating torch.dtype")
        reasons.raise_if_any()
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.empty((slots.shape[0], self.width), dtype=exact, device=self.device)
        self.dequantise(self.gather(slots), out)
        return out.to(dtype)

    def encode(self, kv_c: Tensor, k_pe: Tensor, *, power_of_two: bool = False) -> Tensor:
        """The stored rows of new tokens.

        Args:
            kv_c: [S, L] float.
            k_pe: [S, R] float.
            power_of_two: Let the scales in a row be powers of two; formats without such scales ignore it.

        Returns:
            [S, row_width] of format.storage_dtype, token by token (also for the block-flat formats).
        """
        row, width = self.format, self.kv_lora_rank
        if not row.tile and not row.scaled:
            return torch.cat([kv_c.to(row.dtype), k_pe.to(row.dtype)], dim=-1)
        if row.scaled:
            assert self.scale is not None
            values = torch.cat([kv_c.float(), k_pe.float()], dim=-1)
            return fp8.to_bytes(values.div_(self.scale), row.value_dtype)
        tokens, tiles = kv_c.shape[0], row.num_tiles(width)
        values = kv_c.float().reshape(tokens, tiles, width // tiles)
        scales = fp8.tile_scales(values, row.value_dtype, power_of_two=power_of_two)
        stored = fp8.to_bytes(values / scales, row.value_dtype).view(tokens, width)
        rope = k_pe.to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat([stored, scales.view(tokens, tiles).view(torch.uint8), rope], dim=-1)

    def scatter(self, raw: Tensor, slots: Tensor) -> None:
        """Put stored rows [S, row_width] into slots [S], none of them -1."""
        page, position = self._places(slots)
        if self.format.block_flat:
            values, scales = _split_flat(self.storage, self.kv_lora_rank)
            scales[page, position] = raw[:, self.kv_lora_rank :]
            if self.format.shuffled:
                tiles = _tiles_of(values)
                tiles[page, position // SHUFFLE, position % SHUFFLE] = _in_tiles(raw, self.kv_lora_rank)
            else:
                values[page, position] = raw[:, : self.kv_lora_rank]
        else:
            self.storage[page, position] = raw

    def gather(self, slots: Tensor) -> Tensor:
        """Stored rows [N, row_width] of slots [N], token by token; only these are read. -1 is not a slot."""
        raw = torch.empty(
            (slots.shape[0], self.data.shape[2]), dtype=self.format.storage_dtype, device=self.device
        )
        self.gather_into(*self._places(slots), raw)
        return raw

    def gather_into(self, page: Tensor, position: Tensor, raw: Tensor) -> None:
        """`gather` of tokens given as pages [n] and positions [n] in them, int64, into raw [n, row_width]."""
        if self.format.block_flat:
            values, scales = _split_flat(self.storage, self.kv_lora_rank)
            _take(scales, page, position, raw[:, self.kv_lora_rank :])
            if self.format.shuffled:
                tiles = _tiles_of(values)[page, position // SHUFFLE, position % SHUFFLE]
                _in_tiles(raw, self.kv_lora_rank).copy_(tiles)
            else:
                _take(values, page, position, raw[:, : self.kv_lora_rank])
        else:
            _take(self.storage, page, position, raw)

    def dequantise(self, raw: Tensor, out: Tensor, scratch: DequantScratch | None = None) -> None:
        """Write the values of stored rows into `out`.

        Args:
            raw: [n, row_width], token by token as `gather` gives them, format.storage_dtype or format.dtype.
            out: [n, L + R] fp32 or fp64; fp64 is exact.
            scratch: From `format.dequant_scratch`, of n tokens, used on the CPU. None: it is allocated.
        """
        row, width = self.format, self.kv_lora_rank
        if row.tile:
            tiles = row.num_tiles(width)
            shape, rope = (raw.shape[0], tiles, width // tiles), width + 4 * tiles
            scales = raw[:, width:rope].view(torch.float32).unsqueeze(-1)
            self._write_fp8(raw[:, :width].view(shape), scales, out[:, :width].view(shape), scratch)
            if self.qk_rope_head_dim:
                out[:, width:] = raw[:, rope:].view(torch.bfloat16)
        elif row.scaled:
            assert self.scale is not None
            self._write_fp8(raw.view(torch.uint8), self.scale, out, scratch)
        else:
            out.copy_(raw)

    def dequantise_pages(self, pages: Tensor, out: Tensor, scratch: DequantScratch | None = None) -> None:
        """Write the values of whole pages into `out`.

        Args:
            pages: [p, block_size, row_width], such as `storage.index_select(0, ids)`.
            out: [p, block_size, L + R] fp32 or fp64, contiguous.
            scratch: Likewise, of p * block_size tokens.
        """
        if self.format.block_flat:
            values, scales = _split_flat(pages, self.kv_lora_rank)
            values = _tiles_of(values).reshape(values.shape) if self.format.shuffled else values
            self._write_fp8(values, scales.view(torch.float32), out, scratch)
        else:
            self.dequantise(pages.flatten(0, 1), out.view(-1, self.width), scratch)

    def _write_fp8(self, raw: Tensor, scale: Tensor, out: Tensor, scratch: DequantScratch | None) -> None:
        bits = torch.empty(raw.shape, dtype=torch.int16) if scratch is None else scratch.bits
        scales = scratch.scales if scratch is not None and scale.dim() > 1 else None
        fp8.write_values(raw, self.format.value_dtype, scale, out, bits, scales)

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Page and position of each slot, int64."""
        slots = slots.to(torch.int64)
        return slots // self.block_size, slots % self.block_size


def open_cache(
    data: Tensor, *, kv_lora_rank: int, qk_rope_head_dim: int, kv_format: str | None = None,
    scale: Tensor | float | None = None, tag: str | None = None, convert_to: str | None = None,
    check: bool = False
) -> KVCache:  # fmt: skip
    """Describe pages that exist, or refuse them; bytes are never read as another format than their own.

    Args:
        data: [num_blocks, block_size, row_width], contiguous in the last axis; pages may lie apart.
        kv_lora_rank: L.
        qk_rope_head_dim: R.
        kv_format: The format of `data`. None: it is that of `tag`, else of the dtype; uint8 data needs one of
            the two.
        scale: [1] fp32 or a number, for the formats with one scale.
        tag: `KVCache.tag` of whoever wrote the pages. It is believed; what contradicts it is refused.
        convert_to: A format to convert to by value, into new memory. Beside a tag, kv_format may name it too.
        check: Look at the value of a scale on a device too; this syncs.

    Returns:
        The cache, over the same memory unless converted.

    Raises:
        InvalidInput: with every reason.
    """
    reasons = Reasons("open_cache")
    if not reasons.need(isinstance(data, Tensor), "kv_cache", type(data).__name__, "a torch.Tensor"):
        reasons.raise_if_any()
    check_flags(reasons, check=check)
    target = row_named(reasons, "convert_to", convert_to) if convert_to is not None else None
    row = _row_of(reasons, data, kv_format, target, tag)
    if row is not None:
        scale = _checked_scale(reasons, row, scale, data.device, check=check is True)
    tokens, before = data.shape[1] if data.dim() == 3 else None, len(reasons.found)
    widths = _checked_widths(reasons, row, kv_lora_rank, qk_rope_head_dim, tokens)
    if row is not None and len(reasons.found) == before:
        _check_layout(reasons, data, row, row.row_width(*widths))
    if tag is not None and (told := Tag.parse(tag)) is not None:
        size = told.block_size if tokens is None else tokens
        facts = ("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", qk_rope_head_dim), ("block_size", size)
        for name, value in ((name, count_of(value)) for name, value in facts):
            right = getattr(told, name)
            reasons.need(value in (None, right), name, value, f"{right}, from the tag")
    reasons.raise_if_any()
    assert row is not None and not isinstance(scale, float)
    cache = KVCache(data.view(row.dtype), row, *widths, scale)
    return cache if target is None else convert(cache, target.name)


def convert(cache: KVCache, kv_format: str, *, scale: Tensor | float | None = None) -> KVCache:
    """A copy of a cache in another format, by value.

    Between the two flavours of one fp8 layout, scales double towards e4m3fnuz and every finite value is kept
    exactly; towards e4m3fn scales stay, and only magnitudes below 2^-6 of the scale are rounded. Everything
    else goes through fp32.

    Args:
        cache: What to convert; unused slots are converted too.
        kv_format: Name of a row of KV_FORMATS.
        scale: [1] fp32 or a number. Needed by a format with one scale unless `cache` has one as well.

    Returns:
        A new cache with the same pages, or `cache` itself if there is nothing to convert.

    Raises:
        InvalidInput: The format is unknown, cannot hold these widths, or lacks a scale.
    """
    reasons = Reasons("convert")
    needs = "a KVCache, from KVCache.allocate or open_cache"
    if not reasons.need(isinstance(cache, KVCache), "cache", type(cache).__name__, needs):
        reasons.raise_if_any()
    target, source, width = row_named(reasons, "kv_format", kv_format), cache.format, cache.kv_lora_rank
    if target is source and scale is None:
        return cache
    reasons.raise_if_any()
    assert target is not None
    flavours = {source.value_dtype, target.value_dtype}
    twins = scale is None and source.tile == target.tile and flavours == {*fp8.FLAVOURS}
    # The same rows, in another order.
    moved = bool(source.tile) and source.tile == target.tile and len(flavours) == 1
    factor = 2.0 if target.value_dtype == fp8.FNUZ else 1.0
    if twins and cache.scale is not None:
        scale = cache.scale * factor
    result = KVCache.allocate(
        cache.num_blocks, cache.block_size, kv_lora_rank=width, qk_rope_head_dim=cache.qk_rope_head_dim,
        kv_format=target.name, scale=scale, device=cache.device,
    )  # fmt: skip
    num_slots, step = cache.num_blocks * cache.block_size, max(1, _CONVERTED_AT_ONCE // cache.width)
    for start in range(0, num_slots, step):
        slots = torch.arange(start, min(start + step, num_slots), device=cache.device)
        if moved:
            result.scatter(cache.gather(slots), slots)
        elif twins:
            raw = cache.gather(slots)
            _recode(raw, source, target, width if target.tile else cache.width, factor)
            result.scatter(raw, slots)
        else:
            rows = cache.read(slots)
            result.scatter(result.encode(rows[:, :width], rows[:, width:]), slots)
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
    row = row_named(reasons, "kv_format", kv_format)
    if row is not None:
        scaled = " or ".join(name for name, other in KV_FORMATS.items() if other.scaled)
        reasons.need(row.scaled, "kv_format", row.name, f"a format with one scale: {scaled}")
    right = 1 <= number_of(margin) < math.inf
    reasons.need(right, "margin", shown(margin), "a finite number, at least 1")
    amax = 0.0
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        if not check_tensor(reasons, name, tensor, None, _CALIBRATED_DTYPES):
            continue
        if reasons.need(not tensor.is_meta, name, "device meta", "values to look at") and tensor.numel():
            found = tensor.abs().amax().item()
            reasons.need(math.isfinite(found), name, f"a largest magnitude of {found}", "finite values")
            amax = max(amax, found)
    reasons.raise_if_any()
    assert row is not None
    scale = min(max(amax * margin / row.largest, _FP32.tiny), _FP32.max / row.largest) if amax else 1.0
    return torch.tensor([scale], dtype=torch.float32, device=kv_c.device)


def _row_of(
    reasons: Reasons, data: Tensor, kv_format: str | None, target: KVFormat | None, tag: str | None
) -> KVFormat | None:
    """The format of `data` by its tag, else by name, else by dtype."""
    by_dtype = NAME_OF_DTYPE.get(data.dtype)
    if isinstance(kv_format, str) and kv_format in ("fp8", "fp8_e4m3") and data.dtype in fp8.FLAVOURS:
        kv_format = by_dtype
    named = None if kv_format is None else row_named(reasons, "kv_format", kv_format)
    if tag is not None:
        told = Tag.parse(tag)
        needs = f"one of this version, such as '{Tag('fp8_e4m3fn', 512, 64, 64)}'"
        reasons.need(told is not None, "tag", shown(tag), needs)
        if told is None:
            return None
        if named is not None and named is not target:
            wanted = f"{told.kv_format}, from the tag, or convert_to={named.name!r}"
            reasons.need(named.name == told.kv_format, "kv_format", named.name, wanted)
        return (KV_FORMATS | FOREIGN_FORMATS)[told.kv_format]
    if kv_format is not None:
        return named
    got = f"None, with data of {word(data.dtype)}"
    if reasons.need(by_dtype is not None, "kv_format", got, f"a tag, or one of {', '.join(KV_FORMATS)}"):
        assert by_dtype is not None
        return KV_FORMATS[by_dtype]
    return None


def _check_layout(reasons: Reasons, data: Tensor, row: KVFormat, width: int) -> None:
    """Note a dtype, shape or stride that rows of this format and width cannot have."""
    dtypes = dict.fromkeys((row.dtype, row.storage_dtype))
    needs = f"{' or '.join(map(word, dtypes))} for {row.name}"
    reasons.need(data.dtype in dtypes, "kv_cache", f"dtype {word(data.dtype)}", needs)
    fits = data.dim() == 3 and data.shape[1] >= 1 and data.shape[2] == width
    needs = f"(pages, block_size, {width}) for {row.name} of these widths"
    strided = reasons.need(data.layout == torch.strided, "kv_cache", f"layout {data.layout}", "torch.strided")
    if not reasons.need(fits, "kv_cache", f"shape {tuple(data.shape)}", needs) or not strided:
        return
    (pages, size, _), (page, token, element) = data.shape, data.stride()
    # The stride of an axis of length 1 means nothing.
    token, element = (width if size == 1 else token), (1 if width == 1 else element)
    got = f"strides {tuple(data.stride())}"
    reasons.need(element == 1, "kv_cache", got, "a contiguous last axis")
    apart = token >= width and (pages <= 1 or page >= (size - 1) * token + width)
    reasons.need(apart, "kv_cache", got, "tokens and pages that do not overlap")
    if row.block_flat:
        reasons.need(token == width, "kv_cache", got, f"tokens {width} apart for {row.name}")
    if row.tile:
        offsets = data.storage_offset(), (page if pages > 1 else 0), token
        aligned = all(offset % 4 == 0 for offset in offsets)
        got += f" from offset {data.storage_offset()}"
        reasons.need(aligned, "kv_cache", got, f"multiples of 4 bytes for {row.name}")


def _checked_scale(
    reasons: Reasons, row: KVFormat, scale: Tensor | float | None, device: torch.device, *, check: bool
) -> Tensor | None:
    """The scale as [1] fp32, or None and a note; a value on a device is looked at only with `check`."""
    if not row.scaled:
        reasons.need(
            scale is None, "scale", _shown(scale), f"None: {row.name} has no scale of the whole cache"
        )
        return None
    most = _FP32.max / row.largest
    needs = f"[1] fp32 on {device}, above 0 and at most {most:.3g}, for {row.name} (see calibrate_scale)"
    if not isinstance(scale, Tensor):
        value = number_of(scale)
        if not reasons.need(_FP32.smallest_normal <= value <= most, "scale", _shown(scale), needs):
            return None
        return torch.tensor([value], dtype=torch.float32, device=device)
    right = scale.shape in ((), (1,)) and scale.dtype == torch.float32 and scale.device == device
    if not reasons.need(right, "scale", _shown(scale), needs):
        return None
    if device.type == "cpu" or (check and device.type != "meta"):
        reasons.need(0 < scale.item() <= most, "scale", scale.item(), needs)
    return scale.reshape(1)


def _checked_widths(
    reasons: Reasons,
    row: KVFormat | None,
    kv_lora_rank: object,
    qk_rope_head_dim: object,
    block_size: int | None,
) -> tuple[int, int]:
    """L and R as ints, noting what is none, or cannot be a row of this format in pages of this size."""
    rank, rope = count_of(kv_lora_rank), count_of(qk_rope_head_dim)
    if rank is None or rope is None:
        rank = check_count(reasons, "kv_lora_rank", kv_lora_rank)
        rope = check_count(reasons, "qk_rope_head_dim", qk_rope_head_dim, 0)
    elif row is not None and (refusal := row.refusal(rank, rope, block_size)):
        reasons.found.append(refusal)
    return rank, rope


def _shown(scale: object) -> str:
    if isinstance(scale, Tensor):
        return f"{list(scale.shape)} {word(scale.dtype)} on {scale.device}"
    return str(scale)


def _take(pages: Tensor, page: Tensor, position: Tensor, out: Tensor) -> None:
    """out = pages[page, position], of pages [p, n, width] whose last axis is contiguous."""
    (count, size, width), (page_stride, token_stride, _) = pages.shape, pages.stride()
    if count and token_stride and page_stride % token_stride == 0:
        # One index into rows is an order of magnitude faster on a CPU than a pair of indices.
        step = page_stride // token_stride
        rows = pages.as_strided(((count - 1) * step + size, width), (token_stride, 1))
        torch.index_select(rows, 0, page * step + position, out=out)
    else:
        torch.ops.aten.index.Tensor_out(pages, [page, position], out=out)


def _split_flat(pages: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Block-flat uint8 pages [p, n, width + 4] as values [p, n, width] and scale bytes [p, n, 4], views."""
    count, size, _ = pages.shape
    page = pages.stride(0)
    values = pages.as_strided((count, size, width), (page, width, 1))
    scales = pages.as_strided((count, size, 4), (page, 4, 1), pages.storage_offset() + size * width)
    return values, scales


def _tiles_of(values: Tensor) -> Tensor:
    """Shuffled values [p, n, width] as [p, n / 16, 16 tokens, width / 16, 16 values], a view."""
    count, size, width = values.shape
    shape = count, size // SHUFFLE, SHUFFLE, width // SHUFFLE, SHUFFLE
    strides = values.stride(0), SHUFFLE * width, SHUFFLE, SHUFFLE * SHUFFLE, 1
    return values.as_strided(shape, strides, values.storage_offset())


def _in_tiles(raw: Tensor, width: int) -> Tensor:
    """The values of rows [n, width + …] as [n, width / 16, 16], a view."""
    return raw[:, :width].view(raw.shape[0], width // SHUFFLE, SHUFFLE)


def _recode(raw: Tensor, source: KVFormat, target: KVFormat, num_values: int, factor: float) -> None:
    """Turn the fp8 values of rows into the other flavour, divided by `factor`, and multiply scales by it."""
    values = torch.empty((raw.shape[0], num_values), dtype=torch.float32, device=raw.device)
    inverse = torch.tensor([1 / factor], device=raw.device)
    fp8.write_values(
        raw[:, :num_values], source.value_dtype, inverse, values, torch.empty_like(values, dtype=torch.int16)
    )
    raw[:, :num_values] = fp8.to_bytes(values, target.value_dtype)
    if target.tile:
        raw[:, num_values : num_values + 4 * target.num_tiles(num_values)].view(torch.float32).mul_(factor)
