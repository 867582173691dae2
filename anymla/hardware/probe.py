"""Machine: what this process runs on, or a chip that one asks about. The only file that asks a driver."""

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from anymla.arguments import check_device, check_name, shown
from anymla.errors import InvalidInput, Reasons
from anymla.hardware.arches import ARCHES, Arch


@dataclass(frozen=True)
class Package:
    """How a package that a backend needs is recognised and had.

    Attributes:
        distributions: Names under which it is distributed.
        install: What to do where it is missing.
        proof: A file of the package that a namesake does not have; "" where there is no namesake.
    """

    distributions: tuple[str, ...]
    install: str
    proof: str = ""


PACKAGES: Mapping[str, Package] = {
    "torch": Package(("torch",), "pip install torch"),
    "triton": Package(
        ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton"), "pip install 'anymla[triton]'"
    ),
    # PyPI's "aiter" is a library for asynchronous iterators.
    "aiter": Package(("amd-aiter", "aiter"), "building github.com/ROCm/aiter", proof="mla.py"),
}

NEWEST = ""
"""The version of a package of an assumed machine: whatever is newest."""


@dataclass(frozen=True)
class Machine:
    """One device and what is installed beside it.

    Attributes:
        arch: Name of a row of ARCHES, or a chip that no row describes.
        packages: Name and version of each package of PACKAGES that is there, by name.
        assumed: Whether the machine was named, not probed, and every package taken to be there.
        device_name: What the driver calls the device.
        multiprocessors: Compute units or SMs, 0 where unknown.
        failures: Why functions of its libraries cannot be called, by name, as far as they were tried.
        takes_unrun: Whether kernels that nobody ran are taken too: for whoever is about to run them.
    """

    arch: str
    packages: tuple[tuple[str, str], ...] = ()
    assumed: bool = False
    device_name: str = ""
    multiprocessors: int = 0
    failures: tuple[tuple[str, str], ...] = ()
    takes_unrun: bool = False

    @property
    def facts(self) -> Arch | None:
        """The row of ARCHES, None for a chip without one."""
        return ARCHES.get(self.arch)

    @property
    def fp8_flavour(self) -> str:
        """What a bare "fp8" means here."""
        return self.facts.fp8_flavour if self.facts else "e4m3fn"

    def having(self, package: str, version: str) -> "Machine":
        """The same machine with that release of a package, which makes it one that is only asked about.

        Raises:
            InvalidInput: the package is none of PACKAGES, or the version no text.
        """
        reasons = Reasons("machine")
        check_name(reasons, "package", package, tuple(PACKAGES))
        reasons.need(isinstance(version, str), "version", shown(version), "a release, such as '2.13.0'")
        reasons.raise_if_any()
        packages = dict(self.packages) | {package: version}
        return replace(self, packages=tuple(sorted(packages.items())), assumed=True)


def machine_named(name: str) -> Machine:
    """A machine that one does not have: that chip with the newest release of every package.

    Args:
        name: A key of ARCHES.

    Returns:
        The machine, marked as assumed.

    Raises:
        InvalidInput: no row has that name; the message lists all.
    """
    arch = ARCHES.get(name) if isinstance(name, str) else None
    if arch is None:
        raise InvalidInput("machine", [f"machine got {shown(name)}; needs one of {', '.join(ARCHES)}"])
    packages = tuple((package, NEWEST) for package in sorted(PACKAGES))
    return Machine(name, packages, True, arch.part, arch.multiprocessors or 0)


def this_machine(device: object = None) -> Machine:
    """The machine of a device of this process, asked of its driver once.

    Args:
        device: A torch.device or its name. None: the first GPU that a driver reports, else the CPU;
            this needs no torch.

    Returns:
        The machine, not assumed.

    Raises:
        InvalidInput: it names no device of this process.
    """
    try:
        return _machine_at(device)
    except TypeError:
        pass
    # What cannot be remembered names no device: asked without memory, it is refused in words.
    return _machine_at.__wrapped__(device)


