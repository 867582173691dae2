"""`anymla doctor`: it prints whatever state the machine is in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from anymla import cli
from anymla.cli import doctor as module
from anymla.hardware.probe import Machine, machine_named
from anymla.problem import OPS


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU whose torch is fine, in a folder without evidence."""
    fine = {"torch": torch.__version__, "cuda": "", "hip": "", "devices": ""}
    monkeypatch.setattr(module, "torch_report", lambda: fine)
    monkeypatch.setattr(module, "this_machine", lambda: Machine("cpu", (("torch", torch.__version__),)))
    monkeypatch.setattr(module.anymla, "__file__", str(tmp_path / "anymla" / "__init__.py"))
    monkeypatch.chdir(tmp_path)


def examined(*arguments: str, exit_code: int = 0) -> str:
    """What `anymla doctor` prints."""
    result = CliRunner().invoke(cli.app, ["doctor", *arguments])
    assert result.exit_code == exit_code, result.output
    return result.stdout


def test_json_has_the_machine_versions_every_operation_quirks_and_evidence() -> None:
    found = json.loads(examined("--json"))
    assert list(found) == [
        "machine", "versions", "torch", "verdicts", "quirks", "evidence", "libraries"
    ]  # fmt: skip
    assert found["machine"]["arch"] == "cpu"
    assert found["versions"]["torch"] == torch.__version__
    assert list(found["verdicts"]) == list(OPS)
    assert [said[-1]["accepted"] for said in found["verdicts"].values()] == [True] * len(OPS)
    assert (found["quirks"], found["evidence"], found["libraries"]) == ([], [], {})


def test_a_person_sees_what_each_backend_does_here() -> None:
    text = examined()
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert rows["cpu"][1:6] == ["✓"] * 5
    assert rows["hopper"][1:6] == ["✗", "✗", "–", "–", "–"]
    assert "package triton is not installed" in text
    assert "none on this machine" in text
    assert "nothing recorded; run anymla verify --record" in text


def test_quirks_of_this_chip_are_listed_with_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: machine_named("gfx942"))
    found = json.loads(examined("--json"))
    assert {quirk["does"] for quirk in found["quirks"]} >= {
        "sets chunk_q=num_heads",
        "AITER has no bf16 kernel of 64 heads with an lse on gfx942",
    }
    assert all(quirk["source"] for quirk in found["quirks"])
    assert "sets chunk_q=num_heads" in examined()


def test_on_rocm_it_says_what_aiter_has_and_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_named("gfx942").having("aiter", "v0.1.16.post2")
    monkeypatch.setattr(module, "this_machine", lambda: machine)
    aiter = json.loads(examined("--json"))["libraries"]["aiter"]
    assert aiter["release"] == "0.1.16.post2"
    assert {"mla_decode_fwd", "mla_reduce_v1", "get_mla_metadata_v1"} <= set(aiter["bound"])
    assert aiter["kernels"]["bf16/bf16 rows"] == 7
    assert aiter["kernels"]["bf16/bf16 prefill"] == 2
    assert "this AITER returns an lse that nothing wrote" not in aiter["quirks"]
    assert "sets finite_slot_0=1" in aiter["quirks"]
    assert aiter["missing"] == []
    text = examined()
    assert "0.1.16.post2" in text
    assert "quirk: AITER's bf16 kernel of 64 heads faults" in text


def test_on_rocm_without_aiter_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: Machine("gfx942", (("torch", "2.13.0"),)))
    text = examined()
    assert "not installed" in text
    assert "to install: building github.com/ROCm/aiter" in text


def test_a_broken_torch_is_a_failed_check_and_everything_else_is_still_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "torch_report", lambda: {"error": "OSError: libcudart.so.13 [missing]"})
    text = examined(exit_code=1)
    assert "broken: OSError: libcudart.so.13 [missing]" in text
    assert "hopper" in text
    assert json.loads(examined("--json", exit_code=1))["torch"]["error"].startswith("OSError")


def test_evidence_of_this_chip_is_shown_and_a_torn_record_does_not_hide_the_rest(tmp_path: Path) -> None:
    for arch, name, text in (
        ("cpu", "cpu.json", json.dumps({"backend": "cpu", "cases": 9, "worst": {"decode": {"share": 0.25}}})),
        ("cpu", "torn.json", '{"backend": '),
        ("sm90", "triton.json", json.dumps({"backend": "triton"})),
    ):
        path = tmp_path / "evidence" / arch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    first, second = json.loads(examined("--json"))["evidence"]
    assert (first["file"], first["backend"], first["cases"]) == ("cpu.json", "cpu", 9)
    assert (second["file"], "Expecting value" in second["error"]) == ("torn.json", True)
    text = examined()
    assert "backend cpu, cases 9, worst share of the budget 0.25" in text
    assert "torn.json cannot be read" in text


def test_it_prints_even_if_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no libtorch here')")
    root = str(Path(cli.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", "from anymla.cli import main; main()", "doctor"],
        env={"PYTHONPATH": f"{tmp_path}:{root}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "broken: ImportError: no libtorch here" in done.stdout
    assert "aiter" in done.stdout
    assert done.stderr == ""
