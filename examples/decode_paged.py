"""A decode step of two sequences over a paged cache, planned once and run for two layers."""

import torch

import anymla

model = anymla.MODELS["deepseek-v3"]
heads, block_size = model.local_heads(8), 64
seq_lens = torch.tensor([100, 37], dtype=torch.int32)
block_table = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)

batch = anymla.Batch.of(seq_lens=seq_lens, block_table=block_table, block_size=block_size)
plan = anymla.plan_decode(
    batch,
    num_heads=heads,
    kv_lora_rank=model.kv_lora_rank,
    qk_rope_head_dim=model.qk_rope_head_dim,
    q_dtype=torch.float32,
    kv_format="fp32",
    return_lse=True,
)
print(plan.explain())

for layer in range(2):
    kv_cache = torch.randn(3, block_size, model.kv_lora_rank + model.qk_rope_head_dim)
    ql_nope = torch.randn(2, heads, model.kv_lora_rank)
    q_pe = torch.randn(2, heads, model.qk_rope_head_dim)
    out, lse = plan.run(ql_nope, q_pe, kv_cache, sm_scale=model.sm_scale, return_lse=True)
    print(f"layer {layer}: out {tuple(out.shape)}, lse {tuple(lse.shape)}")
