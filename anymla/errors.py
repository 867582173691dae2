"""Every error that anymla raises on purpose.

AnyMLAError
├── InvalidInput(ValueError)        the call is wrong on every backend
└── BackendError
    ├── UnknownBackend(ValueError)  no row of that name
    └── NoBackend(RuntimeError)     rows exist, none takes the call; carries .verdicts

One grammar for every message: `<name> got <value>; needs <requirement>`, all reasons at once.
"""

from collections.abc import Iterable, Sequence


class AnyMLAError(Exception):
    """The root of every deliberate error of this package."""


class InvalidInput(AnyMLAError, ValueError):
    """A call that no backend could serve, because its arguments contradict themselves.

    Attributes:
        reasons: Every reason, in the order of the arguments.
    """

    def __init__(self, what: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{what}: " + "; ".join(self.reasons))


class BackendError(AnyMLAError):
    """A backend could not be chosen."""


class UnknownBackend(BackendError, ValueError):
    """A backend name that no row has."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"backend got {name!r}; needs one of auto, {', '.join(known)}")


class NoBackend(BackendError, RuntimeError):
    """No backend, or not the requested one, takes the call.

    Attributes:
        verdicts: One verdict a backend that was asked, each with all of its reasons.
    """

    def __init__(self, message: str, verdicts: Sequence[object]) -> None:
        self.verdicts = tuple(verdicts)
        super().__init__(message)


class Reasons:
    """A list of refusals that is raised once, complete."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.found: list[str] = []

    def need(self, holds: bool, name: str, got: object, needs: str) -> bool:
        """Note `<name> got <got>; needs <needs>` unless `holds`; return `holds`."""
        if not holds:
            self.found.append(f"{name} got {got}; needs {needs}")
        return holds

    def raise_if_any(self) -> None:
        """Raise InvalidInput with every reason noted so far."""
        if self.found:
            # Once each, though a flag may have been looked at twice.
            raise InvalidInput(self.what, list(dict.fromkeys(self.found)))
