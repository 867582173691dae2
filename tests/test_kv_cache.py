"""Cache formats: what a write stores and a read returns, the bytes, conversion by value, calibration."""

import math
import struct

import pytest
import torch

from anymla import fp8, kv_cache, reference
from anymla.errors import InvalidInput
from anymla.kv_cache import KV_FORMATS, KVCache, calibrate_scale, convert, open_cache
from anymla.problem import KV_FORMAT_NAMES

WIDTHS = [(512, 64), (512, 0), (256, 64), (256, 32), (128, 32), (128, 0), (64, 96), (12, 0), (1, 3)]
STORABLE = [(f, *w) for f in KV_FORMATS for w in WIDTHS if KV_FORMATS[f].refusal(*w) is None]
SCALED = [name for name, row in KV_FORMATS.items() if row.scaled]
SHORT = {name: (512, 64) if not row.block_flat else (128, 0) for name, row in KV_FORMATS.items()}


def made(
    name: str, blocks: int = 4, size: int = 3, widths: tuple[int, int] | None = None, scale: float = 0.037
):
    """A cache of zeros."""
    rank, rope = widths or SHORT[name]
    return KVCache.allocate(
        blocks, size, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_format=name,
        scale=scale if KV_FORMATS[name].scaled else None,
    )  # fmt: skip


