"""The transformers releases that this integration was tested with."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from anymla.errors import InvalidInput

OLDEST, NEWEST = (5, 16, 1), (5, 24)
"""The first and the last release tested; later patches of the last one are taken as well."""


@cache
def check_version() -> None:
    """Refuse a transformers that the integration was not tested with; looked up once a process.

    Raises:
        InvalidInput: transformers is missing, older than OLDEST or newer than NEWEST.
    """
    ours = version_or_none("anymla") or "from source"
    needs = f"{shown(OLDEST)} to {shown(NEWEST)}, which anymla {ours} was tested with"
    found = version_or_none("transformers")
    if found is None:
        raise InvalidInput("transformers", [f"version got none installed; needs {needs}"])
    parts = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if parts < OLDEST or parts[: len(NEWEST)] > NEWEST:
        raise InvalidInput("transformers", [f"version got {found}; needs {needs}"])


def version_or_none(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def shown(release: tuple[int, ...]) -> str:
    """`5.16.1`."""
    return ".".join(map(str, release))
