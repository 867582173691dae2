"""Calls: the functions of the AITER that is installed, imported when first planned with."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from anymla.backends.aiter_mla import bindings
from anymla.backends.aiter_mla.bindings import FUNCTIONS, Binding
from anymla.backends.aiter_mla.provider import Aiter, aiter_of
from anymla.errors import BackendError
from anymla.hardware.probe import Machine


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
    try:
        told = bindings.introspected(function, name)
    except (AttributeError, TypeError, ValueError) as error:
        raise BackendError(f"{name} of {aiter} does not tell its parameters: {error}") from None
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


def import_apart(aiter: Aiter, timeout_s: float = 300) -> dict[str, str]:
    """Why functions of the AITER that is installed cannot be called, by name, those that can left out.

    Each is imported in another process, which it may take down; the functions that this one had not come to
    are then refused.
    """
    import subprocess

    command = [sys.executable, "-c", _QUESTION, aiter.release, aiter.arch]
    # It is to find what this process would, whatever was put on its path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=environment,
        )
        said, lines = done.stderr.strip().splitlines(), done.stdout.split("\n")
        died = said[-1] if said else f"python exited with {done.returncode}"
    except subprocess.TimeoutExpired:
        died, lines = f"it took more than {timeout_s:.0f} s", []
    # AITER may print before and behind us on a line, too.
    told = dict(json.loads(line.split(_MARK)[1]) for line in lines if line.count(_MARK) > 1)
    unasked = f"{aiter} cannot be imported: {died}"
    answers = {name: told.get(name, unasked) for name in FUNCTIONS}
    return {name: failure for name, failure in answers.items() if failure}


def tell_failures(release: str, arch: str) -> None:
    """Print the failure of each function, or "", as `import_apart` reads it."""
    aiter = aiter_of(Machine(arch, (("aiter", release),)))
    for name in FUNCTIONS:
        print(_MARK + json.dumps([name, import_failure(aiter, (name,))]) + _MARK, flush=True)


_MARK = "\x1e"
_QUESTION = "import sys; from anymla.backends.aiter_mla import calls; calls.tell_failures(*sys.argv[1:])"


def _imported(aiter: Aiter, name: str) -> Callable[..., Any]:
    reasons = []
    for module in FUNCTIONS[name].modules:
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (Exception, SystemExit) as error:  # AITER builds and runs code when it is imported.
            # The package itself dies before any part of it, so that is named once, whichever part was asked.
            died = module if sys.modules.get("aiter") else "aiter"
            reasons.append(f"{died}: {type(error).__name__}: {error}")
        else:
            return function
    raise BackendError(f"{aiter} cannot be imported: {'; '.join(dict.fromkeys(reasons))}")
