"""A code object of AMD as assembly text: what a disassembler says, and what the kernel's descriptor says."""

import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from anymla.errors import AnyMLAError

LEAST_LLVM = {"gfx942": 19, "gfx950": 20}
"""The first LLVM whose disassembler knows every instruction of these kernels."""

PLACES = (
    "llvm-objdump",
    *(f"llvm-objdump-{n}" for n in range(30, 18, -1)),
    "/opt/rocm/llvm/bin/llvm-objdump",
)
"""Where a disassembler is looked for, after what LLVM_OBJDUMP names."""

_SYMBOL_TABLES = (2, 11)
_LABEL = re.compile(r"^[0-9a-f]{16} <.*>:$", re.M)
"""A symbol inside the kernel; branches are resolved by their addresses."""
_UNDECODED = re.compile(r"^\s+\.(?:long|byte|short)\b|<unknown>", re.M)


class NoDisassembler(AnyMLAError, RuntimeError):
    """There is no llvm-objdump here that is new enough for a chip; the message says what there is."""


@dataclass(frozen=True)
class Disassembler:
    """An llvm-objdump.

    Attributes:
        path: Of the program.
        version: Of its LLVM, the first number.
    """

    path: str
    version: int

    @classmethod
    def of(cls, chip: str) -> "Disassembler":
        """The first one that knows a chip.

        Args:
            chip: A key of LEAST_LLVM.

        Raises:
            NoDisassembler: none does.
        """
        least, found = LEAST_LLVM[chip], []
        for place in (os.environ.get("LLVM_OBJDUMP", ""), *PLACES):
            path = shutil.which(place) if place else None
            version = _version(path) if path else 0
            if path and version >= least:
                return cls(path, version)
            found += [f"{path} of LLVM {version}"] if path else []
        raise NoDisassembler(
            f"llvm-objdump got {', '.join(dict.fromkeys(found)) or 'none'}; {chip} needs one of LLVM {least} "
            f"or newer: apt install llvm-{least}, or name it in LLVM_OBJDUMP"
        )

    def text(self, path: Path, chip: str) -> str:
        """The assembly of the one kernel of a code object, for `amdgcn.program`.

        Raises:
            CodeObjectError: it is none, or something in it is not decoded.
        """
        command = [self.path, "-d", f"--mcpu={chip}", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CodeObjectError(f"{path.name}: {done.stderr.strip() or 'llvm-objdump failed'}")
        body = done.stdout.partition(">:\n")[2]
        lost = _UNDECODED.search(body)
        if not body or lost is not None:
            line = body[lost.start() :].partition("//")[0].strip() if lost else "a kernel"
            raise CodeObjectError(f"{path.name}: {line} is not decoded by LLVM {self.version}")
        name, fields = descriptor(path.read_bytes(), path.name)
        head = [f".globl {name}", *(f".amdhsa_{field} {value}" for field, value in fields.items())]
        return "\n".join([*head, _LABEL.sub("", body)])


class CodeObjectError(AnyMLAError, ValueError):
    """A file is no code object of one kernel, or not all of it is understood."""


@lru_cache(maxsize=64)
def _version(path: str) -> int:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"LLVM version (\d+)", done.stdout)
    return int(found[1]) if found and "amdgcn" in done.stdout else 0


def descriptor(blob: bytes, name: str) -> tuple[str, dict[str, int]]:
    """The kernel of a code object and what its descriptor says.

    Args:
        blob: The file, ELF of 64 bits.
        name: How messages call it.

    Returns:
        The kernel's name, and the fields that `amdgcn.program` takes, as an assembler calls them.

    Raises:
        CodeObjectError: it is no code object, or has not one kernel.

    Source: llvm.org/docs/AMDGPUUsage.html, "Code Object V3 Kernel Descriptor".
    """
    try:
        kernels = {symbol: at for symbol, at in _symbols(blob) if symbol.endswith(".kd")}
        (symbol,) = kernels
        shared, scratch, arguments, *_ = struct.unpack_from("<IIII", blob, kernels[symbol])
        registers, _, settings, properties = struct.unpack_from("<IIIH", blob, kernels[symbol] + 44)
    except (struct.error, ValueError, IndexError) as error:
        raise CodeObjectError(f"{name}: no code object of one kernel: {error}") from None
    fields = {
        "group_segment_fixed_size": shared,
        "private_segment_fixed_size": scratch,
        "kernarg_size": arguments,
        "accum_offset": ((registers & 63) + 1) * 4,
        "user_sgpr_count": settings >> 1 & 31,
        "user_sgpr_private_segment_buffer": properties & 1,
        "user_sgpr_dispatch_ptr": properties >> 1 & 1,
        "user_sgpr_queue_ptr": properties >> 2 & 1,
        "system_sgpr_workgroup_id_x": settings >> 7 & 1,
        "system_sgpr_workgroup_id_y": settings >> 8 & 1,
        "system_sgpr_workgroup_id_z": settings >> 9 & 1,
    }
    return symbol.removesuffix(".kd"), fields


def _symbols(blob: bytes) -> Iterator[tuple[str, int]]:
    """Names of symbols and where in the file what they name lies."""
    if blob[:5] != b"\x7fELF\x02":
        raise ValueError("it is no ELF file of 64 bits")
    (segments_at, sections_at) = struct.unpack_from("<QQ", blob, 32)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<HHHH", blob, 54)
    segments = [
        struct.unpack_from("<IIQQQQ", blob, segments_at + i * segment_size) for i in range(segment_count)
    ]
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", blob, sections_at + i * section_size) for i in range(section_count)
    ]
    for section in sections:
        if section[1] not in _SYMBOL_TABLES:
            continue
        names = sections[section[6]][4]
        for i in range(section[5] // 24):
            place, *_, address, _ = struct.unpack_from("<IBBHQQ", blob, section[4] + i * 24)
            name = blob[names + place : blob.index(b"\0", names + place)].decode()
            for kind, _, offset, start, _, size in segments:
                if name and kind == 1 and start <= address < start + size:
                    yield name, address - start + offset
                    break
