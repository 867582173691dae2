"""docs/rocm.md is current, and both chips have a working choice for every model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from anymla.hardware.probe import machine_named
from anymla.models import MODELS
from anymla.select import choose

ROOT = Path(__file__).parents[3]


def test_the_table_is_what_explain_says_now() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "rocm_table"), "--check"], check=False)
    assert done.returncode == 0, "run scripts/rocm_table"


def test_what_the_page_names_is_there() -> None:
    text = (ROOT / "docs" / "rocm.md").read_text()
    for name in re.findall(r"`((?:aiter_mla|tests|scripts|hardware|backends|facts)[./][\w./]+)`", text):
        path = name if name.startswith(("tests", "scripts")) else f"anymla/{name}"
        path = path.replace("anymla/aiter_mla.", "anymla/backends/aiter_mla/").replace(
            "anymla/facts", "anymla/backends/aiter_mla/facts"
        )
        first = path.split(".")[0]
        assert any((ROOT / one).exists() for one in (path, first, f"{first}.py")), name


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_a_choice_at_every_size_and_format_of_the_cache(name: str, chip: str) -> None:
    model, machine = MODELS[name], machine_named(chip)
    for tp in model.tp_sizes:
        for kv_format in ("bf16", "fp8_e4m3fnuz" if chip == "gfx942" else "fp8_e4m3fn"):
            for asked in ({}, {"lse": True}, {"sinks": True}):
                problem = model.problem("decode", tp=tp, kv_format=kv_format, **asked)
                assert choose(problem, machine).backend.name in ("aiter", "triton")
