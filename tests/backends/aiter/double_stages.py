"""AITER's decode kernels and second stages: what they compute, leave out, and read that nothing wrote."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

OLD_64 = "MLA_A16W16_1TG_4W_64mx1_16nx1_Coex0_Msk1_QH16"
OLD_32 = "MLA_A16W16_1TG_4W_32mx1_16nx1_Coex0_Msk1_QH16"
NEW_32 = "MLA_A16W16_1TG_4W_16mx4_32nx1_Coex0_Msk1_QH16"
UNMASKED = (OLD_32, OLD_64, "mla_dec_stage1_bf16_a16w16_subQ128_mqa128")
"""Kernels in which each of several query tokens sees all keys of its sequence."""
UNSCALED = ("mla_a8w8_qh8_qseqlen1_gqaratio8_v1", "mla_a8w8_qh64_qseqlen4_gqaratio16_ps")
"""Kernels of gfx942 that leave the scale of the cache out of their output."""
NO_EMPTY_SPLITS = ("mla_a8w8_qh16_qseqlen2_gqaratio16", "mla_a8w8_qh128_m32x4_n16x2_msk1")
"""Kernels in which a split of whose keys a token sees none gives NaN."""
MASKED_BY_16 = ("mla_a16w16_qh64_qseqlen1_gqaratio64_v3_ps", "mla_a16w16_qh64_qseqlen1_gqaratio64_lse_v3_ps")
"""Kernels in which 16 rows, heads of one token after another, see keys as the last of them does."""
RANDOM_NAN = (
    "643938cae2fa", "63922638d549", "d5d5936458ee", "1da580e3e228", "793d0a352086", "1b5fb1eb9541"
)  # fmt: skip
"""Code objects of which some give NaN at times; here all of them do."""
WRONG_BYTES = ("3c386201516f", "178e06fe53da", "fed9b3e27f0b", "3ff1ad2fbe7f")
"""Code objects of older releases whose results are others."""
WRONG_LSE = "eeecc67d1b44"
"""A code object of an older release that gives several tokens another lse."""
NAN = math.nan


class Aborted(BaseException):
    """AITER would have ended the process, or written where nothing is."""


@dataclass
class Step:
    """One call of mla_decode_fwd, with the kernel that it looked up."""

    double: Any
    kernel: str
    kinds: tuple[str, str]
    q: Tensor
    kv: Tensor
    o: Tensor
    given: dict[str, Any]
    fold: int
    wants_lse: bool
    lse_from: str

    @property
    def q_len(self) -> int:
        """Query tokens a row."""
        return int(self.given["max_seqlen_q"])

    def keys(self, start: int, end: int) -> Tensor:
        """[n, 576] fp32 keys of a range of the list of slots."""
        slots = self.given["kv_indices"][start:end].long()
        if end > self.given["kv_indices"].shape[0] or bool(((slots < 0) | (slots >= self.kv.shape[0])).any()):
            raise Aborted("a slot outside the cache is read")
        scale = self.given.get("kv_scale") if self.kinds[1] == "fp8" else None
        rows = self.kv[slots, 0, 0].float()
        return rows if scale is None else rows * scale

    def queries(self) -> Tensor:
        """[T, lanes, 576] fp32."""
        return self.q.float() * self.given["q_scale"] if self.kinds[0] == "fp8" else self.q.float()


def attend(step: Step, q: Tensor, start: int, stop: int, end: int) -> tuple[Tensor, Tensor]:
    """Attention of a row's tokens [n, heads, 576] over [start, stop) of its slots, which end at `end`."""
    keys = step.keys(start, stop)
    scores = torch.einsum("nhd,kd->nhk", q, keys) * step.given["sm_scale"]
    n = q.shape[0]
    if n > 1 and step.kernel not in UNMASKED:
        token = torch.arange(n)[:, None].expand(n, q.shape[1])
        if step.kernel in MASKED_BY_16:
            last = torch.arange(token.numel()) // 16 * 16 + 15
            token = (last // q.shape[1]).clamp(max=n - 1).view_as(token)
        seen = end - (n - 1 - token)
        hidden = torch.arange(start, stop) >= seen[..., None]
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    out = torch.einsum("nhk,kd->nhd", weights, keys[:, :512])
    planned = step.given.get("work_meta_data") is not None
    if step.kernel in NO_EMPTY_SPLITS or (planned and not step.double.record.whole_tails()):
        lse = torch.where(lse == -math.inf, NAN, lse)
    if step.kernel == NEW_32 and n > 2 and 0 < (end - start) % 32 < n - 1:
        out[-1] = NAN
    is_among = step.double.record.is_among
    if is_among(step.kernel, *RANDOM_NAN):
        out[0] = NAN
    if is_among(step.kernel, *WRONG_BYTES):
        out = -out
    if is_among(step.kernel, WRONG_LSE) and n > 1:
        lse = lse - 2
    if step.kernel in UNSCALED and step.double.arch == "gfx942":
        out = out / step.given["kv_scale"]
    if not bool(step.kv[0].float().isfinite().all()) and (stop - start) % 16:
        # Lanes past the tail read slot 0, and 0 times NaN is NaN.
        out = torch.full_like(out, NAN)
    return out, lse


def granularity(step: Step) -> int:
    """Keys that AITER's second stage takes for the least of a split."""
    heads, since = step.o.shape[1], step.double.record.since
    if heads == 16 and step.q_len == 1:
        return 64
    if heads == 8 and ((step.q_len == 1 and since("0.1.14rc0")) or (step.q_len == 2 and since("0.1.17rc0"))):
        return 64
    if heads == 128 and step.kinds == ("fp8", "fp8") and since("0.1.12"):
        return 32
    if heads == 64 and step.kinds[0] == "bf16" and step.q_len == 1 and since("0.1.13.dev0"):
        return 32
    return 16


def tile(step: Step) -> int:
    """Keys of the kernel's own tile."""
    heads, arch = step.o.shape[1], step.double.arch
    if step.kernel == NEW_32:
        return 32
    if step.kinds == ("fp8", "fp8") and heads == 16 and step.q_len == 1 and arch == "gfx950":
        return 128
    if step.kinds == ("fp8", "fp8") and heads == 16 and step.q_len in (3, 4):
        return 32
    if heads == 128 and step.kinds == ("fp8", "fp8"):
        return 32
    return granularity(step)


def rows(step: Step) -> tuple[Tensor, Tensor | None]:
    """A kernel with a workgroup for each split of a row, and the merge of the splits."""
    given, o, arch = step.given, step.o, step.double.arch
    tokens, heads = o.shape[:2]
    splits = given["num_kv_splits"]
    offsets = given["num_kv_splits_indptr"].tolist()
    assert offsets == list(range(0, (len(offsets) - 1) * splits + 1, splits))
    _may_fault(step, splits)
    overwritten = arch == "gfx950" and step.kinds == ("fp8", "fp8") and heads == 16 and step.q_len in (3, 4)
    part_out = torch.full((tokens, splits, heads, 512), NAN)
    part_lse = torch.full((tokens, splits, heads), NAN)
    starts, q = given["kv_indptr"].tolist(), step.queries()
    q_starts, size = given["qo_indptr"].tolist(), tile(step)
    for row, (start, end) in enumerate(pairwise(starts)):
        blocks = -(-(end - start) // size)
        written = min(splits, blocks)
        at = slice(q_starts[row], q_starts[row + 1])
        for split in range(written):
            first = start + blocks * split // written * size
            stop = min(start + blocks * (split + 1) // written * size, end)
            out, lse = attend(step, q[at], first, stop, end)
            to = 0 if overwritten else split
            part_out[at, to], part_lse[at, to] = out, lse
    lse = torch.full((tokens, heads), NAN) if step.wants_lse else None
    if splits == 1 and (direct(step) or heads not in (8, 16) or step.q_len > 1):
        # Copied as they are: rows without keys are not written at all.
        written_rows = ~part_out[:, 0].isnan().all(-1)
        o[written_rows] = part_out[:, 0][written_rows].to(o.dtype)
        if lse is not None and step.kernel == NEW_32:
            lse = part_lse[:, 0]
        return part_out, lse
    merged_out, merged_lse = _merged(step, part_out, part_lse, splits)
    o.copy_(merged_out)
    if lse is not None and step.lse_from != "garbage":
        lse = merged_lse
    return part_out, lse


def direct(step: Step) -> bool:
    """Whether one split is written where the output is, and the second stage not run."""
    heads, q = step.o.shape[1], step.kinds[0]
    return (
        q == "fp8" or step.q_len == 4 or heads == 32 or (heads == 8 and step.double.record.since("0.1.17rc0"))
    )


def _may_fault(step: Step, splits: int) -> None:
    heads, arch = step.o.shape[1], step.double.arch
    if step.kernel == OLD_64:
        raise Aborted("a store through a null pointer")
    if step.kernel == OLD_32 and (arch == "gfx950" or splits == 1):
        raise Aborted("a store through a null pointer")
    if heads == 8 and step.kinds[0] == "bf16" and step.q_len == 1 and splits == 1:
        raise Aborted("fp32 rows are written past a bf16 output")
    if heads == 8 and arch == "gfx942" and not step.double.record.since("0.1.15rc0"):
        raise Aborted("160 KiB of LDS are asked for")
    if heads == 8 and step.q_len > 1:
        raise Aborted("the kernel of one token is given several")


def _merged(step: Step, part_out: Tensor, part_lse: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """AITER's second stage, which believes that a split has at least `granularity` keys."""
    starts, q_starts = step.given["kv_indptr"].tolist(), step.given["qo_indptr"].tolist()
    out, lse = torch.full_like(part_out[:, 0], NAN), torch.full_like(part_lse[:, 0], NAN)
    for row, (start, end) in enumerate(pairwise(starts)):
        valid = min(splits, -(-(end - start) // granularity(step)))
        if valid:
            at = slice(q_starts[row], q_starts[row + 1])
            out[at], lse[at] = _join(part_out[at, :valid], part_lse[at, :valid])
    return out, lse


def _join(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Parts [n, parts, heads, 512] joined as they stand."""
    total = lse.logsumexp(1)
    weights = (lse - total[:, None]).exp()
    return (weights[..., None] * out).sum(1), total


def persistent(step: Step, in_order: bool) -> tuple[Tensor, Tensor | None]:
    """A kernel whose workgroups walk AITER's plan, and its reducer."""
    import double_planner

    given, o, fold, q_len = step.given, step.o, step.fold, step.q_len
    tokens, lanes = o.shape[:2]
    heads = lanes // fold
    starts = given["kv_indptr"].tolist()
    items = double_planner.check(given, starts, q_len, fold)
    if fold > 1 and tokens % q_len:
        raise Aborted("folded tokens do not divide into rows")
    q = _folded(step.queries(), fold, q_len)
    out, lse = torch.full((tokens * fold, heads, 512), NAN), torch.full((tokens * fold, heads), NAN)
    # No plan names more partials than that; those that it does not name are not written.
    size = max([item[1] + q_len for item in items if item[1] >= 0], default=0)
    assert size <= given["reduce_partial_map"].shape[0] * q_len
    part_out, part_lse = torch.full((size, heads, 512), NAN), torch.full((size, heads), NAN)
    writes_lse = step.kernel.find("_lse") > 0 and step.kernel != "mla_a8w8_qh32_qseqlen1_gqaratio32_lse_ps"
    for row, partial, first, last, start, stop, *_ in items:
        got_out, got_lse = attend(step, q[first:last], start, stop, starts[row + 1])
        if partial < 0:
            out[first:last] = got_out
            if writes_lse:
                lse[first:last] = got_lse
        else:
            part_out[partial : partial + q_len], part_lse[partial : partial + q_len] = got_out, got_lse
    ends, to, partials = (
        given[name].tolist() for name in ("reduce_indptr", "reduce_final_map", "reduce_partial_map")
    )
    for at, (begin, end) in enumerate(pairwise(ends)):
        if end - begin > 1:
            rows_of = [slice(p, p + q_len) for p in partials[begin:end]]
            target = slice(*to[at])
            parts = (
                torch.stack([part_out[r] for r in rows_of], 1),
                torch.stack([part_lse[r] for r in rows_of], 1),
            )
            out[target], lse[target] = _join(*parts)
    if fold == 1 or q_len == 1 or not in_order:
        written = ~out.isnan().all(-1).view(tokens, lanes)
        o[written] = out.view(tokens, lanes, 512)[written].to(o.dtype)
    else:
        # The memory that the caller gave keeps the folded order; only the tensor is pointed elsewhere.
        o.copy_(out.view(tokens, lanes, 512))
        o.set_(_unfolded(out, fold, q_len).to(o.dtype).contiguous())
    final = _unfolded(lse[..., None], fold, q_len)[..., 0] if in_order else lse.view(tokens, lanes)
    return part_out, final if step.wants_lse else None


def _folded(x: Tensor, fold: int, q_len: int) -> Tensor:
    """[T, lanes, D] with groups of heads as rows: [T · fold, lanes / fold, D]."""
    tokens, lanes, width = x.shape
    grouped = x.view(tokens // q_len, q_len, fold, lanes // fold, width)
    return grouped.transpose(1, 2).reshape(tokens * fold, lanes // fold, width)


def _unfolded(x: Tensor, fold: int, q_len: int) -> Tensor:
    rows_, heads, width = x.shape
    tokens = rows_ // fold
    grouped = x.view(tokens // q_len, fold, q_len, heads, width)
    return grouped.transpose(1, 2).reshape(tokens, heads * fold, width)
