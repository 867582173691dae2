"""Estimates for a chip that is not here: its roofline, kernels as compiled, what peers have published.

Every number is an estimate or was published by somebody, and says which. None is a measurement.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anymla.benchmarking.estimate_kernels import read
from anymla.benchmarking.estimate_peers import PEERS, Published
from anymla.benchmarking.workloads import Workload
from anymla.errors import InvalidInput
from anymla.hardware.arches import ARCHES, Peaks
from anymla.problem import Problem


@dataclass(frozen=True)
class Roofline:
    """The least time that a chip could take, by its published peaks.

    Attributes:
        memory_us: To move the bytes that have to move, once.
        matrix_us: To multiply.
        intensity: Multiplications and additions a byte.
        ridge: The intensity from which products take longer than memory.
    """

    memory_us: float
    matrix_us: float
    intensity: float
    ridge: float

    @classmethod
    def of(cls, work: Workload, peaks: Peaks, *, fp8_products: bool = False) -> "Roofline":
        """Of a workload whose products are of 16 bits, or of fp8 where the chip multiplies that."""
        rate = peaks.fp8_rate if fp8_products and peaks.fp8_rate else peaks.rate
        memory, matrix = work.num_bytes / peaks.bandwidth, work.flops / rate
        return cls(memory * 1e6, matrix * 1e6, work.flops / work.num_bytes, rate / peaks.bandwidth)

    @property
    def floor_us(self) -> float:
        """The longer of the two."""
        return max(self.memory_us, self.matrix_us)

    @property
    def limit(self) -> str:
        """Which of the two."""
        return "memory" if self.memory_us >= self.matrix_us else "matrix"


@dataclass(frozen=True)
class Estimate:
    """One workload on one chip.

    Attributes:
        chip: A key of ARCHES.
        work: The workload.
        roofline: Of it.
        kernels: Of each kernel as compiled: launch row, registers, waves, bytes, instructions by kind.
        executed: What a small call of the same problem executed on the emulator; None where there is none.
        published: What peers have published, and the floor for their conditions where these are complete.
    """

    chip: str
    work: Workload
    roofline: Roofline
    kernels: Sequence[dict[str, Any]]
    executed: dict[str, Any] | None
    published: Sequence[tuple[Published, float | None]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; "estimate" and "published" are apart."""
        work, p, line = self.work, self.work.problem, self.roofline
        return {
            "machine": self.chip,
            "is": "an estimate, not a measurement",
            "workload": work.id,
            "num_heads": p.num_heads,
            "batch": work.batch,
            "context": work.context,
            "estimate": {
                "limit": line.limit,
                **{name: round(value, 3) for name, value in asdict(line).items()},
                "num_bytes": work.num_bytes,
                "flops": work.flops,
                "kernels": self.kernels,
                "executed": self.executed,
            },
            "peaks": asdict(peaks_of(self.chip)),
            "published": [
                {
                    **{name: value for name, value in asdict(row).items() if name not in ("shape", "part")},
                    "estimated_floor_us": None if floor is None else round(floor, 2),
                }
                for row, floor in self.published
            ],
        }


def estimates(chip: str, works: Sequence[Workload]) -> list[Estimate]:
    """Estimate each workload.

    Args:
        chip: A key of ARCHES.
        works: Of one problem; batch and context differ.

    Returns:
        One for each.

    Raises:
        InvalidInput: the chip has no published peaks.
    """
    peaks = peaks_of(chip)
    found = read(chip, works)
    published = [(row, _floor(row, peaks)) for row in PEERS if row.part == ARCHES[chip].part]
    return [
        Estimate(
            chip,
            work,
            # A prefill in fp8 is multiplied in 16 bits by our own kernels, of which this speaks.
            Roofline.of(
                work,
                peaks,
                fp8_products=work.problem.q_dtype.startswith("fp8") and work.problem.op != "prefill",
            ),
            made["kernels"],
            made["executed"],
            [(row, floor) for row, floor in published if row.op == work.problem.op],
        )
        for work, made in zip(works, found, strict=True)
    ]


def peaks_of(chip: str) -> Peaks:
    """The published peaks of a chip.

    Raises:
        InvalidInput: there is no such chip, or its vendor has published none.
    """
    known = [name for name, arch in ARCHES.items() if arch.peaks]
    peaks = ARCHES[chip].peaks if chip in ARCHES else None
    if peaks is None:
        need = f"a chip whose peaks its vendor has published: {', '.join(known)}"
        raise InvalidInput("bench", [f"machine got {chip!r}; needs {need}"])
    return peaks


def _floor(row: Published, peaks: Peaks) -> float | None:
    """Microseconds of the roofline for the conditions of a published figure."""
    if row.shape is None:
        return None
    s = row.shape
    problem = Problem(row.op, "bf16", s.kv_format, s.heads, 512, 64, block_size=64)
    work = Workload("", 1, problem, 1.0, s.batch, s.context)
    return Roofline.of(work, peaks, fp8_products=s.fp8_products).floor_us
