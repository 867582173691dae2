"""Every backend that can run here, on cases generated from its rows; a new one needs no tests of its own."""

from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from anymla import api, reference
from anymla.backends import BACKENDS
from anymla.errors import NoBackend
from anymla.hardware.probe import machine_named, this_machine
from anymla.kv_cache import KV_FORMATS
from anymla.models import MODELS
from anymla.problem import OPS, Feature
from anymla.verification import checks, eager, run
from anymla.verification.batches import moved, num_sequences, take
from anymla.verification.cases import AXES, DTYPES, FP8_QUERIES, INDEX_DTYPES, MOST_CHOSEN, cases, offered
from anymla.verification.inputs import (
    SINKS,
    decode_inputs,
    index_inputs,
    prefill_inputs,
    sparse_inputs,
    write_inputs,
)
from anymla.verification.judge import judge
from anymla.verification.memory import ABSURD_PAGES, POISONS
from anymla.verification.needles import Widths

NAMES = list(dict.fromkeys(row.name for row in BACKENDS))
DEVICES = {name: torch.device(run.device_of(name)) for name in NAMES}
HERE = {name: cases(name, this_machine(device), quick=True) for name, device in DEVICES.items()}
RUNNING = [name for name in NAMES if any(case.check == "right" for case in HERE[name])]
CPU = machine_named("cpu")
FULL = cases("cpu", CPU)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RUNNING])
def test_a_backend_that_cannot_run_here_is_skipped_with_its_reasons(name):
    with pytest.raises(NoBackend) as refusal:
        run.verify(name, quick=True)
    pytest.skip(str(refusal.value).splitlines()[1].strip())


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(n, c, id=f"{n}-{c.id}") for n in RUNNING for c in HERE[n]]
)
def test_it_does_what_its_row_offers_and_refuses_the_rest(name, case):
    checks.check_case(case, name, this_machine(DEVICES[name]), DEVICES[name]).require_pass()


