"""Runs the Triton kernels' tests in a process of their own, where Triton interprets kernels on the CPU.

Triton decides so when a kernel is decorated, for a whole process. The tests are in `triton_interpreter`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "triton_interpreter"


def test_every_kernel_is_right_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed; pip install 'anymla[triton]'")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=TESTS.parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-5_000:]
    assert " passed" in run.stdout
