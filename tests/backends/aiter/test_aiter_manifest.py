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
OBJECT = b"\x7fELF" + bytes(60)
FOLDER_CODE = "find_aiter = None\nAITER_ASM_DIR = 'hsa'\n"
DIGEST_OF = facts.digest_of
TAGGED = [release for release in facts.releases() if facts.recorded_dispatch(release)]


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a package with the stubs, tables and reducers of a recorded release; its dispatch is known."""

    def write(release: str = "0.1.20.post1", arch: str = "gfx942") -> Path:
        for function, row in bindings.FUNCTIONS.items():
            path = tmp_path.joinpath(*row.modules[0].split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as source:
                source.write("import enum; MlaVersion = enum.Enum('MlaVersion', 'V32')\n")
                source.write(f"def {function}({facts.recorded_parameters(function, release)}): ...\n")
                source.write(f"# {facts._PAGES_OF_STAGE1}\n" * facts.recorded_index_pages(release))
        folder = tmp_path / "aiter_meta" / "hsa" / arch / "mla"
        folder.mkdir(parents=True)
        with (folder / "mla_asm.csv").open("w", newline="") as lines:
            table = csv.writer(lines)
            table.writerow((*provider._COLUMNS[:-1], "knl_name", "co_name"))
            for kernel in facts.recorded_kernels(release, arch):
                table.writerow((*kernel[:-1], "name", f"{kernel.code_object}.co"))
                (folder / f"{kernel.code_object}.co").write_bytes(OBJECT)
        for path in provider._SOURCES.values():
            (tmp_path / "aiter_meta" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "aiter_meta" / path).write_text("// known\n")
        heads = facts.recorded_reducers(release, 512)
        text = "".join(f"MLA_REDUCE_CASE_EF(NUM_HEAD, {h}, HEAD_DIM, 512, X)\n" for h in heads)
        (tmp_path / "aiter_meta" / provider._REDUCER).write_text(text)
        (tmp_path / "aiter" / "install_mode").write_text("install")
        (tmp_path / "aiter" / "jit").mkdir()
        (tmp_path / "aiter" / "jit" / "core.py").write_text(f"import os\n\n{FOLDER_CODE}# more\n")
        monkeypatch.setattr(provider, "_FOLDER_BLOB", facts.git_blob(FOLDER_CODE.strip().encode()))
        known = facts.recorded_dispatch(release)
        blobs = {"blob": ""}

        def dispatch_with(found: dict[str, str]) -> facts.Dispatch | None:
            blobs["blob"] = blobs["blob"] or str(sorted(found.items()))
            return known if str(sorted(found.items())) == blobs["blob"] and all(found.values()) else None

        monkeypatch.setattr(facts, "dispatch_with", dispatch_with)
        # The files are empty, and taken for those of the release.
        monkeypatch.setattr(facts, "digest_of", lambda path: facts.recorded_digest(release, arch, path.stem))
        return tmp_path

    forget()
    yield write  # type: ignore[misc]
    forget()


@pytest.fixture
def beside_triton(installation, monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, Problem]:
    """A chip with that AITER and Triton, and a decode that both take."""
    root = installation()
    monkeypatch.setattr(provider, "package_root", lambda: root)
    machine = Machine("gfx942", (("aiter", "0.1.20.post1"), ("triton", "3.6.0")), multiprocessors=304)
    return machine, model_named("deepseek-v3").problem(tp=8)


def forget() -> None:
    """Read and choose anew."""
    for kept in (provider._read, select.explain, select.choose):
        kept.cache_clear()


def read(root: Path, arch: str = "gfx942") -> provider.Aiter:
    """What is read anew from a folder."""
    forget()
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


def test_a_code_object_of_other_bytes_is_refused(installation, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("0.1.20.post1", "gfx942", 16, "bf16", 1, False, False, "ragged")
    root = installation()
    assert manifest.route_of(cases.problem_of(case), read(root), 1)[0]
    for path in (root / "aiter_meta" / "hsa" / "gfx942" / "mla").glob("*.co"):
        path.write_bytes(path.read_bytes() + b"other bytes")
    monkeypatch.setattr(facts, "digest_of", DIGEST_OF)
    route, reasons = manifest.route_of(cases.problem_of(case), read(root), 1)
    assert route is None
    assert "the bytes of AITER's kernel are none that were run; anymla verify --aiter runs them" in reasons
    about_to_run = installed_aiter("0.1.20.post1", "gfx942", root, takes_unrun=True)
    assert manifest.route_of(cases.problem_of(case), about_to_run, 1)[0]


def test_a_digest_is_the_start_of_what_git_calls_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.co").write_bytes(b"")
    assert facts.digest_of(tmp_path / "a.co") == "e69de29bb2d1"
    assert facts.digest_of(tmp_path / "b.co") == ""


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
    elif how == "code objects of 0 bytes":
        for path in table.parent.glob("*.co"):
            path.write_bytes(b"")
    elif how == "Git LFS pointers":
        for path in table.parent.glob("*.co"):
            path.write_text(
                f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 31744\n"
            )
    elif how == "code objects that were cut off":
        for path in table.parent.glob("*.co"):
            path.write_bytes(OBJECT[:40] + (31000).to_bytes(8, "little") + OBJECT[48:])
    elif how == "other code for folders":
        (root / "aiter" / "jit" / "core.py").write_text(FOLDER_CODE.replace("hsa", "elsewhere"))
    elif how == "no code for folders":
        (root / "aiter" / "jit" / "core.py").unlink()
    elif how == "other dispatch code":
        (root / "aiter_meta" / provider._SOURCES["asm_mla.cu"]).write_text("// patched\n")
    elif how == "no dispatch code":
        (root / "aiter_meta" / provider._SOURCES["asm_mla.cu"]).unlink()
    elif how == "a changed stub":
        stub = root / "aiter" / "mla.py"
        stub.write_text(stub.read_text().replace("max_seqlen_q,", "max_seqlen_q, stream,", 1))


REASONS = {
    "no folder of kernels": "aiter 0.1.20.post1 has no folder",
    "no table": "aiter 0.1.20.post1 has no kernel table",
    "a malformed table": "aiter 0.1.20.post1 has a malformed kernel table",
    "a table of other columns": "aiter 0.1.20.post1 has a malformed kernel table",
    "no code object": "aiter 0.1.20.post1 has no whole code object of",
    "code objects of 0 bytes": "aiter 0.1.20.post1 has no whole code object of",
    "Git LFS pointers": "aiter 0.1.20.post1 has no whole code object of",
    "code objects that were cut off": "aiter 0.1.20.post1 has no whole code object of",
    "other code for folders": "aiter 0.1.20.post1 finds its kernel table by code that is not recorded",
    "no code for folders": "aiter 0.1.20.post1 finds its kernel table by code that is not recorded",
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
    choice = select.choose(model_named("deepseek-v3").problem(tp=8), machine)
    assert choice.backend.name == "triton"
    (aiter,) = (verdict for verdict in choice.verdicts if verdict.backend.name == "aiter")
    assert any(one.startswith(reason) for one in aiter.reasons), aiter.reasons


@pytest.mark.parametrize(("switch", "harmless"), SWITCHES.items())
def test_a_switch_is_seen_where_an_aiter_is_installed(
    installation, monkeypatch: pytest.MonkeyPatch, switch: str, harmless: str
) -> None:
    root = installation()
    other = "01".replace(harmless, "")
    for value, seen in ((other, {switch}), (harmless, set()), ("", set("0") - {harmless} and {switch})):
        monkeypatch.setenv(switch, value)
        assert installed_aiter("0.1.20.post1", "gfx942", root).switches == seen
        assert recorded_aiter("HEAD", "gfx942").switches == set()


def here(monkeypatch: pytest.MonkeyPatch, root: Path, arch: str = "gfx942") -> Machine:
    """A machine with what was written to a folder, whose import would not die."""
    monkeypatch.setattr(provider, "package_root", lambda: root)
    AiterDouble("0.1.20.post1", arch).install(monkeypatch)
    return Machine(arch, (("aiter", "0.1.20.post1"), ("triton", "3.6.0")), multiprocessors=304)


def reasons_of(problem: Problem, machine: Machine) -> str:
    """Why AITER would not be taken; "" if it would."""
    found = select.explain(problem, machine)
    return "; ".join(next(one for one in found if one.backend.name == "aiter").reasons)


PERSISTENT = Problem("decode", "bf16", "fp8_e4m3fnuz", 16, 512, 64)
INDEX = Problem("index_topk", "fp8_e4m3fnuz", "index_k_fnuz", 64, 128, 0, block_size=1, topk=64)


@pytest.mark.parametrize(
    ("switch", "value", "problem", "reason"),
    [
        ("AITER_MLA_REDUCE_FLYDSL", "1", PERSISTENT, "AITER_MLA_REDUCE_FLYDSL is set"),
        ("AITER_MLA_META_USE_PARALLEL", "0", PERSISTENT, "AITER_MLA_META_USE_PARALLEL is 0"),
        ("CU_NUM", "80", PERSISTENT, "CU_NUM is set: plans get buffers for so many compute units"),
        ("GPU_ARCHS", "gfx942;gfx950", PERSISTENT, "GPU_ARCHS got 'gfx942;gfx950'; needs gfx942 last"),
        ("AITER_META_DIR", "{elsewhere}", PERSISTENT, "aiter 0.1.20.post1 has no folder {elsewhere}/hsa"),
        (
            "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS",
            "1",
            INDEX,
            "AITER_ENABLE_AOT_GLUON_PA_MQA_LOGITS is set",
        ),
    ],
)
def test_a_switch_set_after_the_first_choice_is_seen_by_the_next(
    installation,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    switch: str,
    value: str,
    problem: Problem,
    reason: str,
) -> None:
    machine = here(monkeypatch, installation())
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "csrc").mkdir(parents=True)
    reason = reason.format(elsewhere=elsewhere)
    assert reason not in reasons_of(problem, machine)
    with monkeypatch.context() as environment:
        environment.setenv(switch, value.format(elsewhere=elsewhere))
        assert reason in reasons_of(problem, machine)
    assert reason not in reasons_of(problem, machine)


@pytest.mark.parametrize("named", ["native", "gfx942", "gfx950;gfx942"])
def test_an_environment_that_names_this_chip_changes_nothing(
    installation, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("GPU_ARCHS", named)
    assert read(installation()).refusals(bindings.DECODE) == ()


def test_the_table_that_is_read_is_the_one_that_aiter_reads(
    installation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = installation()
    whole, named = len(read(root).kernels), tmp_path / "named"
    for folder, kept in ((root, 1), (named, 2)):
        shutil.copytree(root / "aiter_meta", folder, dirs_exist_ok=True)
        table = folder / "hsa" / "gfx942" / "mla" / "mla_asm.csv"
        table.write_text("".join(table.read_text().splitlines(keepends=True)[: kept + 1]))
    mode = root / "aiter" / "install_mode"
    assert len(read(root).kernels) == whole
    mode.write_text("develop\n")
    assert len(read(root).kernels) == 1
    mode.unlink()
    assert len(read(root).kernels) == 1
    monkeypatch.setenv("AITER_META_DIR", str(named))
    assert len(read(root).kernels) == 2
    monkeypatch.setenv("AITER_META_DIR", str(tmp_path / "nowhere"))
    assert len(read(root).kernels) == 1


def test_an_aiter_that_is_not_there_is_a_reason() -> None:
    assert installed_aiter("", "gfx942", None).missing == ("aiter is not installed",)


def test_a_release_that_is_not_recorded_says_which_are() -> None:
    reasons = recorded_aiter("9.9", "gfx942").refusals(bindings.DECODE)
    assert reasons == ("aiter 9.9 is not recorded; 0.1.5 to 0.1.20.post1 and HEAD are",)


@pytest.mark.parametrize(("named", "nearest"), [("head", "HEAD"), ("0.1.16.post22", "0.1.16.post2")])
def test_a_release_that_is_not_recorded_says_which_come_nearest(named: str, nearest: str) -> None:
    (reason,) = recorded_aiter(named, "gfx942").refusals(bindings.DECODE)
    assert reason.startswith(f"aiter {named} is not recorded; 0.1.5 to 0.1.20.post1 and HEAD are; nearest: ")
    assert nearest in reason.partition(" nearest: ")[2].split(", ")


@pytest.mark.parametrize("release", ["0.1.5", "0.1.7.post5", "0.1.10"])
def test_a_release_before_kernel_tables_is_too_old(release: str) -> None:
    reasons = recorded_aiter(release, "gfx950").refusals(bindings.DECODE)
    assert any(
        "has no kernel table for gfx950; 0.1.10.post1 is the first release with one" in r for r in reasons
    )


def test_an_import_that_dies_is_a_reason_and_the_next_backend_takes_the_call(
    beside_triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, problem = beside_triton
    with monkeypatch.context() as alive:
        AiterDouble("0.1.20.post1", "gfx942").install(alive)
        forget()
        assert select.choose(problem, machine).backend.name == "aiter"
    monkeypatch.setitem(sys.modules, "aiter", None)
    forget()
    choice = select.choose(problem, machine)
    assert choice.backend.name == "triton"
    assert "aiter 0.1.20.post1 cannot be imported: aiter: " in str(choice)


def test_a_part_whose_import_dies_is_refused_alone(installation, monkeypatch: pytest.MonkeyPatch) -> None:
    root = installation()
    monkeypatch.setattr(provider, "package_root", lambda: root)
    machine = Machine("gfx942", (("aiter", "0.1.20.post1"), ("triton", "3.6.0")), multiprocessors=304)
    AiterDouble("0.1.20.post1", "gfx942").install(monkeypatch)
    forget()
    asked = model_named("glm-5").problem("index_topk", q_dtype="fp8_e4m3fnuz", kv_format="index_k_fnuz")
    choice = select.choose(asked, machine)
    assert choice.backend.name == "triton"
    assert "cannot be imported: aiter.ops.triton.attention.pa_mqa_logits" in str(choice)
    assert select.choose(model_named("deepseek-v3").problem(tp=8), machine).backend.name == "aiter"


DEATHS = {
    "an error": ("import no_such_rocm", "aiter: ModuleNotFoundError: No module named 'no_such_rocm'"),
    "an exit": ("raise SystemExit('no ROCm')", "aiter: SystemExit: no ROCm"),
    "an exit that claims success": ("raise SystemExit(0)", "aiter: SystemExit: 0"),
    "a crash": ("import os; os.abort()", "python exited with -6"),
}


@pytest.mark.parametrize(("source", "reason"), DEATHS.values(), ids=DEATHS)
def test_an_import_that_dies_in_another_process_is_a_reason_here(
    installation, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    root = installation()
    monkeypatch.setattr(provider, "package_root", lambda: root)
    monkeypatch.syspath_prepend(root)
    machine = Machine("gfx942", (("aiter", "0.1.20.post1"),))
    assert select.tried(machine) == machine
    assert manifest.report(machine)["missing"] == []
    (root / "aiter" / "__init__.py").write_text(f"{source}\n")
    broken, expected = select.tried(machine), f"aiter 0.1.20.post1 cannot be imported: {reason}"
    assert dict(broken.failures) == dict.fromkeys(bindings.FUNCTIONS, expected)
    assert expected in reasons_of(model_named("deepseek-v3").problem(tp=8), broken)
    said = manifest.report(broken)
    assert (said["missing"], said["bound"]) == ([expected], [])
    assert said["advice"] == "python -c 'import aiter.mla' shows the whole error"


def test_a_part_that_takes_the_process_down_leaves_what_was_asked_before_it(
    installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = installation()
    monkeypatch.setattr(provider, "package_root", lambda: root)
    monkeypatch.syspath_prepend(root)
    (root / "aiter" / "ops" / "cache.py").write_text("import os; os.abort()\n")
    broken = select.tried(Machine("gfx942", (("aiter", "0.1.20.post1"),)))
    asked = list(bindings.FUNCTIONS)
    assert list(dict(broken.failures)) == asked[asked.index("concat_and_cache_mla") :]


def test_what_was_named_and_not_probed_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "import_apart", lambda aiter: pytest.fail("imported"))
    machine = machine_named("gfx942")
    assert select.tried(machine) is machine
    absent = Machine("gfx942", ())
    assert select.tried(absent) == absent


def test_a_verdict_without_an_import_does_not_outlive_it(
    beside_triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, problem = beside_triton
    monkeypatch.setitem(sys.modules, "aiter", None)
    with monkeypatch.context() as without_torch:
        without_torch.delitem(sys.modules, "torch")
        assert select.choose(problem, machine).backend.name == "aiter"
    assert select.choose(problem, machine).backend.name == "triton"


@pytest.mark.parametrize("impostor", [None, getattr, 3])
def test_what_does_not_tell_its_parameters_is_a_reason_and_the_next_backend_takes_the_call(
    installation, monkeypatch: pytest.MonkeyPatch, impostor: object
) -> None:
    machine = here(monkeypatch, installation())
    monkeypatch.setattr(sys.modules["aiter.mla"], "mla_decode_fwd", impostor)
    choice = select.choose(model_named("deepseek-v3").problem(tp=8), machine)
    assert choice.backend.name == "triton"
    assert "mla_decode_fwd of aiter 0.1.20.post1 does not tell its parameters: " in str(choice)


def test_an_import_that_ends_the_process_is_a_reason(installation, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exits:
        def find_spec(self, name, path, target=None):
            if name == "aiter.mla":
                sys.exit("no ROCm")

    machine = here(monkeypatch, installation())
    monkeypatch.delitem(sys.modules, "aiter.mla")
    monkeypatch.setattr(sys.modules["aiter"], "__path__", [], raising=False)
    monkeypatch.setattr(sys, "meta_path", [Exits(), *sys.meta_path])
    choice = select.choose(model_named("deepseek-v3").problem(tp=8), machine)
    assert choice.backend.name == "triton"
    assert "aiter 0.1.20.post1 cannot be imported: aiter.mla: SystemExit: no ROCm" in str(choice)


COMMIT = "e40486071234567890abcdef1234567890abcdef"


@pytest.mark.parametrize("how", ["detached", "loose", "packed", "worktree"])
def test_the_commit_of_a_source_tree_is_read_without_git(tmp_path: Path, how: str) -> None:
    git = tmp_path / ".git"
    git.mkdir()
    (git / "HEAD").write_text(f"{COMMIT}\n" if how == "detached" else "ref: refs/heads/main\n")
    if how == "packed":
        (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{COMMIT} refs/heads/main\n")
    else:
        (git / "refs" / "heads").mkdir(parents=True)
        (git / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    tree = tmp_path
    if how == "worktree":
        linked, tree = git / "worktrees" / "one", tmp_path / "one"
        linked.mkdir(parents=True), tree.mkdir()
        (tree / ".git").write_text(f"gitdir: {linked}\n")
        (linked / "HEAD").write_text("ref: refs/heads/main\n")
        (linked / "commondir").write_text("../..\n")
    assert provider.commit_of(tree) == COMMIT


def test_a_folder_without_git_has_no_commit(tmp_path: Path) -> None:
    assert provider.commit_of(tmp_path) == provider.commit_of(None) == ""
    (tmp_path / ".git").mkdir()
    assert provider.commit_of(tmp_path) == ""


def test_an_import_that_dies_names_what_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    monkeypatch.delitem(sys.modules, "aiter.mla", raising=False)
    with pytest.raises(BackendError, match="aiter HEAD cannot be imported: aiter: "):
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
