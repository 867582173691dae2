"""One call, one result: every operation as plan and run in one step.

T query tokens, B sequences, H heads, L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim,
V = v_head_dim, S new tokens of latent, K indices a query token.
"""

from dataclasses import replace

import torch
from torch import Tensor

from anymla import contract, planned, plans, select
from anymla.contract import AttentionOutput
from anymla.errors import Reasons
from anymla.hardware.probe import Machine
from anymla.kv_cache import KVCache
from anymla.problem import Problem, canonical_name


def decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor | KVCache,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    qo_indptr: Tensor | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    kv_format: str | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str = "auto",
    check: bool = False,
) -> AttentionOutput:
    """Attend each query token to its sequence's paged latent cache (absorbed form).

    Args:
        ql_nope: [T, H, L] fp32, bf16, fp16, or fp8 like the cache. Queries after `absorb_q`.
        q_pe: [T, H, R], same dtype. Rotated.
        kv_cache: [num_blocks, block_size, row], kv_c then k_pe, or a KVCache.
        block_table: [B, max_blocks] int32. Pages past seq_lens are never read.
        seq_lens: [B] int32 tokens. Includes the tokens of this call.
        sm_scale: Multiplies q·k. Use `Model.sm_scale`; the absorbed width is not the scale's width.
        qo_indptr: [B + 1] int32. Tokens from qo_indptr[-1] on belong to no sequence. None: one token a
            sequence, T = B.
        max_q_len: The most query tokens of any one sequence. None: as qo_indptr says, or T where that is on a
            device, which is as right, but may be planned for more rows than there are.
        causal: Row t of q_len sees the first seq_len - q_len + 1 + t keys; False: all of them.
        sinks: [H] fp32 logits, added to each row's denominator.
        kv_format: Name of a row of KV_FORMATS. None: the cache's dtype says it.
        q_scale: [1] fp32. Multiplies fp8 query values. Required with fp8 queries, which need a cache with one
            scale and values of the same dtype.
        k_scale: [1] fp32. Multiplies fp8 cache values. Required with an fp8 cache.
        return_lse: Whether to return the lse.
        out: [T, H, L] to write into, dtype of ql_nope; with fp8 queries bf16 or fp16.
        lse: [T, H] fp32 to write into; needs return_lse.
        backend: A registry name, or "auto" for the first that accepts. Never falls back.
        check: Read device tensors back to check their values; this syncs.

    Returns:
        out: [T, H, L], dtype of ql_nope; with fp8 queries bf16, or that of the `out` given. 0 where a row
            attends to nothing.
        lse: [T, H] fp32, natural log, sinks excluded, -inf where a row attends to nothing.
            None unless asked for.

    Raises:
        InvalidInput: an argument contradicts another one.
        NoBackend: nothing, or not the named backend, takes this call; the message gives every reason.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. `reference.decode` is the definition.
    """
    reasons = Reasons("decode")
    contract.check_flags(reasons, return_lse=return_lse)
    cache = _cache_of(reasons, ql_nope, q_pe, kv_cache, kv_format, k_scale, check)
    batch = None
    if cache is not None:
        contract.check_queries(reasons, ql_nope, q_pe, cache, sm_scale, sinks, None, None, q_scale, check)
        _all_have_sequences(reasons, qo_indptr, seq_lens, ql_nope.shape[0])
        batch = contract.check_batch(
            reasons,
            block_table=block_table,
            seq_lens=seq_lens,
            qo_indptr=qo_indptr,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            causal=causal,
            num_tokens=ql_nope.shape[0],
            max_q_len=_bound(max_q_len, qo_indptr, ql_nope.shape[0]),
            check=check,
        )
    reasons.raise_if_any()
    assert cache is not None and batch is not None
    facts = _facts("decode", ql_nope, cache, num_heads=ql_nope.shape[1])
    features = plans.features(batch, sinks=sinks is not None, return_lse=return_lse)
    plan = plans.decode_plan(batch, replace(facts, q_len=batch.max_q_len, features=features), backend)
    return plan.run(
        ql_nope,
        q_pe,
        cache,
        sm_scale=sm_scale,
        sinks=sinks,
        q_scale=q_scale,
        return_lse=return_lse,
        out=out,
        lse=lse,
    )


