"""AITER's dispatch code, cut out of its sources and asked: which row of its kernel table does a call look up?

Three files decide: the C++ of the attention kernel and of the planner, which are compiled with g++, and the
Python around them, which is run with stand-ins. Nothing of AITER is kept.
"""

import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

CHIPS, KINDS = ("gfx942", "gfx950"), (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"))
HEADS, TOKENS = range(8, 129, 8), range(1, 9)

Key = tuple[Any, ...]

PRELUDE = """
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
using std::max; using std::min;
struct Pointer { void* data_ptr() { return 0; } };
struct Args { int s_MQA, s_Q_Bs, s_Bs, out_16_nosplit; void* ptr_RP; };
#define AITER_CHECK(holds, ...) do { if (!(holds)) throw 1; } while (0);
#define TORCH_CHECK(holds, ...) do { if (!(holds)) throw 1; } while (0);
static const char* __f = "";
int main() {
 const char* chips[] = {"gfx942", "gfx950"};
 const char* kinds[][2] = {{"bf16", "bf16"}, {"bf16", "fp8"}, {"fp8", "fp8"}};
 for (auto chip : chips) for (auto kind : kinds)
 for (int H = 8; H <= 128; H += 8) for (int q = 1; q <= 8; q++) {
  std::string arch_id = chip, q_type = kind[0], kv_type = kind[1];
"""


def asked(code: str) -> dict[Key, tuple[int, ...]]:
    """Compile and run: lines of a key and its answer; what the code refuses is not among them."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "ask.cpp"), Path(folder, "ask")
        source.write_text(code)
        subprocess.run(["g++", "-w", "-O0", "-o", str(program), str(source)], check=True)
        lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    answers = {}
    for line in lines:
        key, _, answer = line.partition(" : ")
        chip, q, kv, *numbers = key.split()
        answers[chip, q, kv, *map(int, numbers)] = tuple(map(int, answer.split()))
    return answers


@lru_cache
def asm_keys(source: str) -> dict[Key, tuple[int, ...]]:
    """(chip, q, kv, heads, tokens, persistent, lse, causal) to what is looked up and handed over.

    That is heads, persistent, tokens, causal, lse, and whether the kernel is told heads instead of rows.
    """
    body = source[source.index("mla_decode_stage1_asm_fwd(") :]
    start, call = body.index("int ps = persistent"), "std::string kernelName = get_heuristic_kernel_mla("
    end = body.index(call, start)
    region = body[start:end].replace("__func__", "__f")
    given = [one.strip() for one in body[end + len(call) : body.index(");", end)].split(",")]
    heads, ps, causal, tokens = given[2], given[3], given[5], given[6]
    lse = given[9] if len(given) > 9 else "0"
    declared = "" if re.search(r"int causal\s*=", region) else "int causal = C;"
    return asked(
        PRELUDE
        + """
  for (int P = 0; P < 2; P++) for (int L = 0; L < 2; L++) for (int C = 0; C < 2; C++) {
   bool persistent = P; int gqa_ratio = H, max_seqlen_q = q, page_size = 1, stride_Page = 1, kv_split = 1;
   int num_kv_heads = 1, num_heads = H;
   Pointer some; Pointer *lse = L ? &some : 0, *g_kv_indptr = 0; Args args{};
   try { """
        + declared
        + region
        + f"""
    printf("%s %s %s %d %d %d %d %d : %d %d %d %d %d %d\\n", chip, kind[0], kind[1], H, q, P, L, C,
           (int){heads}, (int){ps}, (int){tokens}, (int){causal}, (int)({lse}), args.s_MQA != 0);
   }} catch (int) {{}}
  }}
 }}
}}
"""
    )


@lru_cache
def planner_folds(source: str) -> dict[Key, tuple[int, ...]]:
    """(chip, q, kv, heads, tokens) to how often the planner folds heads into (rows, tokens)."""
    at = source.index("const bool natively_supported")
    before = source.rfind("const bool hk_mtp_experimental", 0, at)
    at = before if before > 0 else at
    end = at + source[at:].rfind("int32_t", 0, re.search(r"num_splits\s*=", source[at:]).start())
    return asked(
        PRELUDE
        + """
  bool q_is_fp8 = q_type == "fp8", kv_is_fp8 = kv_type == "fp8", enable_experimental = false;
  int num_heads = H, max_seqlen_qo = q, uni_seqlen_qo = q;
  int num_batches = 1, qk_batch_ratio = 1, qk_seqlen_ratio = 1;
  try { """
        + source[at:end].replace("__func__", "__f")
        + """
   printf("%s %s %s %d %d : %d %d\\n", chip, kind[0], kind[1], H, q, qk_batch_ratio, qk_seqlen_ratio);
  } catch (int) {}
 }
}
"""
    )


class Anything:
    """Stands in for whatever a module wants at import."""

    def __getattr__(self, name: str) -> "Anything":
        return self

    def __call__(self, *given: Any, **named: Any) -> "Anything":
        return self


class Kernel:
    """A Triton kernel that notes with what it is launched."""

    def __init__(self, notes: dict[str, Any]) -> None:
        self.notes = notes

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: self.notes.__setitem__("merge", named)


def wrapper(source: str, chip: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """AITER's mla_decode_fwd with stand-ins for all that it calls, and the notes that they take."""
    notes: dict[str, Any] = {}
    fp8 = torch.float8_e4m3fnuz if chip == "gfx942" else torch.float8_e4m3fn
    dtypes = types.SimpleNamespace(
        bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32, fp8=fp8, i32=torch.int32
    )

    def jit(*given: Any, **named: Any) -> Any:
        return Kernel(notes) if given else lambda function: Kernel(notes)

    told = {
        "aiter": {
            "dtypes": dtypes,
            "mla_decode_stage1_asm_fwd": lambda *given, **named: notes.__setitem__("attention", given),
            "mla_reduce_v1": lambda *given, **named: None,
        },
        "triton": {"jit": jit, "next_power_of_2": lambda n: n, "language": Anything()},
        "triton.language": {"constexpr": Anything(), "int64": Anything()},
        "aiter.jit": {},
        "aiter.jit.core": {"is_experimental_enabled": lambda: False},
        "aiter.jit.utils": {},
        "aiter.jit.utils.chip_info": {"get_cu_num": lambda: 256, "get_gfx": lambda: chip},
        "aiter.ops": {},
        "aiter.ops.attention": {"get_mla_decode_fwd_max_splits": lambda *given: 256},
    }
    kept = {name: sys.modules.get(name) for name in told}
    for name, contents in told.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(contents)
        if name == "triton.language":
            vars(sys.modules[name])["__getattr__"] = lambda attribute: Anything()
    space: dict[str, Any] = {"__name__": "recorded"}
    try:
        exec(compile(source, "mla.py", "exec"), space)
    finally:
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
    return space["mla_decode_fwd"], notes


