"""The judge: whether a result is right, by one budget that is derived and that no case can widen.

With `reference` in fp64 and `eager` the same maths done straightforwardly in the call's dtypes, a result `x`
passes if max|x - reference| <= 2 max|eager - reference| + 2 eps max|reference|, if the same holds with means,
and if infinities and NaNs stand in the same places. The lse is fp32 by contract and is judged against fp32
eager runs.

Two additions keep that rule sharp. Each row of `out` must also stay within the budget scaled down to its own
size, so that a wrong row of a long sequence cannot hide below a short one's error. And `eager` may be several
runs that differ only in the order of their sums: one order can be right by luck, and then a right result
would fail against it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anymla.contract import AttentionOutput
from anymla.errors import AnyMLAError

FP64 = torch.float64


class JudgementFailed(AnyMLAError, AssertionError):
    """A result that is not right; the message says where, and by how much of the budget."""


@dataclass(frozen=True)
class Judgement:
    """What the judge found.

    Attributes:
        share: The largest share of the budget that was used; above 1 is wrong, infinite where no budget
            applies.
        where: The worst element, its value and what it should be.
        reasons: Everything that is wrong; empty if nothing is.
    """

    share: float
    where: str
    reasons: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the result is right."""
        return not self.reasons

    def require_pass(self) -> None:
        """Raise JudgementFailed unless the result is right."""
        if not self.passed:
            raise JudgementFailed("; ".join(self.reasons))


def judge(got: AttentionOutput, reference: AttentionOutput, *eager: AttentionOutput) -> Judgement:
    """Judge an attention result.

    Args:
        got: out [T, H, X] in its dtype; lse [T, H] fp32 or None, which is then not judged.
        reference: The same in fp64, from `reference`.
        eager: One or more runs of `eager`, out in the call's dtype and lse in fp32.

    Returns:
        The judgement of out and lse together. No rows: passed, share 0.

    Raises:
        Nothing of its own; see `Judgement.require_pass`.
    """
    outs = {id(e.out): e.out for e in eager}
    parts = [judge_tensor("out", got.out, reference.out, *outs.values())]
    if got.lse is not None:
        assert reference.lse is not None
        if got.lse.dtype != torch.float32:
            parts.append(wrong(f"lse got dtype {got.lse.dtype}; needs torch.float32"))
        noise = [e.lse for e in eager if e.lse is not None]
        parts.append(judge_tensor("lse", got.lse, reference.lse, *noise, by_row=False))
    return together(*parts)


def judge_tensor(name: str, got: Tensor, reference: Tensor, *eager: Tensor, by_row: bool = True) -> Judgement:
    """Judge one tensor; the dtype of `got` gives the eps.

    Args:
        name: How messages call it.
        got: [..., X], any float dtype.
        reference: The same shape, fp64.
        eager: One or more tensors of the same shape.
        by_row: Hold each row (last axis) to a budget of its own size as well. False where an error does not
            grow with the value, as in an lse.

    Returns:
        The judgement. No elements: passed, share 0.

    Raises:
        Nothing of its own; see `Judgement.require_pass`.
    """
    if got.shape != reference.shape:
        return wrong(f"{name} got shape {tuple(got.shape)}; needs {tuple(reference.shape)}")
    if not got.numel():
        return Judgement(0.0, f"{name} is empty")
    limits = torch.finfo(got.dtype)
    right = reference.detach().to(FP64)
    x = got.detach().to(right)
    finite = right.isfinite()
    fits = torch.where(finite, x.isfinite(), (x == right) | (x.isnan() & right.isnan()))
    if not bool(fits.all()):
        where = tuple((~fits).nonzero()[0].tolist())
        return wrong(
            f"{_element(name, where)} got {x[where]}; needs {right[where]}; {int((~fits).sum())} of "
            f"{x.numel()} elements are infinite or NaN in the wrong place"
        )
    error = torch.where(finite, x - right, 0.0).abs()
    size = torch.where(finite, right, 0.0).abs()
    noises = [e.detach().to(right) for e in eager]
    noises = [torch.where(finite & e.isfinite(), e - right, 0.0).abs() for e in noises]
    worst, reason, row = -1.0, "", 0
    for rows in (1, x.numel() // x.shape[-1])[: 2 if by_row else 1]:
        for word, fold in (("max", _largest), ("mean", _mean)):
            used, allowed = _budget(
                *(t.reshape(rows, -1) for t in (error, size, *noises)), fold=fold, limits=limits
            )
            shares = torch.where(used == 0, 0.0, used / allowed)
            at = int(shares.argmax())
            if float(shares[at]) > worst:
                worst, row = float(shares[at]), at
                of = name if rows == 1 else "its row"
                reason = f"{word} error of {of} {used[at]:.3g} is {worst:.3g} of its budget {allowed[at]:.3g}"
                width = x.numel() // rows
    at = row * width + int(error.flatten()[row * width : (row + 1) * width].argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))
    where_worst = f"{_element(name, place)} got {x[place]:.6g}; reference {right[place]:.6g}"
    return Judgement(worst, where_worst, () if worst <= 1 else (f"{where_worst}; {reason}",))


