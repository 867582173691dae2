"""The algebra of (out, lse): joining results over disjoint key sets, sinks, and every foreign LSE convention.

T query tokens, H heads, X = width of out.

Partial results join exactly: weights are exp(lse) normalised over the parts, computed before any product, in
fp32 (fp64 where out is fp64). A part whose lse is -inf has no keys and its out is never read. An lse of +inf
or NaN is not ours: some libraries mean an empty row by it, so it has to enter through a constructor below.
Merge refuses +inf where the host can see it; elsewhere it makes the row NaN, as NaN always does, and never an
empty row.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.contract import AttentionOutput, check_tensor, on_host
from anymla.errors import Reasons

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def merge(parts: Sequence[AttentionOutput]) -> AttentionOutput:
    """Join attention over disjoint key sets into attention over their union.

    Sinks come after, once: see `apply_sinks`.

    Args:
        parts: One or more results, each out [T, H, X] of one dtype and lse [T, H] fp32 (fp64 beside an fp64
            out), natural log, sinks excluded, -inf for a row without keys.

    Returns:
        out: [T, H, X], dtype of the parts. 0 where every part is empty.
        lse: [T, H], dtype of the parts' lse. -inf where every part is empty.

    Raises:
        InvalidInput: there is no part, one is not an AttentionOutput, has no lse, differs from the first in
            shape, dtype or device, or has an lse of +inf (looked at on the CPU only).

    Source: FlashAttention-2, arXiv 2307.08691, section 3.1; Flash-Decoding.
    """
    _check_parts(parts)
    lses = [_lse(part) for part in parts]
    top = lses[0]
    for lse in lses[1:]:
        top = torch.maximum(top, lse)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = [torch.exp(lse - top) for lse in lses]
    total = sum(weights[1:], start=weights[0])
    share = 1.0 / torch.where(total == 0, 1.0, total)
    out = torch.zeros_like(parts[0].out, dtype=top.dtype)
    for part, lse, weight in zip(parts, lses, weights, strict=True):
        # 0 · NaN is NaN: what an empty part holds must not enter the sum.
        out += torch.where((lse == -math.inf)[..., None], 0.0, (weight * share)[..., None] * part.out)
    return AttentionOutput(out.to(parts[0].out.dtype), top + total.log())


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Give each head one more key with logit `sinks` and a value of zero. Do it once, after every merge.

    Args:
        out: [T, H, X] without sinks, 0 for a row that attends to nothing.
        lse: [T, H] fp32 (fp64 beside an fp64 out), natural log, sinks excluded. It does not change.
        sinks: [H], dtype of lse. -inf is the identity, +inf gives out 0.

    Returns:
        [T, H, X], dtype of out: out / (1 + exp(sink - lse)). 0 for an empty row, whatever the sink.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.
    """
    _check_with_sinks("apply_sinks", out, lse, sinks)
    share = 1.0 / (1.0 + torch.exp(sinks - lse))
    return torch.where((lse == -math.inf)[..., None], 0.0, share[..., None] * out).to(out.dtype)


def from_base2(out: Tensor, lse: Tensor) -> AttentionOutput:
    """Take a result whose lse is a base-2 logarithm.

    Args:
        out: [T, H, X].
        lse: [T, H] fp32 (fp64 beside an fp64 out), log2 of the sum of exponentials, -inf for an empty row.

    Returns:
        The result in our units.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.

    Source: FlashInfer and FlashMLA kernels compute with exp2.
    """
    _check(out, lse, "from_base2")
    return _with_empty_rows(out, lse * math.log(2), lse == -math.inf)


def from_plus_inf_empty(out: Tensor, lse: Tensor) -> AttentionOutput:
    """Take a result whose lse is +inf for a row that attends to nothing.

    Args:
        out: [T, H, X]; anything in empty rows.
        lse: [T, H] fp32 (fp64 beside an fp64 out), natural log.

    Returns:
        The result in our units: out 0 and lse -inf for empty rows. NaN stays NaN.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.

    Source: FlashMLA and FlashAttention-2 return +inf there.
    """
    _check(out, lse, "from_plus_inf_empty")
    return _with_empty_rows(out, lse, lse.isinf())


def from_bhq(out: Tensor, lse: Tensor) -> AttentionOutput:
    """Take a result for B sequences of q query tokens each, with the heads before the tokens in lse.

    Args:
        out: [B, q, H, X].
        lse: [B, H, q] fp32 (fp64 beside an fp64 out), natural log, -inf for an empty row. For another meaning
            of its values, pass the result on to the constructor of that.

    Returns:
        The result as [B·q, H, X] and [B·q, H]. The values do not change.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.

    Source: FlashMLA, flash_mla_with_kvcache.
    """
    reasons = Reasons("from_bhq")
    if check_tensor(reasons, "out", out, (None,) * 4, OUT_DTYPES):
        batch, q_len, heads, _ = out.shape
        check_tensor(
            reasons, "lse", lse, (batch, heads, q_len), (_lse_dtype(out),), out.device, "B, H, q from out"
        )
    reasons.raise_if_any()
    return AttentionOutput(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1))


