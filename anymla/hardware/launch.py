"""LAUNCH: tile sizes and warps for each kernel and chip; the exact chip, then its vendor, then "*"."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anymla.hardware.arches import ARCHES


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched for tiles of up to `block_m` rows.

    Attributes:
        block_m: Rows of a tile.
        block_n: Keys of a block.
        num_warps: Warps of a program.
        num_stages: Blocks of keys in flight, the one in use included.
        programs_a_unit: Programs that share a compute unit or multiprocessor.
        chunk: Columns of the latent that are one operand of a product.
        overlap: Whether the kernel may start while the one before it ends.
        swap: Whether products are transposed, for matrix instructions that want more rows than the tile has.
        widest: The widest key or value that its registers hold; a row with a width is for the shapes that
            no narrower one takes. 0: any.
        wgmma: Whether warpgroups multiply from on-chip memory, copies and products placed by hand.
        reread: Whether each block of keys brings the queries from on-chip memory anew, for chips on which
            every wave would need registers for all of them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_a_unit: int = 1
    chunk: int = 128
    overlap: bool = False
    swap: bool = False
    widest: int = 0
    wgmma: bool = False
    reread: bool = False


# Addresses of caches over 2 GiB take twice the registers: larger tiles or blocks would spill.
_CDNA_ATTEND = (
    Launch(block_m=16, block_n=32, num_warps=4, num_stages=1),
    Launch(block_m=32, block_n=16, num_warps=4, num_stages=2),
)
_RDNA_ATTEND = (Launch(block_m=16, block_n=16, num_warps=8, num_stages=1, swap=True, reread=True),)
_CDNA_PREFILL = (
    Launch(block_m=64, block_n=64, num_warps=4, num_stages=2, widest=192),
    Launch(block_m=128, block_n=64, num_warps=8, num_stages=1, widest=192),
    Launch(block_m=64, block_n=32, num_warps=4, num_stages=2, widest=256),
    Launch(block_m=64, block_n=16, num_warps=8, num_stages=2, widest=640),
)
# A hundred KiB hold no second block of the widest keys and values.
_NARROW_PREFILL = (
    Launch(block_m=64, block_n=32, num_warps=4, num_stages=2, widest=192),
    Launch(block_m=64, block_n=32, num_warps=8, num_stages=2, widest=256),
    Launch(block_m=32, block_n=16, num_warps=8, num_stages=2, widest=512),
    Launch(block_m=32, block_n=16, num_warps=8, num_stages=1, widest=640),
)

LAUNCH: Mapping[tuple[str, str], tuple[Launch, ...]] = {
    ("attend", "*"): (
        Launch(block_m=16, block_n=32, num_warps=4, num_stages=1),
        Launch(block_m=16, block_n=16, num_warps=4, num_stages=1),
    ),
    ("attend", "gfx90a"): _CDNA_ATTEND,
    ("attend", "gfx942"): _CDNA_ATTEND,
    ("attend", "gfx950"): (
        Launch(block_m=16, block_n=32, num_warps=4, num_stages=2),
        Launch(block_m=32, block_n=16, num_warps=4, num_stages=2),
    ),
    ("attend", "gfx1100"): _RDNA_ATTEND,
    ("attend", "gfx1201"): _RDNA_ATTEND,
    ("attend", "nvidia"): (
        Launch(block_m=16, block_n=32, num_warps=8, num_stages=2),
        Launch(block_m=32, block_n=32, num_warps=8, num_stages=2),
    ),
    ("attend", "sm90"): (
        Launch(block_m=16, block_n=64, num_warps=4, num_stages=3, chunk=256),
        Launch(block_m=64, block_n=64, num_warps=4, num_stages=2, chunk=512, wgmma=True),
        Launch(block_m=64, block_n=64, num_warps=8, num_stages=2, chunk=512),
    ),
    ("combine", "*"): (Launch(block_m=1, block_n=32, num_warps=4, num_stages=1),),
    ("combine", "sm90"): (Launch(block_m=1, block_n=16, num_warps=4, num_stages=3, overlap=True),),
    ("prefill", "*"): (
        Launch(block_m=32, block_n=32, num_warps=4, num_stages=1, widest=192),
        Launch(block_m=32, block_n=32, num_warps=8, num_stages=1, widest=256),
        Launch(block_m=16, block_n=16, num_warps=8, num_stages=1, widest=640),
    ),
    ("prefill", "gfx90a"): _CDNA_PREFILL,
    ("prefill", "gfx942"): _CDNA_PREFILL,
    ("prefill", "gfx950"): _CDNA_PREFILL,
    ("prefill", "gfx1100"): (
        Launch(block_m=64, block_n=16, num_warps=4, num_stages=1, widest=192),
        Launch(block_m=16, block_n=16, num_warps=4, num_stages=1, widest=256, reread=True),
        Launch(block_m=32, block_n=16, num_warps=8, num_stages=1, widest=640, reread=True),
    ),
    ("prefill", "nvidia"): (
        Launch(block_m=64, block_n=32, num_warps=4, num_stages=2, widest=192),
        Launch(block_m=64, block_n=32, num_warps=8, num_stages=2, widest=256),
        Launch(block_m=32, block_n=16, num_warps=8, num_stages=2, widest=640),
    ),
    ("prefill", "sm86"): _NARROW_PREFILL,
    ("prefill", "sm89"): _NARROW_PREFILL,
    ("prefill", "sm120"): _NARROW_PREFILL,
    ("prefill", "sm100"): (
        Launch(block_m=32, block_n=32, num_warps=4, num_stages=2, widest=192),
        Launch(block_m=128, block_n=64, num_warps=8, num_stages=2, widest=192),
        Launch(block_m=32, block_n=32, num_warps=4, num_stages=2, widest=256),
        Launch(block_m=32, block_n=16, num_warps=8, num_stages=2, widest=640),
    ),
    ("prefill", "sm90"): (
        Launch(block_m=64, block_n=64, num_warps=4, num_stages=3, widest=192),
        Launch(block_m=128, block_n=64, num_warps=8, num_stages=3, widest=192),
        Launch(block_m=64, block_n=64, num_warps=8, num_stages=2, widest=256),
        Launch(block_m=128, block_n=64, num_warps=8, num_stages=2, widest=256),
        Launch(block_m=64, block_n=32, num_warps=8, num_stages=2, widest=512),
        Launch(block_m=32, block_n=32, num_warps=8, num_stages=2, widest=640),
    ),
    ("expand", "*"): (Launch(block_m=128, block_n=128, num_warps=8, num_stages=2, chunk=32),),
    ("expand", "sm90"): (Launch(block_m=128, block_n=128, num_warps=8, num_stages=3, chunk=64),),
    ("gather", "*"): (Launch(block_m=16, block_n=1, num_warps=4, num_stages=1),),
    ("index_logits", "*"): (Launch(block_m=64, block_n=64, num_warps=4, num_stages=2),),
    ("index_logits", "nvidia"): (Launch(block_m=64, block_n=64, num_warps=8, num_stages=2),),
    ("index_logits", "sm89"): (Launch(block_m=64, block_n=32, num_warps=8, num_stages=2),),
    ("index_logits", "gfx1100"): (Launch(block_m=64, block_n=64, num_warps=8, num_stages=1),),
    ("index_logits", "gfx1201"): (Launch(block_m=64, block_n=64, num_warps=8, num_stages=1),),
    ("index_logits", "sm90"): (Launch(block_m=128, block_n=128, num_warps=8, num_stages=3),),
    ("choose", "*"): (
        Launch(block_m=1, block_n=4096, num_warps=16, num_stages=1),
        Launch(block_m=1, block_n=8192, num_warps=16, num_stages=1),
    ),
    ("cache_write", "*"): (Launch(block_m=1, block_n=1, num_warps=2, num_stages=1),),
}
"""Rows of a kernel in order of preference, width by width: the first that takes a shape and its rows."""


def launch_rows(kernel: str, arch: str) -> tuple[Launch, ...]:
    """The rows for a kernel on a chip: its own, else its vendor's, else those for any."""
    vendor = ARCHES[arch].vendor if arch in ARCHES else "*"
    for key in (arch, vendor, "*"):
        if (kernel, key) in LAUNCH:
            return LAUNCH[kernel, key]
    raise KeyError(kernel)


