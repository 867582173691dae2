"""LDS bank conflicts, counted: each access of an emulated kernel, phase by phase, bank by bank.

Nothing here was timed. The rules are those of "Understanding AMD GPU LDS and Bank Conflicts" in the
documentation of Composable Kernel (rocm.docs.amd.com): a bank is four bytes wide, there are 32 or 64 by chip,
an access of a wave is served in phases, eight lanes each for 16 bytes and 32 banks, and lanes of a phase that
want different words of one bank take turns. What it does not say is assumed: a phase has as many lanes as
fill the banks, so that one of 64 banks is two of 32; lanes that want the same word share it; a pair of
elements counts as two accesses.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anymla.verification.amdgcn.machine import SCALARS, Machine, Step
from anymla.verification.amdgcn.program import Program

Array = NDArray[Any]

BANKS = (32, 64)
"""Both are counted: documentation says that it depends on the chip, not how."""

BANK_BYTES = 4

WIDE_READS = np.array(
    [half + start + i for half in (0, 32) for start in (0, 20, 4, 16, 8, 28, 12, 24) for i in range(4)]
)
"""The 64 lanes of a read of 16 bytes in the order in which phases of eight serve them."""

_ACCESS = re.compile(r"ds_(read|load|write|store)(2|_2addr)?.*?_[bui](\d+)")


@dataclass
class Accesses:
    """Accesses of one instruction by name.

    Attributes:
        executed: How often a wave executed it.
        least: Phases that served a lane: one pass each without conflicts.
        passes: Passes by number of banks.
    """

    executed: int = 0
    least: dict[int, int] = field(default_factory=lambda: dict.fromkeys(BANKS, 0))
    passes: dict[int, int] = field(default_factory=lambda: dict.fromkeys(BANKS, 0))


def passes(addresses: Array, mask: Array, num_bytes: int, banks: int, *, reads: bool) -> tuple[int, int]:
    """Phases that serve anything, and passes that they take.

    Args:
        addresses: [waves, lanes], in bytes.
        mask: [waves, lanes] bool: lanes that take part.
        num_bytes: Of a lane.
        banks: One of BANKS.
        reads: Whether it is a read.
    """
    waves, lanes = addresses.shape
    if reads and num_bytes == 16 and lanes == len(WIDE_READS):
        addresses, mask = addresses[:, WIDE_READS], mask[:, WIDE_READS]
    words = -(-num_bytes // BANK_BYTES)
    # Three words take the place of four.
    a_phase = min(lanes, banks // (1 << (words - 1).bit_length()))
    wanted = addresses[..., None] // BANK_BYTES + np.arange(words)
    wanted = np.where(mask[..., None], wanted, -1).reshape(waves * lanes // a_phase, a_phase * words)
    wanted.sort(axis=1)
    counts = wanted >= 0
    counts[:, 1:] &= wanted[:, 1:] != wanted[:, :-1]
    rows, _ = np.nonzero(counts)
    places = rows * banks + wanted[counts] % banks
    deepest = np.bincount(places, minlength=len(wanted) * banks).reshape(-1, banks).max(axis=1)
    return int((deepest > 0).sum()), int(deepest.sum())


class Counter:
    """Counts the LDS accesses of every kernel that the emulator runs; its `edit` is the emulator's."""

    def __init__(self) -> None:
        self.by_kernel: dict[str, dict[str, Accesses]] = defaultdict(lambda: defaultdict(Accesses))

    def edit(self, program: Program) -> Program:
        """The program, with its accesses counted as they are executed."""
        found = self.by_kernel[program.text.name]
        steps: Sequence[Step] = [self._counted(step, found) for step in program.launch.steps]
        return replace(program, launch=replace(program.launch, steps=steps))

    @staticmethod
    def _counted(step: Step, found: dict[str, Accesses]) -> Step:
        mnemonic = step.instruction.mnemonic
        access = _ACCESS.match(mnemonic)
        if access is None:
            return step
        reads, elements, num_bytes = access[1] in ("read", "load"), 2 if access[2] else 1, int(access[3]) // 8
        register = step.trusts[0] - SCALARS

        def run(machine: Machine) -> None:
            # First, because a load may write the register that its address is in.
            addresses = np.broadcast_to(machine.v[register], machine.mask.shape).astype(np.int64)
            kept = found[mnemonic]
            kept.executed += len(machine.waves)
            for banks in BANKS:
                least, taken = passes(addresses, machine.mask, num_bytes, banks, reads=reads)
                kept.least[banks] += elements * least
                kept.passes[banks] += elements * taken
            step.run(machine)

        return replace(step, run=run)
