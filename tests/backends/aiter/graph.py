"""A graph without a device: what runs is recorded with its memory, and runs again in that memory.

As a stream does while it is captured, it refuses whatever would wait for the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from anymla.backends.aiter_mla.calls import Call

aten = torch.ops.aten
WAITS = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
)
"""Operations whose result, or its size, the host has to know."""


class Waited(AssertionError):
    """The host asked for something that the device had not computed yet."""


class Graph(TorchDispatchMode):
    """Records while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        picks = func in (aten.index.Tensor, aten.index_put_.default) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in WAITS or picks:
            raise Waited(str(func))
        return self._run(func, args, kwargs or {})

    def __enter__(self) -> Any:
        self.nodes.clear()
        self._reads = _Reads()
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._reads.__exit__(*failure)

    def calls(self, calls: Mapping[str, Call]) -> dict[str, "Launched"]:
        """AITER's functions as launches: what happens in them is the device's."""
        return {name: Launched(self, call, call.binding) for name, call in calls.items()}

    def replay(self) -> None:
        """Run it again: same memory, other values."""
        for func, args, kwargs, before in self.nodes:
            after = func(*args, **kwargs)
            for old, new in zip(tree.tree_leaves(before), tree.tree_leaves(after), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self.nodes.append((func, args, kwargs, result))
        return result


class _Reads(TorchFunctionMode):
    """Refuses what copies values to the host without being an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            raise Waited(func.__name__)
        return func(*args, **(kwargs or {}))


@dataclass
class Launched:
    """A function of AITER, as a graph has it."""

    graph: Graph
    call: Call
    binding: Any

    def __call__(self, **ours: Any) -> Any:
        """Launch it."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return self.graph._run(self._without_scratch, (), ours)

    def _without_scratch(self, **ours: Any) -> Any:
        """What it returns, but for a decode's own partial rows, which nobody reads."""
        result = self.call(**ours)
        return (None, result[1]) if self.binding.function == "mla_decode_fwd" else result
