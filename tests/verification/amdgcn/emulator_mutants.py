"""Takes instructions out of the decode kernel, one at a time, and sees whether their absence is found.

In a process of its own, `python emulator_mutants.py CHIP [KINDS] [EVERY] [--record FOLDER]`: prints a line of
JSON for each site of some kinds, or every n-th, of each launch row. With --record all that was found goes
into `FOLDER/CHIP`, if nothing was missed but what nothing can depend on.
"""

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from anymla import plans
from anymla.contract import Batch
from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import LAUNCH, Launch, launch_rows
from anymla.verification.amdgcn.checks import Fault
from anymla.verification.amdgcn.conformance import HOW
from anymla.verification.amdgcn.driver import Emulator, OrderMatters, emulated
from anymla.verification.amdgcn.machine import Machine, Step
from anymla.verification.amdgcn.parse import Instruction
from anymla.verification.amdgcn.program import Program
from anymla.verification.amdgcn.rows import row_named
from anymla.verification.batches import take
from anymla.verification.checks import right_answer
from anymla.verification.inputs import Inputs, decode_inputs
from anymla.verification.judge import judge
from anymla.verification.needles import Widths
from anymla.verification.run import made_with

KERNEL = "attend_kernel"
WIDTHS = 128, 64

SINKS = r"tl\.load\(sinks \+ heads, mask=live"
# What is provably redundant: a pattern of the source line, and why nothing can depend on it.
REDUNDANT = {
    "barrier": {r"rows\[:, None\] \+ cols": "each wave overwrites only what it has read itself"},
    "wait": {
        r"tl\.store\((lse \+ row_tokens|part_lse)|weights\.to\(dtype\)": "all waves write the same there, "
        "and each reads only after what it wrote itself"
    },
    "exec": {
        SINKS: "a row that is not live is not stored",
        r"tl\.store\(lse \+ row \* stride_lt \+ head": "every thread stores the same -inf in the same place",
    },
    "mask": {
        SINKS: "a row that is not live is not stored",
        r"for key in range\(start_key": "a block of which no row sees a key changes nothing",
        r"cols = tl\.arange\(0, WIDTH\)|for step in range\(program": "all threads could store it",
    },
}
IDLE = {"wait": "nothing is under way there", "barrier": "LDS was not used since the barrier before"}
"""Why a wait or a barrier is redundant that does nothing in the whole run."""

KINDS = {
    "barrier": r"s_barrier(_wait)?$",
    "half": r"s_barrier_(signal|wait)$",
    "wait": r"s_wait(cnt(_vscnt)?|_(load|store|ds|km)cnt\w*)$",
    "exec": r"\S*(saveexec|v_cmpx)|\S+\s+exec(_lo|_hi)?\b",
    "mask": r"v_cmpx?_\w+_[iu](32|64)$",
}
"""Of a mnemonic, or of the whole text; "half" is either half of a barrier that has two, "barrier" both."""


