"""Suites and launch rows without the command line's packages: one call on a bare machine.

python -m anymla.benchmarking targets --record FOLDER
python -m anymla.benchmarking sweep --record FOLDER --only 128x
python -m anymla.benchmarking tune --kernel combine --case 1x16x65536
python -m anymla.benchmarking tune --variants '{"128x16x4096": [{"attend": {"num_stages": 2}}]}'
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from anymla.benchmarking import suite, tune
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.run import planned, provenance
from anymla.errors import InvalidInput
from anymla.hardware.probe import this_machine


def main(given: list[str] | None = None) -> int:
    """Run a suite, try launch rows, or compile one case.

    Args:
        given: Arguments. None: those of the process.

    Returns:
        1 if a result is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m anymla.benchmarking",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=(*suite.SUITES, "tune", "compile"))
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write FOLDER/<arch>/<what>.json")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="parts of names of cases")
    parser.add_argument("--kernel", help="of tune: a kernel of hardware/launch.py")
    parser.add_argument("--case", help="of tune and compile")
    parser.add_argument("--variants", help="of tune, JSON or a file of it: rows to time for each case")
    parser.add_argument("--rows", type=json.loads, default={}, help="of compile, JSON: a row for each kernel")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", help="default: a GPU")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--processes", type=int, help="that compile at a time; default: one a core")
    parser.add_argument("--commit", default="", help="where this is not a checkout")
    parser.add_argument("--json", action="store_true", help="print the record, and nothing else")
    arguments = parser.parse_args(given)
    try:
        run = {"tune": run_tune, "compile": run_compile}.get(arguments.what, run_suite)
        return run(arguments, _device(arguments.device))
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2


def _device(name: str | None) -> torch.device:
    """The device of a name, or a GPU: what is sized for one would take hours elsewhere, unasked."""
    if name is None and not torch.cuda.is_available():
        raise InvalidInput("bench", ["device got None; needs a GPU here, or the name of what to run on"])
    return torch.device(name or "cuda")


def run_suite(asked: Any, device: torch.device) -> int:
    """Run a suite, print and record it."""
    tell = _silent if asked.json else say
    found = suite.run_suite(
        asked.what,
        device,
        backend=asked.backend,
        only=asked.only,
        repeats=asked.repeats,
        processes=asked.processes,
        commit=asked.commit,
        say=tell,
    )
    _keep(found, asked)
    tell(suite.summary(found))
    return int(not all(case["passed"] for case in found["cases"]))


def run_tune(asked: Any, device: torch.device) -> int:
    """Try launch rows: those given, else a climb from the one in use."""
    processes = asked.processes if asked.processes is not None else os.cpu_count() or 1
    arch, found, tell = this_machine(device).arch, {}, _silent if asked.json else say
    if asked.variants:
        # A name of a file is never an object.
        is_json = asked.variants.lstrip().startswith("{")
        text = asked.variants if is_json else Path(asked.variants).read_text()
        for name, variants in json.loads(text).items():
            row = suite.row_named(name, device)
            tune.check_tunable(row, device, asked.backend)
            call = drawn_inputs(row.work, device)

            def in_use(kernel: str, row: Any = row, call: Any = call) -> Any:
                return tune.row_in_use(row, call, kernel, asked.backend, arch)

            rows = [{}, *(tune.rows_from(variant, in_use) for variant in variants)]
            found[name] = tune.compared(
                row, call, rows, device, asked.backend, asked.repeats, processes, tell
            )
    else:
        name = asked.case or tune.usual_case(asked.kernel or "attend")
        row = suite.row_named(name, device)
        tune.check_tunable(row, device, asked.backend)
        kernel = asked.kernel or tune.usual_kernel(row)
        options = {"backend": asked.backend, "repeats": asked.repeats, "processes": processes, "say": tell}
        found[name] = tune.tune(row, kernel, device, **options)
        tell(f"fastest for {name}:\n    {tune.proposal(kernel, arch, found[name])}")
    made = provenance(device)
    trials = {name: [trial.to_dict() for trial in tried] for name, tried in found.items()}
    _keep({"suite": "tune", **made, "commit": made["commit"] or asked.commit, "cases": trials}, asked)
    return 0


def run_compile(asked: Any, device: torch.device) -> int:
    """Run a case once, so that its kernels are in the compiler's cache."""
    work = suite.row_named(asked.case, device).work
    with tune.launched_by(tune.rows_from(asked.rows), this_machine(device).arch):
        planned(drawn_inputs(work, device), work, asked.backend).run()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    return 0


def _keep(record: dict[str, Any], asked: Any) -> None:
    """Write and print a record, where that was asked for."""
    if asked.record:
        path = suite.write_record(record, asked.record)
        print(path, file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps(record))


def _silent(line: str) -> None:
    """Say nothing: only the record is wanted."""


def say(line: str) -> None:
    """Print at once, also where output is a file."""
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