class TestMatrix:
    """The cases reach everything that a row offers."""

    @pytest.mark.parametrize("op", OPS)
    def test_every_value_of_every_fact_is_run(self, op):
        judged = [c.problem for c in FULL if c.check == "right" and c.problem.op == op]
        seen = {fact: {getattr(p, fact) for p in judged} for fact in ("q_dtype", "kv_format", "block_size")}
        assert seen["q_dtype"] == set(INDEX_DTYPES if op in FP8_QUERIES else DTYPES)
        assert seen["kv_format"] == set(KV_FORMATS)
        assert seen["block_size"] >= set(AXES["block_size"])
        if op != "write_cache":
            assert {p.num_heads for p in judged} >= set(AXES["num_heads"])
        if op in ("decode", "prefill"):
            assert {p.q_len for p in judged} >= set(AXES["q_len"])
        if op != "index_topk":
            assert {(p.kv_lora_rank, p.qk_rope_head_dim) for p in judged} >= set(AXES["widths"])

    @pytest.mark.parametrize("model", MODELS)
    def test_every_model_is_run(self, model):
        asked = {(c.problem.kv_lora_rank, c.problem.qk_rope_head_dim, round(c.sm_scale, 9)) for c in FULL}
        row = MODELS[model]
        assert (row.kv_lora_rank, row.qk_rope_head_dim, round(row.sm_scale, 9)) in asked

    def test_every_trap_is_laid_in_every_attention(self):
        traps = Counter((c.problem.op, c.poison, c.views) for c in FULL if c.check == "right")
        assert all(traps[op, p, v] > 3 for op in OPS[:3] for p in POISONS for v in (False, True))
        assert {c.sinks for c in FULL} == set(SINKS)

    def test_a_prefill_with_a_cache_asks_for_its_context_by_name(self):
        judged = [c for c in FULL if c.problem.op == "prefill" and c.check == "right"]
        named = [Feature.CACHED_CONTEXT in c.problem.features for c in judged]
        assert named == [c.seq_lens is not None for c in judged] and set(named) == {True, False}

    def test_what_is_not_offered_is_asked_for(self):
        refused = {(c.problem.op, c.fact) for c in FULL if c.check == "refusal"}
        # Absorbed and index queries may have any dtype, and a prefill may be planned in any.
        every = {(op, fact) for op in OPS for fact in ("q_dtype", "features")}
        every -= {(op, "q_dtype") for op in (*FP8_QUERIES, "prefill")}
        assert refused >= every

    def test_ids_are_distinct_and_the_same_every_time(self):
        assert len({case.id for case in FULL}) == len(FULL) > 800
        assert cases("cpu", CPU) == FULL

    @pytest.mark.parametrize(("name", "chip"), [("cpu", "cpu"), ("triton", "sm90"), ("triton", "gfx942")])
    def test_many_keys_are_chosen_of_every_format_by_few_and_many_heads(self, name, chip):
        machine = machine_named(chip)
        many = [case for case in cases(name, machine) if case.problem.topk == MOST_CHOSEN == 4096]
        fnuz = machine.fp8_flavour == "e4m3fnuz"
        formats = {"bf16"} | ({"fp8_e4m3fnuz", "fp8_ds_mla_fnuz"} if fnuz else {"fp8_e4m3fn", "fp8_ds_mla"})
        asked = {(c.problem.kv_format, c.problem.num_heads) for c in many}
        assert asked == {(kv_format, heads) for kv_format in formats for heads in (16, 128)}
        for case in many:
            assert case.check == "right" and min(case.seq_lens) > MOST_CHOSEN
            assert (case.problem.kv_lora_rank, case.problem.qk_rope_head_dim) == (512, 64)
            assert case.problem.features == {Feature.LSE, Feature.SINKS} and case.sinks != "none"
        assert not [c for c in cases(name, machine, quick=True) if c.problem.topk == MOST_CHOSEN]

    @pytest.mark.parametrize(
        "case", [c for c in FULL if c.problem.topk == MOST_CHOSEN], ids=lambda case: case.id
    )
    def test_many_keys_are_attended_to(self, case):
        checks.check_case(case, "cpu", CPU, torch.device("cpu")).require_pass()

    def test_a_planned_backend_is_offered_nothing(self):
        machine = machine_named("sm90")
        assert not offered(MODELS["deepseek-v3"].problem(), "cpu", machine)
        assert {case.check for case in cases("cpu", machine)} == {"refusal"}


