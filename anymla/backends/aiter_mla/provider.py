"""Aiter: one AITER, installed or recorded: its release, its functions, its kernel tables, what it looks up.

Nothing of it is imported: stubs are parsed, tables read, and dispatch code known by its contents.
"""

import csv
import importlib.util
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from anymla.backends.aiter_mla import bindings, facts
from anymla.backends.aiter_mla.bindings import Binding
from anymla.backends.aiter_mla.facts import Dispatch, Kernel
from anymla.hardware.probe import NEWEST, Machine

SWITCHES = {
    "AITER_ENABLE_EXPERIMENTAL": "0",
    "AITER_MLA_USE_OPUS": "0",
    "AITER_MLA_REDUCE_FLYDSL": "0",
    "AITER_MLA_META_USE_PARALLEL": "1",
    "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS": "0",
    "ENABLE_CK": "1",
    "CU_NUM": "0",
}
"""Environment variables that change what AITER runs, and the value that does not. Quirks say what then."""
_READ = (*SWITCHES, "AITER_META_DIR", "GPU_ARCHS")

_SOURCES = {
    "asm_mla.cu": "csrc/py_itfs_cu/asm_mla.cu",
    "v1_2_device.cuh": "csrc/kernels/mla/metadata/v1_2_device.cuh",
}
_REDUCER = "csrc/kernels/mla/reduce.cu"
_REDUCER_ROW = re.compile(r"MLA_REDUCE_CASE_(?:IF|EF)\(\s*NUM_HEAD,\s*(\d+),\s*HEAD_DIM,\s*(\d+)")
_COLUMNS = ("qType", "kvType", "Gqa", "ps", "qSeqLen", "prefill", "causal", "lse", "cprr", "co_name")
_MAY_LACK = ("lse", "cprr")
_ELF = struct.Struct("<4s36xQ10xHH2x")
"""Of the header of a code object: magic, where its section headers begin, the size of one, and how many."""
_FIRST_TABLE = "0.1.10.post1 is the first release with one"
_FOLDER_CODE = re.compile(rb"^find_aiter = .*?^AITER_ASM_DIR = [^\n]*", re.DOTALL | re.MULTILINE)
_FOLDER_BLOB = "904405483e96"
"""Where aiter/jit/core.py says in which folder tables and sources are, alike in every release with tables."""