def attend_row(
    arch: str,
    rows: int,
    latent: int,
    rope: int,
    kv_format: str,
    block_size: int,
    *,
    sparse: bool = False,
    element_bytes: int = 2,
    refuses: Callable[[Launch], object] = lambda row: None,
) -> Launch:
    """The row that attention takes: of those that fit on the chip the first whose tile holds the rows.

    Args:
        arch: The chip.
        rows: Rows of a sequence that share its keys: query tokens times heads, or heads where the split must
            not depend on the number of tokens.
        latent: kv_lora_rank.
        rope: qk_rope_head_dim.
        kv_format: Of the cache.
        block_size: Tokens of a page.
        sparse: Whether keys are given one by one.
        element_bytes: Of a query's element.
        refuses: True, or a reason, for rows that do not take the call for another cause.

    Returns:
        The row; where no tile is that large, the first of the largest.
    """
    room = ARCHES[arch].shared_bytes if arch in ARCHES else 0
    fits = [
        row
        for row in launch_rows("attend", arch)
        if not refuses(row)
        and (not row.wgmma or _warpgroups_take(latent, rope, kv_format))
        and (not room or attend_shared_bytes(row, arch, latent, rope, element_bytes) <= room)
    ]
    assert fits, f"no launch row of attend takes {rows} rows of {latent} + {rope} on {arch}"
    apart = sparse or block_size % max(row.block_n for row in fits) != 0
    if apart or kv_format.startswith("fp8"):
        # What a warpgroup of its own gathers or converts costs the others nothing, however few the rows.
        fits = [row for row in fits if row.wgmma] or fits
    most = max(row.block_m for row in fits)
    return next(row for row in fits if row.block_m >= min(rows, most))


