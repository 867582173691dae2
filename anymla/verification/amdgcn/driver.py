"""A driver for Triton whose device is the emulator.

Inside `emulated(chip)` the ordinary Python API runs on CPU tensors as on that chip, with Triton's own
specialisation and the chip's on-chip limit.
"""

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from anymla.errors import AnyMLAError, InvalidInput
from anymla.hardware import probe
from anymla.hardware.arches import ARCHES, Arch
from anymla.verification.amdgcn.checks import Fault
from anymla.verification.amdgcn.machine import MOST_STEPS, Machine
from anymla.verification.amdgcn.memory import Memory
from anymla.verification.amdgcn.program import Program, packed, program

CHIPS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
"""Chips whose every shipped kernel the emulator runs."""

UNITS = 3
"""Compute units of an emulated chip, so that small batches are cut too."""

NUMBERS = {"i32": "i32", "u32": "i32", "i64": "i64", "u64": "i64", "fp32": "f32", "f32": "f32", "fp64": "f64"}
"""What Triton calls scalar arguments, and how they lie in memory."""


class OrderMatters(AnyMLAError, RuntimeError):
    """A kernel whose result depends on which wave goes first."""


@dataclass(frozen=True)
class Launched:
    """One launch.

    Attributes:
        kernel: Its name.
        grid: Workgroups along x, y, z.
        shared_bytes: LDS of a workgroup.
        num_warps: Waves of a workgroup.
        num_stages: As it was compiled.
        source: What it was compiled from, as Triton keeps it.
        executed: How many waves executed each mnemonic.
        notes: What is undecided.
    """

    kernel: str
    grid: tuple[int, ...]
    shared_bytes: int
    num_warps: int
    num_stages: int
    source: Any
    executed: Mapping[str, int]
    notes: tuple[str, ...]


@dataclass
class Emulator:
    """What Triton takes for a driver.

    Attributes:
        chip: A key of ARCHES.
        orders: Of the waves; each launch is run in every one, and must give the same bits.
        execute: Whether to run kernels, or only to compile them and check their LDS.
        edit: Changes a kernel before it is run, for tests of the checks.
        most: Steps of a batch after which a kernel is said not to end.
        launches: What was run.
        binary_ext: What Triton calls the code that it hands over.
        assembly: Of the kernel that Triton is about to load.
    """

    chip: str
    orders: Sequence[str] = ("lockstep",)
    execute: bool = True
    edit: Callable[[Program], Program] | None = None
    most: int = MOST_STEPS
    launches: list[Launched] = field(default_factory=list)
    binary_ext: str = "hsaco"
    assembly: str = ""

    @property
    def facts(self) -> Arch:
        """The row of the chip."""
        return ARCHES[self.chip]

    @property
    def utils(self) -> "Emulator":
        """Where Triton looks for properties and loads binaries."""
        return self

    def launcher_cls(self, source: Any, metadata: Any) -> "Launcher":
        """The launcher of the kernel that Triton is about to load."""
        return Launcher(self.assembly, source, metadata)

    def get_current_target(self) -> Any:
        """What to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", self.chip, self.facts.wave_size)

    def get_device_properties(self, device: int) -> dict[str, Any]:
        """What kernels may use of the chip."""
        return {
            "max_shared_mem": self.facts.shared_bytes,
            "multiprocessor_count": self.facts.multiprocessors or UNITS,
            "warpSize": self.facts.wave_size,
            "max_num_regs": 512,
            "arch": self.chip,
        }

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_current_stream(self, device: int | None = None) -> int:
        """There is one."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Tensors are on the CPU."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Of tensors."""
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> str:
        """Types need no translation."""
        return kind

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, and the most threads of a workgroup."""
        return 1, 1, 0, 0, 1024