Environment = tuple[tuple[str, str], ...]
"""Name and value of each variable that is set, of those that change what AITER runs."""


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
        root: The folder that holds the package, None where it is not here.
        objects: The folder of its table and code objects, None where it is not here.
        environment: What is set, as it was when this was read; a release that is not here has none.
        takes_unrun: Whether code objects that nobody ran are taken too.
    """

    release: str
    arch: str
    bound: Mapping[str, Binding | tuple[str, ...]]
    kernels: tuple[Kernel, ...]
    dispatch: Dispatch | None
    decode_reducers: frozenset[int]
    prefill_reducers: frozenset[int]
    missing: tuple[str, ...] = ()
    root: Path | None = None
    objects: Path | None = None
    environment: Environment = ()
    takes_unrun: bool = False

    def __str__(self) -> str:
        return f"aiter {self.release}"

    @property
    def installed(self) -> bool:
        """Whether it is here, and so can be imported."""
        return self.root is not None

    @property
    def switches(self) -> frozenset[str]:
        """Which of SWITCHES are set to what changes something."""
        return frozenset(
            name for name, value in self.environment if (value or "0") != SWITCHES.get(name, value or "0")
        )

    @property
    def without_ck(self) -> bool:
        """Whether its environment has it do without Composable Kernel."""
        return "ENABLE_CK" in self.switches

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
        reasons = [*self._other_chips(), *(self.missing if by_tables else ())]
        for function in functions:
            found = self.bound[function]
            reasons += () if isinstance(found, Binding) else found
            if "pa_mqa_logits" in bindings.FUNCTIONS[function].modules[0]:
                reasons += [_AHEAD] if "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS" in self.switches else []
        return tuple(dict.fromkeys(reasons))

    def _other_chips(self) -> tuple[str, ...]:
        """Why its environment has it take this chip for another; () if it does not."""
        named = dict(self.environment).get("GPU_ARCHS", "native")
        if named in ("native", self.arch) or named.endswith(f";{self.arch}"):
            return ()
        return (f"GPU_ARCHS got {named!r}; needs {self.arch} last, which {self} takes for the chip here",)


_AHEAD = "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS is set: it runs kernels that were compiled ahead"


def aiter_of(machine: Machine) -> Aiter:
    """The AITER of a machine: what is installed, or a recorded release where one only asks about it."""
    named = dict(machine.packages).get("aiter")
    if named is None:
        return installed_aiter("", machine.arch, None)
    release = facts.canonical_release(named)
    if machine.assumed or named == NEWEST:
        return recorded_aiter(release or facts.newest_release(), machine.arch)
    return installed_aiter(release, machine.arch, package_root(), takes_unrun=machine.takes_unrun)


def package_root() -> Path | None:
    """The folder that holds the package, found without importing it; None where it is not installed."""
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).parent if places else None


def commit_of(root: Path | None) -> str:
    """The commit that a source tree is at, read without git; "" where there is no such tree."""
    git = root / ".git" if root else None
    if git is None or not git.exists():
        return ""
    try:
        if git.is_file():
            git = git.parent / git.read_text().strip().removeprefix("gitdir: ")
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        name = head.removeprefix("ref: ")
        if (shared / name).exists():
            return (shared / name).read_text().strip()
        packed = (line.split() for line in (shared / "packed-refs").read_text().splitlines())
        return next((words[0] for words in packed if words[1:] == [name]), "")
    except (OSError, ValueError):
        return ""


@lru_cache(maxsize=256)
def recorded_aiter(release: str, arch: str) -> Aiter:
    """A recorded release on a chip; one that is not recorded has nothing, and says so."""
    name = f"aiter {release}"
    if release not in facts.releases():
        as_written = {one.lower(): one for one in facts.releases()}
        alike = [as_written[one] for one in get_close_matches(release.lower(), as_written, cutoff=0.7)]
        known = f"{facts.releases()[0]} to {facts.newest_release()} and HEAD are"
        known += f"; nearest: {', '.join(alike)}" if alike else ""
        unknown = dict.fromkeys(bindings.FUNCTIONS, (f"{name} is not recorded; {known}",))
        return Aiter(release, arch, unknown, (), None, frozenset(), frozenset())
    bound = {one: bindings.bind(one, bindings.recorded(one, release), name) for one in bindings.FUNCTIONS}
    dispatch, kernels = facts.recorded_dispatch(release), facts.recorded_kernels(release, arch)
    decode, prefill = (facts.recorded_reducers(release, width) for width in (512, 128))
    missing = (f"{name} has no kernel table for {arch}; {_FIRST_TABLE}",)
    return Aiter(release, arch, bound, kernels, dispatch, decode, prefill, () if kernels else missing)


def installed_aiter(release: str, arch: str, root: Path | None, *, takes_unrun: bool = False) -> Aiter:
    """The AITER in a folder, read from its own files, in the environment that is set now.

    Args:
        release: What its package metadata call it.
        arch: The chip.
        root: The folder that holds the package `aiter`, and beside it `aiter_meta`, or `csrc` and `hsa`.
        takes_unrun: See Aiter.

    Returns:
        All that could be read; whatever could not is in `missing`, in words.
    """
    return _read(release, arch, root, environment(), takes_unrun)


def environment() -> Environment:
    """What is set of all that changes what AITER runs."""
    return tuple((name, os.environ[name]) for name in _READ if name in os.environ)


@lru_cache(maxsize=64)
def _read(release: str, arch: str, root: Path | None, given: Environment, takes_unrun: bool) -> Aiter:
    name = f"aiter {release or 'unknown'}"
    none: frozenset[int] = frozenset()
    if root is None:
        gone = ("aiter is not installed",)
        return Aiter(release, arch, dict.fromkeys(bindings.FUNCTIONS, gone), (), None, none, none, gone)
    bound = {one: bindings.bind(one, bindings.parsed(one, root), name) for one in bindings.FUNCTIONS}
    meta = _folder(root, dict(given).get("AITER_META_DIR", ""))
    if not (meta / "hsa").is_dir():
        half = (f"{name} has no folder {meta / 'hsa'} with its kernels; install it whole",)
        return Aiter(release, arch, bound, (), None, none, none, half, root, None, given)
    objects = meta / "hsa" / arch / "mla"
    kernels, missing = _table(objects, name)
    if not missing and not _is_folder_code_known(root):
        missing = (f"{name} finds its kernel table by code that is not recorded, or has no jit/core.py",)
    blobs = {one: facts.blob_of(meta / path) for one, path in _SOURCES.items()}
    blobs["mla.py"] = facts.blob_of(root / "aiter" / "mla.py")
    dispatch = facts.dispatch_with(blobs)
    if dispatch is None and not missing:
        lost = [one for one, blob in blobs.items() if not blob]
        what = f"lacks {', '.join(lost)}" if lost else "chooses kernels by code that is not recorded"
        missing = (f"{name} {what}, so which kernel a call would look up is not known",)
    reducers = _reducers(meta / _REDUCER)
    decode, prefill = reducers[512], reducers[128]
    tables = kernels, dispatch, decode, prefill, missing
    return Aiter(release, arch, bound, *tables, root, objects, given, takes_unrun)


def _folder(root: Path, named: str) -> Path:
    """Where AITER looks for tables and sources, by the rule of its jit/core.py."""
    try:
        whole = (root / "aiter" / "install_mode").read_text(errors="replace").strip() != "develop"
    except OSError:
        whole = False
    folder = Path(named).absolute() if named else root / "aiter_meta" if whole else root
    return folder if (folder / "csrc").exists() else root


def _is_folder_code_known(root: Path) -> bool:
    try:
        found = _FOLDER_CODE.search((root / "aiter" / "jit" / "core.py").read_bytes())
    except OSError:
        return False
    return found is not None and facts.git_blob(found[0]).startswith(_FOLDER_BLOB)


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
        if _is_whole_object(folder / fields[-1]):
            kernels.append(kernel)
    missing = () if kernels else (f"{name} has no whole code object of {path}; install it whole",)
    return tuple(kernels), missing


def _is_whole_object(path: Path) -> bool:
    """Whether a file is ELF up to its section headers, which are last: no stand-in, nothing cut off."""
    try:
        with path.open("rb") as file:
            header, size = file.read(_ELF.size), os.fstat(file.fileno()).st_size
    except (OSError, ValueError):  # No name of a file, if there is a NUL in it.
        return False
    if len(header) < _ELF.size:
        return False
    magic, sections, section_size, count = _ELF.unpack(header)
    return bool(magic == b"\x7fELF" and sections + section_size * count <= size)


def _reducers(path: Path) -> dict[int, frozenset[int]]:
    """Heads for each width, read from the reducer's list of cases."""
    try:
        cases = _REDUCER_ROW.findall(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        cases = []
    return {width: frozenset(int(h) for h, w in cases if int(w) == width) for width in (512, 128)}
