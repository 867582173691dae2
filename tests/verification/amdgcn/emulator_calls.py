"""Run in a process of its own, `python emulator_calls.py CHIP WHAT`: prints a line of JSON for each check.

"api" makes the public calls on CPU tensors as on that chip, each in two orders of the waves and judged;
"dots" multiplies matrices of every type and size that the chip has instructions for; "mutants" takes
instructions out of the decode kernel, one at a time.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from anymla import api, plans, quantise_queries
from anymla.contract import Batch
from anymla.hardware.arches import ARCHES
from anymla.verification.amdgcn.checks import Fault
from anymla.verification.amdgcn.driver import Emulator, OrderMatters, emulated
from anymla.verification.amdgcn.program import Program
from anymla.verification.checks import judge_ids, right_answer, run_call
from anymla.verification.inputs import (
    Inputs,
    decode_inputs,
    index_inputs,
    prefill_inputs,
    sparse_inputs,
    write_inputs,
)
from anymla.verification.judge import Judgement, judge, judge_written, together
from anymla.verification.needles import Widths

WIDE, NARROW = Widths(20, 512, 64, 128, 128, 0.07), Widths(20, 128, 64, 64, 48, 0.09)
RAGGED = (100, 0, 33, 64), (1, 1, 4, 2)


def fp8_of(chip: str) -> str:
    """The fp8 cache format that the chip's own is."""
    return f"fp8_{ARCHES[chip].fp8_flavour}"


def api_calls(chip: str) -> Iterator[tuple[str, Inputs]]:
    """Ragged lengths, an empty sequence, 20 heads, sinks; every operation, page size and kind of format."""
    bf16 = {"q_dtype": torch.bfloat16, "sinks": "infinite", "poison": "nan"}
    yield "decode bf16 page 64", decode_inputs(WIDE, *RAGGED, block_size=64, **bf16)
    yield "decode bf16 page 16", decode_inputs(NARROW, *RAGGED, block_size=16, seed=1, **bf16)
    yield "decode fp8 page 1", decode_inputs(NARROW, *RAGGED, block_size=1, kv_format=fp8_of(chip), **bf16)
    yield (
        "decode 656 bytes page 64",
        decode_inputs(WIDE, *RAGGED, block_size=64, kv_format="fp8_ds_mla", **bf16),
    )
    fp16 = {**bf16, "q_dtype": torch.float16}
    yield "sparse fp16 page 16", sparse_inputs(NARROW, 90, 64, 6, block_size=16, kv_format="fp16", **fp16)
    yield (
        "sparse 656 bytes page 64",
        sparse_inputs(WIDE, 90, 40, 6, block_size=64, kv_format="fp8_ds_mla", **bf16),
    )
    few = replace(NARROW, num_heads=3)
    yield (
        "prefill page 16",
        prefill_inputs(few, (70, 0, 33), (3, 40, 1), block_size=16, kv_format=fp8_of(chip), **bf16),
    )
    keys = "index_k" + ("_fnuz" if fp8_of(chip).endswith("fnuz") else "")
    chosen = index_inputs(20, 128, *RAGGED, 9, kv_format=keys)
    q, weights, cache = chosen.tensors
    chosen = replace(chosen, tensors=(*quantise_queries(q, weights, kv_format=keys), cache))
    yield "index fp8 with fp8", chosen
    yield "write fp8", write_inputs(512, 64, 13, kv_format=fp8_of(chip), block_size=16)
    yield "write 656 bytes", write_inputs(512, 64, 13, kv_format="fp8_ds_mla", block_size=64)


def check_api(chip: str) -> Iterator[dict[str, Any]]:
    """Each call through the public functions, with its share of the budget."""
    with emulated(chip, orders=("lockstep", "reverse"), units=8) as emulator:
        for name, call in api_calls(chip):
            emulator.launches.clear()
            if call.op == "write_cache":
                kv_c, k_pe, cache, slots = call.tensors
                api.write_cache(*call.tensors, backend="triton")
                kept = slots >= 0
                expected = cache.read(slots[kept], dtype=torch.float64)
                found = judge_written(expected, _written(call)[kept], torch.cat((kv_c, k_pe), -1)[kept])
            elif call.op == "index_topk":
                found = judge_ids(call, run_call(call, "triton"))
            else:
                exact, runs = right_answer(call)
                found = judge(run_call(call, "triton"), exact, *runs)
            kernels = sorted({launch.kernel for launch in emulator.launches})
            yield {"name": name, "share": found.share, "reasons": found.reasons, "kernels": kernels}


