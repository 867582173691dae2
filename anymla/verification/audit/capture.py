"""What a launch would have compiled on a chip: kernel, signature, constants and options, as Triton saw them.

The ordinary launchers run on CPU tensors, so no argument list is written twice.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from anymla.backends import BACKENDS
from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import LAUNCH, Launch, launch_rows
from anymla.hardware.probe import Machine, machine_named

BACKEND = next(row.module for row in BACKENDS if row.name == "triton")
KERNELS: Mapping[str, str] = {
    "attend_kernel": "attend",
    "attend_wgmma_kernel": "attend",
    "attend_swapped_kernel": "attend",
    "attend_bytes_kernel": "attend",
    "combine_kernel": "combine",
    "schedule_kernel": "schedule",
    "mha_kernel": "prefill",
    "expand_kernel": "expand",
    "gather_kernel": "gather",
    "store_kernel": "cache_write",
    "index_logits_kernel": "index_logits",
    "narrow_kernel": "narrow",
    "choose_kernel": "choose",
}
"""The name in LAUNCH of each device function; one that is not here goes by its own."""


@dataclass(frozen=True, eq=False)
class Specialisation:
    """One kernel as one launch wants it compiled.

    Attributes:
        kernel: Its name in LAUNCH.
        function: The Triton function.
        signature: Type of each argument.
        constants: Value of each argument that is a constant, by its place.
        attributes: What Triton assumes of the others, such as alignment, by their place.
        options: Warps, stages and what else the compiler takes.
    """

    kernel: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same code, on any machine."""
        options = {
            name: value for name, value in self.options.items() if name not in ("extern_libs", "debug")
        }
        parts = (self.signature, self.constants, self.attributes, options)
        return repr((self.kernel, *(sorted(part.items(), key=repr) for part in parts)))

    @property
    def constants_by_name(self) -> dict[str, Any]:
        """Values of the arguments that are constants."""
        names = list(self.signature)
        return {names[place[0]]: value for place, value in self.constants.items() if len(place) == 1}

    def row(self, arch: str) -> Launch | None:
        """The launch row that it was made with; None for a kernel without rows."""
        if not any(kernel == self.kernel for kernel, _ in LAUNCH):
            return None
        alike = [row for row in launch_rows(self.kernel, arch) if self._is_made_with(row)]
        if not alike:
            raise LookupError(f"no launch row of {self.kernel} on {arch} has {self.constants_by_name}")
        facts, columns = self.constants_by_name, 0
        if self.kernel == "index_logits":
            columns = facts["PRODUCTS"] * facts["TOKENS"] * facts["HEADS_PADDED"]
        return min(alike, key=lambda row: (row.widest, columns > row.block_m))

    def _is_made_with(self, row: Launch) -> bool:
        constants, warps = self.constants_by_name, self.options["num_warps"]
        name = self.function.fn.__name__.removesuffix("_kernel")
        by_hand = name if any(row.kernel == name for rows in LAUNCH.values() for row in rows) else ""
        stages = constants.get("NUM_STAGES", self.options["num_stages"])
        facts = {"BLOCK_M": row.block_m, "BLOCK_N": row.block_n, "SWAP": row.swap, "REREAD": row.reread}
        if self.kernel == "combine":
            facts = {"BLOCK_P": row.block_n * row.chunk // constants["WIDTH"]}
        if self.kernel == "choose":
            facts = {"PIECE": row.block_n}
        widest = 0
        if self.kernel == "prefill":
            key = constants["P_WIDTH"] * constants["P_CHUNKS"] + (constants["R"] and constants["R_PADDED"])
            widest = max(key, constants["V_WIDTH"] * constants["V_CHUNKS"])
        return (
            by_hand == row.kernel
            and (by_hand or (stages == row.num_stages and warps == row.num_warps))
            and widest <= (row.widest or widest)
            and all(constants.get(name, value) == value for name, value in facts.items())
        )


class _Chip:
    """As much of a Triton driver as specialisation asks; its device is the name of the chip."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        return target_of(self.arch)

    def get_current_device(self) -> str:
        return self.arch

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def target_of(arch: str) -> Any:
    """Triton's name of a chip."""
    from triton.backends.compiler import GPUTarget

    if ARCHES[arch].vendor == "amd":
        return GPUTarget("hip", arch, ARCHES[arch].wave_size)
    return GPUTarget("cuda", int(arch.removeprefix("sm")), ARCHES[arch].wave_size)


@contextmanager
def capturing(arch: str) -> Iterator[tuple[Machine, list[Specialisation]]]:
    """Inside, Triton launches compile and launch nothing; they are noted in the list as for this chip.

    Args:
        arch: A key of ARCHES with a GPU.

    Yields:
        The machine to plan for, and the list.
    """
    import triton
    from triton.runtime.jit import JITFunction

    found: list[Specialisation] = []
    machine = machine_named(arch)

    def note(
        function: Any,
        key: object,
        signature: Mapping[str, str],
        device: object,
        constants: Mapping[tuple[int, ...], Any],
        options: Any,
        attributes: Mapping[tuple[int, ...], Any],
        warmup: bool,
    ) -> None:
        name = function.fn.__name__
        kept = Specialisation(
            KERNELS.get(name, name), function, signature, constants, attributes, vars(options)
        )
        found.append(kept)

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Chip(arch)),
        mock.patch.object(JITFunction, "_do_compile", note),
        mock.patch(f"{BACKEND}.cache_write.this_machine", lambda device: machine),
    ):
        yield machine, found
