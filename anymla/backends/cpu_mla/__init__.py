"""The CPU backend: blocked torch with fp32 accumulation; the latent is never expanded for decode.

Every operation takes a sequence at a time and its keys a tile at a time, in memory that the plan owns. So a
row comes out bitwise the same alone and in a batch, and no temporary grows with queries × keys.
"""

from anymla.backends.cpu_mla.dense import decode, plan_decode, update_decode
from anymla.backends.cpu_mla.expanded import plan_prefill, prefill
from anymla.backends.cpu_mla.sparse import plan_sparse_decode, sparse_decode
from anymla.backends.cpu_mla.topk import index_topk, plan_index_topk, update_index_topk
from anymla.contract import WriteArgs

__all__ = [
    "decode",
    "index_topk",
    "plan_decode",
    "plan_index_topk",
    "plan_prefill",
    "plan_sparse_decode",
    "prefill",
    "sparse_decode",
    "update_decode",
    "update_index_topk",
    "write_cache",
]


def write_cache(args: WriteArgs) -> None:
    """Store new tokens in the cache, in place; slot -1 is skipped."""
    args.cache.write(args.kv_c, args.k_pe, args.slot_mapping, power_of_two=args.power_of_two)
