"""Cache write: latent and RoPE part of new tokens into their slots, in any KV format, in one launch."""

import torch
import triton

from anymla.backends.triton_mla import store
from anymla.contract import WriteArgs
from anymla.hardware.launch import launch_rows
from anymla.hardware.probe import this_machine


def write_cache(args: WriteArgs) -> None:
    """Store new tokens in the cache, in place; -1 and slots that the cache does not have are skipped.

    Args:
        args: Checked tensors.
    """
    cache, tokens = args.cache, args.kv_c.shape[0]
    if not tokens:
        return
    row, rank, rope = cache.format, cache.kv_lora_rank, cache.qk_rope_head_dim
    launch = launch_rows("cache_write", this_machine(cache.device).arch)[0]
    data = cache.storage if row.scaled else cache.data
    tiles = max(row.num_tiles(rank), 1)
    if row.tile:
        form = store.FLAT if row.block_flat else store.TILED
    else:
        form = store.SCALED if row.scaled else store.PLAIN
    store.store_kernel[(tokens,)](
        args.kv_c,
        args.k_pe,
        args.slot_mapping,
        data,
        cache.scale,
        cache.num_blocks * cache.block_size,
        args.slot_mapping.stride(0),
        *args.kv_c.stride(),
        *args.k_pe.stride(),
        data.stride(0),
        data.stride(1),
        L=rank,
        R=rope,
        TILES=tiles,
        TILES_PADDED=triton.next_power_of_2(tiles),
        TILE_PADDED=triton.next_power_of_2(rank // tiles),
        R_PADDED=triton.next_power_of_2(max(rope, 1)),
        BLOCK_SIZE=cache.block_size,
        FORMAT=form.value,
        FNUZ=row.value_dtype == torch.float8_e4m3fnuz,
        POWER_OF_TWO=args.power_of_two,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
