"""Selection as data: (problem, machine) to backend, exact reasons, padding, knobs and the nearest change."""

import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import anymla
from anymla import select
from anymla.backends import BACKENDS, Backend
from anymla.errors import InvalidInput, NoBackend, UnknownBackend
from anymla.hardware.arches import ARCHES
from anymla.hardware.probe import Machine, machine_named
from anymla.models import MODELS, model_named
from anymla.problem import OPS, Feature, Problem
from anymla.rules import ANY, MultipleOf, offers, one_of, pads_to
from anymla.select import Verdict, choose, explain

V3 = model_named("deepseek-v3")
BARE = partial(Machine, packages=())
"""A machine with nothing installed beyond the base dependencies."""


def verdict_of(name: str, problem: Problem, machine: Machine, **options: object) -> Verdict:
    """One backend's verdict."""
    return next(v for v in explain(problem, machine, **options) if v.backend.name == name)


@pytest.fixture
def with_table(monkeypatch: pytest.MonkeyPatch):
    """Selection from another table of backends."""

    def use(*rows: Backend) -> None:
        monkeypatch.setattr(select, "BACKENDS", rows)
        explain.cache_clear()
        choose.cache_clear()

    yield use
    explain.cache_clear()
    choose.cache_clear()


NO_FNUZ = "Triton has no fp8e4b8 on NVIDIA, and reading e4m3fnuz by its bits is not verified there"


@pytest.fixture
def all_built(with_table) -> None:
    """The table as it will be once every backend is built."""
    with_table(*(replace(row, built=True) for row in BACKENDS))


SKETCH = Backend(
    "triton",
    "nowhere",
    built=True,
    arch=one_of("gfx942", "sm90"),
    packages=("triton",),
    op=one_of("decode"),
    q_dtype=one_of("bf16", "fp16"),
    kv_format=ANY,
    num_heads=pads_to(16, 128),
    kv_lora_rank=ANY,
    qk_rope_head_dim=ANY,
    block_size=MultipleOf(16),
    features=offers(Feature.LSE),
)


def test_a_refusal_names_every_reason_of_every_backend_and_the_nearest_change(with_table) -> None:
    cpu = replace(SKETCH, name="cpu", arch=one_of("cpu"), packages=(), block_size=ANY)
    with_table(SKETCH, cpu)
    problem = V3.problem(tp=4, q_dtype="fp32", block_size=24, sinks=True)
    with pytest.raises(NoBackend) as refusal:
        choose(problem, BARE("gfx942"))
    assert str(refusal.value) == (
        "no backend can serve this decode on gfx942:\n"
        "  triton: package triton is not installed; q_dtype got fp32; needs bf16 or fp16; "
        "block_size got 24; needs a multiple of 16; features lacks sinks\n"
        "    would pass after pip install 'anymla[triton]', with q_dtype bf16 and block_size 32, "
        "without sinks\n"
        "  cpu: arch got gfx942; needs cpu; q_dtype got fp32; needs bf16 or fp16; features lacks sinks\n"
        "    would pass on cpu, with q_dtype bf16, without sinks"
    )
    assert [verdict.backend.name for verdict in refusal.value.verdicts] == ["triton", "cpu"]


def test_a_named_backend_is_refused_alone_and_never_replaced() -> None:
    with pytest.raises(NoBackend) as refusal:
        choose(V3.problem(tp=4), machine_named("cpu"), "aiter")
    assert str(refusal.value) == (
        "backend 'aiter' cannot serve this decode on cpu:\n"
        "  aiter: arch got cpu; needs gfx942 or gfx950\n"
        "    would pass on gfx942"
    )
    assert [verdict.backend.name for verdict in refusal.value.verdicts] == ["aiter"]


def test_an_unknown_backend_is_refused_with_all_names() -> None:
    with pytest.raises(UnknownBackend) as refusal:
        choose(V3.problem(), machine_named("cpu"), "flashmla")
    assert str(refusal.value) == "backend got 'flashmla'; needs one of auto, hopper, aiter, triton, cpu"


def test_a_choice_says_what_was_weighed() -> None:
    choice = choose(V3.problem(tp=8), machine_named("cpu"))
    assert choice.backend.module == "anymla.backends.cpu_mla"
    assert str(choice).splitlines()[0] == "cpu serves this decode on cpu:"
    assert str(choice).splitlines()[-1] == "  cpu: accepts"
    assert choice.verdicts == explain(choice.problem, choice.machine)


