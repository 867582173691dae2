"""Cache write through AITER: latents as they are, index keys in fp8 with a scale each, shuffled or not."""

from functools import lru_cache

import torch

from anymla.backends.aiter_mla import bindings
from anymla.backends.aiter_mla.calls import Call, call_of
from anymla.backends.aiter_mla.provider import aiter_of
from anymla.contract import WriteArgs
from anymla.errors import Reasons
from anymla.hardware.probe import Machine, this_machine


def write_cache(args: WriteArgs) -> None:
    """Store new tokens in the cache, in place; -1 is skipped.

    Args:
        args: Checked tensors.

    Raises:
        InvalidInput: pages of index keys lie apart, or latents are not dense along their width.
    """
    cache = args.cache
    if not args.kv_c.shape[0]:
        return
    call = _call(this_machine(cache.device), bindings.cache_writer(cache.format.name)[0])
    slots = args.slot_mapping.contiguous()
    if cache.format.block_flat:
        reasons, strides = Reasons("write_cache"), cache.data.stride()
        needs = "pages one after another for AITER's writer; backend triton takes others"
        reasons.need(cache.data.is_contiguous(), "kv_cache", f"strides {strides}", needs)
        reasons.raise_if_any()
        call(
            k=args.kv_c.contiguous(),
            kv_cache=cache.data,
            slot_mapping=slots,
            quant_block_size=cache.kv_lora_rank,
            scale_fmt="ue8m0" if args.power_of_two else "",
            preshuffle=cache.format.shuffled,
        )
        return
    # Its scale is read in any case.
    one = torch.ones(1, dtype=torch.float32, device=cache.device)
    call(
        kv_c=args.kv_c.contiguous(),
        k_pe=args.k_pe.contiguous(),
        kv_cache=cache.data,
        slot_mapping=slots,
        kv_cache_dtype="auto",
        scale=one,
    )


@lru_cache(maxsize=32)
def _call(machine: Machine, name: str) -> Call:
    """A writer of a machine's AITER, bound once."""
    return call_of(aiter_of(machine), name)