def judge_written(got: Tensor, expected: Tensor, given: Tensor) -> Judgement:
    """Judge what a cache gives back after a write: equal, or as near to what was written.

    Quotients of fp32 may fall on the other side of a rounding boundary, so an element that differs passes if
    it is no farther from the value given than the expected one is, but for the rounding of that quotient.

    Args:
        got: [S, L + R] rows read back.
        expected: [S, L + R] fp64 from `reference.write_cache`; a row of NaN was not to be written and is not
            judged.
        given: [S, L + R] what was written.

    Returns:
        The judgement; share 0 means equal.
    """
    x, right, source = (t.detach().to(expected.device, FP64) for t in (got, expected, given))
    allowed = (right - source).abs() + 2 * torch.finfo(torch.float32).eps * source.abs()
    skipped = right.isnan().all(-1, keepdim=True) & ~source.isnan().all(-1, keepdim=True)
    same = (x == right) | (right.isnan() & x.isnan()) | skipped
    near = (x - source).abs() <= allowed
    if bool((same | near).all()):
        off = torch.where(same, 0.0, (x - source).abs() / allowed)
        return Judgement(float(off.max()) if off.numel() else 0.0, "the cache")
    where = tuple((~(same | near)).nonzero()[0].tolist())
    count = int((~(same | near)).sum())
    return wrong(
        f"{_element('cache', where)} got {x[where]}; needs {right[where]}, from {source[where]}; "
        f"{count} of {x.numel()} elements differ"
    )


def judge_topk(got: Tensor, chosen: Tensor, logits: Sequence[Tensor], eager: Sequence[Tensor]) -> Judgement:
    """Judge the tokens that an indexer chose.

    Their order is left open. Where fp32 gives every logit exactly, the set must be that of the reference,
    with its ties. Elsewhere the logits of what was chosen instead must be within the budget of those left
    out, the largest beside the largest, so that only near ties may change places.

    Args:
        got: [T, K] int32 token ids, -1 after the last.
        chosen: [T, K] int32 from `reference.index_topk`.
        logits: T tensors [n] fp64 from `reference.index_logits`.
        eager: T tensors [n], the same in fp32.

    Returns:
        The judgement; share 0 means the same ids.
    """
    if got.shape != chosen.shape:
        return wrong(f"indices got shape {tuple(got.shape)}; needs {tuple(chosen.shape)}")
    got, chosen = got.cpu(), chosen.cpu()
    logits, eager = [x.cpu() for x in logits], [x.cpu() for x in eager]
    if torch.equal(got, chosen):
        return Judgement(0.0, "indices")
    flat = torch.cat([x[x.isfinite()] for x in logits]) if logits else torch.zeros(0, dtype=FP64)
    noise = [
        (e.to(FP64) - x)[x.isfinite()].abs() for e, x in zip(eager, logits, strict=True) if x.isfinite().any()
    ]
    rounding = float(torch.cat(noise).max()) if noise else 0.0
    budget = (
        2 * rounding + 2 * torch.finfo(torch.float32).eps * float(flat.abs().max()) if flat.numel() else 0.0
    )
    share, where = 0.0, "indices"
    for row, (ids, right) in enumerate(zip(got, chosen, strict=True)):
        count = int((right >= 0).sum())
        named = ids[:count]
        distinct = (
            bool((named >= 0).all() and (named < len(logits[row])).all()) and len(named.unique()) == count
        )
        if not distinct or bool((ids[count:] != -1).any()):
            return wrong(
                f"indices[{row}] got {_few(ids)}; needs {count} distinct tokens, such as {_few(right)}"
            )
        extra, missing = (
            _best_first(named, right, logits[row]),
            _best_first(right[:count], named, logits[row]),
        )
        if not len(extra):
            continue
        off = (logits[row][extra] - logits[row][missing]).nan_to_num(nan=math.inf).abs()
        worst = float(off.max())
        if rounding == 0.0 or worst > budget:
            i = int(off.argmax())
            got_one, needed = int(extra[i]), int(missing[i])
            return wrong(f"indices[{row}] got {got_one}; needs {needed}; {_few(ids)}")
        share, where = max((share, where), (worst / budget if worst else 0.0, f"indices[{row}]"))
    return Judgement(share, where)


def together(*parts: Judgement) -> Judgement:
    """One judgement of several: the worst share, every reason."""
    worst = max(parts, key=lambda part: part.share)
    return Judgement(worst.share, worst.where, tuple(r for part in parts for r in part.reasons))


def wrong(reason: str) -> Judgement:
    """A judgement that no budget can help."""
    return Judgement(math.inf, reason, (reason,))


def _budget(
    error: Tensor,
    size: Tensor,
    *noises: Tensor,
    fold: Callable[[Tensor], Tensor],
    limits: torch.finfo,
) -> tuple[Tensor, Tensor]:
    """What each row used and what it may use; `fold` is the max or the mean of a row.

    Rows share the relative noise of the noisiest of them: one row's own may be small by luck.
    """
    sizes = fold(size)
    noise = torch.stack([fold(n) for n in noises]).amax(0) if noises else torch.zeros_like(sizes)
    relative = torch.where(sizes > 0, noise / sizes, 0.0).max()
    # A chip may take fp32 below its smallest normal value for zero, and 1 / (1 + exp(x)) does.
    subnormal = max(limits.eps * limits.smallest_normal, torch.finfo(torch.float32).smallest_normal)
    return fold(error), torch.where(sizes > 0, sizes * (2 * relative + 2 * limits.eps) + subnormal, 0.0)


def _largest(rows: Tensor) -> Tensor:
    return rows.amax(-1)


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(-1)


def _element(name: str, where: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, where))}]"


def _best_first(ids: Tensor, known: Tensor, logits: Tensor) -> Tensor:
    """Those ids that are not among the known ones, the largest logit first and NaN last."""
    others = ids[~torch.isin(ids, known)].long()
    return others[logits[others].nan_to_num(nan=-math.inf).argsort(descending=True, stable=True)]


def _few(ids: Tensor) -> str:
    return f"{ids[:8].tolist()}{' ...' if len(ids) > 8 else ''}"
