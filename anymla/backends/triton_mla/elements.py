"""How the kernels see a cache on a chip: its memory in a dtype that they can load, and a FORMAT of `keys`."""

import torch
from torch import Tensor

from anymla.backends.triton_mla import keys
from anymla.hardware.arches import ARCHES
from anymla.kv_cache import KVCache


def elements(cache: KVCache, arch: str) -> tuple[Tensor, int]:
    """The cache as device code reads it on this chip, and its FORMAT."""
    row, chip = cache.format, ARCHES.get(arch)
    fnuz = row.value_dtype == torch.float8_e4m3fnuz
    native = chip is not None and chip.has_fp8 and chip.fp8_flavour == ("e4m3fnuz" if fnuz else "e4m3fn")
    if row.tile:
        tiled = (keys.TILED_FN, keys.TILED_FNUZ) if native else (keys.TILED_FN_BYTES, keys.TILED_FNUZ_BYTES)
        return cache.data, tiled[fnuz].value
    if native or not row.scaled:
        return cache.data, keys.PLAIN.value
    return cache.storage, (keys.FP8_FN_BYTES, keys.FP8_FNUZ_BYTES)[fnuz].value


def query_elements(q: Tensor, form: int) -> Tensor:
    """Queries in fp8 as device code reads a cache like them, which has this FORMAT on the chip."""
    return q if form == keys.PLAIN.value else q.view(torch.uint8)
