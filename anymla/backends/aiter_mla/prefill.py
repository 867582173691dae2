"""Prefill through AITER in fp8: decompressed, cast, attended to tile by tile, the parts of cut tiles merged.

T query tokens, of which N belong to sequences, H heads, L = kv_lora_rank, P, R, V = 128, 64, 128. A launch
takes some of the heads, each with keys of its own, as many as fit into EXPANDED_BYTES; the same plan serves
all launches. AITER plans on the host, so lengths must be known there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

from anymla.backends.aiter_mla import bindings
from anymla.backends.aiter_mla.calls import Call, call_of
from anymla.backends.aiter_mla.manifest import prefill_lanes
from anymla.backends.aiter_mla.operands import EXPANDED_BYTES, expanded, host_lengths, rounded
from anymla.backends.aiter_mla.provider import Aiter, aiter_of
from anymla.backends.aiter_mla.staging import staging_of
from anymla.contract import Batch, PrefillArgs
from anymla.hardware.probe import Machine
from anymla.heads import HeadPadding
from anymla.problem import Problem

TILE_Q, TILE_KV = 256, 128
"""Query tokens of a tile and the keys at whose multiples one is cut; the kernel's own."""
BYTES_A_VALUE = 13
"""Of a value of q, k or v on its way from 16 bits over fp32 to fp8."""


@dataclass(frozen=True)
class PrefillState:
    """A planned prefill.

    Attributes:
        calls: AITER's functions.
        tokens: N.
        lanes: Heads of a launch, padding included.
        qo_indptr: [B + 1] int32, where each sequence's tokens start, which are its keys too.
        pages: [N] int32, 0, 1, …: a page is a token.
        plan: work_indptr, work_info, reduce_indptr, reduce_final_map and reduce_partial_map, on the device.
        partial_out, partial_lse: [parts · TILE_Q, lanes, V] and [parts · TILE_Q, lanes] fp32, of tiles that
            are cut; no more than there are.
    """

    problem: Problem
    batch: Batch
    calls: Mapping[str, Call]
    tokens: int
    lanes: int
    qo_indptr: Tensor
    pages: Tensor
    plan: Mapping[str, Tensor]
    partial_out: Tensor
    partial_lse: Tensor


def plan_prefill(batch: Batch, problem: Problem, machine: Machine, knobs: Mapping[str, int]) -> PrefillState:
    """Have AITER plan one prefill step on the host, and copy the plan; nothing waits for the device.

    Args:
        batch: Lengths, known to the host, of sequences that have nothing cached.
        problem: Facts of the call.
        machine: The chip.
        knobs: None are known.

    Returns:
        The state that `prefill` takes, for any number of layers.
    """
    contexts, indptr = host_lengths(batch)
    assert not any(contexts)
    aiter, device = aiter_of(machine), batch.seq_lens.device
    calls = {name: call_of(aiter, name) for name in bindings.PREFILL}
    lanes = _lanes_of_launch(aiter, problem, indptr[-1])
    plan = _plan(calls, batch, indptr, lanes) if indptr[-1] else {}
    parts = plan["reduce_partial_map"].shape[0] * TILE_Q if plan else 0
    width = problem.v_head_dim
    return PrefillState(
        problem=problem,
        batch=batch,
        calls=calls,
        tokens=indptr[-1],
        lanes=lanes,
        qo_indptr=batch.qo_indptr.contiguous(),
        pages=torch.arange(indptr[-1], dtype=torch.int32, device=device),
        plan=plan,
        partial_out=torch.empty((parts, lanes, width), dtype=torch.float32, device=device),
        partial_lse=torch.empty((parts, lanes), dtype=torch.float32, device=device),
    )


def prefill(args: PrefillArgs, state: PrefillState) -> None:
    """Fill args.out for every row.

    Args:
        args: Checked tensors, without sinks and without a place for an lse, which AITER does not give.
        state: From `plan_prefill`.
    """
    assert args.lse is None and args.sinks is None
    args.out[state.tokens :].zero_()
    heads = state.problem.num_heads
    for first in range(0, heads if state.tokens else 0, state.lanes):
        _attend(args, state, slice(first, min(first + state.lanes, heads)))


