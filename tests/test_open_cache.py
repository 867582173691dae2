"""The one door of a cache: tags, what opens, and every refusal."""

import math

import pytest
import torch

from anymla import fp8
from anymla.errors import InvalidInput
from anymla.kv_cache import KV_FORMATS, KVCache, Tag, open_cache

SCALED = [name for name, row in KV_FORMATS.items() if row.scaled]
SHORT = {name: (512, 64) if not row.block_flat else (128, 0) for name, row in KV_FORMATS.items()}


def filled(name: str) -> tuple[KVCache, torch.Tensor]:
    """A cache with a token in every slot, and the slots."""
    (rank, rope), slots = SHORT[name], torch.arange(12)
    cache = KVCache.allocate(
        4,
        3,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_format=name,
        scale=0.037 if name in SCALED else None,
    )
    cache.write(torch.randn(12, rank), torch.randn(12, rope), slots)
    return cache, slots


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_tag_opens_the_pages_that_it_describes(name: str) -> None:
    cache, slots = filled(name)
    told = Tag.parse(cache.tag)
    assert told == Tag(name, cache.kv_lora_rank, cache.qk_rope_head_dim, 3) and str(told) == cache.tag
    received = cache.data.view(torch.uint8) if cache.data.dtype.itemsize == 1 else cache.data
    opened = open_cache(
        received, kv_lora_rank=told.kv_lora_rank, qk_rope_head_dim=told.qk_rope_head_dim, tag=cache.tag,
        scale=cache.scale,
    )  # fmt: skip
    assert opened.format is cache.format and opened.tag == cache.tag
    assert opened.data.data_ptr() == cache.data.data_ptr()
    assert torch.equal(opened.read(slots), cache.read(slots))


def test_a_tag_is_one_readable_line() -> None:
    assert str(Tag("fp8_e4m3fnuz", 512, 64, 64)) == "anymla-kv/1 fp8_e4m3fnuz L=512 R=64 block=64"


def test_the_dtype_names_the_format_where_it_can() -> None:
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        assert (
            open_cache(torch.zeros(1, 1, 8, dtype=dtype), kv_lora_rank=8, qk_rope_head_dim=0).format.name
            == name
        )
    for dtype, name in zip(fp8.FLAVOURS, SCALED, strict=True):
        data = torch.zeros(1, 1, 8, dtype=torch.uint8).view(dtype)
        for given in (None, "fp8", "fp8_e4m3", name, str(dtype)):
            cache = open_cache(data, kv_lora_rank=8, qk_rope_head_dim=0, scale=1.0, kv_format=given)
            assert cache.format.name == name


def test_the_wrong_flavour_is_converted_when_asked_and_never_reinterpreted() -> None:
    cache, slots = filled("fp8_e4m3fn")
    told = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "tag": cache.tag, "scale": cache.scale}
    with pytest.raises(
        InvalidInput, match="kv_format got fp8_e4m3fnuz; needs fp8_e4m3fn, from the tag, or convert_to"
    ):
        open_cache(cache.storage, kv_format="fp8_e4m3fnuz", **told)
    for given in (None, "fp8_e4m3fn", "fp8_e4m3fnuz"):
        opened = open_cache(cache.storage, kv_format=given, convert_to="fp8_e4m3fnuz", **told)
        assert opened.format.name == "fp8_e4m3fnuz"
        assert torch.equal(opened.read(slots), cache.read(slots))
    same_bytes = open_cache(cache.storage, convert_to="fp8_e4m3fn", **told)
    assert same_bytes.data.data_ptr() == cache.data.data_ptr()


