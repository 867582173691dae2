"""A step of DeepSeek Sparse Attention: keys are indexed, 2,048 of them chosen, and only those attended to."""

import torch

import anymla

model, tokens, block_size = anymla.MODELS["deepseek-v3.2"], 5000, 64
heads, blocks = model.local_heads(16), -(-tokens // block_size)
pages = {"num_blocks": blocks, "block_size": block_size}
kv_cache = anymla.KVCache.allocate(
    **pages,
    kv_lora_rank=model.kv_lora_rank,
    qk_rope_head_dim=model.qk_rope_head_dim,
    kv_format="fp8_ds_mla",
)
index_cache = anymla.KVCache.allocate(
    **pages, kv_lora_rank=model.index_head_dim, qk_rope_head_dim=0, kv_format="index_k"
)
block_table = torch.randperm(blocks, dtype=torch.int32)[None]
position = torch.arange(tokens)
slots = block_table[0].long()[position // block_size] * block_size + position % block_size

# Both caches have the same pages, so a token has one slot in both.
latents = torch.randn(tokens, model.kv_lora_rank), torch.randn(tokens, model.qk_rope_head_dim)
index_keys = torch.randn(tokens, model.index_head_dim)
anymla.write_cache(*latents, kv_cache, slots)
anymla.write_cache(index_keys, index_keys[:, :0], index_cache, slots, power_of_two=True)

index_q = torch.randn(1, model.index_heads, model.index_head_dim)
weights = torch.randn(1, model.index_heads) * model.index_head_dim**-0.5 * model.index_heads**-0.5
index_q, weights = anymla.quantise_queries(index_q, weights, kv_format="index_k", power_of_two=True)
ql_nope, q_pe = torch.randn(1, heads, model.kv_lora_rank), torch.randn(1, heads, model.qk_rope_head_dim)

# Once a step.
batch = anymla.Batch.of(
    seq_lens=torch.tensor([tokens], dtype=torch.int32), block_table=block_table, block_size=block_size
)
choice = anymla.plan_index_topk(
    batch,
    topk=model.index_topk,
    index_heads=model.index_heads,
    index_head_dim=model.index_head_dim,
    q_dtype=index_q.dtype,
)
attention = anymla.plan_sparse_decode(
    batch.num_tokens,
    topk=model.index_topk,
    num_heads=heads,
    kv_lora_rank=model.kv_lora_rank,
    qk_rope_head_dim=model.qk_rope_head_dim,
    block_size=block_size,
    q_dtype=ql_nope.dtype,
    kv_format="fp8_ds_mla",
)

# Once a layer.
indices = choice.run(index_q, weights, index_cache, as_slots=True)
out, _ = attention.run(ql_nope, q_pe, kv_cache, indices=indices, sm_scale=model.sm_scale)
print(f"{int((indices >= 0).sum())} of {tokens} keys: out {tuple(out.shape)}")
