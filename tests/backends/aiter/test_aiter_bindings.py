"""Every AITER function is bound by the names of what is installed; what cannot be is refused by name."""

import sys
import types
from pathlib import Path

import pytest
import torch

from anymla.backends.aiter_mla import bindings, facts
from anymla.backends.aiter_mla.bindings import DECODE, FUNCTIONS, PREFILL, Binding, Parameter, bind
from anymla.errors import InvalidInput

REDUCER = {
    "seven": "0.1.7",
    "with max_seqlen_q": "0.1.12",
    "with num_kv_splits": "0.1.16.post2",
}
PARTS = ("partial_output", "partial_lse", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def bound(function: str, release: str) -> Binding:
    """The binding of a recorded release, which must be there."""
    found = bind(function, bindings.recorded(function, release), f"aiter {release}")
    assert isinstance(found, Binding), found
    return found


def with_kernel_tables() -> list[str]:
    """Releases that have a kernel table."""
    return [release for release in facts.releases() if facts.recorded_dispatch(release)]


@pytest.mark.parametrize("release", with_kernel_tables())
def test_every_function_binds_in_every_release_with_a_kernel_table(release: str) -> None:
    for function in FUNCTIONS:
        bound(function, release)


def test_a_release_before_a_function_says_so() -> None:
    assert bind("mla_reduce_v1", bindings.recorded("mla_reduce_v1", "0.1.5"), "aiter 0.1.5") == (
        "aiter 0.1.5 has no mla_reduce_v1",
    )


@pytest.mark.parametrize("release", REDUCER.values(), ids=REDUCER)
def test_the_reducer_takes_each_of_its_three_shapes_by_name(release: str) -> None:
    ours = {name: name for name in (*PARTS, "final_output", "final_lse")}
    call = bound("mla_reduce_v1", release).arguments(**ours, num_kv_splits=0)
    assert {name: call[name] for name in ours} == ours
    assert call.get("num_kv_splits", 0) == 0
    required = {p.name for p in bindings.recorded("mla_reduce_v1", release) or () if p.required}
    assert required - {"max_seqlen_q"} <= call.keys()


def test_a_value_that_would_be_lost_is_refused_with_its_name() -> None:
    with pytest.raises(
        InvalidInput, match="causal got False; needs a parameter that mla_decode_fwd of aiter"
    ):
        bound("mla_decode_fwd", "0.1.19").arguments(causal=False)
    assert bound("mla_decode_fwd", "0.1.19").arguments(causal=True) == {}
    assert bound("mla_decode_fwd", "HEAD").arguments(causal=False) == {"causal": False}


def test_a_tensor_is_never_dropped() -> None:
    with pytest.raises(InvalidInput, match="q_scale"):
        bound("mla_decode_fwd", "0.1.5").arguments(q_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("release", "swapped"), [("0.1.6.post2", True), ("0.1.7.post5", True), ("0.1.8", False), ("HEAD", False)]
)
def test_the_planner_whose_stub_has_two_names_swapped_gets_the_right_buffers(
    release: str, swapped: bool
) -> None:
    call = bound("get_mla_metadata_v1", release).arguments(work_info_set="info", work_indptr="indptr")
    wrong_way = {"work_indptr": "info", "work_info": "indptr"}
    assert call == (wrong_way if swapped else {"work_info_set": "info", "work_indptr": "indptr"})


def parameters(text: str) -> tuple[Parameter, ...]:
    """Parameters as a stub would have them."""
    definition = bindings._arguments_in(text)
    return bindings._of_arguments(definition)


NOW = "partial_output, partial_lse, reduce_indptr, reduce_final_map, reduce_partial_map, max_seqlen_q"
DRIFTS = {
    "inserted with a default": (f"{NOW}, extra=0, num_kv_splits=0, final_output=None, final_lse=None", ()),
    "reordered": (f"final_lse, final_output, num_kv_splits, {NOW}", ()),
    "inserted as required": (
        f"{NOW}, num_kv_splits, scale, final_output, final_lse=None",
        ("mla_reduce_v1 of aiter 9.9 needs an argument 'scale', whose meaning is not known",),
    ),
    "renamed": (
        f"{NOW}, num_kv_splits, output, final_lse=None",
        (
            "mla_reduce_v1 of aiter 9.9 has no parameter 'final_output'",
            "mla_reduce_v1 of aiter 9.9 needs an argument 'output', whose meaning is not known",
        ),
    ),
    "removed": (
        f"{NOW}, final_output",
        ("mla_reduce_v1 of aiter 9.9 has no parameter 'final_lse'",),
    ),
    "required and only by keyword": (
        f"{NOW}, final_output, final_lse, *, stream",
        ("mla_reduce_v1 of aiter 9.9 needs an argument 'stream', whose meaning is not known",),
    ),
    "only by position": (
        f"{NOW}, final_output, final_lse, /, num_kv_splits=0",
        (
            *(f"mla_reduce_v1 of aiter 9.9 has no parameter {n!r}" for n in FUNCTIONS["mla_reduce_v1"].needs),
            *(
                f"mla_reduce_v1 of aiter 9.9 needs an argument '{name}, /', whose meaning is not known"
                for name in f"{NOW}, final_output, final_lse".split(", ")
            ),
        ),
    ),
}


@pytest.mark.parametrize(("text", "reasons"), DRIFTS.values(), ids=DRIFTS)
def test_a_drift_binds_or_is_refused_naming_provider_release_and_parameter(
    text: str, reasons: tuple[str, ...]
) -> None:
    found = bind("mla_reduce_v1", parameters(text), "aiter 9.9")
    assert found == reasons if reasons else isinstance(found, Binding)


def test_a_known_parameter_that_becomes_required_is_refused_if_no_call_has_a_value_for_it() -> None:
    text = ", ".join((*FUNCTIONS["get_mla_metadata_v1"].needs, "kv_last_page_lens", "topk"))
    assert bind("get_mla_metadata_v1", parameters(text), "aiter 9.9") == (
        "get_mla_metadata_v1 of aiter 9.9 needs an argument 'topk', which no call has a value for",
    )


def test_a_function_is_read_from_source_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "aiter" / "ops").mkdir(parents=True)
    source = "import no_such_module\n\n@compile_ops('m')\ndef mla_reduce_v1(a, b: int, c=3, *, d): ...\n"
    (tmp_path / "aiter" / "ops" / "attention.py").write_text(source)
    assert bindings.parsed("mla_reduce_v1", tmp_path) == (
        ("a", True),
        ("b", True),
        ("c", False),
        ("d", True),
    )
    assert bindings.parsed("mla_decode_fwd", tmp_path) is None


