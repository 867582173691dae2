"""Which launch row a call takes: by its facts and the chip alone."""

from itertools import product

import pytest

from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import launch_rows
from anymla.hardware.tiles import attend_row, attend_shared_bytes
from anymla.models import MODELS
from anymla.problem import KV_FORMAT_NAMES

GPUS = [arch for arch, row in ARCHES.items() if row.vendor in ("amd", "nvidia")]
FORMATS = [name for name in KV_FORMAT_NAMES if not name.startswith("index_k")]
WIDTHS = sorted({(model.kv_lora_rank, model.qk_rope_head_dim) for model in MODELS.values()})


@pytest.mark.parametrize("arch", GPUS)
def test_a_row_fits_every_model_format_and_number_of_rows(arch: str) -> None:
    for (latent, rope), kv_format, rows in product(WIDTHS, FORMATS, (1, 16, 17, 64, 130, 1024)):
        row = attend_row(arch, rows, latent, rope, kv_format, 64)
        assert attend_shared_bytes(row, arch, latent, rope) <= ARCHES[arch].shared_bytes


@pytest.mark.parametrize(
    ("rows", "kv_format", "sparse", "block_size", "kernel", "block_m"),
    [
        (16, "bf16", False, 64, "attend_swapped", 16),
        (16, "fp16", False, 128, "attend_swapped", 16),
        (17, "bf16", False, 64, "attend_swapped", 32),
        (32, "fp16", False, 128, "attend_swapped", 32),
        (32, "bf16", False, 16, "attend_wgmma", 64),
        (33, "bf16", False, 64, "attend_wgmma", 64),
        (16, "bf16", False, 16, "attend_wgmma", 64),
        (16, "bf16", True, 64, "attend_wgmma", 64),
        (16, "fp8_e4m3fn", False, 64, "attend_bytes", 16),
        (16, "fp8_e4m3fn", True, 1, "attend_bytes", 16),
        (17, "fp8_e4m3fn", False, 64, "attend_wgmma", 64),
        (16, "fp8_e4m3fnuz", False, 64, "", 16),
        (1, "fp8_ds_mla", True, 64, "attend_wgmma", 64),
        (128, "fp8_ds_mla_fnuz", True, 64, "", 32),
    ],
)
def test_on_hopper_rows_format_and_places_of_keys_choose_the_kernel(
    rows: int, kv_format: str, sparse: bool, block_size: int, kernel: str, block_m: int
) -> None:
    row = attend_row("sm90", rows, 512, 64, kv_format, block_size, sparse=sparse)
    assert (row.kernel, row.block_m) == (kernel, block_m)


@pytest.mark.parametrize("arch", GPUS)
def test_a_kernel_placed_by_hand_for_bytes_has_a_portable_twin_of_its_tile(arch: str) -> None:
    rows = launch_rows("attend", arch)
    tiles = {(row.block_m, row.block_n, row.chunk) for row in rows if not row.kernel}
    for_bytes = [row for row in rows if row.kernel != "attend_swapped"]
    assert all((row.block_m, row.block_n, row.chunk) in tiles for row in for_bytes)


def test_what_a_kernel_has_no_layouts_for_goes_to_the_portable_one() -> None:
    assert attend_row("sm90", 16, 384, 64, "fp8_e4m3fn", 64).kernel == ""
    assert attend_row("sm90", 16, 384, 64, "bf16", 64).kernel == ""
    assert attend_row("sm90", 16, 512, 16, "fp8_e4m3fn", 64).kernel == "attend_wgmma"
    assert attend_row("sm90", 64, 512, 48, "bf16", 64).kernel == ""


def test_a_row_that_is_refused_is_passed_over() -> None:
    row = attend_row("sm90", 64, 512, 64, "fp8_e4m3fn", 64, refuses=lambda row: row.kernel)
    assert (row.kernel, row.block_m) == ("", 32)


@pytest.mark.parametrize(
    ("latent", "rope", "block_m"), [(512, 6, 16), (500, 128, 16), (300, 64, 16), (448, 64, 32), (512, 96, 32)]
)
def test_other_widths_on_hopper_take_small_blocks_and_uneven_ones_the_smallest_tile(
    latent: int, rope: int, block_m: int
) -> None:
    row = attend_row("sm90", 128, latent, rope, "bf16", 64)
    assert (row.kernel, row.block_m, row.block_n) == ("", block_m, 32)


def test_tiled_rows_that_are_no_multiple_of_16_bytes_go_to_the_portable_kernel() -> None:
    assert attend_row("sm90", 128, 256, 64, "fp8_ds_mla", 64).kernel == ""
    assert attend_row("sm90", 128, 512, 64, "fp8_ds_mla", 64).kernel == "attend_wgmma"
