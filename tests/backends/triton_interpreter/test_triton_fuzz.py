"""The first random calls of the fuzzer on the Triton kernels, small, in Triton's interpreter."""

import kernel_calls
import pytest

from anymla.backends import triton_mla
from anymla.contract import WriteArgs
from anymla.hardware.probe import machine_named
from anymla.problem import OPS
from anymla.verification.checks import judged
from anymla.verification.fuzz import Extent, fuzzed

SMALL = Extent(heads=12, keys=150, sequences=4, work=2e5)
CALLS = [fuzzed("triton", machine_named("sm90"), 0, number, SMALL) for number in range(36)]


def run(drawn):
    """Make a call of the backend itself: a machine of this test has few units, and no GPU."""

    def made(call):
        if call.op == "write_cache":
            return triton_mla.write_cache(WriteArgs(*call.tensors))
        if call.op == "index_topk":
            return kernel_calls.run_index(call, lengths_on_host=drawn.family.planned)
        return kernel_calls.run(call, drawn.case.problem, lengths_on_host=drawn.family.planned)

    return made


@pytest.mark.parametrize("drawn", CALLS, ids=lambda drawn: drawn.id)
def test_a_random_call_is_right(drawn):
    call = drawn.inputs("cpu")
    judged(call, call, run(drawn)).require_pass()


def test_every_operation_is_among_them():
    assert {drawn.case.problem.op for drawn in CALLS} == set(OPS)