GOOD = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
FP8_DATA = torch.zeros(2, 4, 576, dtype=torch.uint8)
REFUSED = {
    "no tensor": ([1, 2], GOOD, "kv_cache got list; needs a torch.Tensor"),
    "bytes without a name": (FP8_DATA, GOOD, "kv_format got None, with data of uint8; needs a tag, or one"),
    "bytes of an unnamed flavour": (
        FP8_DATA,
        GOOD | {"kv_format": "fp8"},
        "kv_format got 'fp8'; needs one of",
    ),
    "a dtype of no format": (
        torch.zeros(2, 4, 576).double(),
        GOOD,
        "kv_format got None, with data of float64",
    ),
    "an unknown name": (
        FP8_DATA,
        GOOD | {"kv_format": "int4"},
        "kv_format got 'int4'; needs one of bf16, fp16",
    ),
    "an unknown target": (
        FP8_DATA,
        GOOD | {"kv_format": "fp8_e4m3fn", "convert_to": "int4"},
        "convert_to got 'int4'; needs one of",
    ),
    "a name that contradicts the dtype": (
        FP8_DATA.view(fp8.FN),
        GOOD | {"kv_format": "fp8_e4m3fnuz"},
        "kv_cache got dtype float8_e4m3fn; needs float8_e4m3fnuz or uint8 for fp8_e4m3fnuz",
    ),
    "a tag that contradicts the dtype": (
        torch.zeros(2, 4, 576),
        GOOD | {"tag": "anymla-kv/1 bf16 L=512 R=64 block=4"},
        "kv_cache got dtype float32; needs bfloat16 for bf16",
    ),
    "a tag that is none": (
        FP8_DATA,
        GOOD | {"tag": "bf16"},
        "tag got 'bf16'; needs one of this version, such as",
    ),
    "a tag of another version": (
        FP8_DATA,
        GOOD | {"tag": "anymla-kv/2 bf16 L=512 R=64 block=4"},
        "tag got 'anymla-kv/2 bf16",
    ),
    "a tag of another width": (
        FP8_DATA,
        GOOD | {"tag": "anymla-kv/1 fp8_e4m3fn L=448 R=64 block=4"},
        "kv_lora_rank got 512; needs 448, from the tag",
    ),
    "a tag of another page": (
        FP8_DATA,
        GOOD | {"tag": "anymla-kv/1 fp8_e4m3fn L=512 R=64 block=64"},
        "block_size got 4; needs 64, from the tag",
    ),
    "another row width": (
        torch.zeros(2, 4, 512),
        GOOD,
        "kv_cache got shape (2, 4, 512); needs (pages, block_size, 576) for fp32 of these widths",
    ),
    "the other fp8 row": (
        FP8_DATA,
        GOOD | {"kv_format": "fp8_ds_mla"},
        "kv_cache got shape (2, 4, 576); needs (pages, block_size, 656)",
    ),
    "no pages axis": (
        torch.zeros(4, 576),
        GOOD,
        "kv_cache got shape (4, 576); needs (pages, block_size, 576)",
    ),
    "pages of no token": (torch.zeros(4, 0, 576), GOOD, "kv_cache got shape (4, 0, 576)"),
    "a strided last axis": (
        torch.zeros(2, 4, 1152)[..., ::2],
        GOOD,
        "kv_cache got strides (4608, 1152, 2); needs a contiguous last axis",
    ),
    "tokens that overlap": (
        torch.zeros(2, 1, 576).expand(2, 4, 576),
        GOOD,
        "needs tokens and pages that do not overlap",
    ),
    "pages that overlap": (
        torch.zeros(1, 4, 576).expand(2, 4, 576),
        GOOD,
        "needs tokens and pages that do not overlap",
    ),
    "index tokens apart": (
        torch.zeros(2, 4, 136, dtype=torch.uint8)[..., :132],
        {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "kv_format": "index_k"},
        "needs tokens 132 apart for index_k",
    ),
    "rows off their alignment": (
        torch.zeros(2, 4, 658, dtype=torch.uint8)[..., 2:],
        GOOD | {"kv_format": "fp8_ds_mla"},
        "kv_cache got strides (2632, 658, 1) from offset 2; needs multiples of 4 bytes for fp8_ds_mla",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pages_that_contradict_their_description_are_refused(case: str) -> None:
    data, given, reason = REFUSED[case]
    with pytest.raises(InvalidInput) as caught:
        open_cache(data, **({"scale": 1.0} if FP8_DATA is data else {}) | given)
    assert any(reason in found for found in caught.value.reasons), caught.value.reasons


def test_an_impossible_allocation_is_refused_with_every_reason_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        KVCache.allocate(-1, 0, kv_lora_rank=0, qk_rope_head_dim=-2, kv_format="fp8_e4m3fn", scale=math.nan)
    names = [reason.split(" got ")[0] for reason in caught.value.reasons]
    assert names[:3] == ["num_blocks", "block_size", "scale"]
    assert (
        "kv_lora_rank got 0; needs at least 1; qk_rope_head_dim got -2; needs at least 0"
        in caught.value.reasons
    )


BAD_SCALES = {
    "missing": None,
    "zero": torch.zeros(1),
    "negative": torch.tensor([-0.5]),
    "nan": torch.tensor([math.nan]),
    "infinite": torch.tensor([math.inf]),
    "so large that values overflow": torch.tensor([2e36]),
    "two of them": torch.ones(2),
    "of another rank": torch.ones(1, 1),
    "fp64": torch.ones(1, dtype=torch.float64),
    "on another device": torch.ones(1, device="meta"),
    "number zero": 0.0,
    "number nan": math.nan,
    "a word": "1.0",
}


@pytest.mark.parametrize("case", BAD_SCALES)
@pytest.mark.parametrize("name", SCALED)
def test_a_scale_that_cannot_be_is_refused(name: str, case: str) -> None:
    needs, scale = "needs [1] fp32 on cpu, above 0 and at most", BAD_SCALES[case]
    given = {"kv_lora_rank": 8, "qk_rope_head_dim": 0, "kv_format": name, "scale": scale}
    data = torch.zeros(1, 1, 8, dtype=torch.uint8)
    for make in (lambda: KVCache.allocate(1, 1, **given), lambda: open_cache(data, **given)):
        with pytest.raises(InvalidInput) as caught:
            make()
        [reason] = caught.value.reasons
        assert reason.startswith("scale got ") and needs in reason and name in reason


@pytest.mark.parametrize("name", [name for name in KV_FORMATS if name not in SCALED])
def test_a_scale_for_a_format_without_one_is_refused(name: str) -> None:
    data = filled(name)[0].data
    rank, rope = SHORT[name]
    with pytest.raises(
        InvalidInput, match=f"scale got 1.0; needs None: {name} has no scale of the whole cache"
    ):
        open_cache(data, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_format=name, scale=1.0)


def test_a_scale_that_only_a_device_knows_is_taken_as_it_is() -> None:
    # A meta tensor cannot be read back: any attempt would raise.
    data = torch.zeros(1, 1, 8, dtype=torch.uint8, device="meta")
    scale = torch.zeros((), device="meta")
    cache = open_cache(data, kv_lora_rank=8, qk_rope_head_dim=0, kv_format="fp8_e4m3fn", scale=scale)
    assert cache.scale.shape == (1,) and cache.device.type == "meta"
