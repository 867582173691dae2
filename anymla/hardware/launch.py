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
        chunk: Columns of the latent that are one operand of a product.
        overlap: Whether the kernel may start while the one before it ends.
        swap: Whether products are transposed, for matrix instructions that want more rows than the tile has.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_a_unit: int = 1
    chunk: int = 128
    overlap: bool = False
    swap: bool = False


LAUNCH: Mapping[tuple[str, str], tuple[Launch, ...]] = {
    ("attend", "*"): (
        Launch(block_m=16, block_n=32, num_warps=4, num_stages=1),
        Launch(block_m=16, block_n=16, num_warps=4, num_stages=1),
    ),
    ("attend", "sm90"): (
        Launch(block_m=16, block_n=64, num_warps=4, num_stages=3, chunk=256),
        Launch(block_m=32, block_n=64, num_warps=8, num_stages=3),
        Launch(block_m=64, block_n=64, num_warps=8, num_stages=2, chunk=512),
    ),
    ("combine", "*"): (Launch(block_m=1, block_n=32, num_warps=4, num_stages=1),),
    ("combine", "sm90"): (Launch(block_m=1, block_n=16, num_warps=4, num_stages=3, overlap=True),),
}
"""Rows of a kernel in ascending block_m; a second of one block_m is for shapes that do not fit the first."""


def launch_rows(kernel: str, arch: str) -> tuple[Launch, ...]:
    """The rows for a kernel on a chip: its own, else its vendor's, else those for any."""
    vendor = ARCHES[arch].vendor if arch in ARCHES else "*"
    for key in (arch, vendor, "*"):
        if (kernel, key) in LAUNCH:
            return LAUNCH[kernel, key]
    raise KeyError(kernel)
