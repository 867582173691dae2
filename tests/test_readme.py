"""The README's shell blocks work as they stand, for someone who has Python, pip and this checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)


PYTHON = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)


def test_the_python_at_the_top_runs() -> None:
    scope: dict[str, object] = {}
    exec(PYTHON[0], scope)
    assert tuple(scope["out"].shape) == (2, 16, 512)


def test_there_are_two_commands_of_one_line_each() -> None:
    assert len(BLOCKS) == 2 and all(block.count("\n") == 1 for block in BLOCKS)


@pytest.mark.skipif(
    "CI" not in os.environ, reason="installs an environment of its own: set CI=true to run it"
)
def test_the_first_command_answers_a_question(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    clean = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", BLOCKS[0]], cwd=tmp_path, capture_output=True, text=True, env=clean
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "Paris" in run.stdout
    assert "tokens are those of stock transformers" in " ".join(run.stdout.split())


def test_the_second_command_is_what_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "scripts/readme_block 2" in script and '"$install_and_test"' in script
    assert "-m pytest" in BLOCKS[1]


@pytest.mark.parametrize("example", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
def test_an_example_runs(example: str) -> None:
    run = subprocess.run([sys.executable, ROOT / "examples" / example], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout
