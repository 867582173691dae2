#!/usr/bin/env python3
"""Run the whole product against the double, and count.

    python tests/backends/aiter/product.py --processes 16 --record evidence/aiter_product.json

A run depends on its release through what the adapter makes of the call (its verdict, routes and knobs), and
through what the double and the adapter's bindings ask of the record, all of which is known after one run.
Releases that are alike in the first and answer the second alike are not run again but counted: one run stands
for all of them. To see that this holds, some that were stood for are drawn by lot and run all the same.
"""

import argparse
import collections
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

import cases  # noqa: E402
import pytest  # noqa: E402
from cases import Case  # noqa: E402
from double import AiterDouble  # noqa: E402
from double_record import Record  # noqa: E402
from double_stages import Aborted  # noqa: E402
from torch import Tensor  # noqa: E402

from anymla import select  # noqa: E402
from anymla.backends.aiter_mla import facts  # noqa: E402
from anymla.backends.aiter_mla.bindings import Binding  # noqa: E402
from anymla.backends.aiter_mla.manifest import route_of  # noqa: E402
from anymla.backends.aiter_mla.provider import aiter_of  # noqa: E402
from anymla.verification.run import made_with  # noqa: E402


def calls() -> Iterator[tuple[Case, list[str]]]:
    """Each call of the product without its release and lengths, and the names of its lengths."""
    found: dict[Case, list[str]] = {}
    first = facts.releases()[0]
    for case in cases.product([first]):
        found.setdefault(replace(case, release="", lengths=""), []).append(case.lengths)
    yield from found.items()


def view(case: Case) -> tuple[object, ...]:
    """All that the adapter makes of a call with one release, after whether it takes it.

    What its code object's bytes are called is left out: the double is asked which faults they have.
    """
    problem, machine = cases.problem_of(case), cases.machine_of(case)
    # That of one backend: to ask the others 200,000 times would take a third of all.
    verdict = select._verdict("aiter", problem, machine, ())
    if verdict.reasons:
        return "refused", *(nameless(reason, case.release) for reason in verdict.reasons)
    aiter = aiter_of(machine)
    routes = []
    for q_len in dict.fromkeys((1, case.q_len)):
        route, _ = route_of(problem, aiter, q_len)
        routes.append(route and (route.call._replace(digest=""), tuple(sorted(route.knobs.items()))))
    return "taken", tuple(routes), tuple(sorted(verdict.knobs.items()))


def nameless(reason: str, release: str) -> str:
    """A reason without the release that it names."""
    return reason.replace(f"aiter {release}", "this AITER")


def kind_of(reason: str) -> str:
    """A reason without the head count, for counting."""
    return re.sub(r", \d+ heads", "", reason)


class Count:
    """What came out.

    Attributes:
        outcomes: "right", "wrong", "aborted", or the reason of a refusal, to how many cases.
        runs: How many were run; each stands for the releases that nothing in it tells apart.
        again: How many that were stood for were run all the same.
    """

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.runs = self.again = 0

    def __add__(self, other: "Count") -> "Count":
        both = Count()
        both.outcomes = self.outcomes + other.outcomes
        both.runs, both.again = self.runs + other.runs, self.again + other.again
        return both

    def add(
        self, case: Case, members: list[str], chance: random.Random, share: float, times: int = 1
    ) -> None:
        """Run one of some releases that have the same view, and those that it does not stand for."""
        while members:
            first, *others = members
            outcome, record = outcome_of(replace(case, release=first))
            alike = [one for one in others if Record(one, case.arch).answers_like(record.asked)]
            members = [release for release in others if release not in alike]
            self.runs += 1
            self.outcomes[outcome] += times * (1 + len(alike))
            if alike and chance.random() < share:
                other = chance.choice(alike)
                again, _ = outcome_of(replace(case, release=other))
                assert again == outcome, f"{case}: {first} is {outcome}, {other} is {again}"
                self.again += 1


