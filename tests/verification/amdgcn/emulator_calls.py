"""Run in a process of its own, `python emulator_calls.py CHIP WHAT`: prints a line of JSON for each check.

"api" makes the public calls on CPU tensors as on that chip, each in two orders of the waves and judged;
"rows" gives some of them one launch row to choose from; "scores" chooses from rows that are hard to choose
from, long for launch rows that are small; "dots" multiplies matrices of every type and size
that the chip has instructions for, "dots part" some.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl

from anymla import api, quantise_queries
from anymla.backends import triton_mla
from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import LAUNCH, Launch
from anymla.hardware.probe import this_machine
from anymla.kv_cache import KV_FORMATS
from anymla.verification.amdgcn.driver import emulated
from anymla.verification.amdgcn.rows import check_row, row_cases, rows_taken
from anymla.verification.checks import judge_ids, right_answer, run_call
from anymla.verification.inputs import (
    Inputs,
    decode_inputs,
    index_inputs,
    prefill_inputs,
    sparse_inputs,
    write_inputs,
)
from anymla.verification.judge import judge, judge_written
from anymla.verification.needles import Widths
from anymla.verification.scores import hard_scores, planned_choice, right_choice

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
    fp8 = {**bf16, "q_dtype": KV_FORMATS[fp8_of(chip)].dtype, "kv_format": fp8_of(chip)}
    yield "decode fp8 queries page 64", decode_inputs(few, *RAGGED, block_size=64, **fp8)
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


DOT_SHAPES = ((16, 16, 128, 1), (32, 32, 64, 1), (64, 32, 128, 2), (64, 64, 64, 4), (128, 64, 64, 8))
"""Rows, columns and depth of a product, and waves that share it."""


def check_dots(chip: str, whole: bool = True) -> Iterator[dict[str, Any]]:
    """Products of small whole numbers, which every type and order of sums has exactly.

    The whole has all shapes, each with matrix instructions of 16 and of 32 columns as the chip has them.
    """
    own, lanes = fp8_of(chip), ARCHES[chip].wave_size
    kinds = ["bf16", "fp16", "fp32"]
    if ARCHES[chip].has_fp8:
        kinds += [own, own.replace("fp8_", "bf8_")]
    with emulated(chip, orders=("lockstep", "forward")) as emulator:
        for kind, (m, n, k, warps) in product(kinds, DOT_SHAPES if whole else DOT_SHAPES[::2]):
            sizes = [32, 16] if min(m, n) >= 32 and lanes == 64 else [16]
            for size in sizes if whole else sizes[:1]:
                rng = torch.Generator().manual_seed(m + n)
                a, b = (torch.randint(-3, 4, s, generator=rng).float() for s in ((m, k), (k, n)))
                c = torch.empty(m, n)
                emulator.launches.clear()
                x, y = (t.to(DOT_TYPES[kind]) for t in (a, b))
                dot_kernel[(1,)](x, y, c, m, n, k, "ieee", num_warps=warps, matrix_instr_nonkdim=size)
                used = [name for name in emulator.launches[0].executed if re.match("v_(mfma|wmma)", name)]
                right = torch.equal(c, a @ b)
                name = f"{kind} {m}x{n}x{k} {warps} waves, {size} columns"
                yield {"name": name, "right": right, "instructions": used}


def check_rows(chip: str) -> Iterator[dict[str, Any]]:
    """Some calls that are given one launch row to choose from, and one whose kernel is never launched."""
    with emulated(chip, orders=("lockstep", "reverse"), units=8) as emulator:
        machine = this_machine(torch.device("cpu"))
        writes = [each for each in row_cases(machine) if each.kernel == "cache_write"]
        joins = next(each for each in row_cases(machine) if each.kernel == "combine")
        # Another row than the chip has, so that it shows which was taken.
        other = replace(joins, row=replace(joins.row, num_warps=2))
        for each in (joins, other, writes[-1], replace(writes[0], kernel="attend", row=joins.row)):
            judged = check_row(each, "triton", machine, emulator)
            taken = sorted(rows_taken(emulator.launches, chip)) if each.kernel == "cache_write" else []
            yield {"name": each.id, "reasons": judged.reasons, "rows": taken}


def check_scores(chip: str) -> Iterator[dict[str, Any]]:
    """Rows narrowed once, and some of them narrowed twice, the second time by the ids that are left."""
    small = {
        ("narrow", chip): (Launch(block_m=1, block_n=1024, num_warps=4, num_stages=2),),
        ("choose", chip): (Launch(block_m=1, block_n=512, num_warps=4, num_stages=1),),
    }
    with emulated(chip, units=8) as emulator, mock.patch.dict(LAUNCH, small):
        machine = this_machine(torch.device("cpu"))
        for width, step, topk in ((2300, 1, 256), (4700, 9, 100)):
            scores, counts = (each[::step].contiguous() for each in hard_scores(width, 1024))
            emulator.launches.clear()
            args, state = planned_choice(triton_mla, machine, scores, counts, topk)
            triton_mla.index_choice(args, state)
            wrong = (args.indices.sort().values != right_choice(scores, counts, topk)).any(1)
            kernels = [launch.kernel for launch in emulator.launches if launch.kernel != "index_rows_kernel"]
            yield {"width": width, "wrong": wrong.nonzero().flatten().tolist(), "kernels": kernels}


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    chip, what, *part = sys.argv[1:]
    checks = {
        "api": check_api,
        "rows": check_rows,
        "scores": check_scores,
        "dots": partial(check_dots, whole=not part),
    }
    for fact in checks[what](chip):
        print(json.dumps(fact), flush=True)
