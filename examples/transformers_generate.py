"""Generate with a transformers model on the paged latent cache, and show that the tokens are those of stock.

python examples/transformers_generate.py              a tiny seeded DeepSeek-V3, made on the spot
python examples/transformers_generate.py smollm2      a really trained model; see the README's first command
"""

import sys

import torch

from anymla.integrations import presets
from anymla.integrations.transformers import attach


def main(preset: str) -> None:
    """Generate for two prompts of different lengths, once with stock attention and once with ours."""
    loaded = presets.load(preset)
    prompts = ["The capital of France is", "Water boils at a temperature of"]
    batch = loaded.tokenizer(prompts, padding=True, return_tensors="pt")

    stock = loaded.model.generate(**batch, max_new_tokens=24, do_sample=False)
    with attach(loaded.model) as attached:
        ours = loaded.model.generate(**batch, max_new_tokens=24, do_sample=False)

    for tokens in ours:
        print(repr(loaded.tokenizer.decode(tokens, skip_special_tokens=True)))
    print(f"tokens equal to stock transformers: {torch.equal(ours, stock)}")
    print(f"decoded by {attached.backend}; layers run in each form: {dict(attached.settings.calls)}")
    print(f"cache bytes a token: {attached.bytes_per_token} (stock: {attached.stock_bytes_per_token})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tiny-deepseek-v3")
