"""Launch rows are tried in a table of their own, verified, timed side by side, and only proposed."""

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from anymla import select
from anymla.benchmarking import commands, tune
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.run import Planned, planned
from anymla.benchmarking.suite import Row
from anymla.benchmarking.timing import Timing
from anymla.benchmarking.tune import KERNELS, Trial, launched_by, neighbours, pasted, rows_from
from anymla.errors import InvalidInput
from anymla.hardware.launch import LAUNCH, Launch, launch_rows
from anymla.hardware.probe import machine_named

CPU = torch.device("cpu")
IN_USE = launch_rows("attend", "cpu")[0]


@pytest.fixture
def chip(monkeypatch):
    """A pretended kernel that is launched by the table.

    Rows of 64 keys do not fit, rows of 8 warps are wrong, and stages are worth more than anything else.
    """

    @dataclass
    class Plan:
        state: Any

    def pretended(call, work, backend):
        launch = launch_rows("attend", "cpu")[0]
        assert launch.block_n < 64, "no launch row of attend fits"
        run = planned(call, work, "cpu").run

        def launched():
            got = run()
            if launch.num_warps == 8:
                got.out[0] = 0
            return got

        launched.launch = launch
        return Planned("pretended", launched, Plan(type("State", (), {"launch": launch})()))

    def timed(calls, device, *, repeats):
        return {name: Timing((1e-5 / call.launch.num_stages,)) for name, call in calls.items()}

    monkeypatch.setattr(tune, "check_tunable", lambda *asked: None)
    monkeypatch.setattr(tune, "planned", pretended)
    monkeypatch.setattr(tune, "time_in_turns", timed)


def climbed(small, **more):
    said: list[str] = []
    row = Row("tiny", small("decode", batch=2, context=40))
    return tune.tune(row, "attend", CPU, say=said.append, **more), said


def test_it_climbs_to_the_fastest_right_row_that_fits_and_changes_no_table(chip, small):
    before = dict(LAUNCH)
    trials, _ = climbed(small, rounds=9)
    assert trials[0].rows["attend"] == replace(IN_USE, num_stages=tune.MOST["num_stages"])
    assert dict(LAUNCH) == before


def test_it_stops_after_the_rounds_it_is_given(chip, small):
    trials, _ = climbed(small, rounds=2)
    assert trials[0].rows["attend"].num_stages == IN_USE.num_stages + 2


def test_what_is_wrong_or_does_not_fit_has_no_time_and_says_why(chip, small):
    trials, said = climbed(small, rounds=1)
    reasons = {trial.rows["attend"]: trial.reason for trial in trials if trial.microseconds is None}
    assert "no launch row of attend fits" in reasons[replace(IN_USE, block_n=64)]
    assert "error of" in reasons[replace(IN_USE, num_warps=8)]
    assert any("no launch row of attend fits" in line for line in said)


def test_a_table_that_does_not_run_is_refused(chip, small):
    with (
        launched_by({"attend": replace(IN_USE, num_warps=8)}, "cpu"),
        pytest.raises(InvalidInput, match="needs a table that it runs with"),
    ):
        climbed(small)


@pytest.mark.parametrize("how", [("--kernel", "attend"), ("--variants", '{"128x16x4096": []}')])
def test_only_kernels_that_launch_by_the_table_on_a_gpu_are_tuned(how, monkeypatch, capsys):
    monkeypatch.setattr(tune, "planned", lambda *asked: pytest.fail("something is run"))
    monkeypatch.setattr(commands, "drawn_inputs", lambda *asked: pytest.fail("something is drawn"))
    assert commands.main(["tune", *how, "--device", "cpu"]) == 2
    assert "device got cpu; needs a GPU: launch rows are of its kernels" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["triton", "other"])
def test_a_case_that_another_backend_takes_is_not_tuned(backend, monkeypatch):
    row, gpu = commands.suite.row_named("128x16x4096", CPU), torch.device("cuda")
    choice = select.choose(row.work.problem, machine_named("sm90"), "triton")
    choice = replace(choice, backend=replace(choice.backend, name=backend))
    monkeypatch.setattr(tune, "this_machine", lambda device: machine_named("sm90"))
    monkeypatch.setattr(tune.select, "choose", lambda problem, machine, name: choice)
    with (
        pytest.raises(InvalidInput, match="backend got other; needs triton")
        if backend == "other"
        else nullcontext()
    ):
        tune.check_tunable(row, gpu, "auto")


