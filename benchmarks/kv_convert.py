"""Time to gather and dequantise one tile of a cache, beside the fp32 matrix products that it feeds.

Run: python benchmarks/kv_convert.py [--tokens 512] [--heads 16] [--threads 1]; prints one JSON line a format.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from anymla.kv_cache import KV_FORMATS, KVCache, calibrate_scale, convert

RANK, ROPE, BLOCK_SIZE, PAGES, REPEATS, ROUNDS = 512, 64, 64, 64, 5, 200


def microseconds(run: Callable[[], object]) -> float:
    """The fastest round of a call."""
    run()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(REPEATS):
            run()
        best = min(best, (time.perf_counter() - start) / REPEATS)
    return round(best * 1e6, 1)


def products(tokens: int, heads: int) -> float:
    """Scores and weighted sum of one tile in fp32."""
    q, keys = torch.randn(heads, RANK + ROPE), torch.randn(tokens, RANK + ROPE)
    scores, out = torch.empty(heads, tokens), torch.empty(heads, RANK)

    def run() -> None:
        torch.mm(q, keys.t(), out=scores)
        torch.mm(scores, keys[:, :RANK], out=out)

    return microseconds(run)


def tile(name: str, tokens: int) -> dict[str, object]:
    """One format: gather by slot, dequantise, and the same by torch's own cast where it is one cast."""
    rank, rope = (128, 0) if KV_FORMATS[name].block_flat else (RANK, ROPE)
    kv_c, k_pe = torch.randn(PAGES * BLOCK_SIZE, rank), torch.randn(PAGES * BLOCK_SIZE, rope)
    scale = calibrate_scale(kv_c, k_pe, name) if KV_FORMATS[name].scaled else None
    cache = KVCache.allocate(
        PAGES, BLOCK_SIZE, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_format=name, scale=scale
    )
    new = tokens, torch.randperm(PAGES * BLOCK_SIZE)[:tokens]
    cache.write(kv_c, k_pe, torch.randperm(PAGES * BLOCK_SIZE))
    page, position = new[1] // BLOCK_SIZE, new[1] % BLOCK_SIZE
    raw, out = cache.gather(new[1]), torch.empty(tokens, cache.width)
    scratch = cache.format.dequant_scratch(tokens, rank, rope)
    record: dict[str, object] = {
        "format": name,
        "gather_us": microseconds(lambda: cache.gather_into(page, position, raw)),
        "dequantise_us": microseconds(lambda: cache.dequantise(raw, out, scratch)),
        "write_us": microseconds(lambda: cache.write(kv_c[:tokens], k_pe[:tokens], new[1])),
    }
    if cache.format.scaled:
        values = raw.view(cache.data.dtype)
        record["torch_cast_us"] = microseconds(lambda: out.copy_(values).mul_(cache.scale))
    if not cache.format.scaled or name.endswith("fn"):
        target = "fp8_ds_mla" if rope else "index_k_fnuz"
        started = time.perf_counter()
        convert(cache, target)
        record[f"to_{target}_ns_per_token"] = round(
            (time.perf_counter() - started) * 1e9 / (PAGES * BLOCK_SIZE)
        )
    return record


def main() -> None:
    """Print the matrix products, then every format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    shape = {"tokens": given.tokens, "heads": given.heads, "threads": given.threads}
    print(json.dumps(shape | {"products_us": products(given.tokens, given.heads)}))
    for name in KV_FORMATS:
        print(json.dumps(shape | tile(name, given.tokens)))


if __name__ == "__main__":
    main()
