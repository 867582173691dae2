"""The conformance matrix of a chip that is not there: compiled for it, and executed on the emulator.

Each chip has processes of its own, because Triton keeps what it built for the first target of a process.
"""

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

import torch

from anymla.errors import AnyMLAError, InvalidInput
from anymla.hardware.arches import ARCHES
from anymla.hardware.probe import Machine, this_machine
from anymla.problem import OPS
from anymla.verification.amdgcn.driver import CHIPS, emulated
from anymla.verification.amdgcn.rows import RowCase, check_row, row_cases, row_names, rows_taken
from anymla.verification.cases import Case, cases
from anymla.verification.checks import check_case
from anymla.verification.judge import Judgement, wrong
from anymla.verification.run import Outcome, Progress, Report

BACKEND = "triton"
"""The backend whose kernels are executed."""

HOW = "executed on the emulator, not on hardware"
"""What evidence says."""

UNITS = 8
"""Compute units of the emulated chip: enough to cut every batch, few enough to be quick."""

LONGEST = 130
"""Tokens of a sequence, at most: more than two blocks of keys of any launch row."""

MOST_ROWS = 320
"""Heads times query tokens of a sequence, at most."""

QUICK = {"decode": 7, "sparse_decode": 4, "prefill": 4, "write_cache": 4, "index_topk": 3}
"""Cases of each operation of a quick run."""


def small_cases(machine: Machine, *, quick: bool = False) -> tuple[Case, ...]:
    """The cases that are executed, with lengths that an emulator can take.

    Args:
        machine: The chip.
        quick: Only a few of each operation.
    """
    by_op: dict[str, list[Case]] = defaultdict(list)
    for case in cases(BACKEND, machine, quick=True):
        problem = case.problem
        if case.check != "refusal" and problem.num_heads * problem.q_len <= MOST_ROWS:
            lens = case.seq_lens and tuple(min(n, LONGEST) for n in case.seq_lens)
            by_op[problem.op].append(replace(case, seq_lens=lens))
    chosen = []
    for op, found in by_op.items():
        count = QUICK.get(op, 0) if quick else len(found)
        chosen += [found[i * len(found) // count] for i in range(count)] if found else []
    return tuple(chosen)


def verify(
    chip: str,
    *,
    quick: bool = False,
    only_rows: bool = False,
    op: str = "",
    processes: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Execute the matrix on the emulator, and every launch row, in processes of its own.

    Args:
        chip: One of CHIPS.
        quick: See `small_cases` and `row_cases`.
        only_rows: Leave the matrix out.
        op: One of OPS: only launch rows, by calls of this operation. Empty: all.
        processes: How many share the cases.
        progress: Told after each case.

    Returns:
        The report; its extent says that it is the emulator's, and how many cases took each launch row.

    Raises:
        InvalidInput: the chip is none that the emulator has.
        AnyMLAError: a process broke; the message ends with what it said last.
    """
    if chip not in CHIPS:
        raise InvalidInput("verify", [f"machine got {chip!r}; needs one of {', '.join(CHIPS)}"])
    if op not in ("", *OPS):
        raise InvalidInput("verify", [f"op got {op!r}; needs one of {', '.join(OPS)}"])
    only_rows = only_rows or bool(op)
    began, lock, done, taken = time.monotonic(), Lock(), [0], Counter[str]()

    def told(total: int, what: str) -> None:
        with lock:
            done[0] += 1
            if progress:
                progress(min(done[0], total), total, what)

    def share(part: int) -> list[Outcome]:
        how = map(int, (quick, only_rows, part, processes))
        command = [sys.executable, "-m", __package__ or "", chip, op, *map(str, how)]
        found: list[Outcome] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stderr is not None
            for line in child.stdout:
                if line.startswith("{"):
                    fact = json.loads(line)
                    told(fact["total"], fact["name"])
                    judged = Judgement(fact["share"], fact["where"], tuple(fact["reasons"]))
                    found.append(Outcome(fact["name"], fact["op"], judged))
                    with lock:
                        taken.update(fact["rows"])
            said = child.stderr.read()
        if child.returncode:
            last = "\n".join(said.strip().splitlines()[-8:])
            raise AnyMLAError(f"the emulator of {chip} got exit code {child.returncode}: {last}")
        return found

    with ThreadPoolExecutor(processes) as pool:
        outcomes = [outcome for part in pool.map(share, range(processes)) for outcome in part]
    missing = [name for name in row_names(chip, op) if not taken[name]]
    outcomes += [Outcome(name, "launch row", wrong("it was never executed")) for name in missing]
    machine = Machine(chip, device_name=f"emulator of {ARCHES[chip].part}", multiprocessors=UNITS)
    extent: dict[str, Any] = {"quick": quick, "how": HOW, "launch_rows": dict(sorted(taken.items()))}
    if only_rows:
        extent = {"only": "launch rows", **({"op": op} if op else {}), **extent}
    return Report(BACKEND, machine, extent, tuple(outcomes), (), time.monotonic() - began)


def main(arguments: Sequence[str]) -> None:
    """One process: chip, operation or "", whether quick, whether rows alone, which part of how many.

    It prints a line of JSON a case.
    """
    (chip, op), (quick, only_rows, part, parts) = arguments[:2], map(int, arguments[2:])
    torch.set_num_threads(1)
    with emulated(chip, orders=("lockstep", "reverse"), units=UNITS) as emulator:
        machine, device = this_machine(torch.device("cpu")), torch.device("cpu")
        found: list[Case | RowCase] = [] if only_rows else [*small_cases(machine, quick=bool(quick))]
        found += row_cases(machine, op, quick=bool(quick))
        for item in found[part::parts]:
            emulator.launches.clear()
            if isinstance(item, RowCase):
                case, judged = item.case, check_row(item, BACKEND, machine, emulator)
            else:
                case, judged = item, check_case(item, BACKEND, machine, device)
            fact = {"name": item.id, "op": case.problem.op, "total": len(found), "share": judged.share}
            fact |= {"where": judged.where, "reasons": judged.reasons}
            print(json.dumps({**fact, "rows": sorted(rows_taken(emulator.launches, chip))}), flush=True)
