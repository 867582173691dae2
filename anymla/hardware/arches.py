"""ARCHES: one row a chip family. Facts only; what a backend makes of them stands in the backend."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Peaks:
    """What a vendor says that a part does at most; nothing here was measured.

    Attributes:
        part: The product that the figures are of.
        bandwidth: Bytes a second of its memory.
        rate: Multiplications and additions a second of dense bf16 and fp16 products with fp32 sums.
        fp8_rate: The same of fp8, 0 where matrix units do not multiply it.
        source: Where the vendor says so.
    """

    part: str
    bandwidth: float
    rate: float
    fp8_rate: float
    source: str


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
        peaks: What the vendor says that it does at most; None where it has said nothing.
        source: Where the numbers are from, but for the peaks.
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
    peaks: Peaks | None = None

    @property
    def sums_fp8_in_fp32(self) -> bool:
        """Whether its matrix units sum products of that flavour in fp32; NVIDIA's keep fewer bits of them.

        Source: CDNA3, CDNA4 and RDNA4 ISA references; DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
        """
        return self.has_fp8 and self.vendor == "amd"


KIB = 1024
GIGA, TERA = 1e9, 1e12
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
        peaks=Peaks(
            "one GCD of an MI250X",
            1638.4 * GIGA,
            191.5 * TERA,
            0,
            "AMD Instinct MI250X data sheet (383.0 TFLOPS, 3.2 TB/s), halved: a GCD is one of two dies",
        ),
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
        peaks=Peaks("MI300X", 5300 * GIGA, 1307.4 * TERA, 2614.9 * TERA, "AMD Instinct MI300X data sheet"),
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
        peaks=Peaks("MI355X", 8000 * GIGA, 2516.6 * TERA, 5033.2 * TERA, "AMD Instinct MI355X data sheet"),
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
        peaks=Peaks(
            "RX 7900 XTX",
            960 * GIGA,
            122.88 * TERA,
            0,
            "AMD Radeon RX 7900 XTX product page (2.5 GHz, 960 GB/s); 512 FLOPS a clock and compute unit: "
            "AMD GPUOpen, How to accelerate AI applications on RDNA 3 using WMMA",
        ),
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
        peaks=Peaks(
            "RX 9070 XT",
            640 * GIGA,
            195 * TERA,
            389 * TERA,
            "AMD Radeon RX 9070 XT product page, without sparsity; 1024 FLOPS a clock and compute unit: "
            "AMD GPUOpen, Using the Matrix Cores of AMD RDNA 4 architecture GPUs",
        ),
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
        peaks=Peaks("A100 SXM of 80 GB", 2039 * GIGA, 312 * TERA, 0, "NVIDIA A100 data sheet"),
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
        peaks=Peaks("RTX 3090", 936 * GIGA, 71 * TERA, 0, "NVIDIA Ampere GA102 architecture whitepaper"),
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
        peaks=Peaks(
            "L40S", 864 * GIGA, 362.05 * TERA, 733 * TERA, "NVIDIA L40S data sheet, without sparsity"
        ),
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
        peaks=Peaks(
            "H200", 4800 * GIGA, 989.5 * TERA, 1979 * TERA, "NVIDIA H200 data sheet, without sparsity"
        ),
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
        peaks=Peaks(
            "B200",
            8000 * GIGA,
            2250 * TERA,
            4500 * TERA,
            "NVIDIA HGX B200 data sheet by eight, without sparsity",
        ),
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
        peaks=Peaks(
            "RTX 5090",
            1792 * GIGA,
            209.5 * TERA,
            419 * TERA,
            "NVIDIA RTX Blackwell GPU architecture whitepaper, fp32 sums, without sparsity",
        ),
    ),
}