@lru_cache(maxsize=64)
def _machine_at(device: object) -> Machine:
    if device is None:
        arch, device_name, multiprocessors = _nvidia_device() or _amd_device() or _cpu_device()
    else:
        kind = _kind_of(device)
        if kind == "cuda":
            arch, device_name, multiprocessors = _torch_device(device)
        else:
            arch, device_name, multiprocessors = _cpu_device() if kind == "cpu" else (kind, "", 0)
    return Machine(arch, installed_packages(), False, device_name, multiprocessors)


@lru_cache(maxsize=1)
def installed_packages() -> tuple[tuple[str, str], ...]:
    """Name and version of each installed package of PACKAGES, sorted by name, without importing any."""
    found = ((name, _installed_version(name, package)) for name, package in sorted(PACKAGES.items()))
    return tuple((name, version) for name, version in found if version is not None)


def torch_report(timeout_s: float = 60) -> dict[str, str]:
    """What torch says of itself, asked in another process, which a broken torch may take down.

    Returns:
        "torch", "cuda", "hip" and "devices", or "error" with the last line of what went wrong.
    """
    import subprocess

    command = [sys.executable, "-c", _TORCH_QUESTION]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"import torch took more than {timeout_s:.0f} s"}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    lines = done.stderr.strip().splitlines() or [f"python exited with {done.returncode}"]
    return {"error": lines[-1]}


_TORCH_QUESTION = """
import json, torch
count = torch.cuda.device_count()
names = [torch.cuda.get_device_name(i) for i in range(count)]
facts = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "hip": torch.version.hip or ""}
print(json.dumps({**facts, "devices": ", ".join(names)}))
"""


def _installed_version(name: str, package: Package) -> str | None:
    # Imported here because a named machine asks for no version, and must be fast.
    import importlib.metadata
    import importlib.util

    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # Something stands in for it that says nothing of itself.
        spec = None
    if spec is None:
        return None
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    if package.proof and not any((root / package.proof).exists() for root in roots):
        return None
    for distribution in package.distributions:
        try:
            return importlib.metadata.version(distribution) or "unknown"
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
    return "unknown"


def _kind_of(device: object) -> str:
    """What kind of device it is, such as "cuda", or InvalidInput if this process has none of that name."""
    if isinstance(device, str) and device == "cpu":  # needs no torch
        return device
    reasons = Reasons("machine")
    place = check_device(reasons, device)
    reasons.raise_if_any()
    assert place is not None
    return place.type


def _cpu_device() -> tuple[str, str, int]:
    return "cpu", "CPU", os.cpu_count() or 0


def _torch_device(device: object) -> tuple[str, str, int]:
    import torch

    facts = torch.cuda.get_device_properties(torch.device(str(device)))
    arch = facts.gcnArchName.partition(":")[0] if torch.version.hip else f"sm{facts.major}{facts.minor}"
    return arch, facts.name, facts.multi_processor_count


def _hidden(*variables: str) -> bool:
    return any(os.environ.get(variable) in ("", "-1") for variable in variables)


def _nvidia_device(library: str = "libnvidia-ml.so.1") -> tuple[str, str, int] | None:
    if _hidden("CUDA_VISIBLE_DEVICES"):
        return None
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(96)
    answers = (
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)),
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
        nvml.nvmlDeviceGetName(handle, name, len(name)),
    )
    nvml.nvmlShutdown()
    if any(answers):
        return None
    arch = f"sm{major.value}{minor.value}"
    known = ARCHES.get(arch)
    return arch, name.value.decode(errors="replace"), (known and known.multiprocessors) or 0


def _amd_device(nodes: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> tuple[str, str, int] | None:
    if _hidden("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        return None
    for properties in sorted(nodes.glob("*/properties")):
        try:
            lines = properties.read_text().splitlines()
        except OSError:
            continue
        facts = {key: int(value) for key, _, value in (line.partition(" ") for line in lines) if value}
        version = facts.get("gfx_target_version", 0)
        if version:
            arch = f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"
            units = facts.get("simd_count", 0) // max(facts.get("simd_per_cu", 1), 1)
            return arch, arch, units
    return None
