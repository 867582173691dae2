"""Calls: the functions of the AITER that is installed, imported when first planned with."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from anymla.backends.aiter_mla import bindings
from anymla.backends.aiter_mla.bindings import FUNCTIONS, Binding
from anymla.backends.aiter_mla.provider import Aiter
from anymla.errors import BackendError


@dataclass(frozen=True)
class Call:
    """A function of AITER that takes our names.

    Attributes:
        function: AITER's own.
        binding: What our names are called there.
    """

    function: Callable[..., Any]
    binding: Binding

    def __call__(self, **ours: Any) -> Any:
        """Call it by the names of its parameters; what it does not take must be neutral."""
        return self.function(**self.binding.arguments(**ours))


def call_of(aiter: Aiter, name: str) -> Call:
    """Import a function and bind it by what it says of itself, or else by its source.

    Raises:
        BackendError: AITER cannot be imported, or the function is not what its source said.
    """
    function = _imported(aiter, name)
    told = bindings.introspected(function, name)
    if told is None:
        return Call(function, aiter.binding(name))
    found = bindings.bind(name, told, str(aiter))
    if not isinstance(found, Binding):
        raise BackendError("; ".join(found))
    return Call(function, found)


@lru_cache(maxsize=64)
def import_failure(aiter: Aiter, names: tuple[str, ...]) -> str:
    """Why functions of the AITER that is installed cannot be called, by importing them; "" if they can."""
    try:
        for name in names:
            call_of(aiter, name)
    except BackendError as failure:
        return str(failure)
    return ""


def import_apart(timeout_s: float = 300) -> str:
    """Why AITER cannot be imported, tried in another process, which it may take down; "" where it can."""
    import subprocess

    command = [sys.executable, "-c", "import aiter.mla"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"import aiter.mla took more than {timeout_s:.0f} s"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines() or [f"python exited with {done.returncode}"]
    return f"import aiter.mla: {said[-1]}"


def _imported(aiter: Aiter, name: str) -> Callable[..., Any]:
    reasons = []
    for module in FUNCTIONS[name].modules:
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except Exception as error:  # AITER builds and runs code when it is imported; any of that may fail.
            reasons.append(f"{module}.{name}: {type(error).__name__}: {error}")
        else:
            return function
    raise BackendError(f"{aiter} cannot be imported: {'; '.join(reasons)}")
