"""Aiter: one AITER, installed or recorded: its release, its functions, its kernel tables, what it looks up.

Nothing of it is imported: stubs are parsed, tables read, and dispatch code known by its contents.
"""

import csv
import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from anymla.backends.aiter_mla import bindings, facts
from anymla.backends.aiter_mla.bindings import Binding
from anymla.backends.aiter_mla.facts import Dispatch, Kernel
from anymla.hardware.probe import NEWEST, Machine

SWITCHES = ("AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_USE_OPUS", "AITER_MLA_REDUCE_FLYDSL")
"""Environment variables that change what AITER runs; any value but 0 does. Quirks say what then."""

_SOURCES = {
    "asm_mla.cu": "csrc/py_itfs_cu/asm_mla.cu",
    "v1_2_device.cuh": "csrc/kernels/mla/metadata/v1_2_device.cuh",
}
_REDUCER = "csrc/kernels/mla/reduce.cu"
_REDUCER_ROW = re.compile(r"MLA_REDUCE_CASE_(?:IF|EF)\(\s*NUM_HEAD,\s*(\d+),\s*HEAD_DIM,\s*(\d+)")
_COLUMNS = ("qType", "kvType", "Gqa", "ps", "qSeqLen", "prefill", "causal", "lse", "cprr", "co_name")
_MAY_LACK = ("lse", "cprr")
_FIRST_TABLE = "0.1.10.post1 is the first release with one"


@dataclass(frozen=True, eq=False)
class Aiter:
    """An AITER as far as it can be known without importing it.

    Attributes:
        release: Its release, such as 0.1.16.post2.
        arch: The chip whose tables were read.
        bound: Each function of bindings.FUNCTIONS: its binding, or why there is none.
        kernels: Rows of the kernel table whose code object is there.
        dispatch: What its dispatch code looks up, or None where that code is not known.
        decode_reducers: Heads that the reducer has for 512 columns.
        prefill_reducers: Heads that the reducer has for 128 columns.
        missing: Why its tables cannot be used; () where they can.
        installed: Whether it is here, and so has an environment.
    """

    release: str
    arch: str
    bound: Mapping[str, Binding | tuple[str, ...]]
    kernels: tuple[Kernel, ...]
    dispatch: Dispatch | None
    decode_reducers: frozenset[int]
    prefill_reducers: frozenset[int]
    missing: tuple[str, ...] = ()
    installed: bool = False

    def __str__(self) -> str:
        return f"aiter {self.release}"

    @property
    def switches(self) -> frozenset[str]:
        """Which of SWITCHES are set; a release that is not here has no environment."""
        names = SWITCHES if self.installed else ()
        return frozenset(name for name in names if os.environ.get(name, "0") not in ("", "0"))

    @property
    def without_ck(self) -> bool:
        """Whether its environment has it do without Composable Kernel."""
        return self.installed and os.environ.get("ENABLE_CK", "1") == "0"

    def binding(self, function: str) -> Binding:
        """The binding of a function that is known to have one."""
        found = self.bound[function]
        assert isinstance(found, Binding), found
        return found

    def refusals(self, functions: Sequence[str], *, by_tables: bool = True) -> tuple[str, ...]:
        """Why nothing can be run with these functions; () if it can.

        Args:
            functions: Names in bindings.FUNCTIONS.
            by_tables: Whether its kernel tables decide what runs.
        """
        reasons = list(self.missing) if by_tables else []
        for function in functions:
            found = self.bound[function]
            reasons += () if isinstance(found, Binding) else found
        return tuple(reasons)


def aiter_of(machine: Machine) -> Aiter:
    """The AITER of a machine: what is installed, or a recorded release where one only asks about it."""
    named = dict(machine.packages).get("aiter")
    if named is None:
        return installed_aiter("", machine.arch, None)
    release = facts.canonical_release(named)
    if machine.assumed or named == NEWEST:
        return recorded_aiter(release or facts.newest_release(), machine.arch)
    return installed_aiter(release, machine.arch, package_root())


def package_root() -> Path | None:
    """The folder that holds the package, found without importing it; None where it is not installed."""
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).parent if places else None