def test_source_that_does_not_parse_has_no_function(tmp_path: Path) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "mla.py").write_text("def mla_decode_fwd(\n")
    assert bindings.parsed("mla_decode_fwd", tmp_path) is None


@pytest.mark.parametrize(
    "folder", [("triton", "attention"), ("triton",)], ids=["where it is now", "where it was"]
)
def test_a_triton_module_is_found_where_a_release_has_it(tmp_path: Path, folder: tuple[str, ...]) -> None:
    path = tmp_path.joinpath("aiter", "ops", *folder)
    path.mkdir(parents=True)
    (path / "pa_mqa_logits.py").write_text("def deepgemm_fp8_paged_mqa_logits(q_fp8): ...\n")
    assert bindings.parsed("deepgemm_fp8_paged_mqa_logits", tmp_path) == (("q_fp8", True),)


def test_a_function_tells_its_own_parameters() -> None:
    def mla_decode_fwd(q, kv_buffer, causal=True): ...

    assert bindings.introspected(mla_decode_fwd, "mla_decode_fwd") == (
        ("q", True),
        ("kv_buffer", True),
        ("causal", False),
    )


def test_a_compiled_operator_is_asked_by_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapper_custom(*args, **kwargs): ...

    schema = torch._C.parse_schema(
        "aiter::mla_reduce_v1(Tensor dummy, Tensor a, int n, Tensor? z=None) -> ()"
    )
    operator = types.SimpleNamespace(default=types.SimpleNamespace(_schema=schema))
    monkeypatch.setattr(torch.ops, "aiter", types.SimpleNamespace(mla_reduce_v1=operator), raising=False)
    assert bindings.introspected(wrapper_custom, "mla_reduce_v1") == (("a", True), ("n", True), ("z", False))
    assert bindings.introspected(wrapper_custom, "another") is None


def test_the_functions_of_an_operation_are_rows() -> None:
    assert {*DECODE, *PREFILL} <= FUNCTIONS.keys()
    assert "aiter" not in sys.modules