@pytest.mark.parametrize("what", ["targets", "sweep", "choose", "tune"])
def test_what_is_sized_for_a_gpu_runs_elsewhere_only_by_name(what, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert commands.main([what]) == 2
    assert "device got None; needs a GPU here, or the name of what to run on" in capsys.readouterr().err


def test_a_table_is_put_back_whatever_happens():
    before = dict(LAUNCH)
    with pytest.raises(ZeroDivisionError), launched_by({"attend": IN_USE, "combine": IN_USE}, "sm90"):
        assert launch_rows("combine", "sm90") == (IN_USE,)
        raise ZeroDivisionError
    assert dict(LAUNCH) == before


def test_neighbours_differ_in_one_field_by_one_step():
    found = neighbours(IN_USE, ("num_warps", "num_stages", "swap"))
    assert found == [
        *(replace(IN_USE, num_warps=n) for n in (2, 8)),
        replace(IN_USE, num_stages=2),
        replace(IN_USE, swap=True),
    ]


@pytest.mark.parametrize(("key", "rows"), LAUNCH.items(), ids=lambda value: str(value)[:24])
def test_a_proposal_is_python_that_gives_the_row(key, rows):
    for row in rows:
        assert eval(pasted(row), {"Launch": Launch}) == row


def test_a_proposal_names_the_table_entry_and_what_it_is_measured_to_be():
    row = Launch(16, 64, 4, 3, chunk=256)
    assert tune.proposal("attend", "sm90", [Trial({"attend": row}, 151.25, 0.947)]) == (
        '("attend", "sm90"): Launch(block_m=16, block_n=64, num_warps=4, num_stages=3, chunk=256),'
        "  # 151.25 us, 94.7%"
    )


def test_rows_are_given_whole_or_as_changes():
    whole = rows_from({"attend": [16, 64, 4, 3], "combine": [1, 16, 4, 3]})
    assert whole == {"attend": Launch(16, 64, 4, 3), "combine": Launch(1, 16, 4, 3)}
    changed = rows_from({"attend": {"num_stages": 2}}, lambda kernel: IN_USE)
    assert changed == {"attend": replace(IN_USE, num_stages=2)}
    assert rows_from(json.loads(tune.as_json(whole))) == whole
    with pytest.raises(InvalidInput, match="attend got"):
        rows_from({"attend": {"depth": 1}}, lambda kernel: IN_USE)


def test_every_kernel_has_a_case_and_fields_that_exist():
    for kernel, usual in KERNELS.items():
        assert any(name == kernel for name, _ in LAUNCH)
        assert tune.usual_case(kernel) == usual.case == commands.suite.row_named(usual.case, CPU).name
        assert all(hasattr(IN_USE, field) for field in usual.vary)
        assert tune.usual_kernel(commands.suite.row_named(usual.case, CPU)) in KERNELS
    with pytest.raises(InvalidInput, match="kernel got conv; needs attend"):
        tune.usual_case("conv")


def test_variants_of_a_case_are_timed_beside_the_table(chip, small, monkeypatch, tmp_path, capsys):
    row = Row("tiny", small("decode", batch=2, context=40))
    monkeypatch.setattr(commands.suite, "row_named", lambda name, device: row)
    variants = tmp_path / "variants.json"
    variants.write_text(json.dumps({"tiny": [{"attend": {"num_stages": 2}}, {"attend": [16, 64, 4, 1]}]}))
    given = ["tune", "--variants", str(variants), "--device", "cpu", "--json", "--record", str(tmp_path)]
    assert commands.main(given) == 0
    record = json.loads(capsys.readouterr().out)
    assert [trial["us"] for trial in record["cases"]["tiny"]] == [5.0, 10.0, None]
    assert record == json.loads((tmp_path / "cpu" / "tune.json").read_text())


def test_without_variants_the_best_row_is_printed_to_paste(chip, small, monkeypatch, capsys):
    monkeypatch.setattr(commands.suite, "row_named", lambda name, device: Row(name, small("decode")))
    assert commands.main(["tune", "--kernel", "attend", "--device", "cpu"]) == 0
    assert '("attend", "cpu"): Launch(block_m=' in capsys.readouterr().out


def test_inputs_are_drawn_once_for_all_rows(chip, small, monkeypatch):
    drawn = []
    monkeypatch.setattr(tune, "drawn_inputs", lambda *args: drawn.append(args) or drawn_inputs(*args))
    climbed(small, rounds=2)
    assert len(drawn) == 1
