"""Code objects: what is read of their descriptor, and which disassembler is taken."""

import struct
from pathlib import Path

import pytest

from anymla.errors import InvalidInput
from anymla.verification.aiter_objects import code_object, run
from anymla.verification.aiter_objects.code_object import (
    CodeObjectError,
    Disassembler,
    NoDisassembler,
    descriptor,
)
from anymla.verification.aiter_objects.kernels import KERNELS, why_not

SEGMENT = 0x200
"""Where the one segment lies in the file; it is loaded at 0x1000 past that."""


def elf(*kernels: str) -> bytes:
    """The smallest file that names kernels, written out field by field."""
    names = b"\0" + b"".join(f"{kernel}.kd".encode() + b"\0" for kernel in kernels)
    # LDS, scratch, bytes of arguments; then at 44: accumulation offset 128, two unused, 17 user registers and
    # workgroup ids x and z, the pointer to a dispatch packet.
    fields = struct.pack("<III", 65536, 16, 368) + bytes(32)
    fields += struct.pack("<IIIH", 31, 0, 17 << 1 | 1 << 7 | 1 << 9, 1 << 1) + bytes(6)
    symbols = bytes(24)
    for at, kernel in enumerate(kernels):
        place = names.index(kernel.encode())
        symbols += struct.pack("<IBBHQQ", place, 0, 0, 1, SEGMENT + 0x1000 + 64 * at, 64)
    body = fields * len(kernels)
    tables = SEGMENT + len(body)
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQ", 3, 224, 1, 0, 64, 128)
    header += struct.pack("<IHHHHHH", 0, 64, 56, 1, 64, 2, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 4, SEGMENT, SEGMENT + 0x1000, 0, len(body), len(body), 4096)
    strings = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, tables + len(symbols), len(names), 0, 0, 1, 0)
    table = struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, tables, len(symbols), 1, 0, 8, 24)
    head = header + segment
    return (head.ljust(128, b"\0") + table + strings).ljust(SEGMENT, b"\0") + body + symbols + names


def test_the_descriptor_of_the_one_kernel_is_read() -> None:
    name, fields = descriptor(elf("attend"), "a.co")
    assert name == "attend"
    assert {key: value for key, value in fields.items() if value} == {
        "group_segment_fixed_size": 65536,
        "private_segment_fixed_size": 16,
        "kernarg_size": 368,
        "accum_offset": 128,
        "user_sgpr_count": 17,
        "user_sgpr_dispatch_ptr": 1,
        "system_sgpr_workgroup_id_x": 1,
        "system_sgpr_workgroup_id_z": 1,
    }


@pytest.mark.parametrize("blob", [b"", b"no elf", elf(), elf("one", "two"), elf("torn")[:300]])
def test_anything_else_is_refused_by_name(blob: bytes) -> None:
    with pytest.raises(CodeObjectError, match=r"a\.co: no code object of one kernel"):
        descriptor(blob, "a.co")


def tool(folder: Path, says: str) -> str:
    """A program that says so, whatever it is asked."""
    path = folder / "llvm-objdump"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return str(path)


VERSION = "Some LLVM version {}.1.0\n  Registered Targets:\n    {} - what it knows"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No disassembler is anywhere but where LLVM_OBJDUMP says."""
    monkeypatch.setattr(code_object, "PLACES", ())
    monkeypatch.delenv("LLVM_OBJDUMP", raising=False)


@pytest.mark.usefixtures("alone")
def test_a_disassembler_that_knows_the_chip_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tool(tmp_path, VERSION.format(19, "amdgcn"))
    monkeypatch.setenv("LLVM_OBJDUMP", path)
    assert Disassembler.of("gfx942") == Disassembler(path, 19)
    with pytest.raises(
        NoDisassembler, match=r"llvm-objdump of LLVM 19; gfx950 needs one of LLVM 20 or newer"
    ):
        Disassembler.of("gfx950")


@pytest.mark.usefixtures("alone")
def test_none_or_one_without_amd_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoDisassembler, match="llvm-objdump got none; gfx942 needs one of LLVM 19"):
        Disassembler.of("gfx942")
    monkeypatch.setenv("LLVM_OBJDUMP", tool(tmp_path, VERSION.format(22, "x86-64")))
    with pytest.raises(NoDisassembler, match="of LLVM 0"):
        Disassembler.of("gfx942")


LISTING = """a.co: file format elf64-amdgpu

Disassembly of section .text:

0000000000002000 <attend>:
\ts_cbranch_scc0 1                         // 000000002000: BF840001
\ts_nop 0                                  // 000000002004: BF800000

0000000000002008 <L1>:
\ts_endpgm                                 // 000000002008: BF810000"""


def test_text_has_the_descriptor_and_no_labels_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.co").write_bytes(elf("attend"))
    text = Disassembler(tool(tmp_path, LISTING), 19).text(tmp_path / "a.co", "gfx942")
    assert text.startswith(".globl attend\n.amdhsa_group_segment_fixed_size 65536\n")
    assert "<L1>" not in text
    with pytest.raises(CodeObjectError, match=r"a\.co: \.long 0xdeadbeef is not decoded by LLVM 19"):
        torn = tool(tmp_path, LISTING.replace("\ts_nop 0 ", "\t.long 0xdeadbeef"))
        Disassembler(torn, 19).text(tmp_path / "a.co", "gfx942")


def test_no_chip_has_a_kernel_twice_for_the_same_call() -> None:
    calls = [(k.name, k.heads, k.q_len, chip) for k in KERNELS for chip in k.chips]
    assert len(set(calls)) == len(calls)


def test_a_code_object_without_a_row_has_a_reason() -> None:
    assert why_not(KERNELS[0].name, "gfx942") == ""
    assert why_not("mla_pfl_bf16_a16w16_causal_subQ16_mqa16", "gfx942") == "a prefill kernel"
    assert why_not("mla_new", "gfx942") == "it has no row in KERNELS"


@pytest.mark.parametrize("tail", ["aiter_meta/hsa/gfx942/mla", "hsa/gfx942/mla", "gfx942/mla", "."])
def test_code_objects_are_found_where_an_aiter_has_them(tmp_path: Path, tail: str) -> None:
    (tmp_path / tail).mkdir(parents=True, exist_ok=True)
    (tmp_path / tail / "a.co").touch()
    assert run.objects_in(tmp_path, "gfx942") == (tmp_path / tail).resolve()


def test_a_place_without_code_objects_or_another_chip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="needs an AITER with code objects in aiter_meta/hsa/gfx942/mla"):
        run.verify(tmp_path, "gfx942")
    with pytest.raises(InvalidInput, match="machine got 'gfx90a'; needs one of gfx942, gfx950 with AITER"):
        run.verify(tmp_path, "gfx90a")


def test_the_package_is_found_with_what_it_calls_itself(tmp_path: Path) -> None:
    assert run.package_in(tmp_path) == (None, "")
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "mla.py").touch()
    assert run.package_in(tmp_path) == (tmp_path.resolve(), "")
    (tmp_path / "amd_aiter-0.1.9.dist-info").mkdir()
    assert run.package_in(tmp_path / "aiter") == (tmp_path.resolve(), "0.1.9")
