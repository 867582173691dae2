"""`anymla bench` times what it has just verified, and nothing else."""

import json

import pytest
import torch
from typer.testing import CliRunner, Result

from anymla.backends import cpu_mla
from anymla.benchmarking import run, sample
from anymla.benchmarking.timing import Timing, time_in_turns
from anymla.benchmarking.workloads import workloads
from anymla.cli import app
from anymla.errors import InvalidInput

CPU = torch.device("cpu")
SMALL = ("--tp", "128", "--batch", "2", "--context", "70", "--repeats", "3")


pytestmark = pytest.mark.usefixtures("small_machine")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def records(*arguments: str) -> list[dict[str, object]]:
    result = bench(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


@pytest.mark.parametrize(
    ("op", "model", "more"),
    [
        ("decode", "deepseek-v3", ("--q-len", "2", "--kv", "fp8")),
        ("sparse_decode", "deepseek-v3.2", ("--topk", "33", "--kv", "fp8_ds_mla")),
        ("prefill", "deepseek-v3", ("--q-len", "9", "--kv", "bf16")),
        ("index_topk", "deepseek-v3.2", ("--topk", "7")),
        ("write_cache", "deepseek-v3", ("--kv", "fp8_ds_mla")),
    ],
)
def test_each_operation_gives_a_record_that_says_what_was_timed_where(op, model, more):
    (found,) = records("--op", op, "--model", model, *SMALL, *more)
    assert (found["op"], found["backend"], found["batch"], found["context"]) == (op, "cpu", 2, 70)
    assert found["passed"] and found["verified_rows"] == 2 * found["q_len"]
    assert 0 < found["least_us"] <= found["q1_us"] <= found["median_us"] <= found["q3_us"]
    assert found["bandwidth_share"] > 0 and (found["product_share"] > 0) == (op != "write_cache")
    assert {"chip", "date", "commit", "torch", "python", "threads"} <= set(found)


def test_every_batch_meets_every_context():
    found = records(
        "--tp", "128", "--batch", "1", "--batch", "2", "--context", "5", "--context", "9", "--repeats", "1"
    )
    assert [(r["batch"], r["context"]) for r in found] == [(1, 5), (1, 9), (2, 5), (2, 9)]


def test_a_result_that_is_wrong_has_no_time_and_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch):
    right = cpu_mla.decode

    def wrong(args, state):
        right(args, state)
        args.out.mul_(1.01)

    monkeypatch.setattr(cpu_mla, "decode", wrong)
    result = bench(*SMALL, "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert not found["passed"] and found["reasons"] and "median_us" not in found
    shown = bench(*SMALL)
    assert shown.exit_code == 1 and "wrong" in shown.output and "error of out" in shown.output


def test_the_table_shows_the_share_of_the_copy_bandwidth():
    result = bench(*SMALL)
    assert result.exit_code == 0
    assert "of copy bandwidth" in result.output and "deepseek-v3 at tensor parallel size 128" in result.output


def test_records_are_appended_one_a_line(tmp_path):
    file = tmp_path / "cpu" / "bench.jsonl"
    for _ in range(2):
        assert bench(*SMALL, "--record", str(file)).exit_code == 0
    assert [json.loads(line)["passed"] for line in file.read_text().splitlines()] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (
            ("--model", "gpt", "--op", "copy", "--q-len", "0"),
            ("model got 'gpt'", "op got copy", "q_len got 0"),
        ),
        (("--context", "0"), ("context got 0; needs at least 1",)),
        (("--backend", "nowhere"), ("backend got 'nowhere'",)),
        (("--kv", "fp9", "--dtype", "int8"), ("kv got fp9", "dtype got int8")),
        (("--tp", "3"), ("tp got 3",)),
    ],
    ids=["model-op-q_len", "context", "backend", "formats", "tp"],
)
def test_wrong_use_names_every_reason_and_exits_with_2(arguments, reasons):
    result = bench(*arguments, "--json")
    assert result.exit_code == 2
    error = json.loads(result.output)["error"]
    assert all(reason in error for reason in reasons), error


