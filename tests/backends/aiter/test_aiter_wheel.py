"""The binder against real code: the wheel that PyPI has, parsed and not imported.

Without the wheel it says so: pip download --pre --no-deps amd-aiter==0.1.7.post2.dev18, AITER_WHEEL=<file>.
"""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from anymla.backends.aiter_mla import bindings
from anymla.backends.aiter_mla.bindings import DECODE, Binding
from anymla.backends.aiter_mla.provider import installed_aiter

WHEEL = os.environ.get("AITER_WHEEL", "")
pytestmark = pytest.mark.skipif(not Path(WHEEL).is_file(), reason="AITER_WHEEL names no wheel of amd-aiter")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel's stubs, tables and sources."""
    folder = tmp_path_factory.mktemp("aiter")
    with zipfile.ZipFile(WHEEL) as wheel:
        wanted = [
            name
            for name in wheel.namelist()
            if name.endswith((".py", ".csv", "/install_mode")) or "/mla" in name
        ]
        wheel.extractall(folder, wanted)
    yield folder


@pytest.mark.parametrize("function", [*DECODE, "mla_reduce_v1", "concat_and_cache_mla"])
def test_a_function_binds(root: Path, function: str) -> None:
    found = bindings.bind(function, bindings.parsed(function, root), "the wheel")
    assert isinstance(found, Binding), found


def test_its_planner_is_one_of_those_whose_stub_has_two_names_swapped(root: Path) -> None:
    found = bindings.bind("get_mla_metadata_v1", bindings.parsed("get_mla_metadata_v1", root), "the wheel")
    assert isinstance(found, Binding)
    assert (found.names["work_info_set"], found.names["work_indptr"]) == ("work_indptr", "work_info")


def test_what_it_does_not_have_is_named(root: Path) -> None:
    parameters = bindings.parsed("mla_prefill_ps_asm_fwd", root)
    assert bindings.bind("mla_prefill_ps_asm_fwd", parameters, "the wheel") == (
        "the wheel has no mla_prefill_ps_asm_fwd",
    )


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_it_is_from_before_kernel_tables_and_refused(root: Path, arch: str) -> None:
    (reason,) = installed_aiter("0.1.7.post2.dev18", arch, root).refusals(DECODE)
    assert "has no kernel table" in reason
