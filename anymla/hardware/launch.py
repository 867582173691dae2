"""LAUNCH: tile sizes and warps for each kernel and chip; the exact chip, then its vendor, then "*"."""

from collections.abc import Mapping
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
        chunk: Columns that are one operand of a product: of the latent, or of a tile of index logits.
        overlap: Whether the kernel may start while the one before it ends.
        swap: Whether products are transposed, for matrix instructions that want more rows than the tile has.
        widest: The widest key or value that its registers hold; a row with a width is for the shapes that
            no narrower one takes. 0: any.
        kernel: Of which kernel with copies and products placed by hand it is, by its module; empty: of none.
        reread: Whether each block of keys brings the queries from on-chip memory anew, for chips on which
            every wave would need registers for all of them.
        registers: The most of a thread that multiplies fp8, on NVIDIA's chips; 0: as the compiler likes.
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
    kernel: str = ""
    reread: bool = False
    registers: int = 0


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
    # Bytes that lie anyhow go to the portable kernel in the same tiles; other widths take the last two.
    ("attend", "sm90"): (
        Launch(block_m=16, block_n=64, num_warps=4, num_stages=2, chunk=256, kernel="attend_swapped"),
        Launch(block_m=16, block_n=64, num_warps=4, num_stages=3, chunk=256),
        Launch(block_m=16, block_n=64, num_warps=4, num_stages=4, chunk=256, kernel="attend_bytes"),
        Launch(block_m=32, block_n=64, num_warps=4, num_stages=2, chunk=256, kernel="attend_swapped"),
        Launch(block_m=64, block_n=64, num_warps=4, num_stages=2, chunk=512, kernel="attend_wgmma"),
        Launch(block_m=64, block_n=64, num_warps=8, num_stages=2, chunk=512),
        Launch(block_m=16, block_n=32, num_warps=8, num_stages=2, chunk=256),
        Launch(block_m=32, block_n=32, num_warps=8, num_stages=2, chunk=256),
    ),
    # As many values at once as block_n pieces of chunk columns: of wider chunks fewer pieces.
    ("combine", "*"): (Launch(block_m=1, block_n=32, num_warps=4, num_stages=1),),
    # One wave: what is summed over pieces stays in it, without on-chip memory and barriers.
    ("combine", "amd"): (Launch(block_m=1, block_n=32, num_warps=1, num_stages=1),),
    ("combine", "gfx1100"): (Launch(block_m=1, block_n=16, num_warps=1, num_stages=1),),
    ("combine", "gfx1201"): (Launch(block_m=1, block_n=16, num_warps=1, num_stages=1),),
    ("combine", "sm90"): (Launch(block_m=1, block_n=128, num_warps=4, num_stages=1, chunk=64, overlap=True),),
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
    ("index_logits", "sm90"): (
        Launch(block_m=64, block_n=64, num_warps=4, num_stages=2),
        Launch(block_m=256, block_n=64, num_warps=4, num_stages=2, registers=128),
    ),
    # Blocks of logits, not less than twice what is wanted; stages are those that are read at once.
    ("narrow", "*"): (Launch(block_m=1, block_n=8192, num_warps=16, num_stages=1),),
    ("narrow", "sm90"): (
        Launch(block_m=1, block_n=4096, num_warps=16, num_stages=4),
        Launch(block_m=1, block_n=8192, num_warps=8, num_stages=1),
    ),
    ("choose", "*"): (
        Launch(block_m=1, block_n=4096, num_warps=16, num_stages=1),
        Launch(block_m=1, block_n=8192, num_warps=16, num_stages=1),
    ),
    ("choose", "sm90"): (
        Launch(block_m=1, block_n=4096, num_warps=8, num_stages=1, overlap=True),
        Launch(block_m=1, block_n=8192, num_warps=8, num_stages=1, overlap=True),
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
