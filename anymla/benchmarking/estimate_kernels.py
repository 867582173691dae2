"""What a chip that is not here would run, compiled for it; of AMD's, a small call executed on the emulator.

One process for each chip, because Triton keeps tables of its first target: `read` starts it, `main` is it.
"""

import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from anymla.benchmarking import estimate_banks
from anymla.benchmarking.inputs import drawn_inputs
from anymla.benchmarking.run import planned
from anymla.benchmarking.workloads import Workload
from anymla.errors import AnyMLAError
from anymla.kv_cache import KV_FORMATS
from anymla.verification.amdgcn.conformance import BACKEND, LONGEST, MOST_ROWS, UNITS
from anymla.verification.amdgcn.driver import CHIPS, emulated
from anymla.verification.audit.calls import Call
from anymla.verification.audit.capture import KERNELS, Specialisation, capturing
from anymla.verification.audit.figures import built, figures_of
from anymla.verification.audit.run import in_short

KINDS: Mapping[str, str] = {
    "matrix": r"v_s?(mfma|wmma)",
    "vector": r"v_",
    "LDS": r"ds_",
    "global": r"(global|buffer|flat|scratch)_",
    "waits": r"s_(wait|barrier|nop|delay|sleep)",
    "scalar": r"s_",
}
"""Kinds of instructions of AMD, each by how a mnemonic begins; the first that fits."""

REACH = 2 << 30
"""Bytes of a cache; a larger one is addressed in another way."""

MOST_KEYS = 128
"""Keys a query token, of a sparse call that is executed."""


def read(chip: str, works: Sequence[Workload]) -> list[dict[str, Any]]:
    """Kernels of each workload as compiled, and what one small call of the same problem executed.

    Args:
        chip: A key of ARCHES with a GPU.
        works: Of one problem; batch and context differ.

    Returns:
        For each: "kernels", and "executed", which is None where there is no emulator of the chip.

    Raises:
        AnyMLAError: it does not compile or run; the message ends with what was said last.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__, chip]
    done = subprocess.run(command, input=pickle.dumps(list(works)), capture_output=True, env=environment)
    if done.returncode:
        last = "\n".join(done.stderr.decode().strip().splitlines()[-4:])
        raise AnyMLAError(f"compiling for {chip} got exit code {done.returncode}: {last}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(chip: str) -> None:
    """The process: workloads pickled on standard input, JSON in the last line of standard output."""
    works: list[Workload] = pickle.load(sys.stdin.buffer)
    compiled = [_compiled(chip, work) for work in works]
    executed = _executed(chip, max(works, key=lambda work: work.context)) if chip in CHIPS else None
    print(json.dumps([{"kernels": kernels, "executed": executed} for kernels in compiled]))


def kinds(mnemonics: Mapping[str, int]) -> dict[str, int]:
    """Instructions by kind; all kinds are there."""
    found = dict.fromkeys(KINDS, 0)
    for mnemonic, count in mnemonics.items():
        kind = next((kind for kind, begins in KINDS.items() if re.match(begins, mnemonic)), None)
        if kind is not None:
            found[kind] += count
    return found


def _wanted(chip: str, work: Workload) -> list[Specialisation]:
    """What the chip would compile for a call, each once."""
    p = work.problem
    cached = work.batch * work.context
    num_bytes = cached * KV_FORMATS[p.kv_format].bytes_per_token(p.kv_lora_rank, p.qk_rope_head_dim)
    call = Call(
        p,
        far=num_bytes > REACH,
        context=work.context if p.op == "prefill" else 0,
        num_seqs=work.batch,
        seq_len=work.context,
    )
    with capturing(chip) as (machine, launches):
        call.run(machine)
    return list({launch.key: launch for launch in launches}.values())


def _row(chip: str, launch: Specialisation) -> str:
    row = launch.row(chip)
    return in_short(row) if row else ""


def _compiled(chip: str, work: Workload) -> list[dict[str, Any]]:
    found = []
    for launch in _wanted(chip, work):
        kernel = built(launch, chip)
        text = kernel.asm.get("amdgcn")
        mnemonics = None if text is None else Counter(re.findall(r"^\t([a-z]+_\w+)", text, re.M))
        found.append(
            {
                "kernel": launch.kernel,
                "row": _row(chip, launch),
                **asdict(figures_of(kernel, chip)),
                "mix": None if mnemonics is None else kinds(mnemonics),
            }
        )
    return found


def small(work: Workload) -> Workload:
    """One sequence of the same problem that an emulator executes in seconds."""
    p, context = work.problem, LONGEST
    if p.op == "prefill":
        # A tile is of one head; it is tokens that choose the launch row.
        p, context = replace(p, num_heads=1), min(work.context, LONGEST)
    q_len = max(1, min(p.q_len, MOST_ROWS // p.num_heads))
    p = replace(p, q_len=q_len, topk=min(p.topk, MOST_KEYS))
    return replace(work, problem=p, batch=1, context=context)


def _executed(chip: str, work: Workload) -> dict[str, Any]:
    torch.set_num_threads(1)
    call, counter = small(work), estimate_banks.Counter()
    # Of few rows, a launch row may be another than that of the workload.
    rows = {launch.kernel: _row(chip, launch) for launch in _wanted(chip, call)}
    with emulated(chip, units=UNITS, edit=counter.edit) as emulator:
        planned(drawn_inputs(call, torch.device("cpu")), call, BACKEND).run()
    mixes: dict[str, Counter[str]] = {}
    waves: Counter[str] = Counter()
    for launched in emulator.launches:
        x, y, z = launched.grid
        waves[launched.kernel] += x * y * z * launched.num_warps
        mixes.setdefault(launched.kernel, Counter()).update(launched.executed)
    p = call.problem
    tokens = f"1 sequence of {call.context} tokens, {p.num_heads} heads, {p.q_len} query tokens"
    return {
        "shape": f"{tokens}, {UNITS} compute units",
        "kernels": [
            {
                "kernel": (kernel := KERNELS.get(name, name)),
                "row": rows.get(kernel, ""),
                "waves": waves[name],
                "mix": kinds(mix),
                "lds": _lds(counter.by_kernel.get(name, {}).items()),
            }
            for name, mix in mixes.items()
        ],
    }


def _lds(accesses: Iterable[tuple[str, estimate_banks.Accesses]]) -> list[dict[str, Any]]:
    return [{"instruction": mnemonic, **asdict(found)} for mnemonic, found in sorted(accesses)]


if __name__ == "__main__":
    main(sys.argv[1])
