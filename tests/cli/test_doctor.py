"""`anymla doctor`: it prints whatever state the machine is in."""

import json
import re
import subprocess
import sys
from dataclasses import replace
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
    found = json.loads(examined("--json"))
    aiter, (verdict,) = (
        found["libraries"]["aiter"],
        [one for one in found["verdicts"]["index_topk"] if one["backend"] == "aiter"],
    )
    assert "q_dtype" not in str(verdict["reasons"]) and "kv_format" not in str(verdict["reasons"])
    assert aiter["release"] == "0.1.16.post2"
    assert {"mla_decode_fwd", "mla_reduce_v1", "get_mla_metadata_v1"} <= set(aiter["bound"])
    assert aiter["kernels"]["bf16/bf16 rows"] == 7
    assert aiter["kernels"]["bf16/bf16 prefill"] == 2
    does = [quirk["does"] for quirk in aiter["quirks"]]
    assert "this AITER returns an lse that nothing wrote" not in does
    assert "sets finite_slot_0=1" in does
    assert all(quirk["source"] and quirk["kernels"] for quirk in aiter["quirks"])
    assert len({quirk["source"] for quirk in aiter["quirks"]}) > 5
    assert (aiter["missing"], aiter["advice"]) == ([], "")
    text = " ".join(examined().split())
    assert "0.1.16.post2" in text
    faults = "AITER's bf16 kernel of 64 heads faults; in MLA_A16W16_1TG_4W_64mx1_16nx1_Coex0_Msk1_QH16"
    assert f"quirk: {faults} (AITER op_tests/test_mla.py skips it" in text
    assert re.search(r"sets finite_slot_0=1; in \d+ kernels \(emulated", text)


def test_on_rocm_without_aiter_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "this_machine", lambda: Machine("gfx942", (("torch", "2.13.0"),)))
    text = examined()
    assert "not installed" in text
    assert "what would help: building github.com/ROCm/aiter whole, " in text


def test_an_aiter_that_is_too_old_is_told_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_named("gfx942").having("aiter", "0.1.8")
    monkeypatch.setattr(module, "this_machine", lambda: machine)
    aiter = json.loads(examined("--json"))["libraries"]["aiter"]
    assert any("0.1.10.post1 is the first release with one" in reason for reason in aiter["missing"])
    assert aiter["advice"].startswith("building github.com/ROCm/aiter whole, 0.1.20.post1 or another release")


def test_an_aiter_whose_import_dies_is_refused_above_as_it_is_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = machine_named("gfx942")
    broken = replace(machine, failures=(("mla_decode_fwd", "aiter cannot be imported: no libamdhip64"),))
    monkeypatch.setattr(module, "this_machine", lambda: machine)
    monkeypatch.setattr(module.select, "tried", lambda asked: broken if asked is machine else asked)
    found = json.loads(examined("--json"))
    (aiter,) = (one for one in found["verdicts"]["decode"] if one["backend"] == "aiter")
    assert aiter["reasons"] == found["libraries"]["aiter"]["missing"] == [broken.failures[0][1]]
    assert found["machine"]["failures"] == dict(broken.failures)
    assert "mla_decode_fwd" not in found["libraries"]["aiter"]["bound"]
    assert "what would help: python -c 'import aiter.mla'" in examined()


def test_a_broken_torch_is_a_failed_check_and_everything_else_is_still_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "torch_report", lambda: {"error": "OSError: libcudart.so.13 [missing]"})
    text = examined(exit_code=1)
    assert "broken: OSError: libcudart.so.13 [missing]" in text
    assert "hopper" in text
    assert json.loads(examined("--json", exit_code=1))["torch"]["error"].startswith("OSError")


RECORD = {
    "backend": "cpu",
    "how": "AITER's code objects, executed on the emulator",
    "objects": "784639297068",
    "cases": 9,
    "worst": {"decode": {"share": 0.25}},
}


def test_evidence_of_this_chip_is_shown_and_a_torn_record_does_not_hide_the_rest(tmp_path: Path) -> None:
    for arch, name, text in (
        ("cpu", "cpu.json", json.dumps(RECORD)),
        ("cpu", "torn.json", '{"backend": '),
        ("sm90", "triton.json", json.dumps({"backend": "triton"})),
    ):
        path = tmp_path / "evidence" / arch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    first, second = json.loads(examined("--json"))["evidence"]
    assert (first["file"], first["backend"], first["cases"]) == ("cpu.json", "cpu", 9)
    assert (second["file"], "Expecting value" in second["error"]) == ("torn.json", True)
    text = " ".join(examined().split())
    how = "AITER's code objects, executed on the emulator"
    assert f"backend cpu, objects 784639297068, cases 9, {how}, worst share of the budget 0.25" in text
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
