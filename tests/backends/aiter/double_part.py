"""A part of AITER's double: functions of one release on one chip, under their real names and parameters."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from double import _signature

from anymla.backends.aiter_mla import bindings, facts


class Part:
    """What a part knows of its release.

    Attributes:
        units: Compute units.
        launched: Kernels, in order.
    """

    def __init__(self, release: str, arch: str, units: int) -> None:
        self.release, self.arch, self.units = release, arch, units
        self.launched: list[str] = []

    def since(self, release: str) -> bool:
        """Whether this is that release or one that is listed later."""
        order = facts.releases()
        return order.index(self.release) >= order.index(facts.canonical_release(release))

    def offer(
        self, monkeypatch: pytest.MonkeyPatch, functions: dict[str, Callable[..., Any]], *, compiled: bool
    ) -> None:
        """Stand in for functions of the package `aiter` until the test ends; those it lacks stay away.

        A compiled function hides its parameters behind a wrapper, as AITER's do.
        """
        for name, function in functions.items():
            text = facts.recorded_parameters(name, self.release)
            if text is None:
                continue
            path = bindings.FUNCTIONS[name].modules[0].split(".")
            for depth in range(1, len(path) + 1):
                module = ".".join(path[:depth])
                if not isinstance(sys.modules.get(module), types.ModuleType):
                    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
            taken = _signed(_signature(text), function)
            if not compiled:
                taken.__signature__ = _signature(text)  # type: ignore[attr-defined]
            monkeypatch.setattr(sys.modules[".".join(path)], name, taken, raising=False)


def _signed(signature: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper_custom(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**bound.arguments)

    return wrapper_custom