def _written(call: Inputs) -> torch.Tensor:
    from anymla import reference

    return reference.write_cache(*call.tensors)


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, CAST: tl.constexpr):
    rows, cols, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + rows[:, None] * K + depth[None, :])
    y = tl.load(b + depth[:, None] * N + cols[None, :])
    tl.store(c + rows[:, None] * N + cols[None, :], tl.dot(x, y, input_precision=CAST))


DOT_TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "bf8_e4m3fn": torch.float8_e5m2,
    "bf8_e4m3fnuz": torch.float8_e5m2fnuz,
}


def check_dots(chip: str) -> Iterator[dict[str, Any]]:
    """Products of small whole numbers, which every type and order of sums has exactly."""
    own = fp8_of(chip)
    kinds = ["bf16", "fp16", "fp32"]
    if ARCHES[chip].has_fp8:
        kinds += [own, own.replace("fp8_", "bf8_")]
    shapes = [(16, 16, 128, 1), (32, 32, 64, 1), (64, 32, 128, 2), (64, 64, 64, 4), (128, 64, 64, 8)]
    with emulated(chip, orders=("lockstep", "forward")) as emulator:
        for kind in kinds:
            for m, n, k, warps in shapes:
                rng = torch.Generator().manual_seed(m + n)
                a, b = (torch.randint(-3, 4, s, generator=rng).float() for s in ((m, k), (k, n)))
                c = torch.empty(m, n)
                emulator.launches.clear()
                x, y = (t.to(DOT_TYPES[kind]) for t in (a, b))
                nonk = 32 if min(m, n) >= 32 and ARCHES[chip].wave_size == 64 else 16
                dot_kernel[(1,)](x, y, c, m, n, k, "ieee", num_warps=warps, matrix_instr_nonkdim=nonk)
                used = [name for name in emulator.launches[0].executed if re.match("v_(mfma|wmma)", name)]
                right = torch.equal(c, a @ b)
                yield {"name": f"{kind} {m}x{n}x{k} {warps} waves", "right": right, "instructions": used}


# What is provably redundant: a pattern of the source line, and why nothing can depend on it.
REDUNDANT = {
    "barrier": {r"rows\[:, None\] \+ cols": "each wave overwrites only what it has read itself"},
    "exec": {
        r"tl\.load\(sinks \+ heads, mask=live": "a row that is not live is not stored",
        r"tl\.store\(lse \+ row \* stride_lt \+ head": "every thread stores the same -inf in the same place",
    },
    "mask": {
        r"for key in range\(start_key": "a block of which no row sees a key changes nothing",
        r"cols = tl\.arange\(0, WIDTH\)|for step in range\(program": "all threads could store it",
    },
}
IDLE = {"wait": "nothing is under way there", "barrier": "LDS was not used since the barrier before"}
"""Why a wait or a barrier is redundant that does nothing in the whole run."""
KINDS = {
    "barrier": lambda mnemonic, text: mnemonic == "s_barrier",
    "wait": lambda mnemonic, text: mnemonic == "s_waitcnt",
    "exec": lambda mnemonic, text: "saveexec" in mnemonic or bool(re.match(r"\S+\s+exec\b", text)),
    "mask": lambda mnemonic, text: bool(re.match(r"v_cmp_.*_[iu](32|64)$", mnemonic)),
}


