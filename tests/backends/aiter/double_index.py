"""AITER's indexer and cache writers: what they compute, leave out and write where nothing is."""

import math
from typing import Any

import pytest
import torch
from double_part import Part
from double_stages import Aborted
from torch import Tensor

NAN = math.nan
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}


class IndexDouble(Part):
    """One release on one chip, with a Triton that has Gluon.

    Attributes:
        given: Of each call, what was passed beside tensors.
    """

    def __init__(self, release: str, arch: str) -> None:
        super().__init__(release, arch, 64)
        self.fp8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
        self.given: list[dict[str, Any]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "IndexDouble":
        """Stand in for `aiter` until the test ends."""
        logits = {
            "deepgemm_fp8_paged_mqa_logits": self._reduced,
            "deepgemm_fp8_paged_mqa_logits_stage1": self._stage1,
        }
        self.offer(monkeypatch, logits, compiled=False)
        writers = {"concat_and_cache_mla": self._latents, "indexer_k_quant_and_cache": self._keys}
        self.offer(monkeypatch, writers, compiled=True)
        return self

    def _reduced(self, **given: Any) -> str:
        """Logits summed over heads."""
        kv, q, size = given["kv_cache"], given["q_fp8"], given["KVBlockSize"]
        chunk, shuffled = given["ChunkK"], given["Preshuffle"]
        assert chunk % size == 0 or size % chunk == 0
        assert kv.shape[1] == size
        if shuffled:
            assert size % 16 == 0, "Preshuffle mode only supports KVBlockSize aligned to 16"
        self._note("deepgemm_fp8_paged_mqa_logits", given)
        if q.shape[2] < 32:
            raise Aborted("a Gluon layout of no rows a thread")
        # The kernel without shuffling takes an entry of the table for a row, whatever a page is.
        for row, keys, seen in self._rows(given, size if shuffled else 1, shuffled):
            per_head = _scores(q, given["weights"], row, keys)
            out = given["out_logits"][row]
            end = min(-(-len(keys) // (size if shuffled else 1)) * (size if shuffled else 1), out.shape[0])
            out[:end] = -math.inf
            out[:seen] = per_head.sum(0)[:seen]
        return "key of a compiled kernel"

    def _stage1(self, **given: Any) -> None:
        """Logits of each head."""
        q, kv = given["q_fp8"], given["kv_cache_fp8"]
        batch, next_n, heads, _ = q.shape
        chunk_q, chunk_k = given["ChunkQ"], given["ChunkK"]
        self._note("deepgemm_fp8_paged_mqa_logits_stage1", given)
        # As it is written there: no program at all where there are fewer heads than that.
        assert self.units // (batch * next_n * (heads // chunk_q)) >= 0
        assert heads % chunk_q == 0
        out = given["out_qk"]
        size = kv.shape[1] if self.since("0.1.20") else 1
        for row, keys, seen in self._rows(given, size, shuffled=False):
            end = -(-len(keys) // chunk_k) * chunk_k
            if end > out.shape[2]:
                raise Aborted("a chunk is written past the end of its row")
            out[:, row, :end] = -math.inf
            out[:, row, :seen] = _scores(q, given["weights"], row, keys)[:, :seen]

    def _note(self, name: str, given: dict[str, Any]) -> None:
        self.launched.append(name)
        self.given.append({key: value for key, value in given.items() if not isinstance(value, Tensor)})
        if given["q_fp8"].dtype != self.fp8:
            raise Aborted(f"bytes of {given['q_fp8'].dtype} are read as {self.fp8}")
        assert given["q_fp8"].is_contiguous() and given["kv_indices"].is_contiguous()

    def _rows(self, given: dict[str, Any], size: int, shuffled: bool) -> Any:
        """Each row that sees something, with all of its sequence's keys [n, D], and how many it sees."""
        kv = given["kv_cache"] if "kv_cache" in given else given["kv_cache_fp8"]
        width, tokens = given["q_fp8"].shape[3], kv.shape[1]
        pages = kv.view(-1, tokens * (width + 4))
        values, scales = pages[:, : tokens * width], pages[:, tokens * width :].view(torch.float32)
        next_n, table = given["q_fp8"].shape[1], given["kv_indices"]
        for row, context in enumerate(given["context_lens"].repeat_interleave(next_n).tolist()):
            if not context:
                continue
            key = torch.arange(context)
            entry = row // next_n * table.shape[1] + key // size
            if int(entry[-1]) >= table.numel():
                raise Aborted("the table is read past its end")
            page = table.flatten()[entry].long()
            if bool(((page < 0) | (page >= pages.shape[0])).any()):
                raise Aborted("a page outside the cache is read")
            at, d = key % size, torch.arange(width)
            place = at[:, None] * width + d
            if shuffled:
                tile = at[:, None] // 16 * 16 * width + d // 16 * 256
                place = tile + at[:, None] % 16 * 16 + d % 16
            found = values[page[:, None], place].view(self.fp8).float() * scales[page, at][:, None]
            yield row, found, context - next_n + row % next_n + 1

    def _latents(self, **given: Any) -> None:
        kv_c, k_pe, cache = given["kv_c"], given["k_pe"], given["kv_cache"]
        if cache.shape[2] != kv_c.shape[1] + k_pe.shape[1]:
            raise Aborted("AITER_CHECK(kv_cache.size(2) == kv_lora_rank + pe_dim)")
        self.launched.append("concat_and_cache_mla")
        assert given["kv_cache_dtype"] == "auto" and kv_c.dtype == cache.dtype
        assert kv_c.stride(1) == k_pe.stride(1) == 1, "it takes strides of rows only"
        for token, slot in enumerate(given["slot_mapping"].tolist()):
            if slot >= 0:
                row = torch.cat((kv_c[token], k_pe[token]))
                cache[slot // cache.shape[1], slot % cache.shape[1]] = row

    def _keys(self, **given: Any) -> None:
        k, cache = given["k"], given["kv_cache"]
        group, shuffled = given["quant_block_size"], given.get("preshuffle", False)
        size, width, stride = cache.shape[1], k.shape[1], cache.shape[2]
        if width % group or (shuffled and (size % 16 or width % 16)):
            raise Aborted("AITER_CHECK of a width or a page size")
        self.launched.append("indexer_k_quant_and_cache")
        assert k.is_contiguous()
        # It has no strides: pages follow one another.
        memory = cache.as_strided((cache.shape[0] * size * stride,), (1,))
        largest = LARGEST[self.fp8]
        for token, slot in enumerate(given["slot_mapping"].tolist()[: k.shape[0]]):
            if slot < 0:
                continue
            page, at = divmod(slot, size)
            values = k[token].float()
            scale = torch.clamp(values.abs().nan_to_num(0.0, math.inf).amax(), min=1e-4) / largest
            if given["scale_fmt"] == "ue8m0":
                scale = torch.exp2(scale.log2().ceil())
            # The middle of three, of which one is NaN, is the least.
            stored = (values * (1 / scale)).clamp(-largest, largest).nan_to_num(-largest)
            base, d = page * size * stride, torch.arange(width)
            place = at * width + d
            if shuffled:
                place = at // 16 * 16 * width + d // 16 * 256 + at % 16 * 16 + d % 16
            memory[base + place] = stored.to(self.fp8).view(torch.uint8)
            end = base + size * width + at * 4
            memory[end : end + 4] = scale.reshape(1).view(torch.uint8)


def _scores(q: Tensor, weights: Tensor, row: int, keys: Tensor) -> Tensor:
    """[H, n] of one row; the larger of NaN and 0 is 0."""
    scores = q.flatten(0, 1)[row].float() @ keys.T
    return scores.nan_to_num(0.0, math.inf, -math.inf).relu() * weights[row][:, None]