def test_the_first_row_that_accepts_wins(with_table) -> None:
    with_table(SKETCH, replace(SKETCH, name="second"))
    assert choose(V3.problem(tp=8), machine_named("sm90")).backend.name == "triton"
    assert choose(V3.problem(tp=8), machine_named("sm90"), "second").backend.name == "second"


def test_rows_of_one_name_compete_by_padding(with_table) -> None:
    with_table(SKETCH, replace(SKETCH, num_heads=pads_to(32, 64)))
    assert verdict_of("triton", V3.problem(tp=4), machine_named("sm90")).padding == (32, 32)
    assert verdict_of("triton", V3.problem(tp=8), machine_named("sm90")).padding == (16, 16)


def test_not_built_yet_stands_beside_the_other_reasons(with_table) -> None:
    with_table(*(replace(row, built=False) for row in BACKENDS))
    verdict = verdict_of("aiter", V3.problem(q_dtype="fp32", kv_format="bf16"), BARE("gfx942"))
    assert verdict.reasons == (
        "not built yet",
        "package aiter is not installed",
        "q_dtype got fp32; needs bf16",
    )
    assert verdict.nearest == (
        "would pass after building github.com/ROCm/aiter, with q_dtype bf16, once it is built"
    )


def test_an_operation_that_no_row_has_is_refused_with_those_of_the_whole_backend() -> None:
    verdict = verdict_of("hopper", V3.problem("write_cache"), machine_named("sm90"))
    assert "op got write_cache; needs decode or sparse_decode" in verdict.reasons
    assert verdict.nearest == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "encode"}, f"op got encode; needs one of {', '.join(OPS[:-1])} or {OPS[-1]}"),
        ({"kv_format": "int4"}, "kv_format got int4; needs one of bf16, fp16"),
        ({"num_heads": 0}, "num_heads got 0; needs at least 1"),
        ({"block_size": 0, "topk": -1}, "block_size got 0; needs at least 1; topk got -1; needs at least 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_problem_that_cannot_be_is_refused_before_any_backend_is_asked(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=f"problem: {re.escape(message)}"):
        explain(replace(V3.problem(), **change), machine_named("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": "16"}, "num_heads got '16'; needs an integer, at least 1"),
        (
            {"q_len": None, "topk": 2.0},
            "q_len got None; needs an integer, at least 0; topk got 2.0; needs an",
        ),
        ({"block_size": [64]}, "block_size got [64]; needs an integer, at least 1"),
        ({"features": {Feature.LSE}}, "features got {<Feature.LSE: 'lse'>}; needs a frozenset of Feature"),
        ({"features": frozenset({"lse"})}, "features got frozenset({'lse'}); needs a frozenset of Feature"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fact_of_another_kind_is_refused_in_words(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"problem: {re.escape(message)}"):
        anymla.explain(replace(V3.problem(), **change), machine_named("cpu"))


def test_what_is_no_problem_and_no_machine_is_not_explained() -> None:
    message = "problem got None; needs a Problem, .*; machine got 'sm90'; needs a Machine, from machine_named"
    with pytest.raises(InvalidInput, match=message):
        anymla.explain(None, "sm90")


def test_counts_of_another_library_are_the_counts_that_they_are() -> None:
    facts = {"num_heads": np.int64(128), "block_size": np.int32(64), "topk": np.uint8(0)}
    problem = replace(V3.problem(), **facts)
    assert problem == replace(V3.problem(), **{name: int(n) for name, n in facts.items()})
    assert all(type(getattr(problem, name)) is int for name in facts)


# Head counts, D5 and the table of tensor parallel sizes.

HEAD_TABLE = [
    # total, tp, local, lanes
    (128, 1, 128, 128),
    (128, 2, 64, 64),
    (128, 4, 32, 32),
    (128, 8, 16, 16),
    (128, 16, 8, 8),
    (64, 1, 64, 64),
    (64, 2, 32, 32),
    (64, 4, 16, 16),
    (64, 8, 8, 8),
    (64, 16, 4, 8),
    (96, 1, 96, 96),
    (96, 2, 48, 48),
    (96, 4, 24, 24),
    (96, 8, 12, 16),
    (96, 16, 6, 8),
    (32, 1, 32, 32),
    (32, 2, 16, 16),
    (32, 4, 8, 8),
    (32, 8, 4, 8),
    (32, 16, 2, 8),
    (40, 1, 40, 48),
    (40, 2, 20, 24),
    (40, 4, 10, 16),
    (40, 8, 5, 8),
    (20, 1, 20, 24),
    (20, 2, 10, 16),
    (20, 4, 5, 8),
    (16, 1, 16, 16),
    (16, 2, 8, 8),
    (16, 4, 4, 8),
    (16, 8, 2, 8),
    (16, 16, 1, 8),
]


@pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch not in ("cpu", "gfx1250")])
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.index_topk])
def test_every_part_of_a_sparse_step_is_served_on_every_gpu(name: str, arch: str) -> None:
    model, machine = MODELS[name], machine_named(arch)
    fnuz = machine.fp8_flavour == "e4m3fnuz"
    keys, tiled = ("index_k_fnuz", "fp8_ds_mla_fnuz") if fnuz else ("index_k", "fp8_ds_mla")
    for q_dtype in ("bf16", f"fp8_{machine.fp8_flavour}"):
        problem = model.problem("index_topk", q_dtype=q_dtype, kv_format=keys, q_len=4)
        assert verdict_of("triton", problem, machine).accepted
    index_keys = replace(model.problem("index_topk", kv_format=keys), op="write_cache", num_heads=1, topk=0)
    assert verdict_of("triton", index_keys, machine).accepted
    for kv_format in ("bf16", tiled):
        sparse = model.problem("sparse_decode", kv_format=kv_format, sinks=True, lse=True)
        assert verdict_of("triton", sparse, machine).accepted