class Launcher:
    """Runs one kernel on the emulator that is then active."""

    def __init__(self, assembly: str, source: Any, metadata: Any) -> None:
        self.assembly, self.source, self.metadata = assembly, source, metadata

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed_metadata: Any, launch_metadata: Any,
        enter: Any, leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        """As Triton calls it: grid, handles, hooks, then every argument of the kernel."""
        import triton

        emulator: Emulator = triton.runtime.driver.active
        kinds = self.source.signature.values()
        given = [(k, v) for k, v in zip(kinds, arguments, strict=True) if k != "constexpr"]
        if not emulator.execute:
            self._note(emulator, (x, y, z), [])
            return
        kernel = program(self.assembly, emulator.chip)
        if emulator.edit is not None:
            kernel = emulator.edit(kernel)
        outcomes = []
        before = _storages(given) if len(emulator.orders) > 1 else {}
        saved = {pointer: array.copy() for pointer, array in before.items()}
        for order in emulator.orders:
            for pointer, array in before.items():
                array[:] = saved[pointer]
            memory = Memory()
            machines = kernel.run(
                (x, y, z),
                _arguments(given, memory),
                memory,
                shared_bytes=self.metadata.shared,
                num_warps=self.metadata.num_warps,
                order=order,
                most=emulator.most,
            )
            outcomes.append({pointer: array.copy() for pointer, array in before.items()})
        for order, outcome in zip(emulator.orders[1:], outcomes[1:], strict=True):
            if any(not np.array_equal(outcome[p], outcomes[0][p]) for p in outcome):
                name = self.metadata.name
                raise OrderMatters(f"{name} gives other bits with waves {order} than {emulator.orders[0]}")
        self._note(emulator, (x, y, z), machines)

    def _note(self, emulator: Emulator, grid: tuple[int, ...], machines: Sequence[Machine]) -> None:
        executed: Counter[str] = Counter()
        for machine in machines:
            for step, count in zip(machine.launch.steps, machine.counts, strict=True):
                executed[step.instruction.mnemonic] += count
        notes = tuple(sorted({note for machine in machines for note in machine.notes}))
        made = self.metadata
        how = made.name, grid, made.shared, made.num_warps, made.num_stages, self.source
        emulator.launches.append(Launched(*how, dict(executed), notes))


def _storages(given: Sequence[tuple[str, Any]]) -> dict[int, NDArray[Any]]:
    """The bytes of every tensor's memory, by its address."""
    found = {}
    for kind, value in given:
        if kind.startswith("*") and value is not None and value.numel():
            storage = value.untyped_storage()
            raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
            found[storage.data_ptr()] = np.ctypeslib.as_array(raw)
    return found


def _arguments(given: Sequence[tuple[str, Any]], memory: Memory) -> bytes:
    """Arguments as the kernel finds them; tensors get addresses of the emulated memory."""
    addresses = {pointer: memory.map(array) for pointer, array in _storages(given).items()}
    lying = []
    for kind, value in given:
        if not kind.startswith("*"):
            lying.append((NUMBERS[kind], value))
        elif value is None or not value.numel():
            lying.append(("pointer", 0))
        else:
            start = value.untyped_storage().data_ptr()
            lying.append(("pointer", addresses[start] + value.data_ptr() - start))
    return packed(lying)


_CHIP_OF_PROCESS: list[str] = []


@contextmanager
def emulated(
    chip: str,
    *,
    orders: Sequence[str] = ("lockstep",),
    execute: bool = True,
    units: int = UNITS,
    edit: Callable[[Program], Program] | None = None,
) -> Iterator[Emulator]:
    """Let the CPU be a chip: kernels are compiled for it and run on the emulator.

    Args:
        chip: A key of ARCHES; one for a process, because Triton keeps tables of its first target.
        orders: See `Emulator`.
        execute: See `Emulator`.
        units: Compute units that plans see.
        edit: See `Emulator`.

    Raises:
        InvalidInput: the chip is not AMD's, the process had another, or Triton interprets kernels here.
    """
    reasons = []
    if chip not in ARCHES or ARCHES[chip].vendor != "amd":
        known = ", ".join(name for name, arch in ARCHES.items() if arch.vendor == "amd")
        reasons.append(f"chip got {chip!r}; needs one of {known}")
    if _CHIP_OF_PROCESS not in ([], [chip]):
        reasons.append(f"chip got {chip}; needs {_CHIP_OF_PROCESS[0]}, as before in this process")
    if os.environ.get("TRITON_INTERPRET") == "1":
        reasons.append("TRITON_INTERPRET got 1; needs to be unset, kernels are compiled")
    if reasons:
        raise InvalidInput("emulated", reasons)
    import triton
    from triton.compiler import CompiledKernel

    _CHIP_OF_PROCESS[:] = [chip]
    emulator = Emulator(chip, orders, execute, edit)
    load = CompiledKernel._init_handles

    def loading(kernel: Any) -> None:
        emulator.assembly = kernel.asm["amdgcn"]
        load(kernel)

    with ExitStack() as stack:
        stack.enter_context(patch.object(CompiledKernel, "_init_handles", loading))
        stack.enter_context(patch.object(probe, "_cpu_device", lambda: (chip, ARCHES[chip].part, units)))
        stack.callback(probe._machine_at.cache_clear)
        probe._machine_at.cache_clear()
        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(emulator)
        stack.callback(setattr, triton.runtime.driver, "_active", before)
        yield emulator


__all__ = ["CHIPS", "Emulator", "Fault", "Launched", "OrderMatters", "emulated"]