@lru_cache(maxsize=256)
def recorded_aiter(release: str, arch: str) -> Aiter:
    """A recorded release on a chip; one that is not recorded has nothing, and says so."""
    name = f"aiter {release}"
    if release not in facts.releases():
        known = f"{facts.releases()[0]} to {facts.newest_release()} and HEAD are"
        unknown = dict.fromkeys(bindings.FUNCTIONS, (f"{name} is not recorded; {known}",))
        return Aiter(release, arch, unknown, (), None, frozenset(), frozenset())
    bound = {one: bindings.bind(one, bindings.recorded(one, release), name) for one in bindings.FUNCTIONS}
    dispatch, kernels = facts.recorded_dispatch(release), facts.recorded_kernels(release, arch)
    decode, prefill = (facts.recorded_reducers(release, width) for width in (512, 128))
    missing = (f"{name} has no kernel table for {arch}; {_FIRST_TABLE}",)
    return Aiter(release, arch, bound, kernels, dispatch, decode, prefill, () if kernels else missing)


@lru_cache(maxsize=16)
def installed_aiter(release: str, arch: str, root: Path | None) -> Aiter:
    """The AITER in a folder, read from its own files.

    Args:
        release: What its package metadata call it.
        arch: The chip.
        root: The folder that holds the package `aiter`, and beside it `aiter_meta`, or `csrc` and `hsa`.

    Returns:
        All that could be read; whatever could not is in `missing`, in words.
    """
    name = f"aiter {release or 'unknown'}"
    none: frozenset[int] = frozenset()
    if root is None:
        gone = ("aiter is not installed",)
        return Aiter(release, arch, dict.fromkeys(bindings.FUNCTIONS, gone), (), None, none, none, gone, True)
    bound = {one: bindings.bind(one, bindings.parsed(one, root), name) for one in bindings.FUNCTIONS}
    meta = next((place for place in (root / "aiter_meta", root) if (place / "hsa").is_dir()), None)
    if meta is None:
        half = (f"{name} has no folder hsa with kernels beside it; install it whole",)
        return Aiter(release, arch, bound, (), None, none, none, half, True)
    kernels, missing = _table(meta / "hsa" / arch / "mla", name)
    blobs = {one: _blob(meta / path) for one, path in _SOURCES.items()}
    blobs["mla.py"] = _blob(root / "aiter" / "mla.py")
    dispatch = facts.dispatch_with(blobs)
    if dispatch is None and not missing:
        lost = [one for one, blob in blobs.items() if not blob]
        what = f"lacks {', '.join(lost)}" if lost else "chooses kernels by code that is not recorded"
        missing = (f"{name} {what}, so which kernel a call would look up is not known",)
    reducers = _reducers(meta / _REDUCER)
    decode, prefill = reducers[512], reducers[128]
    return Aiter(release, arch, bound, kernels, dispatch, decode, prefill, missing, True)


def _table(folder: Path, name: str) -> tuple[tuple[Kernel, ...], tuple[str, ...]]:
    """Rows whose code object is there, and what is wrong with the table."""
    path = folder / "mla_asm.csv"
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error):
        return (), (f"{name} has no kernel table {path}; {_FIRST_TABLE}",)
    kernels = []
    for number, row in enumerate(rows, start=2):
        fields = [row.get(column) or ("0" if column in _MAY_LACK else "") for column in _COLUMNS]
        try:
            kernel = facts.kernel_from([*fields[:-1], fields[-1].removesuffix(".co")])
        except (TypeError, ValueError):
            return (), (f"{name} has a malformed kernel table: {path}, line {number}",)
        if (folder / fields[-1]).is_file():
            kernels.append(kernel)
    missing = () if kernels else (f"{name} has no code object of {path}",)
    return tuple(kernels), missing


def _reducers(path: Path) -> dict[int, frozenset[int]]:
    """Heads for each width, read from the reducer's list of cases."""
    try:
        cases = _REDUCER_ROW.findall(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        cases = []
    return {width: frozenset(int(h) for h, w in cases if int(w) == width) for width in (512, 128)}


def _blob(path: Path) -> str:
    """A file's contents as git names them; "" where there is no file."""
    try:
        text = path.read_bytes()
    except OSError:
        return ""
    return hashlib.sha1(b"blob %d\0" % len(text) + text, usedforsecurity=False).hexdigest()
