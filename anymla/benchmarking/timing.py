"""Timing: calls on a device or a CPU, in turns, and what the machine does at best in the same minutes."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

FLUSH_BYTES = 512 << 20
"""Written and read between calls on a GPU, so that no operand is in a cache: larger than any L2 or MALL."""

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class Timing:
    """Times of one call.

    Attributes:
        seconds: One for each repeat, in the order measured.
    """

    seconds: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """The median in microseconds."""
        return statistics.median(self.seconds) * 1e6

    @property
    def least_us(self) -> float:
        """The fastest in microseconds."""
        return min(self.seconds) * 1e6

    @property
    def quartiles_us(self) -> tuple[float, float]:
        """The first and the third quartile in microseconds; of one repeat, that one twice."""
        if len(self.seconds) == 1:
            return self.median_us, self.median_us
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first * 1e6, third * 1e6

    def to_dict(self) -> dict[str, float]:
        """The figures of a record."""
        first, third = self.quartiles_us
        named = {"median_us": self.median_us, "q1_us": first, "q3_us": third, "least_us": self.least_us}
        return {**{name: round(value, 2) for name, value in named.items()}, "repeats": len(self.seconds)}


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int = 20,
    warmups: int = 2,
    after: Callable[[str], object] | None = None,
) -> dict[str, Timing]:
    """Time several calls in the same minutes: one repeat of each, then the next of each.

    Args:
        calls: By name.
        device: Where they run; on a GPU their caches are flushed before each and events measure.
        repeats: Of each call.
        warmups: Of each call, not measured.
        after: Told the name after each call, outside the time, to undo what it did.

    Returns:
        A timing for each name.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    measure = _seconds_on_cpu if device.type == "cpu" else _Flushed(device).seconds
    for turn in range(-warmups, repeats):
        for name, call in calls.items():
            seconds = measure(call)
            if after is not None:
                after(name)
            if turn >= 0:
                found[name].append(seconds)
    return {name: Timing(tuple(seconds)) for name, seconds in found.items()}


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """On a GPU the call as a captured graph, without the host's part of it; on a CPU the call itself.

    Args:
        call: Has run before, so that everything is compiled; allocates nothing that outlives it.
        device: Where it runs.

    Returns:
        What runs it again.
    """
    if device.type == "cpu":
        return call
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return _Replay(graph, call)


def host_seconds(call: Callable[[], object], device: torch.device, repeats: int = 50) -> Timing:
    """Time until a call returns, its work on a device not waited for; the queue is empty before each."""
    found = []
    for turn in range(-3, repeats):
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        seconds = _seconds_on_cpu(call)
        if turn >= 0:
            found.append(seconds)
    return Timing(tuple(found))


def copy_bandwidth(device: torch.device, repeats: int = 7) -> float:
    """Bytes a second, read and written, of a copy too large for any cache: the best of some."""
    size = COPY_BYTES[device.type] // 4
    source = torch.ones(size, device=device)
    target = torch.empty_like(source)
    timing = time_in_turns({"copy": lambda: target.copy_(source)}, device, repeats=repeats)["copy"]
    return 2 * size * 4 / min(timing.seconds)


def product_rate(device: torch.device, dtype: torch.dtype = torch.float32, repeats: int = 7) -> float:
    """Multiplications and additions a second of a large matrix product: the best of some."""
    size = PRODUCT_SIZE[device.type]
    # Random: a GPU multiplies ones faster, for it draws less power.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a, dtype=dtype if dtype.itemsize > 1 else torch.bfloat16)
    one = torch.ones((), device=device)

    def product() -> object:
        if dtype.itemsize > 1:
            return torch.mm(a, b, out=out)
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=out.dtype, use_fast_accum=True)

    timing = time_in_turns({"mm": product}, device, repeats=repeats)["mm"]
    return 2 * size**3 / min(timing.seconds)


def _seconds_on_cpu(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@dataclass(frozen=True)
class _Replay:
    """A captured graph beside its call, which holds the memory that the graph reads and writes."""

    graph: torch.cuda.CUDAGraph
    call: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


class _Flushed:
    """Measures on a GPU, with memory written and read before each call: no operand is in a cache."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(FLUSH_BYTES // 8, dtype=torch.int64, device=device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call, between two events; while the memory is written, the host gets ahead."""
        start, end = self._events
        self._memory.zero_()
        # What was written last would go from the cache to memory during the call, at the call's expense.
        self._memory.max()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