class Mutants:
    """Decodes through plans, run with an instruction of their attention kernel taken out.

    The lengths end at every place of a block, and tokens of one tile see parts of a block before the last,
    of two blocks and of more. A small scale gives every key about the same weight, so that one too many
    shows. The first call has a query token that belongs to no sequence, the queries of the second end where
    the last tile does not, and the third has but one, in a tile that nobody else has a part of. With the
    heads of the others, other rows of a tile are the first to see a key more, and a tile has one row alone.
    All calls are of one specialisation.
    """

    lens = (100, 0, 37, 61, 1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 31, 45, 50, 56, 17, 33, 65)
    asked = (1, 1, 2, *(1,) * 15, 5, 5, 5)

    def __init__(self, emulator: Emulator, block_m: int) -> None:
        self.emulator = emulator
        first, *others = (
            decode_inputs(Widths(heads, *WIDTHS, sm_scale=0.004), lens, asked, seed=3, sinks="near")
            for heads, lens, asked in (
                (3, self.lens, self.asked),
                (5, (37, 22), (3, 3)),
                (7, (37, 22), (3, 3)),
                (block_m + 1, (5, 20), (1, 1)),
            )
        )
        every, alone = range(len(self.lens)), self.lens.index(5)
        calls = first, take(first, every)[0], take(first, [alone])[0], *others
        self.calls = [(call, self.plan(call), right_answer(call), call.cache.data.clone()) for call in calls]
        self.kernel: Program | None = None

    @staticmethod
    def plan(call: Inputs) -> plans.DecodePlan:
        """A plan of a call, for all that follow."""
        options = call.options
        batch = Batch.of(
            seq_lens=options["seq_lens"],
            block_table=options["block_table"],
            qo_indptr=options["qo_indptr"],
            block_size=call.cache.block_size,
            num_tokens=call.num_rows,
        )
        names = "num_heads", "kv_lora_rank", "qk_rope_head_dim"
        widths = dict(zip(names, (call.shape[1], *WIDTHS), strict=True))
        how = {"sinks": True, "return_lse": True, "backend": "triton"}
        return plans.plan_decode(batch, **widths, **how, q_dtype=torch.bfloat16, kv_format="bf16")

    def shows(self) -> str:
        """What is wrong with the first call that goes wrong, into outputs full of NaN; "" if none does."""
        for call, plan, (exact, runs), kept in self.calls:
            options = call.options
            out = torch.full(call.shape, torch.nan, dtype=torch.bfloat16)
            lse = torch.full(call.shape[:2], torch.nan)
            given = {"sm_scale": options["sm_scale"], "sinks": options["sinks"], "return_lse": True}
            found = judge(plan.run(*call.tensors, **given, out=out, lse=lse), exact, *runs)
            if not torch.equal(call.cache.data.view(torch.int16), kept.view(torch.int16)):
                return "cache"
            if not found.passed:
                return "judge"
        return ""

    def found(self, site: Sequence[int], orders: tuple[str, ...]) -> str:
        """How missing instructions show, "" if they do not."""

        def edit(kernel: Program) -> Program:
            if kernel.launch.name != KERNEL:
                return kernel
            assert self.kernel is not None and kernel.text is self.kernel.text
            return kernel.without(*site)

        self.emulator.edit, self.emulator.orders = edit, orders
        try:
            return self.shows()
        except (Fault, OrderMatters) as fault:
            return type(fault).__name__
        finally:
            for call, _, _, kept in self.calls:
                call.cache.data.copy_(kept)


def sites(steps: Sequence[Step], kind: str) -> list[tuple[int, ...]]:
    """Which instructions are taken out together, the one that names the site last."""
    pattern, found = re.compile(KINDS[kind]), list[tuple[int, ...]]()
    for index, step in enumerate(steps):
        mnemonic, text = step.instruction.mnemonic, step.instruction.text
        if pattern.match(text if kind == "exec" else mnemonic):
            halves = kind == "barrier" and mnemonic == "s_barrier_wait"
            signals = (i for i in range(index, -1, -1) if halves and steps[i].flow == "signal")
            found.append((next(signals), index) if halves else (index,))
    return found


def check_mutants(chip: str, row: Launch, kinds: Sequence[str], every: int) -> Iterator[dict[str, Any]]:
    """Every site of some kinds, or every n-th, of a launch row's kernel, and how its absence is found."""
    only = mock.patch.dict(LAUNCH, {("attend", chip): (row,)})
    with emulated(chip, units=4) as emulator, only, _watched() as busy:
        mutants = Mutants(emulator, row.block_m)

        def look(kernel: Program) -> Program:
            if kernel.launch.name == KERNEL:
                mutants.kernel = kernel
            return kernel

        emulator.edit = look
        assert not mutants.shows() and mutants.kernel is not None
        emulator.most = 200_000
        steps = mutants.kernel.launch.steps
        for kind in kinds:
            for site in sites(steps, kind)[::every]:
                instruction = steps[site[-1]].instruction
                source = _of_region(steps, site[-1]).source
                line = _source_line(source)
                if kind == "mask" and re.search(r"//|%", line):
                    # A step of a division, no mask.
                    continue
                orders = ("lockstep", "forward", "reverse") if kind == "barrier" else ("lockstep",)
                found = mutants.found(site, orders)
                why = next((why for rx, why in REDUNDANT.get(kind, {}).items() if re.search(rx, line)), "")
                if kind in IDLE and instruction.line not in busy:
                    why = IDLE[kind]
                yield {
                    "row": row_named("attend", row),
                    "kind": kind,
                    "text": instruction.text,
                    "at": f"{source} {line}",
                    "found": found,
                    "redundant": why,
                }