@pytest.mark.parametrize(("total", "tp", "local", "lanes"), HEAD_TABLE)
def test_local_heads_are_padded_to_what_aiter_has(total: int, tp: int, local: int, lanes: int) -> None:
    model = next(model for model in MODELS.values() if model.num_heads == total)
    assert model.local_heads(tp) == local
    plain, sinks = (replace(V3.problem(sinks=asked), num_heads=local) for asked in (False, True))
    mi355x, mi300x = machine_named("gfx950"), machine_named("gfx942")
    verdict = verdict_of("aiter", plain, mi355x)
    assert verdict.accepted
    assert verdict.padding == (local, lanes)
    assert verdict.price == pytest.approx(lanes / local)
    without_kernel = "AITER has no bf16 kernel of 64 heads with an lse on gfx942"
    assert (without_kernel in verdict_of("aiter", sinks, mi300x).reasons) == (32 < local <= 64)


@pytest.mark.parametrize("num_heads", [1, 4, 8, 12, 20, 24, 32, 48, 64, 96, 128])
def test_any_head_count_is_explained_with_its_padding(num_heads: int) -> None:
    problem = replace(V3.problem(), num_heads=num_heads)
    cpu, triton, aiter = (
        verdict_of(name, problem, machine_named("cpu")) for name in ("cpu", "triton", "aiter")
    )
    assert cpu.accepted
    assert cpu.padding == triton.padding == (num_heads, num_heads)
    assert aiter.padding == (num_heads, num_heads)


def test_more_heads_than_a_backend_has_are_refused_with_a_tensor_parallel_size_that_fits(all_built) -> None:
    problem = replace(V3.problem(), num_heads=256)
    sizes = ((1, 256), (2, 128), (4, 64))
    verdict = verdict_of("aiter", problem, machine_named("gfx950"), tp_heads=sizes)
    assert verdict.padding is None
    assert verdict.nearest == "would pass with tensor parallel size 2 (128 heads)"


def test_a_head_count_without_a_kernel_is_sent_to_the_nearest_tensor_parallel_size(all_built) -> None:
    sizes = tuple((size, V3.local_heads(size)) for size in V3.tp_sizes)
    verdict = verdict_of("aiter", V3.problem(tp=2, lse=True), machine_named("gfx942"), tp_heads=sizes)
    assert verdict.reasons == ("AITER has no bf16 kernel of 64 heads with an lse on gfx942",)
    assert verdict.nearest == "would pass with tensor parallel size 4 (32 heads)"
    assert verdict_of("aiter", V3.problem(tp=2, lse=True), machine_named("gfx942")).nearest == (
        "would pass without lse"
    )


