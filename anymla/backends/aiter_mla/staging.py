"""Staging: plans made on the host, in two sets of pinned memory by turns, then copied to the device."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod

import torch
from torch import Tensor


class Staging:
    """Host memory of a device's plans.

    A planner that writes on the host may run ahead of the device, which reads its last plan yet. So there are
    two sets, and one is written again only when the copy that read it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._turn = device, 0
        self._sets: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def host(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The other set, int32 of these shapes, free to be written: waits for the copy before the last."""
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        memory = self._sets[self._turn]
        for name, shape in shapes.items():
            if name not in memory or memory[name].numel() < prod(shape):
                pinned = self._device.type == "cuda"
                memory[name] = torch.empty(prod(shape), dtype=torch.int32, pin_memory=pinned)
        return {name: memory[name][: prod(shape)].view(shape) for name, shape in shapes.items()}

    def to_device(self, plan: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of parts of that set on the device, in the order of its current stream; nothing waits."""
        copies = {name: torch.empty_like(part, device=self._device) for name, part in plan.items()}
        for name, part in plan.items():
            copies[name].copy_(part, non_blocking=True)
        if self._device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied[self._turn] = copied
        return copies


@lru_cache(maxsize=16)
def staging_of(device: torch.device) -> Staging:
    """The staging of a device, the same every time."""
    return Staging(device)
