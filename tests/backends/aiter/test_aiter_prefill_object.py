"""AITER's prefill kernel beside its double: executed on the emulator, it writes what the double writes.

Needs the code objects, which are no part of this library: AITER_HSA names the folder `hsa` of an AITER.
"""

import os
import struct
from pathlib import Path

import pytest
import torch
from double_prefill import PrefillDouble
from torch import Tensor

from anymla.verification.aiter_objects.code_object import Disassembler, NoDisassembler
from anymla.verification.amdgcn.memory import Memory
from anymla.verification.amdgcn.program import Program
from anymla.verification.judge import judge_tensor

FOLDER = Path(os.environ.get("AITER_HSA", "")) / "gfx950" / "mla"
NAME = "mla_pfl_qh192_vh128_m32x8_n128x1_causal{}.co"
SCALE, WAVES, SPARE = 0.1, 8, 4096

STEPS = {
    "one tile": ((40,), (40,), 2, 4, True),
    "a tile cut twice": ((300,), (300,), 1, 5, True),
    "two sequences, some tiles cut": ((300, 40), (300, 40), 2, 8, True),
    "more keys than queries": ((300, 20), (431, 150), 1, 7, True),
    "not causal": ((140, 5), (140, 5), 1, 3, False),
}
"""Query tokens and keys of each sequence, heads, compute units, whether causal."""


def program(causal: bool) -> Program:
    """The kernel, or a skip that says what is missing."""
    path = FOLDER / NAME.format(int(causal))
    if not path.is_file():
        pytest.skip(f"no {path.name}: AITER_HSA names no folder hsa of an AITER")
    try:
        text = Disassembler.of("gfx950").text(path, "gfx950")
    except NoDisassembler as missing:
        pytest.skip(str(missing))
    return Program.of(text, "gfx950")


def raw(tensor: Tensor):
    """Bytes, with room behind them."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.cat((data, torch.zeros(SPARE, dtype=torch.uint8))).numpy()


def execute(kernel: Program, given: dict[str, Tensor], results: dict[str, Tensor]) -> None:
    """Launch the kernel as AITER's C++ does: 16 bytes an argument, a workgroup a unit."""
    memory, q, k = Memory(), given["Q"], given["K"]
    buffers = {name: raw(tensor) for name, tensor in results.items()}
    reads = ("work_indptr", "work_info_set", "qo_indptr", "kv_indptr", "kv_page_indices")
    reads += ("q_scale", "k_scale", "v_scale")
    pointers = [memory.map(raw(given[name]), writable=False) for name in ("Q", "K", "V")]
    pointers += [memory.map(buffer) for buffer in buffers.values()]
    pointers += [memory.map(raw(given[name]), writable=False) for name in reads]
    sizes = (q.shape[0], q.shape[1], k.shape[0], k.shape[0])
    arguments = b"".join(struct.pack("<Q8x", pointer) for pointer in pointers)
    arguments += struct.pack("<f12x", SCALE) + b"".join(struct.pack("<I12x", size) for size in sizes)
    grid, shared = (
        (given["work_indptr"].shape[0] - 1, 1, 1),
        kernel.text.descriptor["group_segment_fixed_size"],
    )
    kernel.run(grid, arguments, memory, shared_bytes=shared, num_warps=WAVES, order="clock")
    for name, tensor in results.items():
        size = tensor.numel() * tensor.element_size()
        assert not buffers[name][size:].any(), f"{name} is written past its end"
        tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(buffers[name][:size]))


def planned(q_lens, k_lens, heads: int, units: int, causal: bool) -> dict[str, Tensor]:
    """The step as AITER plans it."""
    starts, kv_starts = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, k_lens))
    shapes = {"work_indptr": (units + 1,), "work_info": (99, 8), "reduce_indptr": (9,)}
    shapes |= {"reduce_final_map": (8, 2), "reduce_partial_map": (99,)}
    plan = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    PrefillDouble("HEAD", "gfx950", units)._plan(
        seqlens_qo_indptr=starts,
        pages_kv_indptr=kv_starts,
        context_lens=kv_starts.diff(),
        gqa_ratio=1,
        num_heads_k=heads,
        **plan,
        qhead_granularity=1,
        qlen_granularity=256,
        kvlen_granularity=128,
        block_size=1,
        is_causal=causal,
    )
    return plan | {"qo_indptr": starts, "kv_indptr": kv_starts}


@pytest.mark.parametrize(("q_lens", "k_lens", "heads", "units", "causal"), STEPS.values(), ids=STEPS)
def test_the_kernel_writes_what_its_double_writes(
    q_lens, k_lens, heads: int, units: int, causal: bool
) -> None:
    kernel, plan = program(causal), planned(q_lens, k_lens, heads, units, causal)
    torch.manual_seed(2)
    tokens, keys, parts = sum(q_lens), sum(k_lens), max(int(plan["reduce_indptr"][-1]), 1)
    widths = {"Q": (tokens, 192), "K": (keys, 192), "V": (keys, 128)}
    given = {name: torch.randn(n, heads, w).to(torch.float8_e4m3fn) for name, (n, w) in widths.items()}
    given |= {name: plan[name] for name in ("qo_indptr", "kv_indptr", "work_indptr")}
    given |= {"kv_page_indices": torch.arange(keys).int(), "work_info_set": plan["work_info"]}
    given |= {"q_scale": torch.tensor([0.5]), "k_scale": torch.tensor([2.0]), "v_scale": torch.tensor([0.25])}

    def nothing() -> dict[str, Tensor]:
        rows, halves = parts * 256, {"dtype": torch.bfloat16}
        out = torch.full((tokens, heads, 128), torch.nan, **halves)
        return {
            "output": out,
            "splitData": torch.full((rows, heads, 128), torch.nan),
            "splitLse": torch.full((rows, heads), torch.nan),
        }

    def double(dtype: torch.dtype, rounds: bool) -> dict[str, Tensor]:
        made, results = PrefillDouble("HEAD", "gfx950", units, dtype=dtype, rounds=rounds), nothing()
        made._attend(**given, **results, max_seqlen_q=max(q_lens), softmax_scale=SCALE, is_causal=causal)
        return results

    got, exact = nothing(), double(torch.float64, rounds=False)
    execute(kernel, given, got)
    runs = [double(torch.float32, rounds) for rounds in (True, False)]
    for name, right in exact.items():
        written = ~right.isnan().flatten(1).all(1)
        one, reference, *eager = (results[name][written] for results in (got, exact, *runs))
        judge_tensor(name, one, reference.double(), *eager, by_row=name != "splitLse").require_pass()
    assert got["output"].isnan().equal(exact["output"].isnan())
