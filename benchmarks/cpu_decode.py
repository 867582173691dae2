"""A decode step of two DeepSeek-V3 attention layers on a CPU: stock transformers against the attached model.

    OMP_NUM_THREADS=2 python benchmarks/cpu_decode.py --record benchmarks/results/cpu/decode.json
    OMP_NUM_THREADS=2 python benchmarks/cpu_decode.py --prefill --record benchmarks/results/cpu/prefill.json

Every form of attention runs the same weights over the same cached latents, in turns, in one process. A case
is verified before it is timed: attention of every layer against the fp64 definition on the step's own
tensors, and with an fp32 cache the logits against stock in fp64. What is wrong has no time.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from anymla import reference
from anymla.backends import cpu_mla
from anymla.benchmarking.run import provenance
from anymla.benchmarking.timing import copy_bandwidth, product_rate, time_in_turns
from anymla.contract import AttentionOutput
from anymla.integrations.transformers import attach
from anymla.kv_cache import KV_FORMATS, calibrate_scale
from anymla.verification import eager
from anymla.verification.judge import Judgement, judge, judge_tensor, together

CPU = torch.device("cpu")
LAYERS, RANK, ROPE, NOPE, VALUE = 2, 512, 64, 128, 128
STOCK = ("sdpa", "eager")
FORMATS = ("fp32", "bf16", "fp8_e4m3fn", "fp8_ds_mla")
SECONDS, REPEATS = 40.0, (5, 25)
"""Time for one case, about, and the fewest and most repeats that it may become."""

KINDS = {
    "products": ("addmm", "baddbmm", "bmm", "mm", "addmv", "mv", "_scaled_dot_product", "_softmax"),
    "copies": ("copy_", "cat", "index_select", "fill_", "zero_", "index"),
}
"""Kinds of operation, by the beginning of their names; the rest is `other`."""

Latents = list[tuple[Tensor, Tensor]]
"""Of each layer, [B, 1, context, L] and [B, 1, context, R]."""


@dataclass(frozen=True)
class Case:
    """One size.

    Attributes:
        heads: Query heads.
        batch: Sequences.
        context: Cached tokens of each; 0 for a prefill.
        new: Tokens of the step, of each sequence.
    """

    heads: int
    batch: int
    context: int
    new: int = 1

    @property
    def cached_bytes(self) -> dict[str, int]:
        """Bytes of all cached latents, by format."""
        tokens = LAYERS * self.batch * (self.context + self.new)
        return {name: tokens * KV_FORMATS[name].bytes_per_token(RANK, ROPE) for name in FORMATS}

    @property
    def attention_flops(self) -> int:
        """Of the products with keys and values in the form that is used, masked pairs left out."""
        rows = LAYERS * self.batch * self.heads
        if self.context:
            return 2 * rows * (self.context + 1) * (2 * RANK + ROPE)
        pairs = self.new * (self.new + 1) // 2
        return 2 * rows * (pairs * (NOPE + ROPE + VALUE) + self.new * RANK * (NOPE + VALUE))

    def linear_flops(self, model: Any) -> int:
        """Of the projections around attention and of all other layers."""
        expanded = LAYERS * RANK * self.heads * (NOPE + VALUE)
        params = sum(p.numel() for p in model.parameters()) - (expanded if not self.context else 0)
        return 2 * params * self.batch * self.new


@dataclass
class Runner:
    """One way to run the step.

    Attributes:
        step: Runs the model over the new tokens and gives their logits [B, new, vocabulary].
        undo: Takes the new tokens back out of the cache.
    """

    step: Callable[[], Tensor]
    undo: Callable[[], object]


def model_of(heads: int, hidden: int) -> Any:
    """Two layers with the attention of DeepSeek-V3, and as little as possible around it."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        first_k_dense_replace=LAYERS,
        max_position_embeddings=8192,
    )
    widths = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    assert widths == (RANK, ROPE, NOPE, VALUE)
    return DeepseekV3ForCausalLM(config).eval()


