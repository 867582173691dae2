"""`python -m anymla.benchmarking`: suites without the command line's packages, one call on a bare machine."""

import argparse
from pathlib import Path

import torch

from anymla.benchmarking import suite
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.run import planned


def main() -> int:
    """Run a suite, or compile one of its cases; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m anymla.benchmarking", description=__doc__)
    parser.add_argument("what", choices=(*suite.SUITES, "compile"))
    parser.add_argument("case", nargs="?", default="", help="of compile")
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="parts of names of cases")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--commit", default="", help="where this is not a checkout")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.what == "compile":
        compile_case(arguments.case, device, arguments.backend)
        return 0
    found = suite.run_suite(
        arguments.what,
        device,
        backend=arguments.backend,
        only=arguments.only,
        repeats=arguments.repeats,
        processes=arguments.processes,
        commit=arguments.commit,
        say=lambda line: print(line, flush=True),
    )
    if arguments.record:
        print(suite.write_record(found, arguments.record))
    print(suite.summary(found), flush=True)
    return int(not all(case["passed"] for case in found["cases"]))


def compile_case(name: str, device: torch.device, backend: str) -> None:
    """Run a case once, so that its kernels are in the compiler's cache."""
    work = suite.row_named(name, device).work
    planned(drawn_inputs(work, device), work, backend).run()
    if device.type != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    raise SystemExit(main())