def test_work_is_counted_as_the_formulas_say():
    (decode,) = workloads("deepseek-v3", tp=8, batches=(2,), contexts=(100,), q_len=2)
    assert decode.flops == 2 * 2 * 16 * (99 + 100) * (576 + 512)
    assert decode.num_bytes == 2 * 100 * 1152 + 4 * 16 * (576 + 512) * 2
    (prefill,) = workloads("deepseek-v3", tp=8, op="prefill", contexts=(10,), q_len=3)
    assert prefill.flops == 2 * 16 * ((11 + 12 + 13) * (192 + 128) + 13 * 512 * 256)
    (sparse,) = workloads("deepseek-v3.2", tp=8, op="sparse_decode", contexts=(4096,), topk=2048)
    assert sparse.keys_read == 2048


def test_an_indexer_of_pools_reads_a_key_a_pool_and_each_query_token_is_a_sequence():
    facts = {"op": "index_topk", "batches": (2,), "contexts": (4096,), "q_len": 3}
    (pooled,) = workloads("glm-5.3-flash", **facts)
    assert (pooled.batch, pooled.context, pooled.num_tokens) == (6, 256, 6)
    assert (pooled.problem.topk, pooled.problem.block_size) == (128, 4)
    assert pooled.keys_read == 6 * 256 and pooled.flops == 2 * 6 * 256 * 32 * 128
    with pytest.raises(InvalidInput, match="context got 15; needs at least 16"):
        list(workloads("glm-5.3-flash", op="index_topk", contexts=(15,)))


def test_an_indexer_of_pools_is_timed():
    arguments = ("--model", "glm-5.3-flash", "--op", "index_topk", "--batch", "2", "--context", "3000")
    (found,) = records(*arguments, "--repeats", "1")
    assert found["passed"] and found["topk"] == 128 and found["context"] == 3000 // 16


def test_the_planning_of_an_indexer_is_timed_where_that_is_asked_for():
    (work,) = workloads("deepseek-v3.2", op="index_topk", batches=(2,), contexts=(70,), topk=7, q_len=2)
    found = run.bench(work, "cpu", CPU, repeats=1, planning=True)
    assert found.passed and found.planning is not None
    assert found.planning["plan_host_us"] > 0 and found.planning["batch_host_us"] > 0


def test_only_as_many_rows_are_verified_as_their_work_allows(monkeypatch: pytest.MonkeyPatch):
    (work,) = workloads("deepseek-v3", tp=128, batches=(9,), contexts=(20,), q_dtype="fp32")
    monkeypatch.setattr(sample, "VERIFIED_FLOPS", work.flops / 9 * sample.MOST_HEADS * 5.5)
    assert run.bench(work, "cpu", CPU, repeats=1).verified.rows == 5
    monkeypatch.setattr(sample, "VERIFIED_FLOPS", 0)
    assert run.bench(work, "cpu", CPU, repeats=1).verified.rows == sample.FEWEST_ROWS


def test_calls_are_timed_in_turns_and_undone_outside_the_time():
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) for name in "ab"}
    found = time_in_turns(calls, CPU, repeats=2, warmups=1, after=lambda name: seen.append(name.upper()))
    assert "".join(seen) == "aAbB" * 3
    assert {name: len(one.seconds) for name, one in found.items()} == {"a": 2, "b": 2}


def test_a_timing_gives_median_quartiles_and_least():
    found = Timing((4e-6, 1e-6, 2e-6, 3e-6, 5e-6)).to_dict()
    assert found == {"median_us": 3.0, "q1_us": 2.0, "q3_us": 4.0, "least_us": 1.0, "repeats": 5}
    assert Timing((2e-6,)).quartiles_us == (2.0, 2.0)