def sharing_weights(model: Any) -> Any:
    """A model of its own with the same weights in the same memory."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def latents(case: Case) -> Latents:
    """Random cached latents."""
    draw = torch.Generator().manual_seed(1)
    shape = case.batch, 1, case.context
    return [
        (torch.randn(*shape, RANK, generator=draw), torch.randn(*shape, ROPE, generator=draw))
        for _ in range(LAYERS)
    ]


def stock(model: Any, form: str, ids: Tensor, cached: Latents) -> Runner:
    """Stock attention, in the dtype of the model."""
    model.set_attn_implementation(form)
    dtype, context = next(model.parameters()).dtype, cached[0][0].shape[2]
    caches: list[Any] = []

    def fresh() -> None:
        caches[:] = [DynamicCache(config=model.config)]
        for layer, (kv_c, k_pe) in enumerate(cached if context else ()):
            caches[0].update(kv_c.to(dtype), k_pe.to(dtype), layer)

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(ids, cache=caches[0]).logits
        return logits

    fresh()
    return Runner(step, (lambda: caches[0].crop(-ids.shape[1])) if context else fresh)


def ours(model: Any, kv_format: str, ids: Tensor, cached: Latents) -> Runner:
    """The attached model over pages of one format."""
    context, scale = cached[0][0].shape[2], None
    if KV_FORMATS[kv_format].scaled:
        # The largest over all layers, and room for the new token.
        scale = torch.stack([calibrate_scale(*pair, kv_format, margin=2.0) for pair in cached]).amax(0)
    cache = attach(model, kv_format=kv_format, k_scale=scale).new_cache()
    if context:
        pool = cache.layers[0].pool
        slots = pool.append(torch.ones(ids.shape[0], context, dtype=torch.bool))
        for layer, (kv_c, k_pe) in zip(cache.layers, cached, strict=True):
            rows = kv_c.flatten(0, 2), k_pe.flatten(0, 2)
            pool.store(layer.index, *rows).write(*rows, slots)
            layer.tokens = context

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(ids, cache=cache).logits
        return logits

    return Runner(step, (lambda: cache.crop(-ids.shape[1])) if context else cache.reset)


@contextmanager
def recorded(name: str) -> Iterator[list[tuple[Any, Any]]]:
    """The arguments and the batch of every call of an operation of the CPU backend, results included."""
    seen: list[tuple[Any, Any]] = []
    original = getattr(cpu_mla, name)

    def recording(args: Any, state: Any) -> None:
        original(args, state)
        seen.append((args, state.batch))

    setattr(cpu_mla, name, recording)
    try:
        yield seen
    finally:
        setattr(cpu_mla, name, original)


def judged_attention(calls: list[tuple[Any, Any]]) -> Judgement:
    """Hold every layer's decode against the fp64 definition on its own tensors."""
    assert len(calls) == LAYERS
    found = []
    for args, batch in calls:
        tensors = args.ql_nope, args.q_pe, args.cache
        options = {
            "block_table": batch.block_table,
            "seq_lens": batch.seq_lens,
            "qo_indptr": batch.qo_indptr,
            "sm_scale": args.sm_scale,
        }
        exact, noise = reference.decode(*tensors, **options), eager.decode(*tensors, **options)
        found.append(judge(AttentionOutput(args.out, None), exact, *noise))
    return together(*found)


def exact_logits(model: Any, ids: Tensor, cached: Latents) -> Tensor:
    """Stock logits in fp64, a sequence at a time, because keys of all heads are large."""
    wide = copy.deepcopy(model).double()
    rows = []
    for b in range(ids.shape[0]):
        one = [(kv_c[b : b + 1], k_pe[b : b + 1]) for kv_c, k_pe in cached]
        rows.append(stock(wide, "eager", ids[b : b + 1], one).step())
    return torch.cat(rows)


def verified(
    case: Case, model: Any, runners: dict[str, Runner], ids: Tensor, cached: Latents
) -> dict[str, Judgement]:
    """Judge every runner of ours; the stock ones are the noise."""
    exact = exact_logits(model, ids, cached)
    noise = []
    for name in STOCK:
        noise.append(runners[name].step())
        runners[name].undo()
    found = {}
    for name, runner in runners.items():
        if name in STOCK:
            continue
        with recorded("decode") as calls:
            logits = runner.step()
        runner.undo()
        parts = [judged_attention(calls)] if case.context else []
        if name == "fp32":
            parts.append(judge_tensor("logits", logits, exact, *noise))
        found[name] = together(*parts)
    return found


