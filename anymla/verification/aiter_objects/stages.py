"""Both stages of a decode of AITER: the kernel on the emulator, and our merge of what it left.

T query tokens, H heads. Results start as NaN, so that what was not written shows.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from anymla.contract import AttentionOutput
from anymla.merging import merge
from anymla.verification.aiter_objects.kernels import Kernel
from anymla.verification.aiter_objects.launch import Objects, Ran, launch
from anymla.verification.aiter_objects.scenes import LATENT, Scene


@dataclass(frozen=True)
class Operands:
    """What every decode kernel reads, whoever calls it.

    Attributes:
        q: [T, H, 576].
        kv: [slots, 576].
        q_scale, kv_scale: [1] fp32 of fp8 operands, else None.
        slots, kv_indptr, qo_indptr: Lists of slots, where each row's start, where its tokens start.
        sm_scale: Multiplies q·k.
    """

    q: Tensor
    kv: Tensor
    q_scale: Tensor | None
    kv_scale: Tensor | None
    slots: Tensor
    kv_indptr: Tensor
    qo_indptr: Tensor
    sm_scale: float

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.kv_indptr.shape[0] - 1

    def tensors(self) -> dict[str, Tensor | None]:
        """By names of launch.SLOTS."""
        return {
            "Q": self.q,
            "KV": self.kv,
            "LTP": self.kv_indptr,
            "LTD": self.slots,
            "LTL": torch.ones(self.rows, dtype=torch.int32),
            "QTP": self.qo_indptr,
            "QSCALE": self.q_scale,
            "KVSCALE": self.kv_scale,
        }


def operands(scene: Scene, sm_scale: float) -> Operands:
    """Those of a scene."""
    data = scene.cache.data[:, 0]
    lists = (scene.slots, scene.kv_indptr, scene.qo_indptr)
    return Operands(scene.q, data, scene.q_scale, scene.cache.scale, *lists, sm_scale)


@dataclass(frozen=True)
class Parts:
    """What a kernel with a workgroup for each split of a row left.

    Attributes:
        ran: What is to be said of the launch.
        out: [T, splits, H, 512] fp32.
        lse: [T, splits, H] fp32.
        final_lse: [T, H] fp32, or None where no buffer was given.
    """

    ran: Ran
    out: Tensor
    lse: Tensor
    final_lse: Tensor | None

    def written(self) -> Tensor:
        """[T, splits] bool: where something is."""
        return ~self.out.isnan().all(-1).all(-1)

    def merged(self, valid: Tensor) -> AttentionOutput:
        """Join the splits [T, splits] bool that are to be read, by our merge; others count as empty."""
        parts = []
        for split in range(self.out.shape[1]):
            is_read = valid[:, split, None]
            lse = torch.where(is_read, self.lse[:, split], -math.inf)
            parts.append(AttentionOutput(self.out[:, split], lse))
        return merge(parts)


def read_splits(given: Operands, kernel: Kernel, splits: int, q_len: int) -> Tensor:
    """[T, splits] bool: the splits that AITER reads. Source: aiter/mla.py, _fwd_kernel_stage2_asm."""
    lens = given.kv_indptr.diff()
    valid = torch.minimum(torch.tensor(splits), -(-lens // kernel.step)).repeat_interleave(q_len)
    return torch.arange(splits)[None, :] < valid[:, None]


def run_rows(
    objects: Objects,
    kernel: Kernel,
    given: Operands,
    splits: int,
    *,
    out: Tensor | None = None,
    final_lse: bool = True,
) -> Parts:
    """Run a kernel that is not persistent.

    Args:
        objects: Where it is.
        kernel: Which.
        given: Operands.
        splits: Of each row.
        out: [T, H, 512] bf16, what AITER hands it as the buffer of parts with one split. None: fp32 parts.
        final_lse: Whether it gets a buffer for the lse of the whole row.
    """
    tokens, heads = given.q.shape[:2]
    parts = torch.full((tokens, splits, heads, LATENT), math.nan) if out is None else out
    lse = torch.full((tokens, splits, heads), math.nan)
    final = torch.full((tokens, heads), math.nan) if final_lse else None
    tensors = given.tensors() | {"STP": torch.arange(given.rows + 1, dtype=torch.int32) * splits}
    ran = launch(
        objects,
        kernel,
        tensors,
        results={"R": parts, "LSE": lse, "RP": None, "LSEP": final},
        sm_scale=given.sm_scale,
        splits=splits,
        grid=(-(-kernel.q_len * heads // kernel.rows), given.rows, splits),
    )
    return Parts(ran, parts.float() if out is None else out[:, None].float(), lse, final)


@dataclass(frozen=True)
class Persistent:
    """What a persistent kernel left, merged.

    Attributes:
        ran: What is to be said of the launch.
        result: out [T, H, 512] fp32 of what it wrote in bf16 or was merged; lse [T, H] of all rows.
        is_cut: [T] bool: rows that the plan cut, whose lse comes from the merge.
        touched: Whether it wrote the output of a row that was cut.
    """

    ran: Ran
    result: AttentionOutput
    is_cut: Tensor
    touched: bool


def run_persistent(
    objects: Objects, kernel: Kernel, given: Operands, plan: dict[str, Tensor], *, final_lse: bool = True
) -> Persistent:
    """Run a persistent kernel over a plan, and reduce what was cut.

    Args:
        objects: Where it is.
        kernel: Which.
        given: Operands.
        plan: Of planner.BUFFERS.
        final_lse: Whether it gets a buffer for the lse of whole rows.
    """
    tokens, heads = given.q.shape[:2]
    count = int(plan["reduce_indptr"][-1])
    size = max(count * kernel.q_len, 1)
    parts, lses = torch.full((size, heads, LATENT), math.nan), torch.full((size, heads), math.nan)
    out = torch.full((tokens, heads, LATENT), math.nan, dtype=torch.bfloat16)
    final = torch.full((tokens, heads), math.nan)
    used = int(plan["work_indptr"][-1])
    lists = {"work_indptr": plan["work_indptr"], "work_info_set": plan["work_info_set"][: max(used, 1)]}
    ran = launch(
        objects,
        kernel,
        given.tensors() | lists,
        results={"R": parts, "LSE": lses, "RP": out, "LSEP": final if final_lse else None},
        sm_scale=given.sm_scale,
        splits=1,
        grid=(plan["work_indptr"].shape[0] - 1, 1, 1),
    )
    whole, is_cut, touched = out.float(), torch.zeros(tokens, dtype=torch.bool), False
    ends = plan["reduce_indptr"].tolist()
    for at, (first, last) in enumerate(pairwise(ends)):
        if last == first:
            continue
        rows = slice(*plan["reduce_final_map"][at].tolist())
        places = plan["reduce_partial_map"][first:last].tolist()
        joined = merge(
            [AttentionOutput(parts[p : p + kernel.q_len], lses[p : p + kernel.q_len]) for p in places]
        )
        touched |= not bool(whole[rows].isnan().all())
        assert joined.lse is not None
        whole[rows], final[rows], is_cut[rows] = joined.out, joined.lse, True
    return Persistent(ran, AttentionOutput(whole, final), is_cut, touched)