def tokens(count: int, rank: int, rope: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and keys of mixed magnitudes, some beyond what a scale of 0.037 holds."""
    generator = torch.Generator().manual_seed(seed)
    latent, keys = (torch.randn(count, width, generator=generator) for width in (rank, rope))
    return latent * torch.logspace(-6, 2, count)[:, None], keys * 8


def filled(name: str, **shape: object) -> tuple[KVCache, torch.Tensor]:
    """A cache with a token in every slot, and the slots."""
    cache = made(name, **shape)
    slots = torch.arange(cache.num_blocks * cache.block_size)
    cache.write(*tokens(len(slots), cache.kv_lora_rank, cache.qk_rope_head_dim), slots)
    return cache, slots


def every_byte(dtype: torch.dtype) -> torch.Tensor:
    """The values of bytes 0 to 255, as torch reads them."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN in the same places."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


# What a row is


def test_every_format_has_a_row_with_a_source() -> None:
    assert tuple(KV_FORMATS) == KV_FORMAT_NAMES
    assert all(row.source and row.name == name for name, row in KV_FORMATS.items())


@pytest.mark.parametrize(
    ("name", "rank", "rope", "expected"),
    [
        ("bf16", 512, 64, 1152),
        ("fp16", 512, 64, 1152),
        ("fp32", 512, 64, 2304),
        ("fp8_e4m3fn", 512, 64, 576),
        ("fp8_e4m3fnuz", 512, 0, 512),
        ("fp8_ds_mla", 512, 64, 656),
        ("fp8_ds_mla_fnuz", 512, 64, 656),
        ("fp8_ds_mla", 256, 32, 328),
        ("index_k", 128, 0, 132),
        ("index_k_fnuz", 128, 0, 132),
    ],
)
def test_bytes_per_token(name: str, rank: int, rope: int, expected: int) -> None:
    cache = made(name, widths=(rank, rope))
    assert cache.bytes_per_token == KV_FORMATS[name].bytes_per_token(rank, rope) == expected
    assert cache.data.nbytes == expected * 12


@pytest.mark.parametrize(
    ("name", "rank", "rope", "reason"),
    [
        ("bf16", 0, 64, "kv_lora_rank got 0; needs at least 1"),
        ("bf16", 512, -1, "qk_rope_head_dim got -1; needs at least 0"),
        ("fp8_ds_mla", 448, 64, "kv_lora_rank got 448; needs a multiple of 128 for fp8_ds_mla"),
        ("fp8_ds_mla", 0, 64, "kv_lora_rank got 0; needs a multiple of 128 for fp8_ds_mla"),
        ("fp8_ds_mla", 512, 63, "qk_rope_head_dim got 63; needs 0 or an even number for fp8_ds_mla"),
        ("index_k", 128, 64, "qk_rope_head_dim got 64; needs 0 for index_k"),
        ("index_k_fnuz", 126, 0, "kv_lora_rank got 126; needs a multiple of 4 for index_k_fnuz"),
    ],
)
def test_widths_that_a_format_cannot_hold_are_refused(name: str, rank: int, rope: int, reason: str) -> None:
    assert KV_FORMATS[name].refusal(rank, rope) == reason
    with pytest.raises(InvalidInput) as caught:
        made(name, widths=(rank, rope))
    assert reason in caught.value.reasons


# Write and read


@pytest.mark.parametrize("block_size", [1, 3, 64])
@pytest.mark.parametrize(("name", "rank", "rope"), STORABLE, ids=str)
def test_a_read_returns_what_the_definition_says_a_write_stores(
    name: str, rank: int, rope: int, block_size: int
) -> None:
    cache = made(name, blocks=130 // block_size + 1, size=block_size, widths=(rank, rope))
    slots = torch.randperm(cache.num_blocks * block_size)[:23]
    kv_c, k_pe = tokens(23, rank, rope)
    kv_c[3, 0], kv_c[4, 0], kv_c[5, 0], kv_c[6] = math.nan, math.inf, -math.inf, 0
    expected = reference.write_cache(kv_c, k_pe, cache, slots)
    cache.write(kv_c, k_pe, slots)
    assert same(cache.read(slots, torch.float64), expected)
    assert same(cache.read(slots), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", KV_FORMATS)
def test_half_precision_tokens_are_stored_by_value(name: str, dtype: torch.dtype) -> None:
    cache, again = made(name), made(name)
    kv_c, k_pe = (part.to(dtype) for part in tokens(5, cache.kv_lora_rank, cache.qk_rope_head_dim))
    cache.write(kv_c, k_pe, torch.arange(5))
    again.write(kv_c.float(), k_pe.float(), torch.arange(5))
    assert torch.equal(cache.storage, again.storage)
    assert torch.equal(cache.read(torch.arange(5), dtype), cache.read(torch.arange(5)).to(dtype))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_views_of_new_tokens_are_stored_as_their_copies_are(name: str) -> None:
    cache, again = made(name), made(name)
    kv_c, k_pe = tokens(5, cache.kv_lora_rank, cache.qk_rope_head_dim)
    both = torch.cat([kv_c, k_pe], dim=-1)
    cache.write(both[:, : kv_c.shape[1]], both[:, kv_c.shape[1] :], torch.arange(5))
    again.write(kv_c.t().contiguous().t(), k_pe, torch.arange(5))
    assert torch.equal(cache.storage, again.storage)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_write_touches_its_slots_and_no_other_byte(name: str) -> None:
    cache, _ = filled(name)
    before, address = cache.storage.clone(), cache.data.data_ptr()
    slots, old = torch.tensor([7, -1, 2, -1, 11]), cache.gather(torch.tensor([7, 2, 11]))
    kv_c, k_pe = tokens(5, cache.kv_lora_rank, cache.qk_rope_head_dim, seed=1)
    kv_c[1], kv_c[3] = math.nan, 1e30
    cache.write(kv_c, k_pe, slots)
    written = torch.tensor([7, 2, 11])
    assert cache.data.data_ptr() == address
    assert not torch.equal(cache.gather(written), old)
    cache.scatter(old, written)
    assert torch.equal(cache.storage, before)


@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=["no tokens", "skipped tokens only"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_write_of_nothing_changes_nothing(name: str, slots: list[int]) -> None:
    cache, _ = filled(name)
    before = cache.storage.clone()
    kv_c, k_pe = tokens(len(slots), cache.kv_lora_rank, cache.qk_rope_head_dim)
    cache.write(kv_c, k_pe, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(cache.storage, before)
    assert cache.read(torch.zeros(0, dtype=torch.int64)).shape == (0, cache.width)


def test_the_cache_takes_no_part_in_autograd() -> None:
    cache = made("bf16")
    kv_c, k_pe = (part.requires_grad_() for part in tokens(2, 512, 64))
    cache.write(kv_c, k_pe, torch.tensor([0, 5]))
    assert not cache.data.requires_grad


@pytest.mark.parametrize("name", SCALED)
def test_fp64_is_the_exact_product_and_fp32_its_rounding(name: str) -> None:
    cache = made(name, blocks=1, size=1, widths=(256, 0), scale=1 / 3)
    cache.storage[0, 0] = torch.arange(256, dtype=torch.uint8)
    exact = every_byte(cache.format.value_dtype) * cache.scale.double()
    slot = torch.zeros(1, dtype=torch.int64)
    assert same(cache.read(slot, torch.float64)[0], exact)
    assert same(cache.read(slot)[0], exact.float())


@pytest.mark.parametrize("name", KV_FORMATS)
def test_pages_read_as_their_tokens_do(name: str) -> None:
    cache, slots = filled(name)
    pages = torch.tensor([3, 0, 3])
    expected = cache.read(slots).view(4, 3, -1)[pages]
    out = torch.empty(3, 3, cache.width)
    cache.dequantise_pages(cache.storage.index_select(0, pages), out)
    assert torch.equal(out, expected)
    exact = torch.empty(3, 3, cache.width, dtype=torch.float64)
    cache.dequantise_pages(cache.storage[pages], exact)
    assert torch.equal(exact.float(), expected)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_lent_scratch_serves_any_smaller_number_of_tokens(name: str) -> None:
    cache, slots = filled(name)
    scratch = cache.format.dequant_scratch(16, cache.kv_lora_rank, cache.qk_rope_head_dim)
    for count in (12, 5, 1, 0):
        raw, out = cache.gather(slots[:count]), torch.empty(count, cache.width)
        cache.dequantise(raw, out, scratch.first(count))
        assert torch.equal(out, cache.read(slots[:count]))
    out = torch.empty(4, 3, cache.width)
    cache.dequantise_pages(cache.storage, out, scratch.first(12))
    assert torch.equal(out.view(12, -1), cache.read(slots))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_int32_slots_are_slots(name: str) -> None:
    cache, slots = filled(name)
    assert torch.equal(cache.read(slots.int()), cache.read(slots))


# Layouts


@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_ds_mla_fnuz"])
def test_a_ds_mla_row_is_values_then_tile_scales_then_bf16_rope(name: str) -> None:
    cache = made(name, blocks=2, size=2)
    largest = cache.format.largest
    kv_c = torch.ones(1, 512) * torch.tensor([1.0, 0.5, 4.0, 2.0]).repeat_interleave(128) * largest
    kv_c[0, ::2] *= -0.5
    k_pe = torch.arange(64.0)[None] - 7.5
    cache.write(kv_c, k_pe, torch.tensor([3]))
    row = bytes(cache.data[1, 1].tolist())
    low = fp8.to_bytes(torch.tensor([-largest / 2]), cache.format.value_dtype).item()
    assert len(row) == 656
    assert row[:512] == bytes([low, 0x7E if largest == 448 else 0x7F]) * 256
    assert struct.unpack("<4f", row[512:528]) == (1.0, 0.5, 4.0, 2.0)
    assert row[528:] == b"".join(struct.pack("<f", x)[2:] for x in k_pe[0].tolist())


def test_an_index_page_is_the_values_of_all_its_tokens_and_then_their_scales() -> None:
    cache = made("index_k", blocks=3, size=4)
    keys = torch.full((4, 128), 448.0) * torch.tensor([1.0, 2.0, 0.25, 8.0])[:, None]
    cache.write(keys, torch.zeros(4, 0), torch.tensor([4, 5, 6, 7]))
    page = bytes(cache.data[1].flatten().tolist())
    assert page[: 4 * 128] == b"\x7e" * 512
    assert struct.unpack("<4f", page[4 * 128 :]) == (1.0, 2.0, 0.25, 8.0)
    assert not cache.data[0].any() and not cache.data[2].any()


@pytest.mark.parametrize(
    "rows,more", [(0, 4), (1, 0), (2, 8)], ids=["a few elements", "a row", "rows and more"]
)
@pytest.mark.parametrize("name", KV_FORMATS)
def test_pages_may_lie_apart_and_the_gap_is_never_touched(name: str, rows: int, more: int) -> None:
    plain, slots = filled(name)
    width = plain.data.shape[2]
    whole = torch.full((4, (3 + rows) * width + more), 0x7F, dtype=torch.uint8)
    whole = whole.to(plain.format.storage_dtype)
    pages = whole[:, : 3 * width].unflatten(1, (3, width))
    cache = open_cache(
        pages, kv_lora_rank=plain.kv_lora_rank, qk_rope_head_dim=plain.qk_rope_head_dim, kv_format=name,
        scale=plain.scale,
    )  # fmt: skip
    cache.write(*tokens(12, cache.kv_lora_rank, cache.qk_rope_head_dim), slots)
    assert torch.equal(cache.read(slots), plain.read(slots))
    assert torch.equal(cache.storage, plain.storage)
    assert (whole[:, 3 * width :] == 0x7F).all()
    assert torch.equal(convert(cache, "fp32").data, plain.read(slots).view(4, 3, -1))


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3fn", "fp8_ds_mla"])
def test_rows_may_be_part_of_wider_rows(name: str) -> None:
    plain, slots = filled(name)
    wide = torch.zeros(4, 3, plain.data.shape[2] + 12, dtype=plain.format.storage_dtype)
    cache = open_cache(
        wide[..., 4:-8], kv_lora_rank=512, qk_rope_head_dim=64, kv_format=name, scale=plain.scale
    )
    cache.write(*tokens(12, 512, 64), slots)
    assert torch.equal(cache.read(slots), plain.read(slots))
    assert not wide[..., :4].any() and not wide[..., -8:].any()


@pytest.mark.parametrize("rank,rope", [(512, 0), (256, 64), (512, 64), (64, 96)])
def test_d12_the_last_row_needs_no_slack(rank: int, rope: int) -> None:
    memory = torch.zeros(9 * (rank + rope), dtype=torch.bfloat16)
    cache = open_cache(memory.view(3, 3, -1), kv_lora_rank=rank, qk_rope_head_dim=rope)
    kv_c, k_pe = (part.bfloat16() for part in tokens(9, rank, rope))
    cache.write(kv_c, k_pe, torch.arange(9))
    assert torch.equal(cache.read(torch.arange(9)), torch.cat([kv_c, k_pe], -1).float())


def test_d8_offsets_beyond_32_bits_are_exact() -> None:
    # Page 7767 of 480 rows of 576 starts at 2147420160, page 7768 at 2147696640, beyond int32.
    shape = 7800, 480, 576
    meta = open_cache(
        torch.empty(shape, dtype=torch.bfloat16, device="meta"), kv_lora_rank=512, qk_rope_head_dim=64
    )
    assert [meta.data[page].storage_offset() for page in (7767, 7768)] == [2147420160, 2147696640]
    # The operating system backs only the pages that are touched.
    memory = torch.empty(shape, dtype=torch.uint8)
    cache = open_cache(memory, kv_lora_rank=512, qk_rope_head_dim=64, kv_format="fp8_e4m3fn", scale=0.037)
    small = made("fp8_e4m3fn", blocks=1, size=8)
    slots = torch.tensor([7767 * 480, 7767 * 480 + 479, 7768 * 480, 7768 * 480 + 1, 7799 * 480 + 479])
    cache.write(*tokens(5, 512, 64), slots)
    small.write(*tokens(5, 512, 64), torch.arange(5))
    assert torch.equal(cache.read(slots), small.read(torch.arange(5)))
    assert torch.equal(cache.read(slots.int()), small.read(torch.arange(5)))
    assert torch.equal(memory[7768, 1], small.storage[0, 3])


# Conversion


@pytest.mark.parametrize("target", KV_FORMATS)
@pytest.mark.parametrize("source", KV_FORMATS)
def test_conversion_is_writing_what_was_read(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = (128, 0) if {"index_k", "index_k_fnuz"} & {source, target} else (256, 32)
    monkeypatch.setattr(kv_cache, "_CONVERTED_AT_ONCE", 5 * sum(widths))
    cache, slots = filled(source, widths=widths)
    rows, target_row = cache.read(slots), KV_FORMATS[target]
    by_itself = not target_row.scaled or cache.format.scaled
    result = convert(cache, target, scale=None if by_itself else 0.05)
    assert (result.format, result.data.shape[:2]) == (target_row, cache.data.shape[:2])
    source_layout, target_layout = (n.replace("_fnuz", "").replace("fnuz", "fn") for n in (source, target))
    twins = source != target and source_layout == target_layout
    if source == target:
        assert result is cache
    elif twins and target.endswith("fnuz"):
        assert torch.equal(result.read(slots), rows)
    elif not twins:
        again = KVCache(
            torch.zeros_like(result.storage).view(result.data.dtype), target_row, *widths, result.scale
        )
        again.write(rows[:, : widths[0]], rows[:, widths[0] :], slots)
        assert torch.equal(result.storage, again.storage)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_ds_mla", "index_k_fnuz"])
def test_conversion_to_fp32_loses_nothing(name: str) -> None:
    cache, slots = filled(name)
    assert torch.equal(convert(cache, "fp32").read(slots, torch.float64), cache.read(slots).double())


def test_from_fn_to_fnuz_every_byte_keeps_its_value_and_the_scale_doubles() -> None:
    cache = made("fp8_e4m3fn", blocks=1, size=1, widths=(256, 0), scale=0.3)
    cache.storage[0, 0] = torch.arange(256, dtype=torch.uint8)
    result, slot = convert(cache, "fp8_e4m3fnuz"), torch.zeros(1, dtype=torch.int64)
    assert torch.equal(result.scale, cache.scale * 2)
    assert same(result.read(slot, torch.float64), cache.read(slot, torch.float64))
    # -0 has no byte of its own in fnuz; the two NaN of fn become the one of fnuz.
    assert (result.storage[0, 0, 0x80], result.storage[0, 0, 0x7F], result.storage[0, 0, 0xFF]) == (
        0,
        0x80,
        0x80,
    )


def test_from_fnuz_to_fn_the_scale_stays_and_only_the_smallest_values_are_rounded() -> None:
    cache = made("fp8_e4m3fnuz", blocks=1, size=1, widths=(256, 0), scale=0.3)
    cache.storage[0, 0] = torch.arange(256, dtype=torch.uint8)
    result, slot = convert(cache, "fp8_e4m3fn"), torch.zeros(1, dtype=torch.int64)
    before, after = cache.read(slot, torch.float64)[0], result.read(slot, torch.float64)[0]
    stored = every_byte(fp8.FNUZ)
    large = ~(stored.abs() < 2.0**-6)
    assert torch.equal(result.scale, cache.scale)
    assert same(after[large], before[large])
    # Half a step of 2^-9 is the most that rounding moves.
    assert ((after - before).abs()[~large] <= 2.0**-10 * cache.scale.double()).all()


@pytest.mark.parametrize("name", ["fp8_ds_mla", "index_k"])
def test_tile_scales_double_towards_fnuz(name: str) -> None:
    cache, slots = filled(name)
    result = convert(cache, name + "_fnuz")
    rank, tiles = cache.kv_lora_rank, cache.format.num_tiles(cache.kv_lora_rank)
    scales = [c.gather(slots)[:, rank : rank + 4 * tiles].view(torch.float32) for c in (cache, result)]
    assert torch.equal(scales[1], scales[0] * 2)
    assert torch.equal(result.read(slots, torch.float64), cache.read(slots, torch.float64))


def test_a_new_scale_requantises() -> None:
    cache, slots = filled("fp8_e4m3fn")
    rows = cache.read(slots)
    result = convert(cache, "fp8_e4m3fn", scale=0.5)
    assert result is not cache and result.scale.item() == 0.5
    expected = reference.write_cache(rows[:, :512], rows[:, 512:], result, slots)
    assert torch.equal(result.read(slots, torch.float64), expected)


def test_nan_in_unused_slots_does_not_hinder_a_conversion() -> None:
    (cache, _), (clean, _) = filled("bf16"), filled("bf16")
    cache.data[2, 1] = math.nan
    result = convert(cache, "fp8_ds_mla")
    assert result.read(torch.tensor([7])).isnan().all()
    assert torch.equal(result.read(torch.tensor([6])), convert(clean, "fp8_ds_mla").read(torch.tensor([6])))


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("bf16", "fp8_e4m3fn", "scale got None; needs [1] fp32 on cpu"),
        ("fp8_ds_mla", "fp8_e4m3fnuz", "scale got None; needs [1] fp32 on cpu"),
        ("bf16", "index_k", "qk_rope_head_dim got 64; needs 0 for index_k"),
        ("bf16", "fp7", "kv_format got 'fp7'; needs one of bf16, fp16"),
        ("bf16", "fp8", "kv_format got 'fp8'; needs one of bf16, fp16"),
    ],
)
def test_conversions_that_cannot_be_are_refused(source: str, target: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=f"(?s).*{reason.replace('[', chr(92) + '[')}"):
        convert(made(source), target)


def test_a_cache_of_no_pages_has_no_slots() -> None:
    for name in KV_FORMATS:
        cache = made(name, blocks=0)
        assert cache.read(torch.zeros(0, dtype=torch.int64)).shape == (0, cache.width)
        cache.write(*tokens(0, cache.kv_lora_rank, cache.qk_rope_head_dim), torch.zeros(0, dtype=torch.int64))
        assert convert(cache, "fp32").num_blocks == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: a device must store what the host stores")
@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_device_stores_reads_and_converts_as_the_host_does(name: str) -> None:
    host = made(name, blocks=10, size=64)
    scale = None if host.scale is None else host.scale.cuda()
    device = KVCache(host.data.cuda(), host.format, host.kv_lora_rank, host.qk_rope_head_dim, scale)
    kv_c, k_pe = tokens(600, host.kv_lora_rank, host.qk_rope_head_dim)
    kv_c[3, 0], kv_c[4, 0], kv_c[5, 0], kv_c[6] = math.nan, math.inf, -math.inf, -0.0
    slots = torch.randperm(640)[:600]
    slots[::7] = -1
    host.write(kv_c, k_pe, slots)
    device.write(kv_c.cuda(), k_pe.cuda(), slots.cuda())
    live = slots[slots >= 0]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert same(device.read(live.cuda(), dtype).cpu(), host.read(live, dtype))
    pages = torch.empty(10, 64, host.width), torch.empty(10, 64, host.width, device="cuda")
    host.dequantise_pages(host.storage, pages[0])
    device.dequantise_pages(device.storage, pages[1])
    assert same(pages[1].cpu(), pages[0])
    for target, row in KV_FORMATS.items():
        if row.refusal(host.kv_lora_rank, host.qk_rope_head_dim) is None:
            new = 0.05 if row.scaled and not host.format.scaled else None
            expected = convert(host, target, scale=new).read(live, torch.float64)
            assert same(convert(device, target, scale=new).read(live.cuda(), torch.float64).cpu(), expected)


# Calibration


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("part", ["latent", "rope"])
def test_a_calibrated_scale_covers_both_parts(name: str, part: str) -> None:
    largest = KV_FORMATS[name].largest
    kv_c, k_pe = torch.ones(7, 32) * 0.01, torch.ones(7, 16) * 0.01
    (kv_c if part == "latent" else k_pe)[3, 5] = -largest / 4
    scale = calibrate_scale(kv_c, k_pe, name)
    assert scale.shape == (1,) and scale.dtype == torch.float32 and scale.item() == 0.25
    assert calibrate_scale(kv_c, k_pe, name, margin=2.0).item() == 0.5
    cache = made(name, widths=(32, 16), scale=scale)
    cache.write(kv_c, k_pe, torch.arange(7))
    assert cache.read(torch.arange(7)).abs().max() == largest / 4


@pytest.mark.parametrize("shape", [(4, 8), (0, 8), (2, 3, 8), (4, 0)], ids=str)
def test_nothing_but_zeros_calibrates_to_one(shape: tuple[int, ...]) -> None:
    assert calibrate_scale(torch.zeros(shape), torch.zeros(*shape[:-1], 0), "fp8_e4m3fn").tolist() == [1.0]


@pytest.mark.parametrize("magnitude", [1e-45, 3e38], ids=["tiny", "huge"])
@pytest.mark.parametrize("name", SCALED)
def test_every_calibrated_scale_is_accepted(name: str, magnitude: float) -> None:
    kv_c = torch.full((1, 8), magnitude)
    scale = calibrate_scale(kv_c, torch.zeros(1, 0), name, margin=4.0)
    cache = made(name, widths=(8, 0), scale=scale)
    cache.write(kv_c, torch.zeros(1, 0), torch.zeros(1, dtype=torch.int64))
    assert cache.read(torch.zeros(1, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize(
    ("kv_c", "k_pe", "given", "reason"),
    [
        (math.nan, 1.0, {}, "kv_c got a largest magnitude of nan; needs finite values"),
        (1.0, math.nan, {}, "k_pe got a largest magnitude of nan; needs finite values"),
        (1.0, -math.inf, {}, "k_pe got a largest magnitude of inf; needs finite values"),
        (1.0, 1.0, {"margin": 0.5}, "margin got 0.5; needs a finite number, at least 1"),
        (1.0, 1.0, {"kv_format": "bf16"}, "kv_format got bf16; needs a format with one scale: fp8_e4m3fn or"),
        (1.0, 1.0, {"kv_format": "fp8"}, "kv_format got 'fp8'; needs one of bf16"),
    ],
)  # fmt: skip
def test_what_cannot_be_calibrated_is_refused(kv_c: float, k_pe: float, given: dict, reason: str) -> None:
    latent, keys = torch.ones(3, 8), torch.ones(3, 4)
    latent[1, 2], keys[2, 1] = kv_c, k_pe
    with pytest.raises(InvalidInput) as caught:
        calibrate_scale(latent, keys, **{"kv_format": "fp8_e4m3fn"} | given)
    assert any(found.startswith(reason) for found in caught.value.reasons)
