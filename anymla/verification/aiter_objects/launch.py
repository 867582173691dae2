"""One launch of a decode kernel of AITER on the emulator, its arguments laid out as AITER's C++ does."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from anymla.errors import AnyMLAError
from anymla.verification.aiter_objects.code_object import Disassembler
from anymla.verification.aiter_objects.kernels import Kernel
from anymla.verification.amdgcn.checks import Fault
from anymla.verification.amdgcn.memory import Memory
from anymla.verification.amdgcn.program import Program

SLOTS = (
    "R", "LSE", "Q", "KV", "LTP", "LTD", "LTL", "scalar", "s_MQA", "s_kv_split", "s_Q_Bs", "s_Bs",
    "s_log2_plen", "QTP", "STP", "RP", "QSCALE", "KVSCALE", "out_16_nosplit", "LSEP", "GKVTP",
    "s_cp_world_size", "s_cp_rank",
)  # fmt: skip
"""Arguments, 16 bytes each. Source: AITER csrc/py_itfs_cu/asm_mla.cu, KernelArgs."""

WAVES = 4
PAST = 4096
"""Bytes behind each buffer that are there when a kernel is found to go past one."""
_MARK = 0x5A


@dataclass(frozen=True)
class Objects:
    """A folder of code objects of one chip, each disassembled when it is first run."""

    folder: Path
    chip: str
    disassembler: Disassembler

    def has(self, kernel: Kernel) -> bool:
        """Whether a code object is there."""
        return (self.folder / f"{kernel.name}.co").is_file()

    def program(self, kernel: Kernel) -> Program:
        """A code object as the emulator takes it.

        Raises:
            CodeObjectError, Unknown: something in it is not understood.
        """
        return _program(self, kernel.name)


@lru_cache(maxsize=128)
def _program(objects: Objects, name: str) -> Program:
    path = objects.folder / f"{name}.co"
    return Program.of(objects.disassembler.text(path, objects.chip), objects.chip)


@dataclass(frozen=True)
class Ran:
    """What a launch left beside its results.

    Attributes:
        undecided: What depends on the timing of waves.
        past: The first access past the end of a buffer, "" for none.
    """

    undecided: frozenset[str]
    past: str


class Faulted(AnyMLAError, RuntimeError):
    """A kernel did on the emulator what would end the process, or harm it, on a chip."""


def launch(
    objects: Objects,
    kernel: Kernel,
    tensors: Mapping[str, Tensor | None],
    *,
    results: Mapping[str, Tensor | None],
    sm_scale: float,
    splits: int,
    grid: tuple[int, int, int],
) -> Ran:
    """Run a kernel.

    Args:
        objects: Where it is.
        kernel: Which.
        tensors: What it only reads, by names of SLOTS; STP is a list of splits, or of the plan's addresses.
        results: What it writes, filled in place; None is a null pointer.
        sm_scale: Multiplies q·k.
        splits: Of each row; 1 for a persistent kernel.
        grid: Workgroups along x, y, z.

    Returns:
        What is to be said of it.

    Raises:
        Faulted: it went where nothing is.
    """
    how = (objects, kernel, tensors, results, sm_scale, splits, grid)
    try:
        return Ran(_run(*how, spare=0), "")
    except Fault as fault:
        first = fault
    kept = [result.clone() for result in results.values() if result is not None]
    try:
        undecided = _run(*how, spare=PAST)
    except Fault:
        for result, old in zip([r for r in results.values() if r is not None], kept, strict=True):
            result.copy_(old)
        raise Faulted(_words(first)) from None
    return Ran(undecided, _words(first))


def _words(fault: Fault) -> str:
    return f"`{fault.instruction.text}`, workgroup {fault.workgroup}: {fault.what}"


def _run(
    objects: Objects,
    kernel: Kernel,
    tensors: Mapping[str, Tensor | None],
    results: Mapping[str, Tensor | None],
    sm_scale: float,
    splits: int,
    grid: tuple[int, int, int],
    spare: int,
) -> frozenset[str]:
    program, memory = objects.program(kernel), Memory()
    q, kv = tensors["Q"], tensors["KV"]
    assert q is not None and kv is not None
    values: dict[str, float | int] = {
        "scalar": sm_scale,
        "s_MQA": kernel.heads * (1 if kernel.told_heads else kernel.q_len),
        "s_kv_split": splits,
        "s_Q_Bs": q.stride(0) * q.element_size() * kernel.q_len,
        "s_Bs": kv.stride(0) * kv.element_size(),
        "out_16_nosplit": int(splits == 1),
        "s_cp_world_size": 1,
    }
    for name, tensor in tensors.items():
        if tensor is not None and name not in ("work_indptr", "work_info_set"):
            values[name] = memory.map(_padded(tensor, spare), writable=False)
    if kernel.persistent:
        lists = [
            memory.map(_padded(tensors[name], spare), writable=False)
            for name in ("work_indptr", "work_info_set")
        ]
        values["STP"] = memory.map(_padded(torch.tensor([*lists, *[0] * 8]), spare), writable=False)
    buffers = {
        name: _padded(tensor, spare, own=True) for name, tensor in results.items() if tensor is not None
    }
    for name, buffer in buffers.items():
        values[name] = memory.map(buffer)
    arguments = b"".join(
        struct.pack("<f12x" if name == "scalar" else "<Q8x", values.get(name, 0)) for name in SLOTS
    )
    machines = program.run(
        grid,
        arguments,
        memory,
        shared_bytes=program.text.descriptor["group_segment_fixed_size"],
        num_warps=WAVES,
        order="clock",
    )
    for name, buffer in buffers.items():
        target = results[name]
        assert target is not None
        size = target.numel() * target.element_size()
        if (buffer[size:] != _MARK).any():
            raise Faulted(f"{name} is written past its end of {size} bytes")
        target.view(-1).view(torch.uint8).copy_(torch.from_numpy(buffer[:size]))
    return frozenset(note for machine in machines for note in machine.notes)


def _padded(tensor: Tensor | None, spare: int, *, own: bool = False):  # type: ignore[no-untyped-def]
    assert tensor is not None
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if not spare and not own:
        return raw.numpy()
    return torch.cat((raw, torch.full((spare,), _MARK, dtype=torch.uint8))).numpy()
