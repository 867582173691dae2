"""AITER's prefill in fp8: its planner on the host, its kernel, its reducer, and how each of them fails."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from double_part import Part
from double_stages import Aborted
from torch import Tensor

from anymla.backends.aiter_mla import facts

TILE, BLOCK = 256, 128
NAN = math.nan


class PrefillDouble(Part):
    """One release on one chip.

    Attributes:
        dtype: In which it calculates.
        rounds: Whether weights are rounded to fp8 before they meet the values, as the kernel has them.
        operands: q, k and v of each launch, as numbers.
        parts: Parts of cut tiles, of each launch.
    """

    def __init__(
        self,
        release: str,
        arch: str,
        units: int,
        *,
        dtype: torch.dtype = torch.float32,
        rounds: bool = False,
    ) -> None:
        super().__init__(release, arch, units)
        self.dtype, self.rounds = dtype, rounds
        self.kernels = facts.recorded_kernels(release, arch)
        self.reducers = facts.recorded_reducers(release, 128)
        self.operands: list[tuple[Tensor, Tensor, Tensor]] = []
        self.parts: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "PrefillDouble":
        """Stand in for `aiter` until the test ends."""
        self.offer(monkeypatch, {"get_ps_metadata_info_v1": self._sizes}, compiled=False)
        compiled = {
            "get_ps_metadata_v1": self._plan,
            "mla_prefill_ps_asm_fwd": self._attend,
            "mla_reduce_v1": self._reduce,
        }
        self.offer(monkeypatch, compiled, compiled=True)
        return self

    def _sizes(self, batch_size: int, num_head_k: int, max_qlen: int, qlen_granularity: int) -> Any:
        cluster = self.units // math.gcd(num_head_k, self.units)
        tiles_a_row = -(-max_qlen // qlen_granularity)
        tiles = batch_size * tiles_a_row
        work = (batch_size + cluster - 1) * tiles_a_row * num_head_k
        parts = min(batch_size + cluster - 1, 2 * (cluster - 1)) * tiles_a_row
        ints = torch.int32
        return (
            (2, torch.uint64),
            (self.units + 1, ints),
            ((work, 8), ints),
            (tiles + 1, ints),
            ((tiles, 2), ints),
            (parts, ints),
        )

    def _plan(self, **given: Any) -> None:
        """Fill the units of each cluster, one after another, cutting a tile where one is full."""
        inputs = [given[name] for name in ("seqlens_qo_indptr", "pages_kv_indptr", "context_lens")]
        assert all(t.device.type == "cpu" for t in inputs), "copies from the device would not wait for it"
        starts, kv_starts, lens = (t.tolist() for t in inputs)
        heads, step = given["num_heads_k"], given["kvlen_granularity"]
        assert given["gqa_ratio"] == given["qhead_granularity"] == given["block_size"] == 1
        tiles = [
            (row, first, min(first + TILE, end), kv_starts[row], n, n - (end - start))
            for row, ((start, end), n) in enumerate(zip(pairwise(starts), lens, strict=True))
            for first in _head_and_tail(range(start, end, given["qlen_granularity"]))
        ]
        clusters = math.gcd(heads, self.units)
        units, own = self.units // clusters, heads // clusters
        ends, items, cut = [0], [], dict[tuple[int, int], list[int]]()
        for cluster in range(clusters):
            shares = _shares(tiles, starts, units, step, given["is_causal"], cut if not cluster else {})
            for share in shares:
                for head in range(cluster * own, cluster * own + own):
                    items += [[*item, head | head + 1 << 16] for item in share]
                ends.append(len(items))
        parts = [part for at in sorted(cut) for part in cut[at]]
        reduce_ends = [0]
        for at in sorted(cut):
            reduce_ends.append(reduce_ends[-1] + len(cut[at]))
        reduce_ends += [reduce_ends[-1]] * (given["reduce_indptr"].shape[0] - len(reduce_ends))
        for name, values in (
            ("work_indptr", ends),
            ("work_info", items),
            ("reduce_indptr", reduce_ends),
            ("reduce_final_map", [list(at) for at in sorted(cut)]),
            ("reduce_partial_map", parts),
        ):
            buffer = given[name]
            if len(values) > buffer.shape[0] or (name == "work_indptr" and len(values) != buffer.shape[0]):
                raise Aborted(f"{name} is written past its end: {len(values)} of {buffer.shape[0]}")
            buffer.zero_()
            if values:
                buffer[: len(values)] = torch.tensor(values, dtype=torch.int32)

    def _attend(self, Q: Tensor, K: Tensor, V: Tensor, **given: Any) -> None:
        if self.arch == "gfx942":
            raise Aborted("fp8 mla persistent prefill is not supported on gfx942")
        if any(t.dtype != torch.float8_e4m3fn for t in (Q, K, V)):
            raise Aborted("unsupport Q dtype")
        key = ("fp8", "fp8", Q.shape[1] // K.shape[1], 1, 0, 1, int(given["is_causal"]), 0, 0)
        names = [kernel.code_object for kernel in self.kernels if kernel[:-1] == key]
        if not names:
            raise Aborted("cannot find suitable kernel")
        if (Q.shape[2], V.shape[2], given["output"].dtype) != (192, 128, torch.bfloat16):
            raise Aborted("a kernel of 192 and 128 columns is given others, or writes bf16 elsewhere")
        if any(given[name] is None for name in ("q_scale", "k_scale", "v_scale")):
            raise Aborted("a scale is read through a null pointer")
        self.launched.append(names[0])
        # It takes no strides: whatever lies there is read as if it were dense.
        q, k, v = (
            t.as_strided(t.shape, (t.shape[1] * t.shape[2], t.shape[2], 1)).to(self.dtype) * given[name]
            for t, name in ((Q, "q_scale"), (K, "k_scale"), (V, "v_scale"))
        )
        self.operands.append((q, k, v))
        out, part_out, part_lse = given["output"], given["splitData"], given["splitLse"]
        part_out.fill_(NAN), part_lse.fill_(NAN)
        out.fill_(NAN)
        starts, kv_starts = given["qo_indptr"].tolist(), given["kv_indptr"].tolist()
        ends, pages = given["work_indptr"].tolist(), given["kv_page_indices"].long()
        assert len(ends) == self.units + 1 and ends == sorted(ends)
        self.parts.append(0)
        for row, part, first, last, begin, end, _, heads in given["work_info_set"][: ends[-1]].tolist():
            head = slice(heads & 0xFFFF, heads >> 16)
            at = pages[begin:end]
            logits = torch.einsum("qhd,khd->qhk", q[first:last, head], k[at, head]) * given["softmax_scale"]
            if given["is_causal"]:
                sees = kv_starts[row + 1] - starts[row + 1] + 1 + torch.arange(first, last)
                hidden = torch.arange(begin, end)[None, :] >= sees[:, None]
                logits = logits.masked_fill(hidden[:, None], -math.inf)
            lse = logits.logsumexp(-1)
            weights = torch.where(lse[..., None] == -math.inf, 0.0, (logits - lse[..., None]).exp())
            if self.rounds:
                most = weights.amax(-1, keepdim=True).clamp(min=torch.finfo(self.dtype).tiny)
                weights = (weights / most).to(torch.float8_e4m3fn).to(self.dtype) * most
            values = torch.einsum("qhk,khd->qhd", weights, v[at, head])
            # Lanes past the tail read what follows, or past the list the first, and 0 · NaN is NaN.
            read = torch.arange(begin, begin + -(-(end - begin) // BLOCK) * BLOCK)
            read = pages[torch.where(read < pages.shape[0], read, 0)]
            bad = k[read, head].isnan().any(-1) | v[read, head].isnan().any(-1)
            values = torch.where(bad.any(0)[:, None], NAN, values)
            if part < 0:
                out[first:last, head] = values.bfloat16()
            else:
                if part + last - first > part_out.shape[0]:
                    raise Aborted("partial rows are written past their end")
                part_out[part : part + last - first, head] = values
                part_lse[part : part + last - first, head] = lse
                self.parts[-1] += 1

    def _reduce(self, **given: Any) -> None:
        heads, width = given["final_output"].shape[1:]
        if width != 128 or heads not in self.reducers:
            raise Aborted(f"the reducer has no {heads} heads of {width} columns")
        ends, starts = given["reduce_indptr"].tolist(), given["reduce_partial_map"].tolist()
        for at, (begin, end) in enumerate(pairwise(ends)):
            if end - begin < 2:
                continue
            first, last = given["reduce_final_map"][at].tolist()
            rows = [slice(start, start + last - first) for start in starts[begin:end]]
            out = torch.stack([given["partial_output"][row] for row in rows])
            lse = torch.stack([given["partial_lse"][row] for row in rows])
            weights = (lse - lse.logsumexp(0)).exp()
            given["final_output"][first:last] = (weights[..., None] * out).sum(0).bfloat16()


def _head_and_tail(firsts: range) -> list[int]:
    """By turns from both ends, so that short and long causal tiles mix."""
    left, found = list(firsts), []
    while left:
        found.append(left.pop(0 if len(found) % 2 == 0 else -1))
    return found


def _shares(tiles: Any, starts: list[int], units: int, step: int, causal: bool, cut: Any) -> list[list[Any]]:
    """What each unit of a cluster does; parts of cut tiles are numbered, and noted in `cut`."""
    sizes = []
    for row, _, last, _, n, context in tiles:
        sees = min(context + last - starts[row], n) if causal else n
        sizes.append(-(-sees // step))
    total, parts = sum(sizes), 0
    tile, done, shares = 0, 0, []
    for unit in range(units):
        left, share = total // units + (unit < total % units), []
        while tile < len(tiles) and left:
            row, first, last, kv_start, n, _ = tiles[tile]
            take = min(left, sizes[tile] - done)
            begin = kv_start + done * step
            end = min(begin + take * step, kv_start + n)
            whole = done == 0 and take == sizes[tile]
            if not whole:
                cut.setdefault((first, last), []).append(TILE * parts)
            is_last = done + take == sizes[tile]
            after = 0 if is_last else n - (end - kv_start)
            share.append([row, -1 if whole else TILE * parts, first, last, begin, end, after])
            parts += not whole
            done, tile = (0, tile + 1) if is_last else (done + take, tile)
            left -= take
        shares.append(share)
    return shares