class TestHostility:
    """The inputs are as hostile as they say."""

    @pytest.mark.parametrize("kv_format", KV_FORMATS)
    def test_dead_slots_are_nan_and_live_ones_are_not(self, kv_format):
        call = decode_inputs(Widths(2, 128, 0), (5, 0, 17), kv_format=kv_format, block_size=4)
        values = call.cache.read(torch.arange(call.cache.num_blocks * 4))
        live = values.isfinite().all(-1)
        assert int(live.sum()) == 22
        assert values[~live].isnan().all()

    def test_table_rows_end_in_absurd_pages(self):
        table = decode_inputs(Widths(2), (5, 0, 40), block_size=16).options["block_table"]
        assert set(table[1].tolist()) <= set(ABSURD_PAGES)
        assert (table[2, :3] >= 0).all() and table[2, -1] in ABSURD_PAGES

    def test_views_have_odd_strides_and_the_same_values(self):
        plain, odd = (decode_inputs(Widths(4), (9, 20), views=v, seed=3) for v in (False, True))
        assert not any(t.is_contiguous() for t in (*odd.tensors[:2], odd.cache.data))
        assert odd.options["block_table"].stride() == (odd.options["block_table"].shape[1] * 2, 2)
        assert torch.equal(plain.tensors[0], odd.tensors[0])
        one, other = (api.decode(*call.tensors, **call.options, return_lse=True) for call in (plain, odd))
        assert torch.equal(one.out, other.out) and torch.equal(one.lse, other.lse)

    @pytest.mark.parametrize("length", [17, 1017])
    def test_the_last_key_of_each_row_and_the_one_past_the_end_are_heavy(self, length):
        call = decode_inputs(Widths(16), (length, length), (3, 1), poison="needle")
        options = {**call.options, "sinks": None}
        whole = reference.decode(*call.tensors, **options).lse
        # One key less, then one key more, for every row but the one of no sequence.
        for step, least in ((-1, 0.3), (1, 0.2)):
            moved = {**options, "seq_lens": options["seq_lens"] + step}
            other = reference.decode(*call.tensors, **moved).lse
            assert (other - whole)[:-1].abs().mean() > least

    def test_sinks_are_near_the_lse_of_rows(self):
        call = decode_inputs(Widths(16), (1024, 9), sinks="near")
        lse = reference.decode(*call.tensors, **{**call.options, "sinks": None}).lse
        distance = (lse - call.options["sinks"]).abs().amin(0)
        assert distance.mean() < 1
        infinite = decode_inputs(Widths(16), (1024, 9), sinks="infinite").options["sinks"]
        assert {float("inf"), float("-inf")} <= set(infinite.tolist())

    def test_a_call_moves_to_a_device_with_its_strides_and_gaps(self):
        call = decode_inputs(Widths(4), (9, 20), (1, 2), kv_format="fp8_e4m3fn", views=True)
        there = moved(call, torch.device("meta"))
        pairs = [(call.cache.data, there.cache.data), *zip(call.tensors[:2], there.tensors[:2], strict=True)]
        pairs += [(call.options[name], there.options[name]) for name in ("block_table", "seq_lens", "sinks")]
        for here, other in pairs:
            assert other.device.type == "meta" and other.dtype == here.dtype and other.shape == here.shape
            assert (other.stride(), other.storage_offset()) == (here.stride(), here.storage_offset())
            assert other.untyped_storage().nbytes() == here.untyped_storage().nbytes()

    def test_the_same_seed_draws_the_same(self):
        one, other = (sparse_inputs(Widths(4), 50, 20, seed=5) for _ in range(2))
        assert torch.equal(one.tensors[0], other.tensors[0])
        assert torch.equal(one.options["indices"], other.options["indices"])

    def test_no_sparse_row_names_slot_zero(self):
        assert not any(
            bool((sparse_inputs(Widths(2), 50, 20, seed=s).options["indices"] == 0).any()) for s in range(20)
        )


class TestEager:
    """Eager runs are the same maths: in fp64 they would be the reference."""

    @pytest.mark.parametrize(
        "call",
        [
            decode_inputs(Widths(4, 128, 32), (9, 0, 33), (2, 1, 5), q_dtype=torch.float32, kv_format="fp32"),
            decode_inputs(Widths(4, 128, 32), (9, 1), causal=False, q_dtype=torch.float32, kv_format="fp32"),
            sparse_inputs(Widths(4, 128, 32), 60, 40, 5, q_dtype=torch.float32, kv_format="fp32"),
            prefill_inputs(Widths(4, 128, 32, 64, 64), (9, 0, 3), (2, 3, 0), q_dtype=torch.float32),
            prefill_inputs(Widths(4, 128, 32, 64, 64), None, (2, 3, 0), q_dtype=torch.float32),
        ],
        ids=["decode", "decode-not-causal", "sparse", "prefill-with-context", "prefill"],
    )
    def test_each_run_is_right_within_the_noise_of_the_others(self, call):
        right = getattr(reference, call.op)(*call.tensors, **call.options)
        runs = getattr(eager, call.op)(*call.tensors, **call.options)
        assert len(runs) == 1 + eager.LOOPS
        for i, one in enumerate(runs):
            judge(one, right, *runs[:i], *runs[i + 1 :]).require_pass()
            assert (one.out - right.out).abs().max() < 1e-4

    def test_on_a_device_sequences_of_like_length_are_attended_to_at_once(self, monkeypatch):
        lens, q_lens = (300, 0, 9, 70, 1000, 290, 65), (2, 1, 0, 4, 1, 3, 2)
        call = decode_inputs(Widths(4, 128, 32), lens, q_lens)
        alone = eager.decode(*call.tensors, **call.options)
        groups_on = eager._groups
        found = groups_on(
            eager._spans(call.options["seq_lens"], call.options["qo_indptr"]), torch.device("cuda")
        )
        assert [[span.length for span in group] for group in found] == [[0, 65, 70], [290, 300, 1000]]
        monkeypatch.setattr(eager, "_groups", lambda spans, _: groups_on(spans, torch.device("cuda")))
        together = eager.decode(*call.tensors, **call.options)
        right = reference.decode(*call.tensors, **call.options)
        for one, other in zip(alone, together, strict=True):
            judge(one, right, *together).require_pass()
            assert torch.equal(one.lse == -torch.inf, other.lse == -torch.inf)

    def test_few_values_are_held_against_more_runs(self):
        for rows, runs in ((1, 41), (20, 11), (40, 6), (1000, 6)):
            call = decode_inputs(Widths(1, 16, 0), (3,) * rows)
            assert len(checks.right_answer(call)[1]) == runs


