"""The fuzzer: random calls that anyone can make again, over all that a backend's rows offer."""

import os
from dataclasses import replace
from itertools import islice

import pytest
import torch

from anymla.backends import cpu_mla
from anymla.hardware.probe import machine_named, this_machine
from anymla.kv_cache import KV_FORMATS
from anymla.problem import OPS, Feature
from anymla.verification import fuzz, run
from anymla.verification.workers import shared_out

CPU, GPU = torch.device("cpu"), machine_named("sm90")
SMALL = fuzz.Extent(keys=300, sequences=4, work=1e6)
MANY = [fuzz.fuzzed("triton", GPU, 0, number) for number in range(6 * fuzz.FAMILIES)]


@pytest.mark.parametrize("number", range(1000, 1060))
def test_a_random_call_of_the_cpu_backend_is_right(number):
    fuzz.check(fuzz.fuzzed("cpu", this_machine(CPU), 0, number, SMALL), "cpu", CPU).require_pass()


class TestDraws:
    """What is drawn reaches everything, and can be drawn again."""

    def test_a_seed_and_a_number_say_everything(self):
        assert fuzz.fuzzed("triton", GPU, 0, 123) == MANY[123]
        assert fuzz.fuzzed("triton", GPU, 1, 123) != MANY[123]
        one, other = (MANY[123].inputs("cpu").tensors[0] for _ in range(2))
        assert torch.equal(one, other)

    def test_every_operation_format_and_feature_is_drawn(self):
        problems = [drawn.case.problem for drawn in MANY]
        assert {p.op for p in problems} == set(OPS)
        formats = {"bf16", "fp16", "fp8_e4m3fn", "fp8_ds_mla", "index_k"}
        assert {p.kv_format for p in problems} == formats
        # Whether lengths are on the host is what a plan finds, not what is drawn.
        undrawn = {Feature.GRAPH, Feature.DEVICE_LENGTHS}
        assert {f for p in problems for f in p.features} == set(Feature) - undrawn
        assert {p.op for p in problems if p.q_dtype == "fp8_e4m3fn"} == {"decode", "sparse_decode"}
        on_cpu = [fuzz.fuzzed("cpu", this_machine(CPU), 0, number).case.problem for number in range(500)]
        assert {p.op for p in on_cpu} == set(OPS)
        assert {p.kv_format for p in on_cpu} == set(KV_FORMATS)

    def test_lengths_are_ragged_empty_and_at_the_edges_of_tiles(self):
        decodes = [drawn.case for drawn in MANY if drawn.case.problem.op == "decode"]
        lens = {n for case in decodes for n in case.seq_lens}
        assert {0, 1, 63, 64, 65, 127, 128, 129} <= lens and max(lens) > 2000
        assert {n for case in decodes for n in case.q_lens or ()} >= set(range(9))
        heads = {case.problem.num_heads for case in decodes}
        assert {1, 128} <= heads and len(heads) > 40

    def test_a_family_differs_only_in_what_kernels_are_not_compiled_for(self):
        for number in range(fuzz.FAMILIES):
            one, *others = (drawn.case for drawn in MANY[number :: fuzz.FAMILIES])
            for other in others:
                p, q = one.problem, other.problem
                assert replace(q, num_heads=p.num_heads, topk=p.topk) == p
                assert (p.num_heads % 16 == 0, p.num_heads == 1) == (q.num_heads % 16 == 0, q.num_heads == 1)
                assert (p.topk % 16 == 0) == (q.topk % 16 == 0)

    def test_a_sparse_row_has_no_key_anywhere_or_nowhere(self):
        sparse = (drawn for drawn in MANY if drawn.case.problem.op == "sparse_decode")
        calls = [drawn.inputs("cpu").options for drawn in islice(sparse, 40)]
        missing = torch.cat([(options["indices"] == -1).float().mean(-1) for options in calls])
        assert missing.min() == 0 and missing.max() == 1 and missing.unique().numel() > 20
        assert {options["counts"] is None for options in calls} == {True, False}


class TestRuns:
    """Many calls, in one process or in several, and what is said of them."""

    def test_a_wrong_backend_is_found_and_the_call_can_be_made_again(self, monkeypatch):
        right = cpu_mla.decode

        def wrong(args, state):
            right(args, state)
            args.out.mul_(1.05)

        monkeypatch.setattr(cpu_mla, "decode", wrong)
        report = run.verify_random("cpu", range(12), seed=4)
        assert report.failures and {failure.op for failure in report.failures} == {"decode"}
        number = report.failures[0].name.split()[0].split(":")[1]
        command = report.to_dict()["failures"][0]["again"]
        assert command == f"anymla verify --backend cpu --seed 4 --fuzz-case {number}"
        assert not run.verify_random("cpu", [int(number)], seed=4).outcomes[0].judgement.passed

    def test_evidence_says_how_many_of_which_seed(self, tmp_path):
        report = run.verify_random("cpu", range(6), seed=2)
        path = run.record(report, tmp_path, "0123456789ab")
        assert path == tmp_path / "cpu" / "cpu_fuzz.json"
        text = path.read_text()
        assert '"commit": "0123456789ab"' in text and '"fuzz": 6' in text and '"seed": 2' in text

    def test_processes_do_all_work_and_a_dead_one_is_a_finding(self):
        groups = [[1, 2], [3], [-4, 5]]
        found = list(shared_out(_halved, groups, 2, lambda item, why: (item, why[:11])))
        assert {item for item, _ in found} == {1, 2, 3, -4, 5}
        assert (-4, "its process") in found
        assert list(shared_out(_halved, [[2], [4]], 1, lambda item, why: item)) == [(2, 1.0), (4, 2.0)]


def _halved(number):
    if number < 0:
        os._exit(1)
    return number, number / 2
