"""Fresh memory is poisoned, so a row that a kernel does not write is seen; and a machine quick to measure."""

import os
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each take every core wait for one another: many times slower than one thread each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

_FRESH = {"empty": torch.empty, "empty_like": torch.empty_like, "empty_strided": torch.empty_strided}


def _poisoned(allocate):
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() and not torch.compiler.is_compiling() and type(tensor) is torch.Tensor:
            tensor.view(torch.uint8).fill_(0xFF) if tensor.dtype.itemsize == 1 else tensor.fill_(float("nan"))
        return tensor

    return allocate_poisoned


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what torch.empty and its kin return with NaN."""
    for name, allocate in _FRESH.items():
        monkeypatch.setattr(torch, name, _poisoned(allocate))
    yield


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ceilings of copies and products that take no time."""
    from anymla.benchmarking import run, timing

    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(timing, "PRODUCT_SIZE", {"cpu": 32})
    run.ceilings.cache_clear()
    run._copy_bandwidth.cache_clear()
    yield
    run.ceilings.cache_clear()
    run._copy_bandwidth.cache_clear()
