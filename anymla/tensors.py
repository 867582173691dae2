"""Tensors as arguments: kind, shape, dtype, device and layout, noted in the same words everywhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.errors import Reasons


def on_host(*tensors: Tensor | None) -> bool:
    """Whether every value can be looked at without a device sync."""
    return all(t is None or t.device.type == "cpu" for t in tensors)


def check_tensor(
    reasons: Reasons,
    name: str,
    tensor: Tensor | None,
    shape: Sequence[int | None] | None,
    dtypes: Sequence[torch.dtype] | None,
    device: torch.device | None = None,
    origin: str = "",
    *,
    packed: bool = False,
) -> bool:
    """Note what is wrong; None in `shape` is an open axis, in its place any shape, in `dtypes` any dtype.

    `origin` says where the shape is from.
    Kernels take no stride of what is `packed`.
    """
    if not reasons.need(isinstance(tensor, Tensor), name, type(tensor).__name__, "a torch.Tensor"):
        return False
    assert tensor is not None
    shape = tensor.shape if shape is None else shape
    fits = len(tensor.shape) == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    axes = ", ".join("any" if s is None else str(s) for s in shape) + ("," if len(shape) == 1 else "")
    wanted = f"({axes})" + (f", {origin}" if origin else "")
    right = reasons.need(fits, name, f"shape {tuple(tensor.shape)}", wanted)
    if dtypes is not None:
        known = " or ".join(map(word, dtypes))
        right &= reasons.need(tensor.dtype in dtypes, name, f"dtype {word(tensor.dtype)}", known)
    if device is not None:
        here = f"{device}, that of the queries"
        right &= reasons.need(tensor.device == device, name, f"device {tensor.device}", here)
    right &= reasons.need(tensor.layout == torch.strided, name, f"layout {tensor.layout}", "torch.strided")
    if right and tensor.dim():
        last = (tensor.shape[-1] - 1) * tensor.stride(-1)
        right = reasons.need(last < 2**31, name, f"columns {last} elements apart", "less than 2**31")
    if right and packed:
        right = reasons.need(tensor.is_contiguous(), name, f"stride {tensor.stride(0)}", "contiguous memory")
    return right


def word(dtype: torch.dtype) -> str:
    """The name of a dtype as a refusal prints it."""
    return str(dtype).removeprefix("torch.")