def _of_region(steps: Sequence[Step], index: int) -> Instruction:
    """The instruction whose source line a site goes by: of a comparison that sets the execution mask, the one
    that kept the mask before it, for what is done under it."""
    before = steps[index - 1].instruction
    kept = steps[index].instruction.mnemonic.startswith("v_cmpx") and "exec" in before.text
    return before if kept else steps[index].instruction


@contextmanager
def _watched() -> Iterator[set[int]]:
    """The lines of waits that something landed at, and of barriers with accesses to LDS before them."""
    seen: set[int] = set()
    wait, meet = Machine.wait, Machine._end_of_epoch

    def watching(machine: Machine, counter: str, most: int) -> None:
        before = machine.group.flights
        wait(machine, counter, most)
        if machine.group.flights != before and machine.launch.name == KERNEL:
            seen.add(machine.step.instruction.line)

    def meeting(machine: Machine) -> None:
        if machine.journal.entries and machine.launch.name == KERNEL:
            place = machine.workgroup_of
            using = {g for entry in machine.journal.entries for g in np.unique(place[entry.waves]).tolist()}
            for group in machine._waiting:
                if not using.isdisjoint(place[group.waves].tolist()):
                    seen.add(machine.launch.steps[group.pc - 1].instruction.line)
        meet(machine)

    with mock.patch.object(Machine, "wait", watching), mock.patch.object(Machine, "_end_of_epoch", meeting):
        yield seen


def _source_line(source: str) -> str:
    from anymla.backends import triton_mla

    name, _, number = source.partition(":")
    path = Path(next(iter(triton_mla.__path__))) / (name or "?")
    lines = path.read_text().splitlines() if path.exists() else []
    return lines[int(number) - 1].strip() if 0 < int(number or 0) <= len(lines) else ""


def record(chip: str, facts: Sequence[dict[str, Any]], seconds: float, folder: Path, commit: str) -> Path:
    """Write down what was taken out, how it was found, and what nothing can depend on."""
    missed = [fact for fact in facts if not fact["found"] and not fact["redundant"]]
    assert not missed, missed
    unseen = [fact for fact in facts if not fact["found"]]
    reasons = Counter((fact["row"], fact["kind"], fact["redundant"], fact["at"]) for fact in unseen)
    kinds = dict.fromkeys(fact["kind"] for fact in facts)
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        **made_with("torch", "triton"),
        **({"commit": commit} if commit else {}),
        "backend": "triton",
        "arch": chip,
        "device": f"emulator of {ARCHES[chip].part}",
        "how": f"each instruction taken out of {KERNEL} in turn; {HOW}",
        "seconds": round(seconds, 1),
        "rows": list(dict.fromkeys(fact["row"] for fact in facts)),
        "found": {
            kind: dict(Counter(f["found"] for f in facts if f["kind"] == kind and f["found"]))
            for kind in kinds
        },
        "redundant": [
            {"row": row, "kind": kind, "count": count, "at": at, "because": why}
            for (row, kind, why, at), count in sorted(reasons.items())
        ],
    }
    path = folder / chip / "triton_mutants.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    return path


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("chip")
    parser.add_argument("kinds", nargs="?", default=",".join(KINDS))
    parser.add_argument("every", nargs="?", type=int, default=1)
    parser.add_argument("--row", type=int, help="only this launch row, counted from 0")
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", default="", help="of what is run, where that is no checkout")
    asked = parser.parse_args()
    facts, began = [], time.monotonic()
    rows = launch_rows("attend", asked.chip)
    for row in rows if asked.row is None else [rows[asked.row]]:
        for fact in check_mutants(asked.chip, row, asked.kinds.split(","), asked.every):
            facts.append(fact)
            print(json.dumps(fact), flush=True)
    if asked.record:
        print(record(asked.chip, facts, time.monotonic() - began, asked.record, asked.commit))


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    main()
