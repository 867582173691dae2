#!/usr/bin/env python3
"""Run the whole product, or what fits into some time, against the double, and count.

    python tests/backends/aiter/product.py --seconds 600 --part 1/2

Cases come in an order that is shuffled once, so a run that ends early is a sample of all of it. Releases that
differ in nothing that the adapter or the double looks at stand for one another.
"""

import argparse
import collections
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

import cases  # noqa: E402
import pytest  # noqa: E402

from anymla.backends.aiter_mla import bindings, facts  # noqa: E402

TURNS = ("0.1.10.post2", "0.1.11.post1", "0.1.12", "0.1.13.dev0", "0.1.14rc0", "0.1.15rc0")
TURNS += ("0.1.17rc0", "0.1.17longctx", "0.1.19", "0.1.20")
"""Releases from which on something is different that no table shows."""


def alike() -> dict[str, str]:
    """The release that stands for each one."""
    first: dict[object, str] = {}
    order = facts.releases()
    found = {}
    for release in order:
        tables = tuple(facts.recorded_kernels(release, arch) for arch in ("gfx942", "gfx950"))
        taken = tuple(facts.recorded_parameters(name, release) for name in bindings.DECODE)
        turns = sum(order.index(release) >= order.index(turn) for turn in TURNS)
        key = (facts.recorded_dispatch(release), tables, taken, facts.recorded_reducers(release, 512), turns)
        found[release] = first.setdefault(key, release)
    return found


def main() -> int:
    """Run, print every case that is wrong, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--part", default="1/1", help="which part of how many, to run several at once")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    stands = set(alike().values())
    everything = [case for case in cases.product() if case.release in stands]
    random.Random(0).shuffle(everything)
    mine, end = everything[part - 1 :: parts], time.monotonic() + options.seconds
    counts: collections.Counter[str] = collections.Counter()
    for case in mine:
        if time.monotonic() > end:
            break
        with pytest.MonkeyPatch.context() as patch:
            try:
                outcome = "right" if cases.run(case, patch) == "right" else "refused"
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcome = "wrong"
                print(f"{case}: {type(error).__name__}: {error}", flush=True)
        counts[outcome] += 1
    done = sum(counts.values())
    print(f"{len(stands)} releases stand for {len(alike())}; {done} of {len(mine)} cases: {dict(counts)}")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
