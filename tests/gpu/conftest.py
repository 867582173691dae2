"""Tests that need a GPU; elsewhere each is skipped, with its reason."""

from collections.abc import Iterator

import device_calls
import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """Skip where there is no GPU; draw the same every time; let a fault end the test that it is of."""
    torch.manual_seed(0)
    if device_calls.DEVICE.type == "cpu":
        pytest.skip("needs a GPU: torch.cuda.is_available() is False")
    yield
    torch.cuda.synchronize()


@pytest.fixture(params=device_calls.BACKENDS_HERE)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that is built for this GPU."""
    return request.param
