"""The tree is the architecture: who may import whom, which names stand where, how long a file may get."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "anymla"
FILES = sorted(ROOT.rglob("*.py"))

WORDS = {"errors", "rules", "problem", "models"}
HARDWARE = {"hardware.arches", "hardware.launch", "hardware.quirks", "hardware.probe"}
MATHS = {"latent", "merge", "heads", "indices"}
CHOICE = {"backends", "select"}
FRONT = {"api", "plans", "ops", "distributed"}
BELOW_FRONT = WORDS | HARDWARE | MATHS | CHOICE | {"kv_cache", "contract"}
USERS = BELOW_FRONT | FRONT

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "rules": set(),
    "problem": set(),
    "models": {"errors"},
    "hardware.arches": set(),
    "hardware.launch": {"hardware.arches"},
    "hardware.probe": {"errors", "hardware.arches"},
    "hardware.quirks": {"rules", "problem", "hardware.arches"},
    "fp8": set(),
    "kv_formats": {"errors", "problem", "fp8"},
    "kv_cache": {"errors", "problem", "fp8", "kv_formats"},
    "contract": {"errors", "problem", "kv_cache"},
    "reference": {"errors", "problem", "kv_cache", "contract"},
    **{module: {"errors", "problem", "kv_cache", "contract"} for module in MATHS},
    "backends": {"problem", "rules"},
    "select": {"errors", "problem", "rules", "backends"} | HARDWARE,
    "plans": BELOW_FRONT,
    "api": BELOW_FRONT | {"plans"},
    "ops": {"api"},
    "distributed": BELOW_FRONT | {"api", "plans"},
}
"""Modules inside the package that each module may import; a package's own submodules are always allowed."""

PREFIXES: dict[str, set[str]] = {
    "backends.": MATHS | HARDWARE | {"contract", "errors", "problem", "kv_cache"},
    "verification": USERS | {"reference"},
    "benchmarking": USERS | {"reference", "verification"},
    "integrations": USERS,
    "cli": USERS | {"verification", "benchmarking", "integrations", "reference"},
}

CHIP = re.compile(r"\b(gfx\d{3,4}[a-z]?|sm_?(?:80|86|89|90|100|120))\b")
CHIP_ROOMS = (
    "hardware/",
    "backends/__init__.py",
    "backends/aiter_mla",
    "backends/hopper_mla",
    "verification/",
    "cli/",
)


def module_name(path: Path) -> str:
    """`anymla/hardware/arches.py` is `hardware.arches`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_inside(path: Path) -> set[str]:
    """The package's own modules that a file imports, anywhere in it."""
    known, found = {module_name(f) for f in FILES}, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        inside = {n.removeprefix("anymla.") for n in names if n.startswith("anymla.")}
        found |= {n for n in inside if n in known}
    return {n for n in found if not any(other.startswith(n + ".") for other in found)}


def room(name: str) -> str:
    """The package whose submodules may import each other."""
    return (
        name.rsplit(".", 1)[0] if name.startswith("backends.") and name.count(".") > 1 else name.split(".")[0]
    )


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_imports_only_what_its_layer_allows(path: Path) -> None:
    name = module_name(path)
    if name == "":
        return
    allowed = MAY_IMPORT.get(name)
    if allowed is None:
        allowed = next((rule for prefix, rule in PREFIXES.items() if name.startswith(prefix)), None)
        assert allowed is not None or path.name == "__init__.py", (
            f"{name} stands in no layer; give it one here"
        )
    for imported in imported_inside(path):
        own = name not in MAY_IMPORT and room(imported) == room(name) and not imported.startswith("backends")
        own |= imported.startswith(room(name) + ".") and name.count(".") > 1
        tops = {imported, imported.split(".")[0]}
        assert own or tops & (allowed or set()), f"{name} imports {imported}; that is not below it"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_chip_names_stand_in_their_rooms(path: Path) -> None:
    place = str(path.relative_to(ROOT))
    if not place.startswith(CHIP_ROOMS):
        assert not CHIP.findall(path.read_text()), f"{place} names a chip; ask a table instead"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_holds_one_thing(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 600, f"{path.name} has {lines} lines; what two things does it hold?"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import anymla", ("torch", "triton", "aiter", "vllm", "transformers", "typer", "rich")),
        ("import anymla.select", ("torch",)),
        ("import anymla.ops", ("triton", "aiter", "vllm", "transformers", "typer")),
        ("import anymla.backends.cpu_mla", ("triton", "aiter", "anymla.select", "anymla.api")),
    ],
)
def test_an_import_brings_only_what_it_needs(statement: str, absent: tuple[str, ...]) -> None:
    script = f"import sys; {statement}; print([m for m in {absent!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
