"""The audit of chips: which specialisations there are, and compiling them in processes that may be lost.

Each process compiles for one chip only, one specialisation after another, and is ended where one takes too
long; what it was at then counts as failed.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from anymla.hardware.arches import ARCHES
from anymla.hardware.launch import LAUNCH, Launch, launch_rows
from anymla.hardware.tiles import attend_shared_bytes
from anymla.verification.audit.calls import calls
from anymla.verification.audit.capture import Specialisation, capturing
from anymla.verification.audit.figures import Figures, compiled

MOST_INSTRUCTIONS = 12_000
"""A kernel that has more converts values in software, such as an fp8 flavour that the chip does not have."""
LIMIT_S = 120.0
"""A compilation that takes longer has gone wrong, mostly by spilling."""


@dataclass(frozen=True)
class KnownSpill:
    """Registers that a launch row is known to spill, and why it stands all the same.

    Attributes:
        most_bytes: The most of any form.
        reason: What was tried.
    """

    most_bytes: int
    reason: str


_DUPLICATED = (
    "each half of a wave holds its own copy of an operand there; of tiles, warps, chunks and sides this is "
    "what spills least"
)

_SKEWED = "fp8 rows that begin at no multiple of 16 bytes, which only views of a cache of such widths do"
_CHOSEN = "some widths, for which the compiler keeps to 128 registers by itself; all others spill nothing"
_CAPPED = "faster on an H200 than without a cap on its registers; forms of few heads spill a little"
_SUMS = (
    "mostly around an item; when it was chosen, two tokens of 16 heads took 147.5 µs on an H200, 152.0 in "
    "tiles of 64 rows, and 168.2 in this tile with 8 warps, which spill nothing"
)
_WIDE = "heads of 512 columns after a cached context take all 256 registers; other forms spill nothing"
_ONE = "of all forms one does, that of {}"
_VIEWS = "views whose rows cannot be copied pass through registers; other forms spill nothing"

KNOWN_SPILLS: Mapping[tuple[str, str, str], KnownSpill] = {
    ("sm90", "attend", "16×64 4w 3s"): KnownSpill(3200, _SKEWED),
    ("sm90", "attend", "64×64 8w 2s"): KnownSpill(1920, _SKEWED),
    ("sm90", "attend", "16×32 8w 2s"): KnownSpill(8, _CHOSEN),
    ("sm90", "attend", "32×64 4w 2s attend_swapped"): KnownSpill(128, _SUMS),
    ("sm90", "attend", "64×64 4w 2s attend_wgmma"): KnownSpill(128, _VIEWS),
    ("sm90", "index_logits", "256×64 4w 2s"): KnownSpill(64, _CAPPED),
    ("sm80", "prefill", "64×32 4w 2s to 192"): KnownSpill(
        8, _ONE.format("heads of 64 columns after a cached context")
    ),
    ("sm100", "attend", "16×32 8w 2s"): KnownSpill(
        16, _ONE.format("queries in fp8 over a latent of 256 in pages of 16")
    ),
    ("gfx1100", "attend", "16×16 8w 1s swapped reread"): KnownSpill(128, _DUPLICATED),
    ("gfx1100", "prefill", "32×16 8w 1s reread to 640"): KnownSpill(68, _WIDE),
    ("gfx1201", "prefill", "16×16 8w 1s to 640"): KnownSpill(8, _WIDE),
}
"""By chip, kernel and row in short."""


@dataclass(frozen=True)
class Finding:
    """One specialisation on one chip.

    Attributes:
        arch: The chip.
        kernel: Name in LAUNCH.
        row: The launch row, in short.
        form: The call that asks for it.
        figures: What came out, None where nothing did.
        planned_bytes: On-chip bytes that the planner counts on, 0 where it does not ask.
        error: Why nothing did.
    """

    arch: str
    kernel: str
    row: str
    form: str
    figures: Figures | None
    planned_bytes: int = 0
    error: str = ""

    def faults(self) -> list[str]:
        """What keeps it from being clean."""
        f = self.figures
        if f is None:
            return [self.error]
        room = ARCHES[self.arch].shared_bytes
        found = [f"{f.shared_bytes} on-chip bytes of {room}"] if f.shared_bytes > room else []
        too_many = 0 < self.planned_bytes < f.shared_bytes
        found += [f"{f.shared_bytes} on-chip bytes; planned for {self.planned_bytes}"] if too_many else []
        known = KNOWN_SPILLS.get((self.arch, self.kernel, self.row))
        spilled = f.spilled_bytes > (known.most_bytes if known else 0)
        found += [f"{f.spilled_bytes} bytes spilled"] if spilled else []
        bare = f.bare_dots if f.matrix else f.dots
        found += [f"{bare} products without matrix instructions"] if bare else []
        found += [f"{f.instructions} instructions"] if f.instructions > MOST_INSTRUCTIONS else []
        columns = ARCHES[self.arch].tensor_columns
        over = f.tensor_columns > columns
        found += [f"{f.tensor_columns} columns of tensor memory of {columns}"] if over else []
        return found


def wanted(arch: str, *, everything: bool = True) -> list[tuple[Specialisation, str]]:
    """The different specialisations of all calls on a chip, each with the first call that asks for it.

    Args:
        arch: The chip.
        everything: False leaves one for each kernel, row and way to read the cache.
    """
    found: dict[str, tuple[Specialisation, str]] = {}
    with capturing(arch) as (machine, launches):
        for call in calls(machine):
            call.run(machine)
            for launch in launches:
                found.setdefault(launch.key, (launch, str(call)))
            launches.clear()
    if everything:
        return list(found.values())
    few: dict[object, tuple[Specialisation, str]] = {}
    for launch, form in found.values():
        constants = launch.constants_by_name
        facts = (constants.get(name) for name in ("FORMAT", "SPARSE", "CONTEXT"))
        is_far = "over 2 GiB" in form
        few.setdefault((launch.kernel, launch.row(arch), is_far, *facts), (launch, form))
    return list(few.values())


def unused_rows(arch: str) -> list[str]:
    """Launch rows of a chip that no call takes; what nothing takes, nothing proves."""
    taken = {(launch.kernel, launch.row(arch)) for launch, _ in wanted(arch)}
    kernels = dict.fromkeys(kernel for kernel, _ in LAUNCH)
    return [
        f"{kernel} {in_short(row)}"
        for kernel in kernels
        for row in launch_rows(kernel, arch)
        if (kernel, row) not in taken
    ]


def audit(
    arches: Iterable[str],
    *,
    everything: bool = True,
    kernels: Iterable[str] = (),
    workers: int = 2,
    progress: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Compile all that these chips want.

    Args:
        arches: Keys of ARCHES.
        everything: As in `wanted`.
        kernels: Names in LAUNCH; none for all.
        workers: Processes at a time.
        progress: Called with each finding, in this thread.

    Returns:
        The findings in the order of the chips, kernels and calls.
    """
    jobs: queue.SimpleQueue[tuple[str, list[int]]] = queue.SimpleQueue()
    only = set(kernels)
    expected = 0
    found: queue.SimpleQueue[tuple[int, Finding]] = queue.SimpleQueue()
    for arch in arches:
        listed = wanted(arch, everything=everything)
        indices = [i for i, (launch, _) in enumerate(listed) if not only or launch.kernel in only]
        expected += len(indices)
        # Chunks of a chip's list, so that all workers end at about the same time.
        for part in range(workers):
            jobs.put((arch, indices[part::workers]))
    threads = [
        threading.Thread(target=_work, args=(jobs, found, everything), daemon=True) for _ in range(workers)
    ]
    for thread in threads:
        thread.start()
    results: dict[tuple[str, int], Finding] = {}
    while len(results) < expected:
        index, finding = found.get()
        results[finding.arch, index] = finding
        progress(finding)
    order = {arch: place for place, arch in enumerate(ARCHES)}
    return [results[key] for key in sorted(results, key=lambda key: (order[key[0]], key[1]))]