# Widths, D12.


@pytest.mark.parametrize(("rank", "rope"), [(512, 0), (256, 64), (512, 64), (64, 96)])
def test_other_widths_run_on_the_cpu_and_are_refused_by_name_where_rows_are_fixed(
    rank: int, rope: int
) -> None:
    problem = replace(V3.problem(tp=16), kv_lora_rank=rank, qk_rope_head_dim=rope)
    assert choose(problem, machine_named("cpu")).backend.name == "cpu"
    reasons = verdict_of("aiter", problem, machine_named("gfx942")).reasons
    assert (f"kv_lora_rank got {rank}; needs 512" in reasons) == (rank != 512)
    assert (f"qk_rope_head_dim got {rope}; needs 64" in reasons) == (rope != 64)
    assert verdict_of("triton", problem, machine_named("gfx942")).accepted


# Quirks.

KNOBS = [
    ("gfx950", V3.problem(tp=4), {"num_kv_splits": 1}),
    ("gfx950", V3.problem(tp=8), {}),
    ("gfx942", V3.problem(tp=4), {"min_num_kv_splits": 2}),
    ("gfx942", V3.problem(tp=8, lse=True), {"min_num_kv_splits": 2}),
    (
        "gfx942",
        V3.problem(tp=8, q_dtype="fp8_e4m3fnuz", kv_format="fp8_e4m3fnuz", lse=True),
        {"min_num_kv_splits": 2},
    ),
    (
        "gfx942",
        model_named("glm-5").problem("index_topk", q_dtype="fp8_e4m3fnuz", kv_format="index_k_fnuz"),
        {"chunk_q": 32},
    ),
    (
        "gfx942",
        model_named("deepseek-v3.2").problem("index_topk", q_dtype="fp8_e4m3fnuz", kv_format="index_k_fnuz"),
        {},
    ),
]
EVERYWHERE = {
    "decode": {"finite_slot_0": 1, "max_cache_gib": 4},
    "index_topk": {"finite_keys": 1, "max_cache_gib": 2},
}
"""What every call of AITER asks of its caller."""


@pytest.mark.parametrize(("arch", "problem", "knobs"), KNOBS, ids=lambda value: str(value)[:60])
def test_a_quirk_sets_the_named_knob_of_the_plan(
    all_built, arch: str, problem: Problem, knobs: dict[str, int]
) -> None:
    choice = choose(problem, machine_named(arch), "aiter")
    expected = knobs | EVERYWHERE[problem.op]
    assert choice.knobs == expected
    assert {quirk.knob for quirk in verdict_of("aiter", problem, machine_named(arch)).quirks} == set(expected)


@pytest.mark.parametrize(
    ("arch", "kv_format", "reason", "nearest"),
    [
        ("sm90", "fp8_e4m3fnuz", NO_FNUZ, "would pass with kv_format bf16"),
    ],
)
def test_a_quirk_refuses_with_its_reason_and_the_way_around(
    all_built, arch: str, kv_format: str, reason: str, nearest: str
) -> None:
    verdict = verdict_of("triton", V3.problem(kv_format=kv_format), machine_named(arch))
    assert verdict.reasons == (reason,)
    assert verdict.nearest == nearest


@pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch.startswith("sm")])
def test_nvidia_takes_e4m3fnuz_of_no_operand_and_every_amd_chip_both_flavours(arch: str) -> None:
    v32, fnuz = model_named("deepseek-v3.2"), "fp8_e4m3fnuz"
    asked = [v32.problem(op, kv_format=fnuz) for op in ("decode", "sparse_decode", "prefill", "write_cache")]
    asked += [v32.problem("index_topk", q_dtype=q, kv_format="index_k_fnuz") for q in ("bf16", "fp8_e4m3fn")]
    asked += [v32.problem("index_topk", q_dtype=fnuz, kv_format=kv) for kv in ("bf16", "index_k")]
    asked += [v32.problem("index_topk", q_dtype=fnuz, kv_format="index_k_fnuz")]
    for problem in asked:
        verdict = verdict_of("triton", problem, machine_named(arch))
        assert verdict.reasons.count(NO_FNUZ) == 1 and not verdict.accepted
        assert verdict_of("triton", problem, machine_named("gfx942")).accepted
        assert verdict_of("triton", problem, machine_named("gfx1201")).accepted


