"""`anymla verify`: a table for people, figures for programs, evidence for those who were not there."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import anymla
from anymla import cli
from anymla.verification import run as module
from anymla.verification.cases import cases
from anymla.verification.faults import FAULTS, Kernel


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every twentieth quick case, three faults, in an empty folder."""
    monkeypatch.setattr(module, "cases", lambda *asked, quick: cases(*asked, quick=True)[::20])
    monkeypatch.setattr(module.faults, "FAULTS", FAULTS[:3])
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    """Run `anymla verify` with these arguments in this process."""
    return CliRunner().invoke(cli.app, ["verify", *arguments])


def report(*arguments: str, exit_code: int = 0) -> dict:
    """What `anymla verify ... --json` prints."""
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def break_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU backend wrong by a twentieth."""
    from anymla.backends import cpu_mla

    right = cpu_mla.decode

    def wrong(args, state):
        right(args, state)
        args.out.mul_(1.05)

    monkeypatch.setattr(cpu_mla, "decode", wrong)


class TestFigures:
    """JSON for programs."""

    def test_they_count_cases_failures_and_faults(self):
        found = report("--quick")
        assert found["cases"] > 8
        assert (found["failed"], found["faults_caught"], found["faults_total"]) == (0, 3, 3)
        assert (found["backend"], found["arch"], found["quick"]) == ("cpu", "cpu", True)
        assert set(found["worst"]) >= {"decode", "prefill"}
        assert all(0 <= worst["share"] <= 1 for worst in found["worst"].values())
        assert found["failures"] == [] and found["evidence"] is None

    def test_a_wrong_backend_is_counted_named_and_exits_1(self, monkeypatch):
        break_decode(monkeypatch)
        found = report("--quick", exit_code=1)
        assert found["failed"] == len(found["failures"]) > 0
        assert "decode" in found["failures"][0]["case"]
        assert "of its budget" in found["failures"][0]["reasons"][0]

    def test_a_missed_fault_exits_1_though_no_case_failed(self, monkeypatch):
        monkeypatch.setattr(module.faults, "FAULTS", (*FAULTS[:3], Kernel))
        found = report("--quick", exit_code=1)
        assert (found["failed"], found["faults_caught"], found["faults_total"]) == (0, 3, 4)
        assert found["failures"][0]["case"] == "right kernel"

    def test_a_share_without_bound_is_null_not_infinity(self, monkeypatch):
        from anymla.backends import cpu_mla

        monkeypatch.setattr(cpu_mla, "decode", lambda args, state: None)
        result = run("--quick", "--json")
        assert json.loads(result.stdout, parse_constant=pytest.fail)["worst"]["decode"]["share"] is None

    def test_an_unknown_backend_and_one_that_cannot_run_here_exit_2(self):
        assert report("--backend", "tritn", exit_code=2)["error"].startswith(
            "backend got 'tritn'; needs one of"
        )
        assert "arch got cpu" in report("--backend", "aiter", exit_code=2)["error"]


class TestTable:
    """Text for people."""

    def test_it_has_a_row_an_operation_and_the_verdict(self):
        text = run("--quick").stdout
        rows = {line.strip().split("  ")[0]: line.split() for line in text.splitlines() if line.strip()}
        assert {"decode", "prefill"} <= set(rows)
        assert rows["decode"][-2] == "0"
        headings = ["operation", "cases", "failed", "worst share of the budget"]
        assert any(re.split(r"\s{2,}", line.strip()) == headings for line in text.splitlines())
        assert "faults caught: 3 of 3" in text
        assert "cpu is right: " in text

    def test_a_failure_is_named_with_its_reason(self, monkeypatch):
        break_decode(monkeypatch)
        result = run("--quick")
        assert result.exit_code == 1
        assert "failed right-decode-" in result.stdout
        assert "cpu is not right: " in result.stdout


class TestRandomCalls:
    """Calls drawn from a seed, each of which can be made again."""

    def test_they_are_counted_with_their_seed(self):
        found = report("--fuzz", "9", "--seed", "6")
        assert (found["cases"], found["failed"], found["fuzz"], found["seed"]) == (9, 0, 9, 6)
        assert "quick" not in found and "faults_total" not in found

    def test_one_that_fails_says_how_to_make_it_again(self, monkeypatch):
        break_decode(monkeypatch)
        failed = report("--fuzz", "9", "--seed", "6", exit_code=1)["failures"][0]
        options = failed["again"].split()
        assert options[:4] == ["anymla", "verify", "--backend", "cpu"]
        assert report(*options[2:], exit_code=1)["failures"] == [failed]
        assert failed["again"] in run("--fuzz", "9", "--seed", "6").stdout

    def test_they_have_evidence_of_their_own(self, tmp_path):
        written = report("--fuzz", "3", "--record")["evidence"]
        assert written == str(Path("evidence") / "cpu" / "cpu_fuzz.json")
        assert json.loads((tmp_path / written).read_text())["fuzz"] == 3
        assert report("--fuzz-case", "3", "--record")["evidence"] is None


class TestProgress:
    """A caller is told what is done, what there is, and what is next."""

    def test_it_counts_to_the_end(self):
        told = []
        module.verify("cpu", quick=True, progress=lambda *step: told.append(step))
        total = told[-1][1]
        assert [done for done, _, _ in told] == list(range(total + 1))
        assert told[0][2].startswith("right-") and told[-2][2].startswith("fault: ")


class TestEvidence:
    """What was verified, where, with what."""

    def test_it_says_where_with_which_versions_and_how_much(self, tmp_path):
        written = report("--quick", "--record")["evidence"]
        assert written == str(Path("evidence") / "cpu" / "cpu.json")
        found = json.loads((tmp_path / written).read_text())
        assert found["torch"] == version("torch")
        assert found["anymla"] == anymla.__version__
        assert set(found) >= {"date", "commit", "python", "arch", "device", "cases", "faults_caught", "worst"}
        assert "recorded in evidence" in run("--quick", "--record").stdout

    def test_nothing_wrong_is_recorded(self, monkeypatch, tmp_path):
        break_decode(monkeypatch)
        assert report("--quick", "--record", exit_code=1)["evidence"] is None
        assert not (tmp_path / "evidence").exists()
        with pytest.raises(anymla.InvalidInput, match=r"report got \d+ failures; needs none"):
            module.record(module.verify("cpu", quick=True), tmp_path)


class TestUnheard:
    """An option that a run does not hear is refused; nothing is run as if it had not been given."""

    @pytest.mark.parametrize(
        ("arguments", "reasons"),
        [
            (
                "--op index_topk",
                ["op got 'index_topk'; needs --machine: a run of the cases does not hear it"],
            ),
            ("--rows --quick", ["rows got True; needs --machine: a run of the cases does not hear it"]),
            ("--seed 3", ["seed got 3; needs --fuzz: a run of the cases does not hear it"]),
            (
                "--fuzz 3 --quick",
                ["quick got True; needs --aiter or --machine or the cases: a run of --fuzz"],
            ),
            (
                "--machine gfx942 --backend cpu --fuzz-case 3",
                ["backend got 'cpu'; needs --fuzz or the cases", "fuzz_case got 3; needs --fuzz: a run of"],
            ),
            ("--aiter there --machine gfx942 --op decode", ["op got 'decode'; needs --machine: a run of"]),
            (
                "--op foo --rows",
                [
                    "op got 'foo'; needs one of decode, sparse_decode, prefill, write_cache, index_topk;",
                    "op got 'foo'; needs --machine",
                    "rows got True; needs --machine",
                ],
            ),
            ("--machine gfx942 --op foo", ["op got 'foo'; needs one of decode, sparse_decode, prefill"]),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_it_exits_2_with_every_reason(self, arguments, reasons):
        error = report(*arguments.split(), exit_code=2)["error"]
        assert all(reason in error for reason in reasons), error
        assert error.count(" got ") == len(reasons)


def test_help_needs_no_torch() -> None:
    program = "import sys; from anymla.cli import main; sys.argv[1:] = ['verify', '--help']\ntry: main()\n"
    program += "except SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "--record" in done.stdout