def outcome_of(case: Case) -> tuple[str, Record]:
    """What comes of a case, and what was asked of its release."""
    double = AiterDouble(case.release, case.arch, cases.UNITS)
    with pytest.MonkeyPatch.context() as patch:
        note_bindings(double.record, patch)
        try:
            said = cases.run_with(double, case, patch)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            print(f"{case}: {type(error).__name__}: {error}", flush=True)
            return "aborted" if isinstance(error, Aborted) else "wrong", double.record
    if said == "right":
        return said, double.record
    # The adapter refused by what is in its view; nothing of the double decided it.
    reasons = said.splitlines()[1].partition(": ")[2].split("; ")
    words = "; ".join(kind_of(nameless(reason, case.release)) for reason in reasons)
    return words, Record(case.release, case.arch)


def note_bindings(record: Record, patch: pytest.MonkeyPatch) -> None:
    """Have what the adapter asks of its bindings noted too."""
    takes, arguments = Binding.takes, Binding.arguments

    def noted_takes(self: Binding, name: str) -> bool:
        record.takes(self.function, name)
        return takes(self, name)

    def noted_arguments(self: Binding, **ours: Any) -> dict[str, Any]:
        told = [(name, "..." if isinstance(value, Tensor) else value) for name, value in ours.items()]
        record.arguments(self.function, *told)
        return arguments(self, **ours)

    patch.setattr(Binding, "takes", noted_takes)
    patch.setattr(Binding, "arguments", noted_arguments)


def count_part(part: int, parts: int, again: float) -> Count:
    """Run a part of the calls.

    Args:
        part, parts: Which, from 1, of how many.
        again: Share of those stood for that is run too.
    """
    began, chance, count = time.monotonic(), random.Random(part), Count()
    mine = list(calls())[part - 1 :: parts]
    for at, (call, lengths) in enumerate(mine, start=1):
        views: dict[tuple[object, ...], list[str]] = {}
        for release in cases.releases():
            views.setdefault(view(replace(call, release=release, lengths=lengths[0])), []).append(release)
        for seen, members in views.items():
            # A refusal comes before any length is looked at.
            for name in lengths if seen[0] == "taken" else lengths[:1]:
                times = 1 if seen[0] == "taken" else len(lengths)
                count.add(replace(call, lengths=name), list(members), chance, again, times)
        if at % 20 == 0 or at == len(mine):
            done = f"{at} of {len(mine)} calls, {sum(count.outcomes.values())} cases by {count.runs} runs"
            print(f"part {part} of {parts}, {time.monotonic() - began:.0f} s: {done}", flush=True)
    return count


def main() -> int:
    """Run, print every case that is wrong, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="only which part of how many")
    parser.add_argument("--processes", type=int, default=1, help="how many share it")
    parser.add_argument("--again", type=float, default=0.02, help="share of those stood for that is run too")
    parser.add_argument("--record", type=Path, help="where to write what came out, if nothing was wrong")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    began, share = time.monotonic(), options.processes
    mine = [(part + parts * at, parts * share, options.again) for at in range(share)]
    with ProcessPoolExecutor(share) as pool:
        count = sum(pool.map(count_part, *zip(*mine, strict=True)), start=Count())
    found = report(count, began)
    print(json.dumps(found, indent=2, ensure_ascii=False))
    failed = count.outcomes["wrong"] + count.outcomes["aborted"]
    if options.record and not failed:
        options.record.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return int(failed > 0)


def report(count: Count, began: float) -> dict[str, object]:
    """What is recorded."""
    counts = count.outcomes
    refused = {name: n for name, n in counts.most_common() if name not in ("right", "wrong", "aborted")}
    with_tables = [release for release in cases.releases() if facts.recorded_dispatch(release)]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        **made_with("torch"),
        "how": "the adapter against a contract double of AITER, not on hardware",
        "releases": len(cases.releases()),
        "releases_with_kernel_tables": len(with_tables),
        "cases": sum(counts.values()),
        "runs": count.runs,
        "runs_again_for_releases_stood_for": count.again,
        "right": counts["right"],
        "refused": sum(refused.values()),
        "wrong": counts["wrong"],
        "aborted": counts["aborted"],
        "seconds": round(time.monotonic() - began),
        "refused_by_reason": refused,
    }


if __name__ == "__main__":
    raise SystemExit(main())
