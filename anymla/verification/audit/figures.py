"""Compile one specialisation for a chip, and read from the result what the chip would have to give."""

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anymla.hardware.arches import ARCHES
from anymla.verification.audit.capture import Specialisation, target_of


@dataclass(frozen=True)
class Figures:
    """What one compiled kernel takes.

    Attributes:
        shared_bytes: On-chip memory of a program.
        tensor_columns: Columns of tensor memory of a program, on chips that have it.
        registers: 32-bit vector registers of a lane, accumulation registers included.
        spilled_bytes: Memory that a lane needs for registers that it does not have.
        scalars_moved: Scalar registers that AMD keeps in lanes of vector registers instead, without memory.
        waves: Waves that fit on a SIMD at once, by registers and on-chip memory.
        instructions: Of the whole kernel.
        matrix: Matrix instructions by name.
        bare_dots: Products that became ordinary multiplications.
        dots: All products.
    """

    shared_bytes: int
    tensor_columns: int
    registers: int
    spilled_bytes: int
    scalars_moved: int
    waves: float
    instructions: int
    matrix: Mapping[str, int]
    dots: int
    bare_dots: int


def compiled(wanted: Specialisation, arch: str) -> Figures:
    """Compile and read; as for `built`."""
    return figures_of(built(wanted, arch), arch)


def built(wanted: Specialisation, arch: str) -> Any:
    """Compile; the first AMD chip of a process must be its only one.

    Triton 3.6.0 keeps its fp8 conversions of the first AMD chip for all later ones.
    """
    import triton

    function = wanted.function
    source = function.ASTSource(
        function, dict(wanted.signature), dict(wanted.constants), dict(wanted.attributes)
    )
    return triton.compile(source, target=target_of(arch), options=dict(wanted.options))


def figures_of(kernel: Any, arch: str) -> Figures:
    """Read what a kernel that Triton compiled takes of a chip."""
    read = _of_amd if ARCHES[arch].vendor == "amd" else _of_nvidia
    found, shared, dots = read(kernel), kernel.metadata.shared, _dots(kernel.asm["ttgir"])
    return Figures(
        shared_bytes=shared,
        tensor_columns=getattr(kernel.metadata, "tmem_size", 0) or 0,
        registers=found.registers,
        spilled_bytes=found.spilled_bytes,
        scalars_moved=found.scalars_moved,
        waves=waves(arch, found.registers, shared, kernel.metadata.num_warps),
        instructions=found.instructions,
        matrix=dict(found.matrix),
        dots=len(dots),
        bare_dots=sum("mma" not in layout and "mfma" not in layout for layout in dots),
    )


class _Binary(NamedTuple):
    registers: int
    spilled_bytes: int
    scalars_moved: int
    instructions: int
    matrix: Counter[str]


def _of_amd(kernel: Any) -> _Binary:
    text = kernel.asm["amdgcn"]

    def fact(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    matrix = Counter(re.findall(r"^\s+(v_s?(?:mfmac?|wmmac?)_\w+)", text, re.M))
    instructions = len(re.findall(r"^\t[a-z]+_\w+", text, re.M))
    spilled = fact("private_segment_fixed_size")
    return _Binary(fact("vgpr_count"), spilled, fact("sgpr_spill_count"), instructions, matrix)


def _of_nvidia(kernel: Any) -> _Binary:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary = kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"{tool.name} says nothing of registers: {text}"
    matrix = Counter(
        re.findall(r"(mma\.sync\.[\w.]+|wgmma\.mma_async\.[\w.]+|tcgen05\.mma\.[\w.:]+)", kernel.asm["ptx"])
    )
    return _Binary(int(found[1]), int(found[2]), 0, _code_bytes(binary) // 16, matrix)


def _code_bytes(elf: bytes) -> int:
    """The bytes of all sections of a cubin that hold code."""
    sections, entry_bytes, count = (
        struct.unpack_from("<Q", elf, 0x28)[0],
        *struct.unpack_from("<HH", elf, 0x3A),
    )
    total = 0
    for index in range(count):
        at = sections + index * entry_bytes
        flags, size = struct.unpack_from("<Q", elf, at + 8)[0], struct.unpack_from("<Q", elf, at + 32)[0]
        total += size if flags & 4 else 0
    return int(total)


def _dots(ttgir: str) -> list[str]:
    """How the result of each product is laid out."""
    layouts = dict(re.findall(r"^#(\w+) = #[\w.]*?(\w+)<", ttgir, re.M))
    results = re.findall(r"= tt\.dot .*-> tensor<[^#]*#(\w+)>", ttgir)
    matrix = re.findall(r"(ttng\.warp_group_dot |ttng\.tc_gen5_mma |wmma )", ttgir)
    return [layouts.get(name, name) for name in results] + ["mma" for _ in matrix]


def waves(arch: str, registers: int, shared_bytes: int, num_warps: int) -> float:
    """Waves that a SIMD holds at once: programs come and go as a whole."""
    chip = ARCHES[arch]
    granule = chip.register_granule
    by_registers = min(chip.waves, chip.registers // max(-(-registers // granule) * granule, granule))
    programs = by_registers * chip.simds // num_warps
    if shared_bytes:
        programs = min(programs, chip.unit_shared_bytes // (shared_bytes + chip.reserved_shared_bytes))
    return programs * num_warps / chip.simds
