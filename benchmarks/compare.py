"""Times other libraries' MLA beside ours: the same call, each judged first, in turns in one run.

    python -m benchmarks.compare --record benchmarks/results
    python -m benchmarks.compare --only 128x16x4096 sparse --libraries FlashMLA

A library that cannot be imported is named with what to install, and one that does not take a case, fails or
is wrong says why; none of that is an error, nor does it cost the others their times.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from anymla.benchmarking.commands import say
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.peers import PEERS, NotTaken, Variants, imported, versions
from anymla.benchmarking.run import ceilings, planned, provenance
from anymla.benchmarking.sample import verified
from anymla.benchmarking.suite import Row, rows_of, write_record
from anymla.benchmarking.timing import captured, time_in_turns
from anymla.benchmarking.workloads import Workload
from anymla.verification.inputs import Inputs

OURS = "anymla"
COMPARED = ("decode", "sparse_decode")
REASON_LETTERS = 300


def ours(call: Inputs, work: Workload) -> Variants:
    """Our call, by the backend that runs it."""
    ready = planned(call, work, "auto")
    return {ready.backend: lambda: ready.run}


def compared(row: Row, here: Mapping[str, ModuleType], device: torch.device, repeats: int) -> dict[str, Any]:
    """One case: ours and every peer's, each way of each judged, then all timed in turns.

    By library the time of its fastest way, also as share of the ceiling that is nearer, or why it has none.
    """
    work = row.work
    call = drawn_inputs(work, device)
    reasons: dict[str, dict[str, str]] = {name: {} for name in (OURS, *here)}
    replays = {}
    for name, refused in reasons.items():
        try:
            ways = ours(call, work) if name == OURS else PEERS[name].bind(here[name], call, work)
        except Exception as error:  # NotTaken, or what a library raises
            refused[""] = _reason(error)
            continue
        for way, ready in ways.items():
            try:
                run = ready()
                verified(call, run()).judgement.require_pass()
                replays[f"{name}\n{way}"] = captured(run, device)
            except Exception as error:  # a wrong result, or what a library raises: no time for it
                refused[way] = _reason(error)
    times = time_in_turns(replays, device, repeats=repeats)
    copy, product = ceilings(device)
    floor = max(work.num_bytes / copy, work.flops / product) * 1e6
    found: dict[str, Any] = {"case": row.name, "workload": work.id}
    for name, refused in reasons.items():
        own = {key.partition("\n")[2]: time for key, time in times.items() if key.startswith(f"{name}\n")}
        figures: dict[str, Any] = {}
        if own:
            variant, timing = min(own.items(), key=lambda item: item[1].median_us)
            share = round(floor / timing.median_us, 4)
            figures |= {"variant": variant, **timing.to_dict(), "share_of_ceiling": share}
            figures["variants_us"] = {way: round(time.median_us, 2) for way, time in own.items()}
        if refused:
            figures["reason"] = "; ".join(f"{way}: {why}" if way else why for way, why in refused.items())
        found[name] = figures
    return found


def attempted(row: Row, here: Mapping[str, ModuleType], device: torch.device, repeats: int) -> dict[str, Any]:
    """As `compared`; a device that a library has left unusable costs that case, not those before it."""
    try:
        return compared(row, here, device, repeats)
    except Exception as error:  # nothing more can be asked of such a device
        return {"case": row.name, "workload": row.work.id, OURS: {"reason": _reason(error)}}


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())[:REASON_LETTERS]
    return words if isinstance(error, NotTaken) else f"{type(error).__name__}: {words}"


def libraries_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a case, by library."""
    return {name: figures for name, figures in case.items() if name not in ("case", "workload")}


def cell(figures: Mapping[str, Any], ours_us: float | None) -> str:
    """A library's figures for the eye: its time, share of the ceiling, and how many times ours it takes."""
    if "median_us" not in figures:
        return "-"
    words = f"{figures['median_us']:.1f} us, {figures['share_of_ceiling']:.0%}"
    ratio = f", {figures['median_us'] / ours_us:.2f} x" if ours_us else ""
    return f"{words}{ratio} ({figures['variant']})" if figures["variant"] else words + ratio


def line(case: Mapping[str, Any]) -> str:
    """A case for the eye, with the reasons of what has no time."""
    found = libraries_of(case)
    ours_us = found[OURS].get("median_us")
    words = []
    for name, figures in found.items():
        why = f" [{figures['reason']}]" if "reason" in figures else ""
        words.append(f"{name} {cell(figures, None if name == OURS else ours_us)}{why}")
    return f"{case['case']}: {'; '.join(words)}"


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    """All cases: our time, and how many times as long as ours each peer takes."""
    names = list(dict.fromkeys(name for case in cases for name in libraries_of(case)))
    lines = [f"| case | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case in cases:
        ours_us = case[OURS].get("median_us")
        cells = [cell(case.get(name, {}), None if name == OURS else ours_us) for name in names]
        lines.append(f"| {case['case']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    """Compare, print, record; 1 if a result of ours is wrong, whatever the others do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write FOLDER/<arch>/compare.json")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="parts of names of cases")
    parser.add_argument("--libraries", nargs="*", default=list(PEERS), choices=list(PEERS), metavar="NAME")
    parser.add_argument("--suite", default="targets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit", default="", help="where this is not a checkout")
    asked = parser.parse_args(given)
    device = torch.device(asked.device)
    rows = [row for row in rows_of(asked.suite, device, asked.only) if row.work.problem.op in COMPARED]
    here, missing = imported({name: PEERS[name] for name in asked.libraries})
    for name, reason in missing.items():
        say(f"{name} is not here: {reason}")
    made, (copy, product) = provenance(device), ceilings(device)
    cases: list[dict[str, Any]] = []
    record = {
        "suite": "compare",
        **made,
        "commit": made["commit"] or asked.commit,
        "libraries": versions(here),
        "missing": missing,
        "copy_bytes_a_second": copy,
        "product_flop_a_second": product,
        "cases": cases,
    }
    for row in rows:
        cases.append(attempted(row, here, device, asked.repeats))
        say(line(cases[-1]))
        if asked.record:
            # After each case: the next library may take the process with it.
            write_record(record, asked.record)
    say(table(cases))
    return int(any("median_us" not in case[OURS] for case in cases))


if __name__ == "__main__":
    raise SystemExit(main())