class TestBatches:
    """A batch is its sequences, in whatever order, however many."""

    @pytest.mark.parametrize("name", RUNNING)
    def test_permuted_batches_give_permuted_bits(self, name):
        call = decode_inputs(Widths(8), (65, 0, 16, 1, 130), (4, 1, 0, 2, 3))
        whole = api.decode(*call.tensors, **call.options, return_lse=True, backend=name)
        other, rows = take(call, (3, 1, 4, 0, 2))
        part = api.decode(*other.tensors, **other.options, return_lse=True, backend=name)
        assert torch.equal(part.out, whole.out[rows]) and torch.equal(part.lse, whole.lse[rows])

    def test_taking_a_sequence_keeps_its_rows(self):
        call = decode_inputs(Widths(2), (5, 7, 9), (1, 3, 2))
        part, rows = take(call, (2, 0))
        assert rows.tolist() == [4, 5, 0]
        assert part.options["qo_indptr"].tolist() == [0, 2, 3]
        assert part.options["seq_lens"].tolist() == [9, 5]
        assert num_sequences(part) == 2

    @pytest.mark.parametrize("name", RUNNING)
    def test_no_sequences_give_no_rows(self, name):
        device, widths = DEVICES[name], Widths(4, 128, 32, 64, 64)
        for call in (
            decode_inputs(widths, ()),
            sparse_inputs(widths, 9, 4, 0),
            prefill_inputs(widths, (), ()),
            prefill_inputs(widths, None, ()),
            index_inputs(4, 128, (), None, 5),
            write_inputs(128, 32, 0),
        ):
            here = moved(call, device)
            got = checks.run_call(here, name)
            if call.op == "index_topk":
                assert got.shape == (0, 5)
            elif call.op != "write_cache":
                extra = call.shape[0]  # the prefill's row of no sequence
                assert got.out.shape == call.shape
                assert (got.out == 0).all() and (got.lse == -torch.inf).all() and extra in (0, 1)


class TestFindings:
    """A wrong backend does not pass."""

    case = next(c for c in FULL if c.id.startswith("right-decode") and Feature.LSE in c.problem.features)

    def judged(self, monkeypatch, change):
        module = import_module("anymla.backends.cpu_mla")
        right = module.decode

        def wrong(args, state):
            right(args, state)
            change(args)

        monkeypatch.setattr(module, "decode", wrong)
        return checks.check_case(self.case, "cpu", CPU, torch.device("cpu"))

    def test_a_wrong_number_is_found(self, monkeypatch):
        judgement = self.judged(monkeypatch, lambda args: args.out.mul_(1.1))
        assert "of its budget" in judgement.reasons[0]

    def test_a_crash_is_found(self, monkeypatch):
        judgement = self.judged(monkeypatch, lambda args: args.out[99999])
        assert "IndexError" in judgement.reasons[0]

    def test_a_write_to_the_cache_is_found(self, monkeypatch):
        judgement = self.judged(monkeypatch, lambda args: args.cache.storage[0, 0, :1].zero_())
        assert judgement.reasons == ("the cache was written to",)

    def test_a_missing_refusal_is_found(self):
        asked = replace(self.case, check="refusal", fact="num_heads")
        judgement = checks.check_case(asked, "cpu", CPU, torch.device("cpu"))
        assert judgement.reasons == ("problem got accepted; needs a refusal: no row of cpu offers it",)
