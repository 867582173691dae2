"""A stand-in for the package `aiter` whose decode runs AITER's own code objects on the emulator.

Our adapter calls it as it calls AITER, with its own lists and plans. What is AITER's Python and C++ around
the kernels is done here as at e4048607 (buffers of one split, second stage, folded heads, reducer); what a
kernel is told of heads and how many keys a split has at least is as the record says of a release.
"""

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anymla.errors import AnyMLAError
from anymla.hardware.kernel_quirks import KernelCall
from anymla.verification.aiter_objects import planner
from anymla.verification.aiter_objects.kernels import KERNELS, Kernel, why_not
from anymla.verification.aiter_objects.launch import Objects
from anymla.verification.aiter_objects.stages import Operands, read_splits, run_persistent, run_rows

MODULES = ("aiter", "aiter.mla", "aiter.ops", "aiter.ops.attention")


class NotModelled(AnyMLAError, RuntimeError):
    """The stand-in does not do what AITER does there, so nothing can be said."""


class StandIn:
    """One AITER on the emulated chip.

    Attributes:
        chosen: The kernel that the next call is to launch.
        undecided: What depended on timing in any call so far.
        launched: Code objects, in order.
    """

    def __init__(self, objects: Objects, units: int) -> None:
        self.objects, self.units = objects, units
        self.chosen: KernelCall | None = None
        self.undecided: set[str] = set()
        self.launched: list[str] = []
        self._asked: list[dict[str, Any]] = []

    @contextmanager
    def installed(self) -> Iterator["StandIn"]:
        """Be `aiter` until the end; what is installed stays findable."""
        made = {name: types.ModuleType(name) for name in MODULES}
        kept = {name: sys.modules.get(name) for name in MODULES}
        before = importlib.machinery.PathFinder.find_spec("aiter")
        made["aiter"].__spec__ = before
        vars(made["aiter.mla"])["mla_decode_fwd"] = self.mla_decode_fwd
        for function in (self.get_mla_metadata_info_v1, self.get_mla_metadata_v1):
            vars(made["aiter.ops.attention"])[function.__name__] = function
        sys.modules.update(made)
        try:
            yield self
        finally:
            for name, module in kept.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module

    def get_mla_metadata_info_v1(
        self,
        batch_size: int,
        max_seqlen_qo: int,
        num_head_qo: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        is_sparse: bool,
        fast_mode: bool = True,
    ) -> Any:
        """Sizes of a plan."""
        return planner.sizes(batch_size, max_seqlen_qo * num_head_qo, self.units)

    def get_mla_metadata_v1(
        self,
        seqlens_qo_indptr: Tensor,
        seqlens_kv_indptr: Tensor,
        num_heads_per_head_k: int,
        num_heads_k: int,
        is_causal: bool,
        work_metadata_ptrs: Tensor,
        work_info_set: Tensor,
        work_indptr: Tensor,
        reduce_indptr: Tensor,
        reduce_final_map: Tensor,
        reduce_partial_map: Tensor,
        kv_granularity: int = 16,
        max_seqlen_qo: int = -1,
        uni_seqlen_qo: int = -1,
        fast_mode: bool = True,
        page_size: int = 1,
        dtype_q: torch.dtype | None = None,
        dtype_kv: torch.dtype | None = None,
        kv_last_page_lens: Tensor | None = None,
    ) -> None:
        """A plan, in the buffers given, written when it is known what is launched."""
        self._asked.append(locals())

    def mla_decode_fwd(
        self,
        q: Tensor,
        kv_buffer: Tensor,
        o: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_lens: Tensor,
        max_seqlen_q: int,
        page_size: int = 1,
        nhead_kv: int = 1,
        sm_scale: float = 0.0,
        logit_cap: float = 0.0,
        num_kv_splits: int | None = None,
        num_kv_splits_indptr: Tensor | None = None,
        work_meta_data: Tensor | None = None,
        work_indptr: Tensor | None = None,
        work_info_set: Tensor | None = None,
        reduce_indptr: Tensor | None = None,
        reduce_final_map: Tensor | None = None,
        reduce_partial_map: Tensor | None = None,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        return_lse: bool = False,
        causal: bool = True,
    ) -> tuple[None, Tensor | None]:
        """A decode; AITER returns its logits first, which nobody here reads."""
        assert self.chosen is not None
        while self._asked:
            planner.plan(self._asked.pop(0), fold=self.chosen.fold, units=self.units)
        given = Operands(q, kv_buffer[:, 0, 0], q_scale, kv_scale, kv_indices, kv_indptr, qo_indptr, sm_scale)
        kernel = kernel_of(self.objects, self.chosen)
        self.launched.append(kernel.name)
        if work_meta_data is None:
            assert num_kv_splits is not None
            return None, self._rows(kernel, given, o, num_kv_splits, return_lse)
        plan = {
            "work_indptr": work_indptr,
            "work_info_set": work_info_set,
            "reduce_indptr": reduce_indptr,
            "reduce_final_map": reduce_final_map,
            "reduce_partial_map": reduce_partial_map,
        }
        return None, self._persistent(kernel, given, o, plan, return_lse)

    def _rows(
        self, kernel: Kernel, given: Operands, o: Tensor, splits: int, return_lse: bool
    ) -> Tensor | None:
        """One workgroup for each split of a row, and AITER's second stage by our merge."""
        direct = splits == 1 and (kernel.q == "fp8" or kernel.q_len == 4 or kernel.heads in (8, 32))
        parts = run_rows(self.objects, kernel, given, splits, out=o if direct else None, final_lse=return_lse)
        self.undecided |= parts.ran.undecided
        if direct:
            return parts.final_lse
        if splits == 1 and not (kernel.heads in (8, 16) and kernel.q_len == 1):
            # The kernel wrote bf16, which is copied.
            flat = parts.out.reshape(-1)[: o.numel() // 2]
            o.copy_(flat.view(torch.bfloat16).view_as(o))
            return parts.final_lse
        merged = parts.merged(read_splits(given, kernel, splits, kernel.q_len))
        o.copy_(merged.out)
        return merged.lse if return_lse else None

    def _persistent(
        self, kernel: Kernel, given: Operands, o: Tensor, plan: Any, return_lse: bool
    ) -> Tensor | None:
        """Workgroups that walk a plan, and AITER's reducer by our merge."""
        assert self.chosen is not None
        fold, q_len = self.chosen.fold, kernel.q_len
        if planner.query_tiles(self.objects.chip, kernel.q, kernel.heads, q_len) > 1:
            raise NotModelled("AITER's planner cuts the query tokens of a row there, and this one does not")
        folded = replace(given, q=_folded(given.q, fold, q_len))
        found = run_persistent(self.objects, kernel, folded, plan, final_lse=return_lse)
        self.undecided |= found.ran.undecided
        # A row without keys is nobody's work: it keeps what was there.
        out = _unfolded(found.result.out, fold, q_len)
        o.copy_(torch.where(out.isnan(), o.float(), out))
        lse = found.result.lse
        assert lse is not None
        return _unfolded(lse[..., None], fold, q_len)[..., 0].contiguous() if return_lse else None


def kernel_of(objects: Objects, chosen: KernelCall) -> Kernel:
    """The row of KERNELS of a code object, for the heads and query tokens that it is called with.

    Raises:
        NotModelled: there is none, or no such object.
    """
    rows = [k for k in KERNELS if k.name == chosen.kernel and objects.chip in k.chips]
    if not rows or not objects.has(rows[0]):
        why = why_not(chosen.kernel, objects.chip) or "its code object is not there"
        raise NotModelled(f"{chosen.kernel} is not run: {why}")
    heads = chosen.lanes // chosen.fold
    return replace(rows[0], heads=heads, q_len=chosen.q_len, told_heads=chosen.told_heads, step=chosen.step)


def _folded(x: Tensor, fold: int, q_len: int) -> Tensor:
    """[T, lanes, D] with groups of heads as rows of their own: [T · fold, lanes / fold, D]."""
    if fold == 1:
        return x
    tokens, lanes, width = x.shape
    grouped = x.view(tokens // q_len, q_len, fold, lanes // fold, width)
    return grouped.transpose(1, 2).reshape(tokens * fold, lanes // fold, width)


def _unfolded(x: Tensor, fold: int, q_len: int) -> Tensor:
    if fold == 1:
        return x
    rows, heads, width = x.shape
    tokens = rows // fold
    grouped = x.view(tokens // q_len, fold, q_len, heads, width)
    return grouped.transpose(1, 2).reshape(tokens, heads * fold, width)
