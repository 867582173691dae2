"""Chips, quirks and probes: rows are sourced and alive; a probe answers without a driver or torch, too."""

import ctypes
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from anymla.backends import BACKENDS
from anymla.errors import InvalidInput
from anymla.hardware import probe
from anymla.hardware.arches import ARCHES
from anymla.hardware.probe import Machine, installed_packages, machine_named, this_machine, torch_report
from anymla.hardware.quirks import QUIRKS, Quirk
from anymla.models import model_named
from anymla.problem import Problem
from anymla.rules import ANY, one_of

AMD = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1250"]
NVIDIA = ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]
NAMED = ["cpu", *AMD, *NVIDIA]


def test_every_named_machine_has_a_row() -> None:
    assert list(ARCHES) == NAMED


@pytest.mark.parametrize("name", ARCHES)
def test_a_chip_is_described_with_sourced_facts(name: str) -> None:
    arch = ARCHES[name]
    assert arch.source
    assert arch.part
    assert arch.vendor == {"g": "amd", "s": "nvidia", "c": "cpu"}[name[0]]
    assert (
        arch.wave_size == {"amd": 64 if name.startswith("gfx9") else 32, "nvidia": 32, "cpu": 1}[arch.vendor]
    )
    assert arch.shared_bytes % 1024 == 0
    assert (arch.shared_bytes > 0) == (arch.vendor != "cpu")


def test_fp8_means_fnuz_on_one_chip_and_fn_everywhere_else() -> None:
    assert {name for name, arch in ARCHES.items() if arch.fp8_flavour == "e4m3fnuz"} == {"gfx942"}
    assert {arch.fp8_flavour for arch in ARCHES.values()} == {"e4m3fnuz", "e4m3fn"}


@pytest.mark.parametrize("name", ARCHES)
def test_a_named_machine_has_every_package_and_says_that_this_is_assumed(name: str) -> None:
    machine = machine_named(name)
    assert machine.assumed
    assert machine.arch == name
    assert dict(machine.packages).keys() == probe.PACKAGES.keys()
    assert machine.facts is ARCHES[name]
    assert hash(machine) == hash(machine_named(name))


def test_an_unknown_machine_is_refused_with_all_names() -> None:
    with pytest.raises(InvalidInput) as refusal:
        machine_named("sm70")
    assert str(refusal.value) == f"machine: machine got 'sm70'; needs one of {', '.join(NAMED)}"


def test_a_chip_without_a_row_still_is_a_machine() -> None:
    machine = Machine("sm70")
    assert machine.facts is None
    assert machine.fp8_flavour == "e4m3fn"


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=["name", "device"])
def test_the_machine_of_a_cpu_device_is_the_cpu(device: object) -> None:
    machine = this_machine(device)
    assert (machine.arch, machine.assumed) == ("cpu", False)
    assert dict(machine.packages)["torch"] == version("torch")


def test_the_machine_of_a_device_without_memory_is_no_chip() -> None:
    assert this_machine("meta").arch == "meta"


class FakeNvml:
    """The management library's calls that the probe makes, for an H200."""

    def __init__(self, library: str) -> None:
        assert library == "libnvidia-ml.so.1"

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: object, major, minor) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0

    def nvmlDeviceGetName(self, handle: object, name, size: int) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def nvmlShutdown(self) -> int:
        return 0


def test_an_nvidia_chip_is_read_from_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", FakeNvml)
    assert probe._nvidia_device() == ("sm90", "NVIDIA H200", 132)


def test_a_hidden_or_failing_nvidia_driver_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert probe._nvidia_device("libno-such-library.so.1") is None
    monkeypatch.setattr(ctypes, "CDLL", FakeNvml)
    monkeypatch.setattr(FakeNvml, "nvmlInit_v2", lambda self: 9)
    assert probe._nvidia_device() is None
    monkeypatch.setattr(FakeNvml, "nvmlInit_v2", lambda self: 0)
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetName", lambda self, handle, name, size: 3)
    assert probe._nvidia_device() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe._nvidia_device() is None


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
        (120500, "gfx1250"),
    ],
)
def test_an_amd_chip_is_read_from_its_driver(
    version: int, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    for node, text in enumerate(
        (
            "cpu_cores_count 64\ngfx_target_version 0\n",
            f"simd_count 1216\nsimd_per_cu 4\ngfx_target_version {version}\n",
        )
    ):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(text)
    assert probe._amd_device(tmp_path) == (arch, arch, 304)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    assert probe._amd_device(tmp_path) is None


def test_a_namesake_of_a_package_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert probe._installed_version("aiter", probe.PACKAGES["aiter"]) is None
    (tmp_path / "aiter" / "mla.py").touch()
    assert probe._installed_version("aiter", probe.PACKAGES["aiter"]) == "unknown"


def test_torch_reports_itself_from_another_process() -> None:
    assert torch_report()["torch"] == torch.__version__


def test_a_broken_torch_is_reported_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('libcudart.so.13 is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert torch_report() == {"error": "RuntimeError: libcudart.so.13 is missing"}


@pytest.mark.parametrize("quirk", QUIRKS, ids=str)
def test_a_quirk_refuses_or_sets_one_knob_of_a_backend_that_exists_and_cites(quirk: Quirk) -> None:
    assert bool(quirk.refuse) != bool(quirk.knob)
    assert quirk.source
    assert bool(quirk.until) == bool(quirk.package)
    rows = [row for row in BACKENDS if row.name == quirk.backend]
    assert any(quirk.arch.accepts(arch) and row.arch.accepts(arch) for row in rows for arch in ARCHES)
    assert set(quirk.when) <= set(Problem.__dataclass_fields__)


def test_no_quirk_outlives_the_versions_that_have_it() -> None:
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    oldest = {
        name: requirement.partition(">=")[2].partition(",")[0]
        for requirements in extras.values()
        for requirement in requirements
        if (name := requirement.partition(">=")[0]) in probe.PACKAGES
    }
    assert "triton" in oldest
    expired = [str(quirk) for quirk in QUIRKS if quirk.is_expired(oldest)]
    assert not expired, "no version that is still allowed has this fault: remove the row"


@pytest.mark.parametrize(
    ("version", "is_expired"),
    [
        ("3.6.0", False),
        ("3.8.9+git1", False),
        ("3.9.0", True),
        ("3.10", True),
        ("", True),
        ("unknown", False),
    ],
)
def test_a_quirk_ends_with_the_version_that_fixes_it(version: str, is_expired: bool) -> None:
    quirk = Quirk("triton", ANY, "test", refuse="broken", package="triton", until="3.9.0")
    assert quirk.is_expired({"triton": version}) is is_expired
    assert not quirk.is_expired({})


def test_a_knob_may_be_set_to_a_fact_of_the_call() -> None:
    problem = model_named("glm-5").problem("index_topk")
    quirk = Quirk("aiter", one_of("gfx942"), "test", knob="chunk_q", value="num_heads")
    assert quirk.setting(problem) == 32


def test_what_is_installed_is_known_without_importing_it() -> None:
    assert dict(installed_packages())["torch"] == version("torch")