@lru_cache
def wrapper_lanes(source: str) -> tuple[dict[Key, tuple[int, int]], dict[Key, bool]]:
    """(chip, q, kv, heads, tokens, persistent) to the heads that reach stage 1 and the keys of a split.

    Beside it, who is given an lse. Keys of a split are what the second stage takes for the least, else 0.
    """
    lanes, gives = {}, {}
    for chip in CHIPS:
        call, notes = wrapper(source, chip)
        taken = call.__code__.co_varnames[: call.__code__.co_argcount]
        fp8 = torch.float8_e4m3fnuz if chip == "gfx942" else torch.float8_e4m3fn
        for (q, kv), heads, tokens, persistent in product(KINDS, HEADS, TOKENS, (False, True)):
            notes.clear()
            given = _arguments(q, kv, fp8, heads, tokens, persistent)
            given |= {"return_lse": True} if "return_lse" in taken else {}
            try:
                call(**given)
            except AssertionError:
                continue
            stage1 = notes["attention"]
            merge = notes.get("merge", {})
            lanes[chip, q, kv, heads, tokens, persistent] = stage1[0].shape[1], merge.get("mgc", 0)
            gives["attention", persistent] = any(
                isinstance(x, torch.Tensor) and x.dim() == 2 and x.dtype == torch.float32 for x in stage1
            )
            gives["merge", persistent] = bool(merge.get("HAS_FINAL_LSE"))
    return lanes, gives


def _arguments(
    q: str, kv: str, fp8: torch.dtype, heads: int, tokens: int, persistent: bool
) -> dict[str, Any]:
    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kinds = {"bf16": torch.bfloat16, "fp8": fp8}
    given: dict[str, Any] = {
        "q": new(2 * tokens, heads, 576, dtype=kinds[q]),
        "kv_buffer": new(9, 1, 1, 576, dtype=kinds[kv]),
        "o": new(2 * tokens, heads, 512, dtype=torch.bfloat16),
        **{name: new(3) for name in ("qo_indptr", "kv_indptr")},
        **{name: new(2) for name in ("kv_indices", "kv_last_page_lens")},
        **{name: new(1) for name in ("q_scale", "kv_scale")},
        "max_seqlen_q": tokens,
        "sm_scale": 0.1,
        "num_kv_splits": 2,
    }
    plan = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map")
    more = (*plan, "reduce_partial_map") if persistent else ("num_kv_splits_indptr",)
    return given | {name: new(3) for name in more}
