"""What is installed is read from its own files; what cannot be is a reason, never an error at import."""

import csv
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import cases
import pytest
from cases import Case
from double import AiterDouble

from anymla import select
from anymla.backends.aiter_mla import bindings, calls, facts, manifest, provider
from anymla.backends.aiter_mla.provider import SWITCHES, installed_aiter, recorded_aiter
from anymla.errors import BackendError
from anymla.hardware.probe import Machine, machine_named
from anymla.models import model_named
from anymla.plans import decode_plan
from anymla.problem import Feature, Problem

ARCHES = ("gfx942", "gfx950")
TAGGED = [release for release in facts.releases() if facts.recorded_dispatch(release)]


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a package with the stubs, tables and reducers of a recorded release; its dispatch is known."""

    def write(release: str = "0.1.20.post1", arch: str = "gfx942") -> Path:
        for function, row in bindings.FUNCTIONS.items():
            path = tmp_path.joinpath(*row.modules[0].split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as source:
                source.write(f"def {function}({facts.recorded_parameters(function, release)}): ...\n")
        folder = tmp_path / "aiter_meta" / "hsa" / arch / "mla"
        folder.mkdir(parents=True)
        with (folder / "mla_asm.csv").open("w", newline="") as lines:
            table = csv.writer(lines)
            table.writerow((*provider._COLUMNS[:-1], "knl_name", "co_name"))
            for kernel in facts.recorded_kernels(release, arch):
                table.writerow((*kernel[:-1], "name", f"{kernel.code_object}.co"))
                (folder / f"{kernel.code_object}.co").touch()
        for path in provider._SOURCES.values():
            (tmp_path / "aiter_meta" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "aiter_meta" / path).write_text("// known\n")
        heads = facts.recorded_reducers(release, 512)
        text = "".join(f"MLA_REDUCE_CASE_EF(NUM_HEAD, {h}, HEAD_DIM, 512, X)\n" for h in heads)
        (tmp_path / "aiter_meta" / provider._REDUCER).write_text(text)
        known = facts.recorded_dispatch(release)
        blobs = {"blob": ""}

        def dispatch_with(found: dict[str, str]) -> facts.Dispatch | None:
            blobs["blob"] = blobs["blob"] or str(sorted(found.items()))
            return known if str(sorted(found.items())) == blobs["blob"] and all(found.values()) else None

        monkeypatch.setattr(facts, "dispatch_with", dispatch_with)
        return tmp_path

    installed_aiter.cache_clear()
    yield write  # type: ignore[misc]
    installed_aiter.cache_clear()


def read(root: Path, arch: str = "gfx942") -> provider.Aiter:
    """What is read anew from a folder."""
    installed_aiter.cache_clear()
    return installed_aiter("0.1.20.post1", arch, root)


@pytest.mark.parametrize("arch", ARCHES)
def test_an_installation_is_read_as_its_release_was_recorded(installation, arch: str) -> None:
    found, recorded = read(installation(arch=arch), arch), recorded_aiter("0.1.20.post1", arch)
    assert found.missing == ()
    assert found.kernels == recorded.kernels
    assert found.decode_reducers == recorded.decode_reducers
    assert found.dispatch is recorded.dispatch
    assert found.refusals(bindings.DECODE) == ()


def test_a_row_whose_code_object_is_gone_is_no_kernel(installation) -> None:
    root = installation()
    gone = recorded_aiter("0.1.20.post1", "gfx942").kernels[0]
    (root / "aiter_meta" / "hsa" / "gfx942" / "mla" / f"{gone.code_object}.co").unlink()
    assert gone not in read(root).kernels


def broken(root: Path, how: str) -> None:
    """Damage an installation."""
    table = root / "aiter_meta" / "hsa" / "gfx942" / "mla" / "mla_asm.csv"
    if how == "no folder of kernels":
        shutil.rmtree(root / "aiter_meta" / "hsa")
    elif how == "no table":
        table.unlink()
    elif how == "a malformed table":
        table.write_text(table.read_text().replace("bf16,bf16,128", "bf16,bf16,many", 1))
    elif how == "a table of other columns":
        table.write_text("kernel,file\na,b\n")
    elif how == "no code object":
        for path in table.parent.glob("*.co"):
            path.unlink()
    elif how == "other dispatch code":
        (root / "aiter_meta" / provider._SOURCES["asm_mla.cu"]).write_text("// patched\n")
    elif how == "no dispatch code":
        (root / "aiter_meta" / provider._SOURCES["asm_mla.cu"]).unlink()
    elif how == "a changed stub":
        stub = root / "aiter" / "mla.py"
        stub.write_text(stub.read_text().replace("max_seqlen_q,", "max_seqlen_q, stream,", 1))


REASONS = {
    "no folder of kernels": "aiter 0.1.20.post1 has no folder hsa with kernels beside it",
    "no table": "aiter 0.1.20.post1 has no kernel table",
    "a malformed table": "aiter 0.1.20.post1 has a malformed kernel table",
    "a table of other columns": "aiter 0.1.20.post1 has a malformed kernel table",
    "no code object": "aiter 0.1.20.post1 has no code object of",
    "other dispatch code": "aiter 0.1.20.post1 chooses kernels by code that is not recorded",
    "no dispatch code": "aiter 0.1.20.post1 lacks asm_mla.cu",
    "a changed stub": "mla_decode_fwd of aiter 0.1.20.post1 needs an argument 'stream'",
}


@pytest.mark.parametrize(("how", "reason"), REASONS.items(), ids=REASONS)
def test_a_damaged_installation_is_a_reason_and_the_next_backend_takes_the_call(
    installation, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    root = installation()
    read(root)
    broken(root, how)
    refusals = read(root).refusals(bindings.DECODE)
    assert any(one.startswith(reason) for one in refusals), refusals
    monkeypatch.setattr(provider, "package_root", lambda: root)
    packages = (("aiter", "0.1.20.post1"), ("triton", "3.6.0"))
    machine = Machine("gfx942", packages, multiprocessors=304)
    select.explain.cache_clear(), select.choose.cache_clear()
    choice = select.choose(model_named("deepseek-v3").problem(tp=8), machine)
    assert choice.backend.name == "triton"
    (aiter,) = (verdict for verdict in choice.verdicts if verdict.backend.name == "aiter")
    assert any(one.startswith(reason) for one in aiter.reasons), aiter.reasons


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_is_seen_where_an_aiter_is_installed(
    installation, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    aiter = read(installation())
    for value, seen in (("1", {switch}), ("0", set()), ("", set())):
        monkeypatch.setenv(switch, value)
        assert aiter.switches == seen
        assert recorded_aiter("HEAD", "gfx942").switches == set()


def test_an_aiter_that_is_not_there_is_a_reason() -> None:
    assert installed_aiter("", "gfx942", None).missing == ("aiter is not installed",)


def test_a_release_that_is_not_recorded_says_which_are() -> None:
    reasons = recorded_aiter("9.9", "gfx942").refusals(("mla_decode_fwd",))
    assert reasons == ("aiter 9.9 is not recorded; 0.1.5 to 0.1.20.post1 and HEAD are",)


@pytest.mark.parametrize("release", ["0.1.5", "0.1.7.post5", "0.1.10"])
def test_a_release_before_kernel_tables_is_too_old(release: str) -> None:
    reasons = recorded_aiter(release, "gfx950").refusals(bindings.DECODE)
    assert any(
        "has no kernel table for gfx950; 0.1.10.post1 is the first release with one" in r for r in reasons
    )


def test_an_import_that_dies_is_a_reason_and_the_next_backend_takes_the_call(
    installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = installation()
    monkeypatch.setattr(provider, "package_root", lambda: root)
    machine = Machine("gfx942", (("aiter", "0.1.20.post1"), ("triton", "3.6.0")), multiprocessors=304)
    problem = model_named("deepseek-v3").problem(tp=8)
    with monkeypatch.context() as alive:
        AiterDouble("0.1.20.post1", "gfx942").install(alive)
        read(root), select.explain.cache_clear(), select.choose.cache_clear()
        assert select.choose(problem, machine).backend.name == "aiter"
    monkeypatch.setitem(sys.modules, "aiter", None)
    read(root), select.explain.cache_clear(), select.choose.cache_clear()
    choice = select.choose(problem, machine)
    assert choice.backend.name == "triton"
    assert "aiter 0.1.20.post1 cannot be imported: aiter.mla.mla_decode_fwd: " in str(choice)


def test_a_part_whose_import_dies_is_refused_alone(installation, monkeypatch: pytest.MonkeyPatch) -> None:
    root = installation()
    monkeypatch.setattr(provider, "package_root", lambda: root)
    machine = Machine("gfx942", (("aiter", "0.1.20.post1"), ("triton", "3.6.0")), multiprocessors=304)
    AiterDouble("0.1.20.post1", "gfx942").install(monkeypatch)
    read(root), select.explain.cache_clear(), select.choose.cache_clear()
    asked = model_named("glm-5").problem("index_topk", q_dtype="fp8_e4m3fnuz", kv_format="index_k_fnuz")
    choice = select.choose(asked, machine)
    assert choice.backend.name == "triton"
    assert "cannot be imported: aiter.ops.triton.attention.pa_mqa_logits" in str(choice)
    assert select.choose(model_named("deepseek-v3").problem(tp=8), machine).backend.name == "aiter"
    select.explain.cache_clear(), select.choose.cache_clear()


def test_a_report_tries_the_import_in_another_process(installation, monkeypatch: pytest.MonkeyPatch) -> None:
    root = installation()
    monkeypatch.setattr(provider, "package_root", lambda: root)
    machine = Machine("gfx942", (("aiter", "0.1.20.post1"),))
    monkeypatch.setenv("PYTHONPATH", str(root))
    read(root)
    assert manifest.report(machine)["missing"] == []
    (root / "aiter" / "__init__.py").write_text("import no_such_rocm\n")
    assert manifest.report(machine)["missing"] == [
        "import aiter.mla: ModuleNotFoundError: No module named 'no_such_rocm'"
    ]


def test_an_import_that_dies_names_what_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    monkeypatch.delitem(sys.modules, "aiter.mla", raising=False)
    with pytest.raises(BackendError, match=r"aiter HEAD cannot be imported: aiter\.mla\.mla_decode_fwd: "):
        calls.call_of(recorded_aiter("HEAD", "gfx942"), "mla_decode_fwd")


def test_a_function_that_is_not_what_its_source_said_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("HEAD", "gfx942", 16, "bf16", 1, False, False, "ragged")
    AiterDouble("HEAD", "gfx942").install(monkeypatch)
    monkeypatch.setattr(sys.modules["aiter.mla"], "mla_decode_fwd", lambda q, stream: None)
    with pytest.raises(BackendError, match="needs an argument 'stream', whose meaning is not known"):
        decode_plan(cases._batch((3,), 1), cases.problem_of(case), "aiter", cases.machine_of(case))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("release", TAGGED)
def test_no_route_leaves_the_tables_of_its_release(release: str, arch: str) -> None:
    aiter = recorded_aiter(release, arch)
    assert aiter.dispatch is not None
    objects = {kernel.code_object for kernel in aiter.kernels}
    for heads in range(1, 131):
        for kind in cases.KINDS:
            case = Case(release, arch, heads, kind, 1, False, False, "ragged")
            for q_len in (1, 2, 4):
                route, reasons = manifest.route_of(cases.problem_of(case), aiter, q_len)
                assert (route is None) == bool(reasons)
                if route is None:
                    continue
                call = route.call
                assert call.kernel in objects
                assert call.lanes >= heads
                assert not call.persistent or call.lanes // call.fold in aiter.decode_reducers


@pytest.mark.parametrize("arch", ARCHES)
def test_what_is_asked_in_fp8_is_run_in_fp8_or_refused_by_name(arch: str) -> None:
    fp8 = "fp8_e4m3fnuz" if arch == "gfx942" else "fp8_e4m3fn"
    kinds = product(("bf16", fp8), ("bf16", fp8), ("decode", "sparse_decode"), (1, 4))
    asked = product(TAGGED[::9], kinds, (1, 12, 33, 48, 100), ((), (Feature.LSE,), (Feature.SINKS,)))
    outcomes = Counter[str]()
    for release, (q_dtype, kv_format, op, q_len), heads, wanted in asked:
        features, topk = frozenset(wanted), 64 if op == "sparse_decode" else 0
        problem = Problem(op, q_dtype, kv_format, heads, 512, 64, q_len=q_len, topk=topk, features=features)
        machine = machine_named(arch).having("aiter", release)
        found = select.explain(problem, machine)
        verdict = next(one for one in found if one.backend.name == "aiter")
        if not verdict.accepted:
            assert verdict.reasons
            outcomes["refused"] += 1
            continue
        for rows in (1, q_len):
            route, _ = manifest.route_of(problem, provider.aiter_of(machine), rows)
            assert route is None or route.call.q == q_dtype.partition("_")[0]
        outcomes[q_dtype] += 1
    assert min(outcomes[key] for key in ("refused", "bf16", fp8)) > 50


def test_24_heads_are_native_where_every_stage_has_them() -> None:
    lanes = {}
    for release in ("0.1.19", "0.1.20"):
        case = Case(release, "gfx950", 24, "bf16", 1, False, False, "ragged")
        route, _ = manifest.route_of(cases.problem_of(case), recorded_aiter(release, "gfx950"), 1)
        assert route is not None
        lanes[release] = route.call.lanes
    assert lanes == {"0.1.19": 32, "0.1.20": 24}


def test_a_machine_that_one_asks_about_has_the_newest_release() -> None:
    assert provider.aiter_of(machine_named("gfx942")).release == facts.newest_release()
