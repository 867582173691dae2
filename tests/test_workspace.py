"""How much memory a plan will hold is asked with one function, before there is a step."""

from dataclasses import replace

import pytest

from anymla import Feature, InvalidInput, NoBackend, machine_named, model_named, workspace_bytes

CHIP = replace(machine_named("sm90"), multiprocessors=132)
MODEL = model_named("deepseek-v3.2")
BOUNDS = {"num_seqs": 64, "num_tokens": 8192, "max_seq_len": 163_840}
GIB = 1 << 30


def asked(op, **facts):
    return MODEL.problem(op, **({} if op == "write_cache" else {"q_len": 1}) | facts)


@pytest.mark.parametrize(
    ("op", "most"), [("decode", GIB), ("sparse_decode", GIB), ("prefill", 3 * GIB), ("index_topk", GIB)]
)
def test_one_set_of_bounds_does_for_all_operations(op, most):
    pytest.importorskip("triton")
    assert 0 < workspace_bytes(asked(op), **BOUNDS, backend="triton", machine=CHIP) < most


def test_batch_invariance_takes_no_product_of_batch_and_length():
    pytest.importorskip("triton")
    problem = asked("decode")
    problem = replace(problem, features=problem.features | {Feature.BATCH_INVARIANT})
    for num_seqs in (64, 512):
        assert workspace_bytes(problem, num_seqs=num_seqs, max_seq_len=163_840, machine=CHIP) < GIB // 3


def test_contexts_known_to_the_host_are_a_bound_of_their_own():
    pytest.importorskip("triton")
    problem = asked("prefill", cached_context=True)
    unknown, known, none = (
        workspace_bytes(problem, num_seqs=8, num_tokens=64, max_seq_len=1024, context_tokens=n, machine=CHIP)
        for n in (None, 2048, 0)
    )
    assert none < known < unknown
    new = replace(problem, features=problem.features - {Feature.CACHED_CONTEXT})
    assert workspace_bytes(new, num_seqs=8, num_tokens=64, max_seq_len=1024, machine=CHIP) == none


def test_a_cache_write_has_no_plan_and_some_backends_set_no_bound():
    assert workspace_bytes(asked("write_cache"), backend="cpu", machine=machine_named("cpu")) == 0
    assert workspace_bytes(asked("decode"), **BOUNDS, backend="cpu", machine=machine_named("cpu")) is None


@pytest.mark.parametrize(
    ("op", "needed"),
    [
        ("decode", ("num_seqs", "max_seq_len")),
        ("sparse_decode", ("num_tokens",)),
        ("prefill", ("num_seqs", "num_tokens", "max_seq_len")),
        ("index_topk", ("num_tokens", "max_seq_len")),
    ],
)
def test_every_bound_that_is_missing_is_named(op, needed):
    with pytest.raises(InvalidInput) as refusal:
        workspace_bytes(asked(op), machine=machine_named("cpu"))
    assert [reason.split()[0] for reason in refusal.value.reasons] == list(needed)
    with pytest.raises(InvalidInput, match="num_seqs got -1; needs at least 0"):
        workspace_bytes(asked(op), **BOUNDS | {"num_seqs": -1}, machine=machine_named("cpu"))


def test_what_no_backend_takes_has_no_bound_but_reasons():
    with pytest.raises(NoBackend, match="arch got sm90"):
        workspace_bytes(asked("decode"), **BOUNDS, backend="cpu", machine=CHIP)