def _work(
    jobs: "queue.SimpleQueue[tuple[str, list[int]]]",
    found: "queue.SimpleQueue[tuple[int, Finding]]",
    everything: bool,
) -> None:
    while True:
        try:
            arch, left = jobs.get_nowait()
        except queue.Empty:
            return
        while left:
            for index, finding in _in_a_process(arch, left, everything):
                left = left[1:]
                found.put((index, finding))


def _in_a_process(arch: str, indices: list[int], everything: bool) -> Iterator[tuple[int, Finding]]:
    """Findings until the process ends or one takes too long; that one is the last."""
    command = [sys.executable, "-m", "anymla.verification.audit", "--compile", arch]
    command += [] if everything else ["--few"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(indices))
    process.stdin.close()
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    output = process.stdout

    def listen() -> None:
        for line in output:
            answers.put(line)
        answers.put("")

    threading.Thread(target=listen, daemon=True).start()
    names: dict[str, Any] = {"kernel": "?", "row": "?", "form": "?", "planned_bytes": 0}
    for index in indices:
        started = time.monotonic()
        error, answer = "", {}
        while True:
            try:
                line = answers.get(timeout=max(0.1, LIMIT_S - (time.monotonic() - started)))
            except queue.Empty:
                line, error = "", f"took more than {LIMIT_S:.0f} s"
            if not line:
                break
            answer = json.loads(line)
            if "figures" in answer:
                break
            names = answer
        if not line:
            process.kill()
            yield index, Finding(arch, **names, figures=None, error=error or "took the process down")
            break
        yield index, from_fields({**names, **answer, "arch": arch})
    process.wait()
    process.stdout.close()


def compile_listed(arch: str, indices: list[int], *, everything: bool) -> None:
    """What a process does: print a line before and after each compilation."""
    listed = wanted(arch, everything=everything)
    for index in indices:
        launch, form = listed[index]
        row = launch.row(arch)
        names = {
            "kernel": launch.kernel,
            "row": in_short(row) if row else "",
            "form": form,
            "planned_bytes": _planned_bytes(launch, row, arch),
        }
        print(json.dumps(names), flush=True)
        try:
            answer: Mapping[str, Any] = {"figures": asdict(compiled(launch, arch))}
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            answer = {"figures": None, "error": f"{type(error).__name__}: {first}"[:200]}
        print(json.dumps(answer), flush=True)


def _planned_bytes(launch: Specialisation, row: Launch | None, arch: str) -> int:
    if launch.kernel != "attend" or row is None:
        return 0
    constants = launch.constants_by_name
    return attend_shared_bytes(row, arch, constants["L"], constants["R"])


def in_short(row: Launch) -> str:
    """A launch row in a few characters: rows × keys, warps, stages."""
    words = f"{row.block_m}×{row.block_n} {row.num_warps}w {row.num_stages}s"
    words += " swapped" if row.swap else ""
    words += " reread" if row.reread else ""
    words += f" {row.kernel}" if row.kernel else ""
    return words + (f" to {row.widest}" if row.widest else "")


def from_fields(fields: Mapping[str, Any]) -> Finding:
    """A finding out of its JSON."""
    figures = fields.get("figures")
    return Finding(
        fields["arch"],
        fields["kernel"],
        fields["row"],
        fields["form"],
        Figures(**figures) if figures else None,
        fields["planned_bytes"],
        fields.get("error", ""),
    )