class Mutants:
    """A decode through a plan, run with an instruction of its attention kernel taken out.

    The lengths end at every place of a block, and tokens of one tile see parts of a block before the last.
    A small scale gives every key about the same weight, so that one too many shows. Of two calls, one has a
    query token that belongs to no sequence, and the queries of the other end where the last tile does not.
    """

    lens = (100, 0, 37, 61, 1, 2, 3, 5, 7, 9, 31, 45, 50, 56, 33, 65)
    asked = (1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 5)

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        widths = Widths(3, 128, 64, sm_scale=0.004)
        call = decode_inputs(widths, self.lens, self.asked, seed=3, block_size=16, sinks="near")
        ql_nope, q_pe, cache = call.tensors
        rows = call.num_rows - 1
        tensors = ql_nope[:rows].clone(), q_pe[:rows].clone(), cache
        tight = replace(call, tensors=tensors, num_rows=rows, shape=(rows, *call.shape[1:]))
        self.calls = [(each, self.plan(each), right_answer(each)) for each in (call, tight)]
        self.cache, self.kept = cache.data, cache.data.clone()
        self.kernel: Program | None = None

    @staticmethod
    def plan(call: Inputs) -> plans.DecodePlan:
        """A plan of a call, for all that follow."""
        options = call.options
        batch = Batch.of(
            seq_lens=options["seq_lens"],
            block_table=options["block_table"],
            qo_indptr=options["qo_indptr"],
            block_size=16,
            num_tokens=call.num_rows,
        )
        widths = {"num_heads": 3, "kv_lora_rank": 128, "qk_rope_head_dim": 64}
        how = {"sinks": True, "return_lse": True, "backend": "triton"}
        return plans.plan_decode(batch, **widths, **how, q_dtype=torch.bfloat16, kv_format="bf16")

    def judged(self) -> Judgement:
        """Both calls, into outputs full of NaN."""
        found = []
        for call, plan, (exact, runs) in self.calls:
            options = call.options
            out = torch.full(call.shape, torch.nan, dtype=torch.bfloat16)
            lse = torch.full(call.shape[:2], torch.nan)
            given = {"sm_scale": options["sm_scale"], "sinks": options["sinks"], "return_lse": True}
            found.append(judge(plan.run(*call.tensors, **given, out=out, lse=lse), exact, *runs))
            if not found[-1].passed:
                break
        return together(*found)

    def found(self, index: int, orders: tuple[str, ...]) -> str:
        """How a missing instruction shows, "" if it does not."""

        def edit(kernel: Program) -> Program:
            return kernel.without(index) if kernel.launch.name == "attend_kernel" else kernel

        self.emulator.edit, self.emulator.orders = edit, orders
        try:
            judged = self.judged()
        except (Fault, OrderMatters) as fault:
            return type(fault).__name__
        finally:
            changed = not torch.equal(self.cache.view(torch.int16), self.kept.view(torch.int16))
            self.cache.copy_(self.kept)
        return "cache" if changed else "" if judged.passed else "judge"


def check_mutants(chip: str, kinds: str, every: int) -> Iterator[dict[str, Any]]:
    """Every site of some kinds, or every n-th, and how its absence is found."""
    with emulated(chip, units=4) as emulator:
        mutants, waited = Mutants(emulator), _watch_waits()

        def look(kernel: Program) -> Program:
            if kernel.launch.name == "attend_kernel":
                mutants.kernel = kernel
            return kernel

        emulator.edit = look
        mutants.judged().require_pass()
        assert mutants.kernel is not None
        emulator.most = 200_000
        steps, landed = mutants.kernel.launch.steps, set(waited)
        for kind in kinds.split(","):
            sites = [
                i for i, s in enumerate(steps) if KINDS[kind](s.instruction.mnemonic, s.instruction.text)
            ]
            for index in sites[::every]:
                instruction = steps[index].instruction
                line = _source_line(instruction.source)
                if kind == "mask" and re.search(r"//|%", line):
                    # A step of a division, no mask.
                    continue
                orders = ("lockstep", "forward", "reverse") if kind == "barrier" else ("lockstep",)
                found = mutants.found(index, orders)
                why = next((why for rx, why in REDUNDANT.get(kind, {}).items() if re.search(rx, line)), "")
                if kind in IDLE and instruction.line not in landed:
                    why = IDLE[kind]
                yield {"kind": kind, "text": instruction.text, "line": line, "found": found, "redundant": why}


def _watch_waits() -> set[int]:
    """The lines of waits that something landed at, and of barriers with accesses to LDS before them."""
    from anymla.verification.amdgcn.machine import Machine

    seen: set[int] = set()
    wait, meet = Machine.wait, Machine._end_of_epoch

    def watching(machine: Machine, counter: str, most: int) -> None:
        before = machine.group.flights
        wait(machine, counter, most)
        if machine.group.flights != before and machine.launch.name == "attend_kernel":
            seen.add(machine.step.instruction.line)

    def meeting(machine: Machine) -> None:
        if machine.journal.entries and machine.launch.name == "attend_kernel":
            place = machine.workgroup_of
            using = {g for entry in machine.journal.entries for g in np.unique(place[entry.waves]).tolist()}
            for group in machine._waiting:
                if not using.isdisjoint(place[group.waves].tolist()):
                    seen.add(machine.launch.steps[group.pc - 1].instruction.line)
        meet(machine)

    Machine.wait, Machine._end_of_epoch = watching, meeting  # type: ignore[method-assign]
    return seen


def _source_line(source: str) -> str:
    from anymla.backends import triton_mla

    name, _, number = source.partition(":")
    path = Path(next(iter(triton_mla.__path__))) / (name or "?")
    lines = path.read_text().splitlines() if path.exists() else []
    return lines[int(number) - 1].strip() if 0 < int(number or 0) <= len(lines) else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    chip, what, *rest = sys.argv[1:]
    checks = {"api": check_api, "dots": check_dots}
    found = check_mutants(chip, rest[0], int(rest[1])) if what == "mutants" else checks[what](chip)
    for fact in found:
        print(json.dumps(fact), flush=True)