def where_time_goes(runner: Runner) -> dict[str, float]:
    """Shares of the time of one step: by kind, and of the six operations that take most."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        runner.step()
    runner.undo()
    spent = {e.key.removeprefix("aten::"): e.self_cpu_time_total for e in seen.key_averages()}
    total = sum(spent.values())
    shares = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, time in spent.items():
        kind = next((kind for kind, names in KINDS.items() if name.startswith(names)), "other")
        shares[kind] += time / total
    for name in sorted(spent, key=lambda name: -spent[name])[:6]:
        shares[f"op {name}"] = spent[name] / total
    return {name: round(share, 3) for name, share in shares.items()}


def run_case(case: Case, hidden: int) -> dict[str, Any]:
    """Verify and time one case."""
    model = model_of(case.heads, hidden)
    cached = latents(case)
    ids = torch.randint(0, 256, (case.batch, case.new), generator=torch.Generator().manual_seed(2))
    runners = {form: stock(sharing_weights(model), form, ids, cached) for form in STOCK}
    formats = FORMATS if case.context else FORMATS[:1]
    runners |= {name: ours(sharing_weights(model), name, ids, cached) for name in formats}
    judgements = verified(case, model, runners, ids, cached)
    right = {name: runner for name, runner in runners.items() if name in STOCK or judgements[name].passed}

    def undo(name: str) -> None:
        right[name].undo()

    steps = {name: runner.step for name, runner in right.items()}
    once = time_in_turns(steps, CPU, repeats=1, warmups=0, after=undo)
    fewest, most = REPEATS
    repeats = int(SECONDS / sum(min(t.seconds) for t in once.values()))
    timings = time_in_turns(steps, CPU, repeats=min(max(repeats, fewest), most), warmups=0, after=undo)
    found: dict[str, Any] = {
        **asdict(case),
        "weight_bytes": sum(p.numel() * 4 for p in model.parameters()),
        "linear_flops": case.linear_flops(model),
        "attention_flops": case.attention_flops,
        "forms": {},
    }
    for name, runner in runners.items():
        form: dict[str, Any] = {}
        if name not in STOCK:
            judged = judgements[name]
            form |= {"passed": judged.passed, "share_of_budget": round(judged.share, 3)}
            form["cached_bytes"] = case.cached_bytes[name]
        if name in timings:
            form |= {k.replace("_us", "_ms"): round(v / 1e3, 3) for k, v in timings[name].to_dict().items()}
            form["repeats"] = len(timings[name].seconds)
            form["where"] = where_time_goes(runner)
        else:
            form["reasons"] = list(judgements[name].reasons)
        if name in timings and name not in STOCK:
            for other in (*STOCK, "fp32"):
                if other in timings:
                    ratio = timings[other].median_us / timings[name].median_us
                    form[f"{other}_over_this"] = round(ratio, 2)
        found["forms"][name] = form
    return found


def set_floors(record: dict[str, Any]) -> None:
    """Say of each time how far it is from what the machine did at best while the record was made."""
    bandwidth, rate = record["copy_gb_s"] * 1e9, record["product_gflop_s"] * 1e9
    for case in record["cases"]:
        linear = max(case["weight_bytes"] / bandwidth, case["linear_flops"] / rate)
        for form in case["forms"].values():
            if "cached_bytes" in form and "median_ms" in form:
                attention = max(form["cached_bytes"] / bandwidth, case["attention_flops"] / rate)
                form["floor_ms"] = round((linear + attention) * 1e3, 3)
                form["times_floor"] = round(form["median_ms"] / form["floor_ms"], 2)


def shown(found: dict[str, Any]) -> str:
    """A case in lines."""
    lines = [f"{found['heads']} heads, batch {found['batch']}, {found['context']} cached, {found['new']} new"]
    for name, form in found["forms"].items():
        if "median_ms" not in form:
            lines.append(f"  {name:12} wrong: {'; '.join(form['reasons'])}")
            continue
        line = f"  {name:12} {form['median_ms']:10.2f} ms  ({form['q1_ms']:.2f} to {form['q3_ms']:.2f}, "
        line += f"least {form['least_ms']:.2f}, {form['repeats']} repeats)"
        if name not in STOCK:
            line += f"  sdpa x{form['sdpa_over_this']}  eager x{form['eager_over_this']}"
            line += (
                f"  floor {form['floor_ms']:.2f} ms x{form['times_floor']}  budget {form['share_of_budget']}"
            )
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    """Run the cases; 1 if one is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--prefill", action="store_true", help="2048 new tokens and no cache instead")
    parser.add_argument("--new", type=int, default=2048, help="tokens of a prefill")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--note", default="", help="what to say in the record")
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    heads, batches = (
        asked.heads or ([16] if asked.prefill else [16, 128]),
        asked.batch or ([1] if asked.prefill else [1, 4]),
    )
    sizes = [(0, asked.new)] if asked.prefill else [(context, 1) for context in asked.context]
    record: dict[str, Any] = {
        **provenance(CPU),
        "what": f"one step of {LAYERS} DeepSeek-V3 attention layers with fp32 weights",
        "hidden": asked.hidden,
        "copy_gb_s": 0.0,
        "product_gflop_s": 0.0,
        "floor": "weights and latents read once at the copy bandwidth, or products at the product rate",
        "note": asked.note,
        "cases": [],
    }
    print(", ".join(f"{name} {record[name]}" for name in ("chip", "threads", "load_1min")), flush=True)
    for case in (Case(h, b, c, n) for h in heads for b in batches for c, n in sizes):
        # The best of all cases, because the machine may be shared.
        record["copy_gb_s"] = max(record["copy_gb_s"], round(copy_bandwidth(CPU) / 1e9, 2))
        record["product_gflop_s"] = max(record["product_gflop_s"], round(product_rate(CPU) / 1e9, 1))
        record["cases"].append(run_case(case, asked.hidden))
        set_floors(record)
        print(shown(record["cases"][-1]), flush=True)
        if asked.record:
            asked.record.parent.mkdir(parents=True, exist_ok=True)
            asked.record.write_text(json.dumps(record, indent=1) + "\n")
    print(f"copy {record['copy_gb_s']} GB/s, products {record['product_gflop_s']} GFLOP/s")
    passed = [form.get("passed", True) for found in record["cases"] for form in found["forms"].values()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
