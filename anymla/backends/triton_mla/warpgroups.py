"""What kernels placed by hand need of the host: Gluon, aligned rows, and boxes in which keys are copied."""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module

import torch
from torch import Tensor

from anymla.hardware.launch import LAUNCH
from anymla.problem import Problem

PAIRS = 64
"""Pairs of bytes that are copied, and are one operand of a product."""


@cache
def missing() -> str | None:
    """What the installed Triton lacks: Gluon is still experimental, and may move."""
    try:
        for kernel in {row.kernel for rows in LAUNCH.values() for row in rows} - {""}:
            import_module(f"anymla.backends.triton_mla.{kernel}")
    except (ImportError, AttributeError) as error:
        return f"triton's Gluon got {error}; needs that of 3.6"
    return None


def aligned(*tensors: Tensor) -> bool:
    """Whether rows are known to lie so that they can be copied 16 bytes at a time; those of views may not."""
    return all(
        (t.stride(-1) == 1 or t.shape[-1] <= 1) and all(n % 16 == 0 for n in (*t.stride()[:-1], t.data_ptr()))
        for t in tensors
    )


def key_boxes(data: Tensor, problem: Problem, block_n: int) -> tuple[object, object] | None:
    """Descriptors of a cache for copies of part of a latent, and of a RoPE part, of `block_n` keys of a page.

    The part is half a latent; of fp8, PAIRS pairs of bytes. None where a block of keys is not one box.
    """
    pages, block_size, width = data.shape
    if block_size % block_n or data.stride(0) != block_size * data.stride(1):
        return None
    flat = data.as_strided((pages * block_size, width), (data.stride(1), 1))
    part, rope = problem.kv_lora_rank // 2, problem.qk_rope_head_dim
    if data.dtype.itemsize == 1:
        flat, part, rope = flat.view(torch.float16), PAIRS, rope // 2
    latents, ropes = (_box(block_n, cols, flat.dtype)(flat) for cols in (part, max(rope, 16)))
    return latents, ropes


@cache
def _box(block_n: int, cols: int, dtype: torch.dtype) -> Callable[[Tensor], object]:
    """Makes descriptors of one shape; worked out once, because a layout takes longer than a launch."""
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = bfloat16 if dtype == torch.bfloat16 else float16
    layout = NVMMASharedLayout.get_default_for([block_n, cols], element)
    return partial(TensorDescriptor.from_tensor, block_shape=[block_n, cols], layout=layout)
