"""ARCHES: one row a chip family. Facts only; what a backend makes of them stands in the backend."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """The facts of a chip family that kernels and selection depend on.

    Attributes:
        vendor: "amd", "nvidia" or "cpu".
        part: The product whose `multiprocessors` is given.
        wave_size: Threads that run in lockstep.
        shared_bytes: The most LDS or shared memory that one workgroup can have, 0 for a CPU.
        multiprocessors: Compute units or SMs of `part`; None where the vendor has published none.
        simds: SIMDs of a unit (two compute units where these share LDS) or parts of a multiprocessor.
        waves: The most waves that a SIMD holds.
        registers: 32-bit vector registers that a SIMD has for each lane of a wave.
        register_granule: A wave gets a multiple of so many.
        unit_shared_bytes: LDS or shared memory of a unit.
        reserved_shared_bytes: What each workgroup takes of it beside its own.
        tensor_columns: Columns of tensor memory of a multiprocessor.
        fp8_flavour: What a bare "fp8" means there: "e4m3fn" or "e4m3fnuz".
        has_fp8: Whether its matrix units multiply that flavour.
        source: Where the numbers are from.
    """

    vendor: str
    part: str
    wave_size: int
    shared_bytes: int
    multiprocessors: int | None
    fp8_flavour: str
    has_fp8: bool
    source: str
    simds: int = 4
    waves: int = 1
    registers: int = 0
    register_granule: int = 1
    unit_shared_bytes: int = 0
    reserved_shared_bytes: int = 0
    tensor_columns: int = 0


KIB = 1024
_ROCM = "ROCm documentation, AMD GPU specifications (rocm.docs.amd.com/en/latest/reference/gpu-specs.html)"
_CUDA = "CUDA C++ Programming Guide, Technical Specifications per Compute Capability; data sheet of the part"

ARCHES: Mapping[str, Arch] = {
    "cpu": Arch(
        vendor="cpu",
        part="any CPU that torch runs on",
        wave_size=1,
        shared_bytes=0,
        multiprocessors=None,
        fp8_flavour="e4m3fn",
        has_fp8=False,
        source="torch converts both fp8 flavours on a CPU and multiplies neither",
    ),
    "gfx90a": Arch(
        vendor="amd",
        part="one GCD of an MI250X",
        wave_size=64,
        shared_bytes=64 * KIB,
        multiprocessors=110,
        fp8_flavour="e4m3fn",
        has_fp8=False,
        source=_ROCM,
        waves=8,
        registers=512,
        register_granule=8,
        unit_shared_bytes=64 * KIB,
    ),
    "gfx942": Arch(
        vendor="amd",
        part="MI300X",
        wave_size=64,
        shared_bytes=64 * KIB,
        multiprocessors=304,
        fp8_flavour="e4m3fnuz",
        has_fp8=True,
        source=f"{_ROCM}; CDNA3 ISA reference: its fp8 is E4M3 FNUZ",
        waves=8,
        registers=512,
        register_granule=8,
        unit_shared_bytes=64 * KIB,
    ),
    "gfx950": Arch(
        vendor="amd",
        part="MI355X",
        wave_size=64,
        shared_bytes=160 * KIB,
        multiprocessors=256,
        fp8_flavour="e4m3fn",
        has_fp8=True,
        source=f"{_ROCM}; CDNA4 ISA reference: its fp8 is OCP E4M3",
        waves=8,
        registers=512,
        register_granule=8,
        unit_shared_bytes=160 * KIB,
    ),
    "gfx1100": Arch(
        vendor="amd",
        part="RX 7900 XTX",
        wave_size=32,
        shared_bytes=64 * KIB,
        multiprocessors=96,
        fp8_flavour="e4m3fn",
        has_fp8=False,
        source=f"{_ROCM}; 128 KiB a WGP, 64 KiB a workgroup",
        waves=16,
        registers=1536,
        register_granule=24,
        unit_shared_bytes=128 * KIB,
    ),
    "gfx1201": Arch(
        vendor="amd",
        part="RX 9070 XT",
        wave_size=32,
        shared_bytes=64 * KIB,
        multiprocessors=64,
        fp8_flavour="e4m3fn",
        has_fp8=True,
        source=f"{_ROCM}; 128 KiB a WGP, 64 KiB a workgroup",
        waves=16,
        registers=1536,
        register_granule=24,
        unit_shared_bytes=128 * KIB,
    ),
    "gfx1250": Arch(
        vendor="amd",
        part="MI400 series",
        wave_size=32,
        shared_bytes=320 * KIB,
        multiprocessors=None,
        fp8_flavour="e4m3fn",
        has_fp8=True,
        source="LLVM AMDGPU.td, gfx1250: FeatureAddressableLocalMemorySize327680, FeatureWavefrontSize32",
    ),
    "sm80": Arch(
        vendor="nvidia",
        part="A100",
        wave_size=32,
        shared_bytes=163 * KIB,
        multiprocessors=108,
        fp8_flavour="e4m3fn",
        has_fp8=False,
        source=_CUDA,
        waves=16,
        registers=512,
        register_granule=8,
        unit_shared_bytes=164 * KIB,
        reserved_shared_bytes=KIB,
    ),
    "sm86": Arch(
        vendor="nvidia",
        part="RTX 3090",
        wave_size=32,
        shared_bytes=99 * KIB,
        multiprocessors=82,
        fp8_flavour="e4m3fn",
        has_fp8=False,
        source=_CUDA,
        waves=12,
        registers=512,
        register_granule=8,
        unit_shared_bytes=100 * KIB,
        reserved_shared_bytes=KIB,
    ),
    "sm89": Arch(
        vendor="nvidia",
        part="L40S",
        wave_size=32,
        shared_bytes=99 * KIB,
        multiprocessors=142,
        fp8_flavour="e4m3fn",
        has_fp8=True,
        source=_CUDA,
        waves=12,
        registers=512,
        register_granule=8,
        unit_shared_bytes=100 * KIB,
        reserved_shared_bytes=KIB,
    ),
    "sm90": Arch(
        vendor="nvidia",
        part="H100 SXM and H200",
        wave_size=32,
        shared_bytes=227 * KIB,
        multiprocessors=132,
        fp8_flavour="e4m3fn",
        has_fp8=True,
        source=_CUDA,
        waves=16,
        registers=512,
        register_granule=8,
        unit_shared_bytes=228 * KIB,
        reserved_shared_bytes=KIB,
    ),
    "sm100": Arch(
        vendor="nvidia",
        part="B200",
        wave_size=32,
        shared_bytes=227 * KIB,
        multiprocessors=148,
        fp8_flavour="e4m3fn",
        has_fp8=True,
        source=_CUDA,
        waves=16,
        registers=512,
        register_granule=8,
        unit_shared_bytes=228 * KIB,
        reserved_shared_bytes=KIB,
        tensor_columns=512,
    ),
    "sm120": Arch(
        vendor="nvidia",
        part="RTX 5090",
        wave_size=32,
        shared_bytes=99 * KIB,
        multiprocessors=170,
        fp8_flavour="e4m3fn",
        has_fp8=True,
        source=_CUDA,
        waves=12,
        registers=512,
        register_granule=8,
        unit_shared_bytes=100 * KIB,
        reserved_shared_bytes=KIB,
    ),
}
