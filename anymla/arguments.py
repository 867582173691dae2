"""Arguments that are no tensors: names, counts, numbers, flags, devices, refused in one wording everywhere.

Needs no torch, for selection, models and machines have such arguments too.
"""

import math
import sys
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from anymla.errors import Reasons
from anymla.problem import count_of
from anymla.rules import listed

if TYPE_CHECKING:
    import torch


def check_name(reasons: Reasons, name: str, value: object, known: Sequence[str]) -> bool:
    """Note what is none of these names; return whether it is one."""
    right = isinstance(value, str) and value in known
    return reasons.need(
        right, name, value if isinstance(value, str) else shown(value), f"one of {listed(known)}"
    )


def check_count(reasons: Reasons, name: str, value: object, least: int = 1) -> int:
    """The int that `value` is, noting one that is no integer or too small; `least` in place of such a one."""
    count = count_of(value)
    if count is None:
        reasons.need(False, name, shown(value), f"an integer, at least {least}")
        return least
    return count if reasons.need(count >= least, name, count, f"at least {least}") else least


def check_flags(reasons: Reasons, **flags: object) -> None:
    """Note what is neither True nor False; a tensor might have to be read back to know which it means."""
    for name, value in flags.items():
        reasons.need(isinstance(value, bool), name, shown(value), "True or False")


def check_device(reasons: Reasons, device: Any) -> "torch.device | None":
    """The device of that name, torch's default for None; None and a note where this process has none."""
    import torch

    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError):
        # A name that torch does not know, or a device that this process does not have.
        needs = "a torch.device or the name of one of this process, such as cuda:0"
        reasons.need(False, "device", shown(device), needs)
        return None


def number_of(value: object) -> float:
    """The float that a number of any library is, infinite if it is too large; NaN for all else, flags too."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def shown(value: object) -> str:
    """A value as a refusal prints it; of a tensor, whose values may be on a device, only where it is."""
    is_tensor = isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))
    return f"a tensor on {value.device}" if is_tensor else repr(value)  # type: ignore[attr-defined]
