"""The sequences of a call in another batch: in another order, or one of them alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from anymla.kv_cache import KVCache
from anymla.verification.inputs import Inputs

QUERY_TENSORS = {"decode": 2, "sparse_decode": 2, "prefill": 4, "index_topk": 2}
"""How many of a call's positional arguments have a row for each query token."""


def num_sequences(call: Inputs) -> int:
    """Sequences of a call; each query token of a sparse decode is one."""
    if call.op == "sparse_decode":
        return call.num_rows
    return len(_indptr(call)) - 1


def spans(call: Inputs) -> list[range]:
    """The rows of each sequence."""
    return [range(first, last) for first, last in pairwise(_indptr(call))]


def take(call: Inputs, sequences: Sequence[int]) -> tuple[Inputs, Tensor]:
    """A call of some of the sequences of another, over the same cache.

    Args:
        call: Any attention or index call.
        sequences: Which, in the order wanted.

    Returns:
        The call, without query tokens that belong to no sequence, and for each of its rows the row of `call`.
    """
    options, every = dict(call.options), spans(call)
    chosen_spans = [every[s] for s in sequences]
    rows = torch.tensor([row for span in chosen_spans for row in span], dtype=torch.int64)
    chosen = torch.tensor(list(sequences), dtype=torch.int64)
    if options.get("qo_indptr") is not None:
        lens = torch.tensor([0, *map(len, chosen_spans)], dtype=torch.int32)
        options["qo_indptr"] = lens.cumsum(0, dtype=torch.int32).to(options["qo_indptr"].device)
    for name in ("block_table", "seq_lens", "indices", "counts"):
        if options.get(name) is not None:
            options[name] = options[name][chosen]
    count = QUERY_TENSORS[call.op]
    tensors = (*(t[rows] for t in call.tensors[:count]), *call.tensors[count:])
    return replace(
        call, tensors=tensors, options=options, num_rows=len(rows), shape=(len(rows), *call.shape[1:])
    ), rows


def tokens_alone(call: Inputs) -> Inputs:
    """A causal decode with each query token of another as a sequence of its own, over the same cache."""
    every, options = spans(call), dict(call.options)
    sequence = torch.tensor([s for s, span in enumerate(every) for _ in span], dtype=torch.int64)
    later = torch.tensor([span.stop - 1 - row for span in every for row in span], dtype=torch.int32)
    lens: Tensor = options["seq_lens"]
    options["seq_lens"] = (lens[sequence] - later.to(lens.device)).clamp(min=0)
    options |= {"block_table": options["block_table"][sequence], "qo_indptr": None}
    rows = torch.tensor([row for span in every for row in span], dtype=torch.int64)
    tensors = (*(t[rows] for t in call.tensors[:2]), call.cache)
    return replace(
        call, tensors=tensors, options=options, num_rows=len(rows), shape=(len(rows), *call.shape[1:])
    )


def moved(call: Inputs, device: torch.device) -> Inputs:
    """The call on a device, every tensor with its strides and the memory around it."""
    return replace(
        call,
        tensors=tuple(_moved(value, device) for value in call.tensors),
        options={name: _moved(value, device) for name, value in call.options.items()},
    )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, KVCache):
        return replace(value, data=_moved(value.data, device), scale=_moved(value.scale, device))
    if not isinstance(value, Tensor) or value.device == device:
        return value
    size = value.untyped_storage().nbytes() // value.itemsize
    whole = value.as_strided((size,), (1,), 0).to(device)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _indptr(call: Inputs) -> list[int]:
    """Where each sequence's query tokens begin, and where the last ones end."""
    given = call.options.get("qo_indptr")
    return list(range(call.num_rows + 1)) if given is None else given.tolist()