def sparse_decode(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor | KVCache,
    *,
    indices: Tensor,
    sm_scale: float,
    counts: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_format: str | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str = "auto",
    check: bool = False,
) -> AttentionOutput:
    """Attend each query token to the cache slots that its indices name (absorbed form).

    Args:
        ql_nope: [T, H, L] fp32, bf16, fp16, or fp8 like the cache. Queries after `absorb_q`.
        q_pe: [T, H, R], same dtype. Rotated.
        kv_cache: [num_blocks, block_size, row], kv_c then k_pe, or a KVCache.
        indices: [T, K] int32 slots, page * block_size + offset. -1 is no key and never read; a slot that is
            named twice counts twice. `indices.to_slots` makes slots of request-local token ids.
        sm_scale: Multiplies q·k. Use `Model.sm_scale`.
        counts: [T] int32. Only the first counts[t] indices of a row count. None: all K.
        sinks: [H] fp32 logits, added to each row's denominator.
        kv_format: Name of a row of KV_FORMATS. None: the cache's dtype says it.
        q_scale: [1] fp32. Multiplies fp8 query values. Required with fp8 queries, which need a cache with one
            scale and values of the same dtype.
        k_scale: [1] fp32. Multiplies fp8 cache values. Required with an fp8 cache.
        return_lse: Whether to return the lse.
        out: [T, H, L] to write into, dtype of ql_nope; with fp8 queries bf16 or fp16.
        lse: [T, H] fp32 to write into; needs return_lse.
        backend: A registry name, or "auto" for the first that accepts. Never falls back.
        check: Read device tensors back to check their values; this syncs.

    Returns:
        out: [T, H, L], dtype of ql_nope; with fp8 queries bf16, or that of the `out` given. 0 where a row
            attends to nothing.
        lse: [T, H] fp32, natural log, sinks excluded, -inf where a row attends to nothing.
            None unless asked for.

    Raises:
        InvalidInput: an argument contradicts another one.
        NoBackend: nothing, or not the named backend, takes this call; the message gives every reason.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2. `reference.sparse_decode` is the definition.
    """
    reasons = Reasons("sparse_decode")
    contract.check_flags(reasons, return_lse=return_lse, check=check)
    cache = _cache_of(reasons, ql_nope, q_pe, kv_cache, kv_format, k_scale, check)
    if cache is not None and contract.check_queries(
        reasons, ql_nope, q_pe, cache, sm_scale, sinks, None, None, q_scale, check
    ):
        contract.check_indices(reasons, indices, counts, cache, ql_nope.shape[0], ql_nope.device, check)
    reasons.raise_if_any()
    assert cache is not None
    facts = _facts("sparse_decode", ql_nope, cache, num_heads=ql_nope.shape[1])
    features = plans.features(None, sinks=sinks is not None, return_lse=return_lse)
    problem = replace(facts, topk=indices.shape[1], features=features)
    plan = plans.sparse_plan(ql_nope.shape[0], problem, ql_nope.device, backend)
    return plan.run(
        ql_nope,
        q_pe,
        cache,
        indices=indices,
        sm_scale=sm_scale,
        counts=counts,
        sinks=sinks,
        q_scale=q_scale,
        return_lse=return_lse,
        out=out,
        lse=lse,
    )


