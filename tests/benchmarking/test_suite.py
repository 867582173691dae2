"""A suite: named cases, what each has to reach, one record."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from anymla.benchmarking import commands, inputs, suite
from anymla.benchmarking.suite import Row, Target
from anymla.errors import InvalidInput
from anymla.kv_cache import KVCache

CPU = torch.device("cpu")


def row(name: str) -> Row:
    return suite.row_named(name, CPU)


@pytest.mark.parametrize(
    ("name", "shape", "target"),
    [
        ("128x16x4096", (128, 16, 4096, 1, "bf16"), Target("copy_rate", 0.90)),
        ("32x16x8192", (32, 16, 8192, 1, "bf16"), Target("copy_rate", 0.85)),
        ("8x16x32768", (8, 16, 32768, 1, "bf16"), Target("copy_rate", 0.85)),
        ("1x16x65536", (1, 16, 65536, 1, "bf16"), Target("copy_rate", 0.60)),
        ("128x16x4096-q2", (128, 16, 4096, 2, "bf16"), Target("times_slower", 1.05, "128x16x4096")),
        ("128x16x4096-q4", (128, 16, 4096, 4, "bf16"), Target("times_slower", 1.15, "128x16x4096")),
        ("128x128x4096", (128, 128, 4096, 1, "bf16"), Target("matrix_rate", 0.50)),
        ("128x128x4096-q2", (128, 128, 4096, 2, "bf16"), Target("matrix_rate", 0.50)),
        ("128x16x4096-fp8", (128, 16, 4096, 1, "fp8_e4m3fn"), Target("times_faster", 1.7, "128x16x4096")),
        ("sparse-128x128-656", (128, 128, 8192, 1, "fp8_ds_mla"), Target("matrix_rate", 0.45)),
        ("sparse-prefill-4096x128-8192", (1, 128, 8192, 4096, "bf16"), Target("matrix_rate", 0.50)),
        ("sparse-prefill-4096x128-32768", (1, 128, 32768, 4096, "bf16"), Target("matrix_rate", 0.50)),
        ("index-logits-64x32768", (64, 64, 32768, 1, "index_k"), Target("floor", 0.60)),
        ("index-logits-4096x32768", (1, 64, 32768, 4096, "index_k"), Target("floor", 0.60)),
        ("topk-64x32768", (64, 64, 32768, 1, "index_k"), Target("times_faster", 3, "topk-64x32768-torch")),
        ("topk-64x131072", (64, 64, 131072, 1, "index_k"), Target("times_faster", 3, "topk-64x131072-torch")),
        (
            "sparse-step-64x64x65536",
            (64, 64, 65536, 1, "bf16"),
            Target("times_faster", 3, "dense-step-64x64x65536"),
        ),
        ("128x16x8448-uneven", (128, 16, 8448, 1, "bf16"), Target("times_slower", 1.1, "128x16x8448")),
        ("plan-256x16x1024", (256, 16, 1024, 1, "bf16"), Target("plan_us", 30)),
    ],
)
def test_each_row_of_the_speed_table_is_a_case_with_its_target(name, shape, target):
    found, p = row(name), row(name).work.problem
    assert (found.work.batch, p.num_heads, found.work.context, p.q_len, p.kv_format) == shape
    assert found.target == target
    assert p.topk == (2048 if p.op in ("sparse_decode", "index_topk") else 0)


def test_an_uneven_batch_has_the_tokens_of_the_even_one():
    uneven, even = row("128x16x8448-uneven").work, row("128x16x8448").work
    assert sorted(set(uneven.lens)) == [512, 16384]
    assert sum(uneven.lens) == sum(even.lens)
    assert (uneven.num_bytes, uneven.flops) == (even.num_bytes, even.flops)


def test_names_are_unique_and_what_is_compared_with_comes_first():
    for name, rows in suite.SUITES.items():
        seen: set[str] = set()
        for one in rows("e4m3fn"):
            assert one.name not in seen, name
            assert one.target is None or not one.target.than or one.target.than in seen
            seen.add(one.name)


def test_a_chip_with_another_fp8_gets_its_own_formats():
    formats = {one.work.problem.kv_format for one in suite.targets("e4m3fnuz")}
    assert formats == {"bf16", "fp8_e4m3fnuz", "fp8_ds_mla_fnuz", "index_k_fnuz"}


def test_a_part_of_a_suite_brings_what_it_compares_with():
    names = [one.name for one in suite.rows_of("targets", CPU, ["-q4"])]
    assert names == ["128x16x4096", "128x16x4096-q4"]
    with pytest.raises(InvalidInput, match="only got nothing"):
        suite.rows_of("targets", CPU, ["nothing"])
    with pytest.raises(InvalidInput, match="suite got all; needs targets, sweep or choose"):
        suite.rows_of("all", CPU)


@pytest.mark.parametrize("one", tuple(suite.targets()), ids=lambda one: one.name)
def test_every_input_is_drawn_where_it_runs(one, monkeypatch):
    """On the meta device: shapes only, and no operation takes a CPU tensor with one of another device."""

    def init(self, seed, device):
        self.seed, self.generator, self.device = seed, None, device

    def write(self, kv_c, k_pe, slots):
        self.scatter(self.encode(kv_c, k_pe), slots)

    monkeypatch.setattr(inputs.Drawn, "__init__", init)
    monkeypatch.setattr(KVCache, "write", write)
    call = inputs.drawn_inputs(one.work, torch.device("meta"))
    tensors = [t for t in (*call.tensors, *call.options.values()) if isinstance(t, torch.Tensor | KVCache)]
    assert {t.device.type for t in tensors} == {"meta"}
    tokens = one.work.num_tokens if one.work.problem.op != "write_cache" else one.work.batch
    assert call.shape[0] == call.num_rows == tokens


@pytest.fixture
def tiny(monkeypatch, small):
    """A suite of small cases, with a target of each kind."""
    base = small("decode")
    rows = [
        Row("base", base, Target("copy_rate", 1e-9)),
        Row("same", base, Target("times_slower", 1e9, "base")),
        Row("faster", base, Target("times_faster", 1e9, "base")),
        Row("uneven", small("decode", turns=(5, 90))),
        Row("sparse", small("sparse_decode", topk=9, q_len=4), Target("matrix_rate", 1e9)),
        Row("prefill", small("prefill", q_len=5)),
        Row("plan", base, Target("plan_us", 1e9), planning=True),
        Row("write", small("write_cache")),
    ]
    monkeypatch.setattr(suite, "SUITES", {"tiny": lambda flavour: rows})


def run_tiny(**more):
    said: list[str] = []
    return suite.run_suite("tiny", CPU, repeats=2, say=said.append, **more), said


def test_a_run_gives_one_record_with_ceilings_targets_and_where_it_was_made(tiny, tmp_path):
    record, said = run_tiny()
    assert {"chip", "date", "commit", "torch", "copy_bytes_a_second", "product_flop_a_second"} <= set(record)
    by_name = {case["case"]: case for case in record["cases"]}
    assert all(case["passed"] for case in record["cases"])
    met = {name: case.get("met") for name, case in by_name.items()}
    assert {name for name, is_met in met.items() if is_met} == {"base", "same", "plan"}
    assert {name for name, is_met in met.items() if is_met is False} == {"faster", "sparse"}
    assert by_name["same"]["value"] == pytest.approx(
        by_name["same"]["median_us"] / by_name["base"]["median_us"], abs=1e-3
    )
    assert by_name["plan"]["plan_host_us"] > 0 and by_name["plan"]["batch_bounds_us"] > 0
    assert len(said) == 1 + len(record["cases"])
    path = suite.write_record(record, tmp_path)
    assert path == tmp_path / "cpu" / "tiny.json"
    assert json.loads(path.read_text()) == record
    assert "3 of 5 targets met; missed: faster and sparse" in suite.summary(record)


def test_a_case_that_breaks_says_why_and_the_others_go_on(tiny, monkeypatch):
    right = suite.bench

    def breaking(work, *args, **kwargs):
        if work.problem.op == "prefill":
            raise RuntimeError("no such instruction")
        return right(work, *args, **kwargs)

    monkeypatch.setattr(suite, "bench", breaking)
    record, said = run_tiny()
    (wrong,) = [case for case in record["cases"] if not case["passed"]]
    assert wrong == {"case": "prefill", "passed": False, "reasons": ["RuntimeError: no such instruction"]}
    assert any("no such instruction" in line for line in said)
    assert "WRONG: prefill" in suite.summary(record)


def test_a_ratio_to_a_case_without_a_time_is_not_met(monkeypatch, small):
    timed = SimpleNamespace(timing=None, to_dict=dict)
    monkeypatch.setattr(suite, "bench", lambda *args, **kwargs: timed)
    case = suite.measured(Row("a", small("decode"), Target("times_slower", 9, "b")), {}, CPU, "cpu", 1)
    assert case["value"] is None and case["met"] is False


def test_cases_that_compile_the_same_are_compiled_once(small):
    base = small("decode", batch=32, context=64)
    same, one, odd = (replace(base, batch=48), replace(base, batch=1), replace(base, batch=33))
    rows = [Row(str(i), work) for i, work in enumerate((base, same, one, odd))]
    assert [kept.name for kept in suite.distinct(rows)] == ["0", "2", "3"]


def test_each_case_is_compiled_in_a_process_of_its_own_and_its_error_comes_back():
    good = ["compile", "--case", "write-128-bf16", "--device", "cpu"]
    bad = ["compile", "--case", "write-128-bf16", "--device", "cpu", "--rows", '{"attend": {"width": 3}}']
    errors = suite.in_processes([good, bad], 2)
    assert errors[0] == "" and "attend got {'width': 3}; needs fields of Launch" in errors[1]


def test_the_command_line_writes_the_record_and_exits_with_1_if_a_result_is_wrong(
    tiny, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(commands.suite, "SUITES", suite.SUITES)
    given = ["targets", "--device", "cpu", "--repeats", "1", "--record", str(tmp_path), "--json"]
    monkeypatch.setitem(suite.SUITES, "targets", suite.SUITES["tiny"])
    assert commands.main(given) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "cpu" / "targets.json").read_text())
    monkeypatch.setattr(suite, "bench", lambda *args, **kwargs: 1 / 0)
    assert commands.main(given) == 1