def from_head_first(out: Tensor, lse: Tensor) -> AttentionOutput:
    """Take a result whose lse has the heads first.

    Args:
        out: [T, H, X].
        lse: [H, T] fp32 (fp64 beside an fp64 out), natural log.

    Returns:
        The result with lse [T, H]. The values do not change.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.

    Source: FlashAttention's varlen forward.
    """
    reasons = Reasons("from_head_first")
    if check_tensor(reasons, "out", out, (None,) * 3, OUT_DTYPES):
        shape = (out.shape[1], out.shape[0])
        check_tensor(reasons, "lse", lse, shape, (_lse_dtype(out),), out.device, "H, T from out")
    reasons.raise_if_any()
    return AttentionOutput(out, lse.t())


def from_sink_included(out: Tensor, lse: Tensor, sinks: Tensor) -> AttentionOutput:
    """Take the sinks out of a result that already has them in out and in lse.

    What a sink outweighs beyond the precision of lse cannot be had back: such a row comes out empty, and one
    with a sink of +inf comes out NaN.

    Args:
        out: [T, H, X], sinks applied.
        lse: [T, H] fp32 (fp64 beside an fp64 out), natural log, sinks in the sum; the sink itself for an
            empty row.
        sinks: [H], dtype of lse.

    Returns:
        The result in our units, as if there had been no sinks.

    Raises:
        InvalidInput: shapes, dtypes or devices do not fit.
    """
    _check_with_sinks("from_sink_included", out, lse, sinks)
    keys_share = -torch.expm1(sinks - lse)
    restored = (out / keys_share[..., None]).to(out.dtype)
    return _with_empty_rows(restored, lse + keys_share.log(), (lse <= sinks) & (sinks < math.inf))


def _with_empty_rows(out: Tensor, lse: Tensor, is_empty: Tensor) -> AttentionOutput:
    return AttentionOutput(torch.where(is_empty[..., None], 0.0, out), torch.where(is_empty, -math.inf, lse))


def _lse(part: AttentionOutput) -> Tensor:
    assert part.lse is not None
    return part.lse


def _lse_dtype(out: Tensor) -> torch.dtype:
    return torch.float64 if out.dtype == torch.float64 else torch.float32


def _check_parts(parts: Sequence[AttentionOutput]) -> None:
    reasons = Reasons("merge")
    if not reasons.need(
        isinstance(parts, Sequence), "parts", type(parts).__name__, "a list of AttentionOutput"
    ):
        reasons.raise_if_any()
    reasons.need(len(parts) > 0, "parts", "none", "at least 1")
    first: Tensor | None = None
    for i, part in enumerate(parts):
        name = f"parts[{i}]"
        if not reasons.need(
            isinstance(part, AttentionOutput),
            name,
            type(part).__name__,
            "an AttentionOutput, or a from_ constructor",
        ):
            continue
        if not _check_result(reasons, f"{name}.", part.out, part.lse, first):
            continue
        first = part.out if first is None else first
        if on_host(part.lse) and (wrong := (_lse(part) == math.inf).nonzero()).numel():
            where = wrong[0].tolist()
            reasons.need(
                False, f"{name}.lse", f"+inf at {where}", "-inf for an empty row; see from_plus_inf_empty"
            )
    reasons.raise_if_any()


def _check(out: Tensor, lse: Tensor, what: str) -> None:
    reasons = Reasons(what)
    _check_result(reasons, "", out, lse)
    reasons.raise_if_any()


def _check_result(
    reasons: Reasons, prefix: str, out: Tensor, lse: Tensor | None, like: Tensor | None = None
) -> bool:
    """Note what keeps out and lse from being one result, or one like `like`."""
    shape = (None, None, None) if like is None else tuple(like.shape)
    dtypes = OUT_DTYPES if like is None else (like.dtype,)
    device = None if like is None else like.device
    origin = "" if like is None else "from the first part"
    right = check_tensor(reasons, f"{prefix}out", out, shape, dtypes, device, origin)
    # The lse is held against its own out, so that one wrong part gives all of its reasons.
    has_out = isinstance(out, Tensor) and out.dim() == 3
    lse_shape = tuple(out.shape[:2]) if has_out else (None, None)
    lse_dtypes = (_lse_dtype(out),) if has_out else (torch.float32, torch.float64)
    where = out.device if has_out else None
    return check_tensor(reasons, f"{prefix}lse", lse, lse_shape, lse_dtypes, where, "T, H from out") and right


def _check_with_sinks(what: str, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    reasons = Reasons(what)
    _check_result(reasons, "", out, lse)
    if isinstance(out, Tensor) and out.dim() == 3:
        shape, dtype = (out.shape[1],), _lse_dtype(out)
        check_tensor(reasons, "sinks", sinks, shape, (dtype,), out.device, "H from out")
    reasons.raise_if_any()
