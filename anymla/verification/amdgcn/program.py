"""A kernel that can be run: decoded steps, and how a launch begins."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anymla.hardware.arches import ARCHES
from anymla.verification.amdgcn.instructions import decode
from anymla.verification.amdgcn.machine import MOST_STEPS, SCALARS, Launch, Machine, Step
from anymla.verification.amdgcn.memory import Memory
from anymla.verification.amdgcn.parse import TTMP, Text, Unknown, parse

WAVES_A_BATCH = 256
"""Waves whose registers are held at once, at most, unless one workgroup has more."""

LIMITS = {
    64: {"vmcnt": 63, "lgkmcnt": 15},
    32: {"vmcnt": 63, "vscnt": 63, "lgkmcnt": 63, "kmcnt": 31},
}
"""What the counters of accesses under way count to, by lanes of a wave."""

FORMATS = {"pointer": "Q", "i64": "q", "i32": "i", "f32": "f", "f64": "d"}
"""How arguments lie in memory."""


@dataclass(frozen=True)
class Program:
    """A kernel of one chip.

    Attributes:
        chip: A key of ARCHES.
        text: As parsed.
        launch: What the machine takes.
    """

    chip: str
    text: Text
    launch: Launch

    @classmethod
    def of(cls, assembly: str, chip: str) -> "Program":
        """Parse and decode assembly text.

        Args:
            assembly: See `parse`.
            chip: A key of ARCHES.

        Raises:
            Unknown: something in it is not known.
        """
        text = parse(assembly)
        vectors = _most(text, "v")
        steps = decode(text, chip, SCALARS + vectors)
        scratch = text.descriptor.get("private_segment_fixed_size", 0)
        if scratch and text.descriptor.get("user_sgpr_private_segment_buffer"):
            raise Unknown(f"program {text.name} got scratch in a buffer; needs flat scratch")
        leaders = frozenset(step.target for step in steps if step.flow == "branch")
        lanes = ARCHES[chip].wave_size
        vectors += _most(text, "a")
        launch = Launch(text.name, steps, leaders, vectors, lanes, scratch, LIMITS[lanes])
        return cls(chip, text, launch)

    def without(self, *indices: int) -> "Program":
        """The program with nothing in the places of some instructions."""
        steps = list(self.launch.steps)
        for index in indices:
            steps[index] = Step(_nothing, steps[index].instruction, spread="")
        return replace(self, launch=replace(self.launch, steps=tuple(steps)))

    def run(
        self,
        grid: Sequence[int],
        arguments: bytes,
        memory: Memory,
        *,
        shared_bytes: int,
        num_warps: int,
        order: str = "lockstep",
        most: int = MOST_STEPS,
    ) -> list[Machine]:
        """Run a grid of workgroups, batch by batch.

        Args:
            grid: Workgroups along x, y, z.
            arguments: The kernel's, as they lie in memory.
            memory: What they point to.
            shared_bytes: LDS of a workgroup.
            num_warps: Waves of a workgroup.
            order: One of ORDERS.
            most: Steps of a batch after which the kernel is said not to end.

        Returns:
            The machine of each batch after its end.

        Raises:
            Fault: the kernel did what it must not do.
        """
        size = max(self.text.descriptor.get("kernarg_size", 0), len(arguments))
        segment = np.zeros(-(-size // 16) * 16 + 16, np.uint8)
        segment[: len(arguments)] = np.frombuffer(arguments, np.uint8)
        self._hide(segment, grid, num_warps)
        address = memory.map(segment, writable=False)
        everyone = np.stack(np.meshgrid(*map(np.arange, reversed(grid)), indexing="ij"), -1).reshape(-1, 3)[
            :, ::-1
        ]
        share = max(1, WAVES_A_BATCH // num_warps)
        machines = []
        for first in range(0, len(everyone), share):
            machine = Machine(
                self.launch, memory, everyone[first : first + share], num_warps, shared_bytes, order
            )
            self._begin(machine, address)
            machine.run(most)
            machines.append(machine)
        return machines

    def _hide(self, segment: NDArray[Any], grid: Sequence[int], num_warps: int) -> None:
        """Fill in what the runtime adds to the arguments; what is not known here stays 0."""
        threads = (num_warps * self.launch.lanes, 1, 1)
        values = {"grid_dims": 3}
        for axis, name in enumerate("xyz"):
            values |= {f"block_count_{name}": grid[axis], f"group_size_{name}": threads[axis]}
        for name, (offset, size) in self.text.hidden.items():
            value = values.get(name, 0).to_bytes(size, "little")
            segment[offset : offset + size] = np.frombuffer(value, np.uint8)

    def _begin(self, machine: Machine, kernel_arguments: int) -> None:
        """What the hardware puts into registers: where the arguments are, which workgroup, which thread."""
        fields = self.text.descriptor
        pointer = 4 * fields.get("user_sgpr_private_segment_buffer", 0) + 2 * (
            fields.get("user_sgpr_dispatch_ptr", 0) + fields.get("user_sgpr_queue_ptr", 0)
        )
        machine.set_scalar(pointer, kernel_arguments & 0xFFFFFFFF)
        machine.set_scalar(pointer + 1, kernel_arguments >> 32)
        workgroups = machine.workgroups[machine.workgroup_of].astype(np.uint32)
        if self.chip.startswith("gfx12"):
            machine.set_scalar(TTMP + 9, workgroups[:, 0])
            machine.set_scalar(TTMP + 7, workgroups[:, 1] | workgroups[:, 2] << np.uint32(16))
        after = fields.get("user_sgpr_count", pointer + 2)
        for axis, name in enumerate("xyz"):
            if fields.get(f"system_sgpr_workgroup_id_{name}", int(axis == 0)):
                machine.set_scalar(after, workgroups[:, axis])
                after += 1
        threads = machine.wave_of[:, None] * machine.lanes + np.arange(machine.lanes)
        machine.set_vector(0, threads.astype(np.uint32))


def _nothing(machine: Machine) -> None:
    """An instruction that was taken out."""


def _most(text: Text, kind: str) -> int:
    """Registers of a kind, at least one."""
    written = [half for i in text.instructions for half in (i, i.second) if half is not None]
    used = [o.index + o.count for i in written for o in i.operands if o.kind == kind]
    return max(used, default=1)


@lru_cache(maxsize=32)
def program(assembly: str, chip: str) -> Program:
    """A program, decoded once."""
    return Program.of(assembly, chip)


def packed(arguments: Sequence[tuple[str, Any]]) -> bytes:
    """Arguments as they lie in memory, each aligned to its size.

    Args:
        arguments: Pairs of a key of FORMATS and a value.
    """
    blob = bytearray()
    for kind, value in arguments:
        form = FORMATS[kind]
        blob += bytes(-len(blob) % struct.calcsize(form))
        blob += struct.pack("<" + form, value)
    return bytes(blob)
