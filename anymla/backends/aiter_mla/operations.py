"""The operations of the AITER backend, as every backend has them."""

from collections.abc import Mapping

from anymla.backends.aiter_mla import chunked
from anymla.backends.aiter_mla import prefill as fp8
from anymla.backends.aiter_mla.cache_write import write_cache
from anymla.backends.aiter_mla.decode import (
    decode,
    plan_decode,
    plan_sparse_decode,
    sparse_decode,
    update_decode,
)
from anymla.backends.aiter_mla.index import index_topk, plan_index_topk, update_index_topk
from anymla.contract import Batch, PrefillArgs
from anymla.hardware.probe import Machine
from anymla.problem import Feature, Problem

__all__ = [
    "decode",
    "index_topk",
    "plan_decode",
    "plan_index_topk",
    "plan_prefill",
    "plan_sparse_decode",
    "prefill",
    "sparse_decode",
    "update_decode",
    "update_index_topk",
    "write_cache",
]


def plan_prefill(
    batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]
) -> fp8.PrefillState | chunked.ChunkedState:
    """Plan a prefill, by chunks where a sequence may have a cached context; see `prefill` and `chunked`."""
    plan = chunked.plan_chunked if Feature.CACHED_CONTEXT in problem.features else fp8.plan_prefill
    return plan(batch, problem, machine, knobs)


def prefill(args: PrefillArgs, state: fp8.PrefillState | chunked.ChunkedState) -> None:
    """Fill args.out for every row, as planned."""
    if isinstance(state, chunked.ChunkedState):
        chunked.attend_chunked(args, state)
    else:
        fp8.prefill(args, state)
