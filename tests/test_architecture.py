"""The tree is the architecture: who may import whom, which names stand where, how long a file may get."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "anymla"
FILES = sorted(ROOT.rglob("*.py"))

WORDS = {"errors", "rules", "problem", "arguments", "models"}
CONTRACT = {"tensors", "kv_formats", "kv_cache", "contract"}
MATHS = {"latent", "merging", "heads", "indices"}
CHOICE = {"backends", "select"}
FRONT = {"planned", "plans", "workspace", "api", "ops", "distributed"}
LIBRARY = WORDS | CONTRACT | MATHS | CHOICE | FRONT | {"hardware"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "rules": set(),
    "problem": set(),
    "arguments": {"errors", "rules", "problem"},
    "models": {"errors", "problem", "arguments"},
    "hardware.arches": set(),
    "hardware.launch": {"hardware.arches"},
    "hardware.tiles": {"hardware.arches", "hardware.launch"},
    "hardware.probe": {"errors", "arguments", "hardware.arches"},
    "hardware.quirks": {"rules", "problem", "hardware.arches"},
    "hardware.kernel_quirks": {"rules", "hardware.quirks"},
    "fp8": set(),
    "tensors": {"errors"},
    "kv_formats": {"errors", "problem", "arguments", "fp8"},
    "kv_cache": {"errors", "problem", "arguments", "tensors", "fp8", "kv_formats"},
    "contract": {"errors", "problem", "arguments", "tensors", "kv_cache"},
    **{module: {"errors", "problem", "arguments"} | CONTRACT for module in (*MATHS, "reference")},
    "indices": {"errors", "problem", "arguments", "fp8"} | CONTRACT,
    "backends": {"problem", "rules"},
    "select": {"errors", "problem", "rules", "arguments", "backends", "hardware"},
    "backends.*": {"errors", "problem", "hardware"} | CONTRACT | MATHS,
    "planned": WORDS | CONTRACT | {"select"},
    "plans": WORDS | CONTRACT | {"select", "hardware", "planned"},
    "workspace": WORDS | CONTRACT | {"select", "hardware", "planned"},
    "api": WORDS | CONTRACT | {"select", "hardware", "planned", "plans"},
    "ops": {"api", "contract"},
    "distributed": WORDS | CONTRACT | MATHS | {"planned", "plans", "api"},
    "integrations": LIBRARY,
    "verification": LIBRARY | {"reference", "fp8"},
    "benchmarking": LIBRARY | {"reference", "fp8", "verification"},
    "cli": LIBRARY | {"integrations", "verification", "benchmarking"},
    "__init__": LIBRARY,
}
"""What a module, or any module of a package, may import; a package's own modules are always allowed."""

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


MODULES = {module_name(path) for path in FILES}


def imported_inside(path: Path) -> set[str]:
    """The package's own modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found |= set() if node.module == "anymla" else {node.module}
    inside = {name.removeprefix("anymla.") for name in found if name.startswith("anymla.")} & MODULES
    return {name for name in inside if not any(other.startswith(name + ".") for other in inside)}


def layer(name: str) -> str:
    """The key of MAY_IMPORT under which a module stands."""
    package = name.split(".")[0]
    if package == "backends" and name != "backends":
        return "backends.*"
    return name if name in MAY_IMPORT else package


def own_package(name: str) -> str:
    """The package whose modules may import each other: that of one backend, one user of the library."""
    return ".".join(name.split(".")[: 2 if name.startswith("backends.") else 1])


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_imports_only_what_its_layer_allows(path: Path) -> None:
    name = module_name(path)
    if name == "hardware":
        return
    assert layer(name) in MAY_IMPORT, f"{name} stands in no layer; give it one here"
    allowed = MAY_IMPORT[layer(name)]
    for imported in imported_inside(path):
        own = layer(name) != name and own_package(imported) == own_package(name)
        below = {layer(imported), imported.split(".")[0]} & allowed and not imported.startswith("backends.")
        assert own or below, f"{name} imports {imported}; that is not below it"


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