def prefill(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    qo_indptr: Tensor,
    sm_scale: float,
    kv_cache: Tensor | KVCache | None = None,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    kv_format: str | None = None,
    k_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str = "auto",
    check: bool = False,
) -> AttentionOutput:
    """Attend new tokens to themselves and to their cached context, in decompressed (MHA) form.

    The cheaper form for many new tokens. Keys are [W_UK c ; k_pe], values c W_UV; the context, the first
    seq_len - q_len tokens of a sequence, is read from the cache in chunks and merged.

    Args:
        q_nope: [T, H, P] fp32, bf16 or fp16. Not absorbed.
        q_pe: [T, H, R], same dtype. Rotated.
        kv_c: [T, L], same dtype. Normed latents of the new tokens; they need not be in the cache.
        k_pe: [T, R], same dtype. Rotated.
        w_uk: [H, P, L], same dtype. From `split_kv_b`.
        w_uv: [H, L, V], same dtype. From `split_kv_b`.
        qo_indptr: [B + 1] int32 offsets of each sequence's new tokens.
        sm_scale: Multiplies q·k. Use `Model.sm_scale`.
        kv_cache: [num_blocks, block_size, row] or a KVCache. None: there is no context.
        block_table: [B, max_blocks] int32 pages of the context.
        seq_lens: [B] int32 tokens, context and new ones. None: there is no context.
        max_q_len: The most new tokens of any one sequence. None: as qo_indptr says, or T where that is on a
            device, which is as right, but may be planned for more rows than there are.
        causal: New token t sees the context and new tokens 0 to t; False: all of them.
        sinks: [H] fp32 logits, added to each row's denominator.
        kv_format: Name of a row of KV_FORMATS. None: the cache's dtype says it.
        k_scale: [1] fp32. Multiplies fp8 cache values. Required with an fp8 cache.
        return_lse: Whether to return the lse.
        out: [T, H, V] to write into.
        lse: [T, H] fp32 to write into; needs return_lse.
        backend: A registry name, or "auto" for the first that accepts. Never falls back.
        check: Read device tensors back to check their values; this syncs.

    Returns:
        out: [T, H, V], dtype of q_nope. 0 where a row attends to nothing.
        lse: [T, H] fp32, natural log, sinks excluded, -inf where a row attends to nothing.
            None unless asked for.

    Raises:
        InvalidInput: an argument contradicts another one.
        NoBackend: nothing, or not the named backend, takes this call; the message gives every reason.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. `reference.prefill` is the definition.
    """
    reasons = Reasons("prefill")
    sized = contract.check_tensor(reasons, "q_nope", q_nope, (None, None, None), contract.Q_DTYPES)
    sized &= contract.check_tensor(reasons, "kv_c", kv_c, (None, None), contract.Q_DTYPES)
    sized &= contract.check_tensor(reasons, "k_pe", k_pe, (None, None), contract.Q_DTYPES)
    sized &= contract.check_tensor(reasons, "w_uv", w_uv, (None, None, None), contract.Q_DTYPES)
    sized &= contract.check_tensor(reasons, "qo_indptr", qo_indptr, (None,), (torch.int32,))
    given = {"kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    missing = [name for name, value in given.items() if value is None]
    needs = f"{', '.join(missing)} too: a context is a cache, its pages and the lengths"
    reasons.need(len(missing) in (0, 3), "context", ", ".join(n for n in given if n not in missing), needs)
    cache = None
    if sized and kv_cache is not None:
        cache = planned.opened(reasons, kv_cache, kv_c.shape[-1], k_pe.shape[-1], kv_format, k_scale, check)
    reasons.raise_if_any()
    batch = contract.check_batch(
        reasons,
        block_table=block_table,
        seq_lens=qo_indptr.diff() if seq_lens is None else seq_lens,
        qo_indptr=qo_indptr,
        block_size=1 if cache is None else cache.block_size,
        num_blocks=None if cache is None else cache.num_blocks,
        causal=causal,
        num_tokens=q_nope.shape[0],
        max_q_len=_bound(max_q_len, qo_indptr, q_nope.shape[0]),
        new_tokens_are_cached=False,
        check=check,
    )
    reasons.raise_if_any()
    assert batch is not None
    plan = plans.plan_prefill(
        batch,
        num_heads=q_nope.shape[1],
        kv_lora_rank=kv_c.shape[-1],
        qk_rope_head_dim=k_pe.shape[-1],
        qk_nope_head_dim=q_nope.shape[-1],
        v_head_dim=w_uv.shape[-1],
        q_dtype=q_nope.dtype,
        kv_format=None if cache is None else cache.format.name,
        sinks=sinks is not None,
        return_lse=return_lse,
        backend=backend,
    )
    return plan.run(
        q_nope,
        q_pe,
        kv_c,
        k_pe,
        w_uk,
        w_uv,
        sm_scale=sm_scale,
        kv_cache=cache,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
        lse=lse,
    )


def write_cache(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor | KVCache,
    slot_mapping: Tensor,
    *,
    kv_format: str | None = None,
    k_scale: Tensor | None = None,
    power_of_two: bool = False,
    backend: str = "auto",
    check: bool = False,
) -> None:
    """Write new latents into their slots, in the cache's format, in place.

    Args:
        kv_c: [S, L] fp32, bf16 or fp16. Normed.
        k_pe: [S, R], same dtype. Rotated. For an index key cache: [S, 0].
        kv_cache: [num_blocks, block_size, row] or a KVCache; written in place.
        slot_mapping: [S] int64 slots, page * block_size + offset. -1 is skipped.
        kv_format: Name of a row of KV_FORMATS. None: the cache's dtype says it.
        k_scale: [1] fp32. Stored fp8 values are x / k_scale, saturated. Required with an fp8 cache.
        power_of_two: Round the scales in a row (of index keys, of fp8_ds_mla) up to powers of two, as some
            models are trained. Formats without such scales ignore it.
        backend: A registry name, or "auto" for the preferred that accepts. Never falls back.
        check: Read device tensors back to check their values; this syncs.

    Raises:
        InvalidInput: an argument contradicts another one; nothing has been written.
        NoBackend: nothing, or not the named backend, takes this call; the message gives every reason.
    """
    reasons = Reasons("write_cache")
    contract.check_flags(reasons, power_of_two=power_of_two, check=check)
    cache = None
    if contract.check_tensor(
        reasons, "kv_c", kv_c, (None, None), contract.Q_DTYPES
    ) and contract.check_tensor(
        reasons, "k_pe", k_pe, (kv_c.shape[0], None), (kv_c.dtype,), kv_c.device, "S from kv_c"
    ):
        cache = planned.opened(reasons, kv_cache, kv_c.shape[-1], k_pe.shape[-1], kv_format, k_scale, check)
        if cache is not None:
            device = cache.device
            reasons.need(
                kv_c.device == device, "kv_c", f"device {kv_c.device}", f"{device}, that of the cache"
            )
            contract.check_slots(reasons, slot_mapping, cache, kv_c.shape[0], check)
    reasons.raise_if_any()
    assert cache is not None
    problem = _facts("write_cache", kv_c, cache, num_heads=1)
    choice = select.choose(problem, plans.machine_of(kv_c.device), backend)
    planned.module_of(choice).write_cache(contract.WriteArgs(kv_c, k_pe, cache, slot_mapping, power_of_two))


def index_topk(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor | KVCache,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    topk: int,
    qo_indptr: Tensor | None = None,
    max_q_len: int | None = None,
    as_slots: bool = False,
    kv_format: str | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    check: bool = False,
) -> Tensor:
    """Choose each query token's `topk` keys by the DSA index score, sum over heads of weight * relu(q·k).

    Args:
        q: [T, H, D] fp32, bf16, fp16 or fp8 index queries; H index heads of width D.
        weights: [T, H] fp32, may be negative. Every constant factor of the model is already in them, and the
            scales of fp8 queries: see `quantise_queries`.
        index_cache: [num_blocks, block_size, row] index keys of width D, or a KVCache.
        block_table: [B, max_blocks] int32. Pages past seq_lens are never read.
        seq_lens: [B] int32 tokens. Includes the tokens of this call.
        topk: K.
        qo_indptr: [B + 1] int32. Tokens from qo_indptr[-1] on belong to no sequence. None: one token a
            sequence, T = B.
        max_q_len: The most query tokens of any one sequence. None: as qo_indptr says, or T where that is on a
            device, which is as right, but may be planned for more rows than there are.
        as_slots: Return slots of the pages, page * block_size + offset, as `sparse_decode` takes them over a
            cache with the same pages, and not token ids.
        kv_format: "index_k" or another row of KV_FORMATS. None: the cache's dtype says it.
        out: [T, K] int32 to write into.
        backend: A registry name, or "auto" for the first that accepts. Never falls back.
        check: Read device tensors back to check their values; this syncs.

    Returns:
        [T, K] int32 token ids within the sequence, or slots: those of the highest scores, the same every time
        but in no particular order; of equal scores the earlier tokens, NaN only after everything else. -1
        after the last visible key; a row that sees nothing is all -1.

    Raises:
        InvalidInput: an argument contradicts another one.
        NoBackend: nothing, or not the named backend, takes this call; the message gives every reason.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2. `reference.index_topk` is the definition.
    """
    reasons = Reasons("index_topk")
    topk = contract.check_count(reasons, "topk", topk)
    cache = batch = None
    if contract.check_tensor(reasons, "q", q, (None, None, None), contract.INDEX_Q_DTYPES):
        cache = planned.opened(reasons, index_cache, q.shape[-1], 0, kv_format, None, check)
    if cache is not None:
        contract.check_index_queries(reasons, q, weights, cache, None, None)
        _all_have_sequences(reasons, qo_indptr, seq_lens, q.shape[0])
        batch = contract.check_batch(
            reasons,
            block_table=block_table,
            seq_lens=seq_lens,
            qo_indptr=qo_indptr,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            causal=True,
            num_tokens=q.shape[0],
            max_q_len=_bound(max_q_len, qo_indptr, q.shape[0]),
            check=check,
        )
    reasons.raise_if_any()
    assert cache is not None and batch is not None
    facts = _facts("index_topk", q, cache, num_heads=q.shape[1])
    problem = replace(facts, topk=topk, q_len=batch.max_q_len, features=plans.features(batch))
    return plans.index_plan(batch, problem, backend).run(q, weights, cache, as_slots=as_slots, out=out)


def explain(problem: Problem, machine: Machine | None = None) -> tuple[select.Verdict, ...]:
    """Say what every backend would do with a problem, and why, without running anything.

    Args:
        problem: The facts of a call.
        machine: A chip, from `machine_named` or `this_machine`. None: the default device of this process.

    Returns:
        One verdict a backend, in order of preference, each with all of its reasons.

    Raises:
        InvalidInput: the problem has an unknown name or a count that cannot be, or the machine is none.
    """
    reasons = Reasons("explain")
    reasons.need(
        isinstance(problem, Problem), "problem", repr(problem), "a Problem, such as Model.problem(op)"
    )
    machine = plans.machine_on(reasons, torch.device("cpu"), machine)
    reasons.raise_if_any()
    select.check(problem)
    return select.explain(problem, machine)


def _cache_of(
    reasons: Reasons,
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor | KVCache,
    kv_format: str | None,
    k_scale: Tensor | None,
    check: bool,
) -> KVCache | None:
    sized = contract.check_tensor(reasons, "ql_nope", ql_nope, (None, None, None), contract.ABSORBED_Q_DTYPES)
    sized &= contract.check_tensor(reasons, "q_pe", q_pe, (None, None, None), contract.ABSORBED_Q_DTYPES)
    if not sized:
        return None
    return planned.opened(reasons, kv_cache, ql_nope.shape[-1], q_pe.shape[-1], kv_format, k_scale, check)


def _all_have_sequences(
    reasons: Reasons, qo_indptr: Tensor | None, seq_lens: Tensor, num_tokens: int
) -> None:
    """Note tokens past one a sequence: only offsets tell padding from offsets that were forgotten."""
    if qo_indptr is None and isinstance(seq_lens, Tensor) and seq_lens.dim() == 1:
        num_seqs = seq_lens.shape[0]
        needs = f"[{num_seqs + 1}] int32: {num_tokens} query tokens are more than {num_seqs}, one a sequence"
        reasons.need(num_tokens <= num_seqs, "qo_indptr", None, needs)


def _bound(given: int | None, qo_indptr: Tensor | None, tokens: int) -> int | None:
    """The bound that a batch is told: what is known of a device without asking it."""
    asks = isinstance(qo_indptr, Tensor) and not contract.on_host(qo_indptr)
    return tokens if given is None and asks else given


def _facts(op: str, like: Tensor, cache: KVCache, *, num_heads: int) -> Problem:
    return Problem(
        op=op,
        q_dtype=canonical_name(str(like.dtype)),
        kv_format=cache.format.name,
        num_heads=num_heads,
        kv_lora_rank=cache.kv_lora_rank,
        qk_rope_head_dim=cache.qk_rope_head_dim,
        block_size=cache.block_size,
    )