def test_a_quirk_that_a_newer_version_fixes_refuses_only_the_older(all_built) -> None:
    old, new = (Machine("gfx1250", (("triton", version),)) for version in ("3.6.0", "3.9.0"))
    assert "Triton before 3.9" in verdict_of("triton", V3.problem(), old).reasons[0]
    assert verdict_of("triton", V3.problem(), new).accepted
    assert verdict_of("triton", V3.problem(), machine_named("gfx1250")).accepted


def test_a_cache_of_the_other_fp8_flavour_is_told_the_one_of_the_chip(all_built) -> None:
    for arch, given, native in (("gfx942", "fn", "fnuz"), ("gfx950", "fnuz", "fn")):
        verdict = verdict_of("aiter", V3.problem(tp=8, kv_format=f"fp8_e4m3{given}"), machine_named(arch))
        assert verdict.reasons == (f"kv_format got fp8_e4m3{given}; needs fp8_e4m3{native}",)
        assert verdict.nearest == f"would pass with kv_format fp8_e4m3{native}"


# The whole fleet.


def fleet() -> list[tuple[Problem, Machine]]:
    """Every operation of every model at two sizes, plain and demanding, on every machine."""
    problems = []
    for model in MODELS.values():
        for op in OPS:
            if op == "index_topk" and not model.index_heads:
                continue
            for tp in (1, model.tp_sizes[-2]):
                problems.append(model.problem(op, tp=tp))
                problems.append(
                    model.problem(op, tp=tp, q_len=8, block_size=16, lse=True, kv_format="fp8_e4m3fn")
                )
    return [(problem, machine_named(arch)) for problem in dict.fromkeys(problems) for arch in ARCHES]


def test_the_cpu_takes_the_whole_fleet_on_a_cpu_and_nothing_elsewhere() -> None:
    for problem, machine in fleet():
        verdict = verdict_of("cpu", problem, machine)
        assert verdict.accepted == (machine.arch == "cpu"), (problem, machine)


def test_a_verdict_has_reasons_exactly_when_it_refuses() -> None:
    for problem, machine in fleet():
        for verdict in explain(problem, machine):
            assert verdict.accepted == (not verdict.reasons)
            assert not (verdict.accepted and verdict.nearest)
            assert verdict.accepted <= verdict.backend.built


def test_the_nearest_change_really_makes_a_backend_pass(all_built) -> None:
    suggested = 0
    for problem, machine in fleet()[::3]:
        for verdict in explain(problem, machine):
            if verdict.nearest:
                suggested += 1
                name = verdict.backend.name
                assert verdict_of(name, *followed(verdict.nearest, problem, machine)).accepted, verdict
    assert suggested > 1000


def followed(nearest: str, problem: Problem, machine: Machine) -> tuple[Problem, Machine]:
    """The problem and the machine after a suggestion was followed to the letter."""
    if place := re.search(r" on (\w+)", nearest):
        machine = machine_named(place[1])
    numbers = {
        name: int(value)
        for name, value in re.findall(r"(\w+) (\d+)(?!\w)", nearest)
        if hasattr(problem, name)
    }
    words = dict(re.findall(r"(q_dtype|kv_format) (\w+)", nearest))
    without = nearest.partition("without ")[2]
    features = frozenset(feature for feature in problem.features if feature.value not in without)
    return replace(problem, **numbers, **words, features=features), machine


def test_one_question_is_answered_once() -> None:
    problem, machine = V3.problem(tp=8), machine_named("sm90")
    assert explain(problem, machine) is explain(V3.problem(tp=8), machine_named("sm90"))
    assert choose(V3.problem(), machine_named("cpu")) is choose(V3.problem(), machine_named("cpu"))


def test_selection_needs_no_torch() -> None:
    script = (
        "import sys; from anymla import machine_named, model_named, this_machine\n"
        "from anymla.select import choose\n"
        "choose(model_named('deepseek-v3').problem(), machine_named('cpu')); this_machine()\n"
        "print(sorted({'torch', 'numpy', 'triton', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
