"""Times launch rows of the Triton attention kernel side by side on one GPU, beside the chip's ceilings.

Run on a GPU: `python benchmarks/triton_sweep.py --out DIR`. Each variant is checked against fp32 torch first.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from anymla.backends import triton_mla  # noqa: E402
from anymla.contract import Batch, DecodeArgs  # noqa: E402
from anymla.hardware.launch import Launch, launch_rows  # noqa: E402
from anymla.hardware.probe import this_machine  # noqa: E402
from anymla.kv_cache import KVCache  # noqa: E402
from anymla.problem import Feature, Problem  # noqa: E402

planner = sys.modules["anymla.backends.triton_mla.decode"]

CASES = {
    "128x16x1x4096": (128, 16, 1, 4096),
    "128x16x2x4096": (128, 16, 2, 4096),
    "128x16x4x4096": (128, 16, 4, 4096),
    "128x128x1x4096": (128, 128, 1, 4096),
    "32x16x1x8192": (32, 16, 1, 8192),
    "8x16x1x32768": (8, 16, 1, 32768),
    "1x16x1x65536": (1, 16, 1, 65536),
}
SM_SCALE = 192**-0.5


def made(batch_size, heads, q_len, length, kv_format="bf16", page=64):
    """Inputs of one case on the GPU, pages permuted."""
    pages = batch_size * length // page
    generator = torch.Generator("cuda").manual_seed(0)
    scale = torch.full((1,), 0.02, device="cuda") if kv_format.startswith("fp8_e4m3") else None
    cache = KVCache.allocate(
        pages, page, kv_lora_rank=512, qk_rope_head_dim=64, kv_format=kv_format, scale=scale, device="cuda"
    )
    if kv_format == "bf16":
        cache.data.normal_(generator=generator)
    else:
        cache.data.view(torch.uint8).random_(0, 120, generator=generator)
    table = torch.randperm(pages, generator=generator, device="cuda").int().view(batch_size, -1)
    lens = torch.full((batch_size,), length, dtype=torch.int32, device="cuda")
    indptr = torch.arange(0, batch_size * q_len + 1, q_len, dtype=torch.int32, device="cuda")
    ql = torch.randn(batch_size * q_len, heads, 512, device="cuda", generator=generator).bfloat16()
    q_pe = torch.randn(batch_size * q_len, heads, 64, device="cuda", generator=generator).bfloat16()
    return cache, table, lens, indptr, ql, q_pe


class _NoKernel:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


combine_kernel = planner.combine_kernel


def planned(inputs, heads, q_len, launch, combine=None, features=frozenset({Feature.LSE})):
    """A runnable step with one launch row, whatever the table says."""
    cache, table, lens, indptr, ql, q_pe = inputs
    batch = Batch.of(
        seq_lens=lens,
        block_table=table,
        qo_indptr=indptr,
        block_size=64,
        num_tokens=ql.shape[0],
        max_q_len=q_len,
    )
    problem = Problem(
        "decode", "bf16", cache.format.name, heads, 512, 64, block_size=64, q_len=q_len, features=features
    )
    planner._launch_for = lambda *_: launch
    planner.launch_rows = lambda kernel, arch: (
        (Launch(*combine),) if combine and combine != "none" else launch_rows(kernel, arch)
    )
    planner.combine_kernel = _NoKernel() if combine == "none" else combine_kernel
    state = triton_mla.plan_decode(batch, problem, this_machine("cuda:0"), {})
    out = torch.full_like(ql, math.nan)
    lse = torch.full(ql.shape[:2], math.nan, device="cuda")
    args = DecodeArgs(ql, q_pe, cache, SM_SCALE, None, out, lse)
    return (lambda: triton_mla.decode(args, state)), out, lse


def checked(inputs, q_len, out, lse):
    """Largest error of some rows against fp64."""
    cache, table, lens, indptr, ql, q_pe = inputs
    worst = 0.0
    for seq in {0, len(lens) // 2, len(lens) - 1}:
        n = int(lens[seq])
        slots = (table[seq].long()[:, None] * 64 + torch.arange(64, device="cuda")).flatten()[:n]
        keys = cache.read(slots, dtype=torch.float32).double()
        for t in range(q_len):
            row = int(indptr[seq]) + t
            seen = keys[: n - q_len + 1 + t]
            q = torch.cat((ql[row], q_pe[row]), -1).double()
            scores = SM_SCALE * (q @ seen.T)
            want = torch.softmax(scores, -1) @ seen[:, :512]
            worst = max(worst, float((out[row] - want).abs().max() / want.abs().max()))
            worst = max(worst, float((lse[row] - scores.logsumexp(-1)).abs().max()))
    return worst


def timed(run, flush, repeats=30, captured=True):
    """Median microseconds of a run, captured unless it is one copy, the L2 flushed between repeats."""
    run()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    for _ in range(3):
        run()
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) * 1000 for a, b in pairs)[repeats // 2]


def ceilings(flush):
    """Bytes a second of a copy and FLOP a second of a bf16 product, of this run."""
    big = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    other = torch.empty_like(big)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    copy = timed(lambda: other.copy_(big), flush, 15, captured=False)
    product = timed(lambda: torch.mm(a, b), flush, 15, captured=False)
    return 2 * big.nbytes / copy * 1e6, 2 * 8192**3 / product * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--variants", required=True, help="JSON: case to rows of Launch")
    parser.add_argument("--kv-format", default="bf16")
    parser.add_argument("--commit", default="")
    parser.add_argument("--warm", help="compile this variant of this case only", nargs=2)
    arguments = parser.parse_args()
    variants = json.loads(arguments.variants)
    if arguments.warm:
        row = json.loads(arguments.warm[1])
        row, *combine = row if isinstance(row[0], list) else (row,)
        case, launch = arguments.warm[0], Launch(*row)
        batch_size, heads, q_len, length = CASES[case]
        inputs = made(2, heads, q_len, 512, arguments.kv_format)
        run, _, _ = planned(inputs, heads, q_len, launch, *combine)
        run()
        torch.cuda.synchronize()
        return
    jobs = {(CASES[c][1:3], json.dumps(v)): (c, v) for c, rows in variants.items() for v in rows}
    started = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--warm", case, json.dumps(row)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        for case, row in jobs.values()
    ]
    for process in started:
        process.wait()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    copy, product = ceilings(flush)
    print(f"copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s", flush=True)
    records = []
    for case, rows in variants.items():
        batch_size, heads, q_len, length = CASES[case]
        inputs = made(*CASES[case], arguments.kv_format)
        bytes_moved = batch_size * length * inputs[0].bytes_per_token + 2 * inputs[4].nbytes
        flops = 2 * batch_size * heads * q_len * length * (576 + 512)
        floor = max(bytes_moved / copy, flops / product) * 1e6
        for row in rows:
            try:
                row, *combine = row if isinstance(row[0], list) else (row,)
                run, out, lse = planned(inputs, heads, q_len, Launch(*row), *combine)
                run()
                torch.cuda.synchronize()
                worst = checked(inputs, q_len, out, lse)
                microseconds = timed(run, flush)
            except Exception as error:
                print(f"{case} {row}: {type(error).__name__} {str(error)[:120]}", flush=True)
                continue
            record = {
                "case": case, "launch": row, "us": microseconds, "error": worst,
                "share_of_floor": floor / microseconds, "tflops": flops / microseconds / 1e6,
                "gbs": bytes_moved / microseconds / 1e3,
            }  # fmt: skip
            records.append(record)
            print(
                f"{case} {row} {combine}: {microseconds:.1f} us, {record['share_of_floor']:.1%} of floor, "
                f"{record['tflops']:.0f} TFLOP/s, {record['gbs']:.0f} GB/s, error {worst:.1e}",
                flush=True,
            )
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": arguments.commit,
        "chip": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kv_format": arguments.kv_format,
        "copy_bytes_a_second": copy,
        "product_flop_a_second": product,
        "timing": "captured graph, L2 flushed, median of 30",
        "records": records,
    }
    Path(arguments.out, f"attend_{arguments.kv_format}.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