def _warpgroups_take(latent: int, rope: int, kv_format: str) -> bool:
    """Whether `attend_wgmma` has layouts for these widths, and knows the format."""
    return latent in (256, 512) and rope in (0, 16, 32, 64, 128) and kv_format != "fp32"


def attend_shared_bytes(row: Launch, arch: str, latent: int, rope: int, element_bytes: int = 2) -> int:
    """The most on-chip bytes of a program of attention; the audit holds it against what compilers lay out.

    AMD keeps queries in registers, and operands pass through LDS in chunks. Elsewhere the block in use has
    left the buffers of those in flight, except where a warpgroup multiplies from them.
    """
    latent, rope = padded(latent, row.chunk), padded(rope)
    block, weights = row.block_n * (latent + rope), row.block_m * row.block_n
    if arch in ARCHES and ARCHES[arch].vendor == "amd":
        # Sums, in fp32, pass only where they have to be transposed.
        passing = max(row.block_m, row.block_n) * min(row.chunk, latent) * (2 if row.swap else 1)
        return element_bytes * max((row.num_stages - 1) * block + weights, passing)
    if row.wgmma:
        # Weights take the room of RoPE parts as large; maxima, sums and barriers beside.
        weights = 0 if rope == row.block_n else 2 * weights
        return element_bytes * (row.block_m * (latent + rope) + 2 * block + weights) + 32 * row.block_m
    in_flight = row.num_stages if row.block_m >= 64 else max(row.num_stages - 1, 1)
    indices = 4 * row.block_n * in_flight
    return element_bytes * (row.block_m * (latent + rope) + in_flight * block + weights) + indices


def padded(width: int, chunk: int = 0) -> int:
    """The width that a kernel works in: whole chunks, or one power of two from 16 on."""
    if chunk and width % chunk == 0:
        return width
    return max(16, 1 << (width - 1).bit_length())
