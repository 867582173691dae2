"""What would serve DeepSeek-V3 at tensor parallel 16 on an MI300X, asked on any laptop."""

import anymla

model = anymla.MODELS["deepseek-v3"]
problem = anymla.Problem(
    op="decode",
    q_dtype="bf16",
    kv_format="bf16",
    num_heads=model.local_heads(16),
    kv_lora_rank=model.kv_lora_rank,
    qk_rope_head_dim=model.qk_rope_head_dim,
    block_size=64,
    features=frozenset({anymla.Feature.LSE}),
)
for verdict in anymla.explain(problem, anymla.machine_named("gfx942")):
    print(verdict)
