"""The lse of a decode through AITER: functional and in place, beside the plain decode, or refused."""

import itertools

import cases
import pytest
import torch
from cases import Case
from double import AiterDouble

import anymla.ops  # noqa: F401  registers torch.ops.anymla
from anymla import plans, reference
from anymla.backends.aiter_mla import facts, manifest
from anymla.backends.aiter_mla.provider import recorded_aiter
from anymla.contract import AttentionOutput
from anymla.errors import BackendError, NoBackend
from anymla.verification import eager
from anymla.verification.judge import judge

ops = torch.ops.anymla
SERVED = {
    "a workgroup a row": Case("HEAD", "gfx942", 16, "bf16", 1, True, False, "ragged"),
    "padded": Case("HEAD", "gfx942", 12, "bf16", 1, True, False, "with empty"),
    "persistent": Case("HEAD", "gfx950", 48, "bf16", 1, True, False, "a tail of one"),
    "several tokens": Case("HEAD", "gfx950", 64, "bf16", 2, True, False, "a tail of one"),
    "with sinks": Case("HEAD", "gfx942", 16, "bf16", 1, True, True, "with empty"),
}


def call_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[AiterDouble, tuple, dict[str, object]]:
    """The double of a case in this process, and the arguments of an op."""
    machine = cases.machine_of(case)
    monkeypatch.setattr(plans, "machine_of", lambda device: machine)
    double = AiterDouble(case.release, case.arch, cases.UNITS).install(monkeypatch)
    lens = cases.LENGTHS[case.lengths]
    batch = cases._batch(lens, case.q_len)
    q = cases._queries(case.heads, batch.num_tokens)
    options = {
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "qo_indptr": batch.qo_indptr,
        "sm_scale": cases.SM_SCALE,
        "sinks": torch.linspace(-2, 4, case.heads) if case.sinks else None,
    }
    return double, (*q, cases._values("bf16").data), options


@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_both_forms_and_the_plain_decode_are_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    double, args, options = call_of(case, monkeypatch)
    out, lse = ops.decode(*args, **options, backend="aiter")
    assert lse.dtype == torch.float32 and lse.shape == out.shape[:2]
    given = {"out": torch.full_like(out, torch.nan), "lse": torch.full_like(lse, torch.nan)}
    ops.decode_out(*args, **options, **given, backend="aiter")
    assert torch.equal(given["out"], out) and torch.equal(given["lse"], lse)
    plain = torch.full_like(out, torch.nan)
    ops.decode_out(*args, **options, out=plain, backend="aiter")
    cache = cases._values("bf16")
    exact = reference.decode(*args[:2], cache, **options)
    runs = eager.decode(*args[:2], cache, **options)
    # The natural logarithm: that to base 2 would be off by half of itself.
    judge(AttentionOutput(out, lse), exact, *runs).require_pass()
    judge(AttentionOutput(plain, None), exact, *runs).require_pass()
    assert len(double.launched) == 3


def test_the_op_has_a_schema_and_a_fake_that_hold_for_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    _, args, options = call_of(SERVED["a workgroup a row"], monkeypatch)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.decode.default, args, options | {"backend": "aiter"}, test_utils=tests)
    outputs = {"out": torch.empty_like(args[0]), "lse": torch.empty(args[0].shape[:2])}
    for given in (outputs, {"out": outputs["out"]}):
        torch.library.opcheck(
            ops.decode_out.default, args, options | given | {"backend": "aiter"}, test_utils=tests
        )


def test_where_no_kernel_gives_an_lse_the_op_is_refused_and_the_plain_decode_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("0.1.16.post2", "gfx942", 16, "bf16", 1, False, False, "ragged")
    double, args, options = call_of(case, monkeypatch)
    with pytest.raises(
        NoBackend, match=r"aiter 0\.1\.16\.post2 has no kernel for bf16 × bf16, 16 heads, lse"
    ):
        ops.decode(*args, **options, backend="aiter")
    assert not double.launched
    ops.decode_out(*args, **options, out=torch.empty_like(args[0]), backend="aiter")
    assert len(double.launched) == 1


def test_a_kernel_that_returned_none_is_an_error_of_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    double, args, options = call_of(SERVED["a workgroup a row"], monkeypatch)
    real = double._decode
    monkeypatch.setattr(double, "_decode", lambda **given: (real(**given)[0], None))
    double.install(monkeypatch)
    with pytest.raises(BackendError, match="was asked for an lse and AITER returned none"):
        ops.decode(*args, **options, backend="aiter")


def test_no_plan_is_ever_given_to_an_lse_where_the_chip_has_no_kernel_for_it() -> None:
    found = set()
    for release, arch in itertools.product(facts.releases(), ("gfx942", "gfx950")):
        aiter = recorded_aiter(release, arch)
        for heads, kind, q_len in itertools.product((8, 16, 48, 64, 128), cases.KINDS, (1, 2, 4)):
            case = Case(release, arch, heads, kind, q_len, True, False, "ragged")
            route, reasons = manifest.route_of(cases.problem_of(case), aiter, q_len)
            assert (route is None) == bool(reasons)
            if route and route.call.persistent:
                found.add(arch)
                keyed = [kernel for kernel in aiter.kernels if kernel.code_object == route.call.kernel]
                assert all(kernel.lse for kernel in keyed), route
    assert found == {"gfx950"}


def test_fp16_queries_get_memory_of_their_own_because_kernels_write_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("HEAD", "gfx942", 16, "fp8", 1, True, False, "ragged")
    AiterDouble(case.release, case.arch, cases.UNITS).install(monkeypatch)
    batch = cases._batch(cases.LENGTHS["ragged"], 1)
    plan = plans.decode_plan(batch, cases.problem_of(case), "aiter", cases.machine_of(case))
    call, written = plan.state.calls["mla_decode_fwd"], []

    def spied(**given):
        written.append(given["o"].dtype)
        return call(**given)

    plan.state.calls = {**plan.state.calls, "mla_decode_fwd": spied}
    q = [t.half() for t in cases._queries(16, batch.num_tokens)]
    cache = cases._values("fp8_e4m3fnuz")
    got = plan.run(*q, cache, sm_scale=cases.SM_SCALE, return_lse=True).out
    assert written == [torch.bfloat16] and got.dtype == torch.float16 and got.isfinite().all()