def plan_sizes(indptr: tuple[int, ...], lanes: int, units: int) -> tuple[int, int, int]:
    """How long a plan can get.

    Args:
        indptr: Offsets of query tokens, the keys of their sequences too.
        lanes: Heads of a launch.
        units: Compute units.

    Returns:
        Tiles, items of work, and parts of cut tiles at most. Heads are shared among as many clusters of units
        as divide both; each of a cluster's units is filled, cutting a tile once, before the next one.
    """
    tiles = sum(-(-(end - start) // TILE_Q) for start, end in pairwise(indptr))
    units_a_cluster = units // gcd(lanes, units)
    return tiles, (tiles + units_a_cluster) * lanes, min(tiles + units_a_cluster, 2 * units_a_cluster)


def _lanes_of_launch(aiter: Aiter, problem: Problem, tokens: int) -> int:
    """The most heads that fit, but no more than hold all of them; the least where not even those fit."""
    able, width = prefill_lanes(aiter), problem.qk_nope_head_dim + problem.qk_rope_head_dim
    bytes_a_head = tokens * (2 * width + problem.v_head_dim) * BYTES_A_VALUE
    enough = next((lanes for lanes in able if lanes >= problem.num_heads), able[-1])
    fitting = [lanes for lanes in able if lanes <= enough and lanes * bytes_a_head <= EXPANDED_BYTES]
    return max(fitting, default=able[0])


def _plan(calls: Mapping[str, Call], batch: Batch, indptr: tuple[int, ...], lanes: int) -> dict[str, Tensor]:
    """AITER's plan on the device, no longer than it is."""
    sizes = calls["get_ps_metadata_info_v1"](
        batch_size=batch.num_seqs,
        num_head_k=lanes,
        max_qlen=batch.max_q_len,
        qlen_granularity=TILE_Q,
    )
    # Only this one is exact; the others are of sequences that are all as long as the longest.
    slots = int(sizes[1][0])
    tiles, items, parts = plan_sizes(indptr, lanes, slots - 1)
    staging = staging_of(batch.seq_lens.device)
    host = staging.host(
        {
            "work_indptr": (slots,),
            "work_info": (items, 8),
            "reduce_indptr": (tiles + 1,),
            "reduce_final_map": (tiles, 2),
            "reduce_partial_map": (parts,),
        }
    )
    starts = torch.tensor(indptr, dtype=torch.int32, device="cpu")
    calls["get_ps_metadata_v1"](
        seqlens_qo_indptr=starts,
        pages_kv_indptr=starts,
        context_lens=starts.diff(),
        gqa_ratio=1,
        num_heads_k=lanes,
        work_metadata_ptrs=torch.empty(2, dtype=torch.uint64, device="cpu"),
        **host,
        qhead_granularity=1,
        qlen_granularity=TILE_Q,
        kvlen_granularity=TILE_KV,
        block_size=1,
        is_causal=batch.causal,
    )
    host["work_info"] = host["work_info"][: int(host["work_indptr"][-1])]
    host["reduce_partial_map"] = host["reduce_partial_map"][: int(host["reduce_indptr"][-1])]
    return staging.to_device(host)


def _attend(args: PrefillArgs, state: PrefillState, heads: slice) -> None:
    """Some of the heads, in one launch and a merge."""
    own, rows, plan = heads.stop - heads.start, state.tokens, state.plan
    # The chip's own, whatever a cache of which nothing is read has.
    fp8 = torch.float8_e4m3fn
    padding = HeadPadding.between(own, state.lanes)
    keys, values = expanded(args.kv_c[:rows], args.k_pe[:rows], args.w_uk[heads], args.w_uv[heads])
    q, q_scale = rounded(torch.cat((args.q_nope[:rows, heads], args.q_pe[:rows, heads]), -1), fp8)
    k, k_scale = rounded(keys, fp8)
    v, v_scale = rounded(values, fp8)
    out = torch.empty((rows, state.lanes, v.shape[-1]), dtype=torch.bfloat16, device=args.out.device)
    state.calls["mla_prefill_ps_asm_fwd"](
        Q=padding.pad_q(q).contiguous(),
        K=padding.pad_q(k).contiguous(),
        V=padding.pad_q(v).contiguous(),
        qo_indptr=state.qo_indptr,
        kv_indptr=state.qo_indptr,
        kv_page_indices=state.pages,
        work_indptr=plan["work_indptr"],
        work_info_set=plan["work_info"],
        max_seqlen_q=state.batch.max_q_len,
        softmax_scale=args.sm_scale,
        is_causal=state.batch.causal,
        splitData=state.partial_out,
        splitLse=state.partial_lse,
        output=out,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if state.partial_out.shape[0]:
        state.calls["mla_reduce_v1"](
            partial_output=state.partial_out,
            partial_lse=state.partial_lse,
            reduce_indptr=plan["reduce_indptr"],
            reduce_final_map=plan["reduce_final_map"],
            reduce_partial_map=plan["reduce_partial_map"],
            max_seqlen_q=TILE_Q,
            num_kv_splits=0,
            final_output=out,
            final_lse=None,
        )
    args.out[:rows, heads].copy_(padding.unpad_out(out))
