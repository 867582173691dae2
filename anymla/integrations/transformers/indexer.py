"""A model's own indexer, with our scores and our choice over index keys in pages.

B sequences of q new tokens each, Hi index heads of width D, T tokens that are stored, K chosen ones, p tokens
a pool. Chosen tokens are named as the model counts them: in the grid of its sequences, hidden ones included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymla import indices
from anymla.contract import Batch
from anymla.errors import InvalidInput
from anymla.integrations.transformers import problems, steps
from anymla.integrations.transformers.cache import PagedLatentLayer
from anymla.integrations.transformers.families import LatentSite
from anymla.integrations.transformers.pages import PagePool
from anymla.kv_cache import KVCache
from anymla.planned import IndexPlan
from anymla.plans import index_plan
from anymla.problem import canonical_name


def run(site: LatentSite, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """In the place of an indexer's forward: it makes queries, keys and weights itself, and we score them.

    Args:
        site: Of the attention that the indexer belongs to.
        forward: The indexer's own.
        args: What the attention passes.
        kwargs: Likewise, the cache among them.

    Returns:
        [B, q, K] int32 chosen tokens; -1 is none.
    """
    # transformers 5.24 renamed the argument.
    name = next(name for name in ("cache", "past_key_values") if name in kwargs)
    cache = kwargs.pop(name)
    with torch.no_grad():
        if site.pool_size:
            return _pooled(site, cache, **kwargs)
        return forward(*args, **kwargs, **{name: _Recorder(site, cache)})


@dataclass(frozen=True)
class _Recorder:
    """In the place of the cache that an indexer is given: its keys come back as scores to be written down."""

    site: LatentSite
    cache: Any

    def update_indexer(self, keys: Tensor, layer_idx: int) -> "IndexScores":
        """Take the new keys [B, q, D]."""
        return IndexScores(self.site, self.cache, keys)


class Choice(NamedTuple):
    """What stands for the result of `topk`: [B, q, K] int32."""

    indices: Tensor


@dataclass(frozen=True)
class IndexScores:
    """What a model does with its index keys, written down call by call and worked out by `topk`.

    It answers to the calls that make a score, sum over heads of weight · relu(scale · q·k), in that order,
    and refuses every other: an indexer with another score is never scored by ours.

    Attributes:
        site: Of the attention.
        cache: The model's, or None.
        keys: [B, q, D] new index keys, rotated.
        queries: [B, q, Hi, D], rotated.
        scale: Multiplies q·k.
        is_cut: relu has been asked for.
        weights: [B, q, Hi] fp32.
        mask: [B, q, tokens] bool or additive, or None.
    """

    site: LatentSite
    cache: Any
    keys: Tensor
    queries: Tensor | None = None
    scale: float = 1.0
    is_cut: bool = False
    weights: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: object = None
    ) -> "IndexScores":
        """Products and relu, which torch is asked for."""
        scores: IndexScores | None = next((arg for arg in args if isinstance(arg, cls)), None)
        if function is torch.matmul and scores is not None and scores is args[1]:
            return scores._times(args[0])
        if function is torch.nn.functional.relu and scores is not None:
            return scores._then("relu", scores.queries is not None and scores.weights is None, is_cut=True)
        raise _refusal(getattr(function, "__name__", function))

    def __getattr__(self, name: str) -> Any:
        """Refuse what is not asked of a score."""
        raise AttributeError(name) if name.startswith("__") else _refusal(name)

    @property
    def shape(self) -> torch.Size:
        """[B, q, tokens], of scores."""
        before = 0 if self.cache is None else _layer_of(self.site, self.cache).tokens
        return torch.Size((*self.keys.shape[:2], before + self.keys.shape[1]))

    @property
    def device(self) -> torch.device:
        """Of the keys."""
        return self.keys.device

    def transpose(self, *dims: int) -> "IndexScores":
        """Keys as the right side of a product."""
        return self._then("transpose", self.queries is None and dims == (-1, -2))

    def unsqueeze(self, dim: int) -> "IndexScores":
        """Likewise, with an axis of heads."""
        return self._then("unsqueeze", self.queries is None and dim == 1)

    def squeeze(self, dim: int) -> "IndexScores":
        """Without the axis that the weights had."""
        return self._then("squeeze", self.weights is not None and dim == -2)

    def __mul__(self, scale: Any) -> "IndexScores":
        """Products times a positive number, which relu keeps."""
        right = self.queries is not None and not self.is_cut and isinstance(scale, float | int) and scale > 0
        return self._then("mul", right, scale=self.scale * float(scale) if right else 1.0)

    def __add__(self, mask: Tensor) -> "IndexScores":
        """With a mask; one of bools, from a transformers that adds it all the same, says what is seen."""
        return self._then("add", self.weights is not None and self.mask is None, mask=mask)

    def masked_fill(self, hidden: Tensor, value: object) -> "IndexScores":
        """Likewise."""
        right = self.weights is not None and self.mask is None and value == -torch.inf
        return self._then("masked_fill", right, mask=~hidden)

    def float(self) -> "IndexScores":
        """Keys in fp32, as whatever works the scores out has them anyway."""
        return self._then("float", self.queries is None)

    def topk(self, k: int, dim: int = -1) -> Choice:
        """Store the keys, and choose."""
        if self.queries is None or not self.is_cut or self.weights is None or dim != -1:
            raise _refusal("topk")
        pages = _begin(self.site, self.cache, self.keys, self.mask)
        return Choice(_chosen(pages, self.queries, self.keys, self.weights * self.scale, k))

    def _times(self, other: Tensor) -> "IndexScores":
        if self.queries is None:
            heads = other.dim() == 4 and other.shape[:2] == self.keys.shape[:2]
            return self._then("matmul", heads and other.shape[-1] == self.keys.shape[-1], queries=other)
        right = self.is_cut and self.weights is None and other.shape[:-1] == (*self.keys.shape[:2], 1)
        return self._then("matmul", right, weights=other[:, :, 0] if right else None)

    def _then(self, call: str, right: bool, **found: Any) -> "IndexScores":
        if not right:
            raise _refusal(call)
        return replace(self, **found)


def _refusal(call: object) -> InvalidInput:
    needs = "sum over heads of weight · relu(q·k), then topk; or attach(model, index_format=None)"
    return InvalidInput("indexer", [f"scores got {call}; needs {needs}"])


@dataclass(frozen=True)
class _Pages:
    """Where an indexer keeps its keys, and the step that runs.

    Attributes:
        site: Of the attention.
        pool: All pages.
        index: The layer.
        step: Of the forward pass.
    """

    site: LatentSite
    pool: PagePool
    index: int
    step: steps.Step

    def store(self, keys: Tensor, slots: Tensor, per_page: int) -> KVCache:
        """The index keys of this layer, `keys` [S, D] put into slots [S]."""
        settings = self.site.settings
        assert settings.index_format is not None
        none = keys[:, :0]
        store = self.pool.store(("index", self.index), keys, none, settings.index_format, per_page)
        if keys.shape[0]:
            steps.write(self.site, keys, none, store, slots, power_of_two=settings.index_power_of_two)
        return store

    def best(self, batch: Batch, queries: Tensor, weights: Tensor, store: KVCache, topk: int) -> Tensor:
        """[T, K] int32 of queries [T, Hi, D] and weights [T, Hi]: the keys chosen, -1 after the last."""
        settings, plans = self.site.settings, self.step.plans
        settings.calls["indexed"] += 1
        key = ("index_topk", batch is self.step.hidden, *queries.shape[1:], store.format.name, topk)
        if key not in plans:
            problem = problems.index_topk(self.site, topk, q_len=batch.max_q_len)
            plans[key] = index_plan(batch, problem, settings.asked(problem))
        plan: IndexPlan = plans[key]
        # The model makes queries fp32 only to score with them.
        queries, weights = queries.to(self.site.weight.dtype), weights.float()
        if store.format.value_dtype.itemsize == 1:
            queries, weights = indices.quantise_queries(
                queries, weights, kv_format=store.format.name, power_of_two=settings.index_power_of_two
            )
        return plan.run(queries, weights, store)


def _layer_of(site: LatentSite, cache: Any) -> PagedLatentLayer:
    layer = cache.layers[site.module.layer_idx]
    if not isinstance(layer, PagedLatentLayer):
        needs = "a cache that was made or adopted after attach"
        raise InvalidInput("indexer", [f"cache got {type(layer).__name__}; needs {needs}"])
    return layer


def _begin(site: LatentSite, cache: Any, keys: Tensor, mask: Tensor | None) -> _Pages:
    """The pages of this layer, and the step, begun if no layer before has."""
    grid = keys.shape[0], keys.shape[1]
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    if cache is None:
        pool, index = steps.scratch(site, keys), 0
        pool.step = steps.begin(site, pool, grid, mask)
        return _Pages(site, pool, index, pool.step)
    layer = _layer_of(site, cache)
    step = steps.begun(site, layer, grid, mask)
    if not site.owns_tokens:
        layer.settle_with_pool()
    return _Pages(site, layer.pool, layer.index, step)


def _chosen(pages: _Pages, queries: Tensor, keys: Tensor, weights: Tensor, topk: int) -> Tensor:
    """[B, q, K] int32 tokens of queries [B, q, Hi, D], weights [B, q, Hi]; new keys [B, q, D] are stored."""
    step, (num_seqs, new, _) = pages.step, keys.shape
    stored = _rows(keys.flatten(0, 1).to(pages.site.weight.dtype), step.rows)
    store = pages.store(stored, step.slot_mapping, pages.pool.block_size)
    if step.tokens <= topk:
        return step.everything()
    chosen = torch.full((num_seqs * new, topk), -1, dtype=torch.int32, device=keys.device)
    queries, weights = queries.flatten(0, 1), weights.flatten(0, 1)
    for rows, batch in ((step.rows, step.batch), (step.hidden_rows, step.hidden)):
        if batch is not None:
            found = pages.best(batch, _rows(queries, rows), _rows(weights, rows), store, topk)
            chosen[slice(None) if rows is None else rows] = step.in_grid(found, rows)
    return chosen.view(num_seqs, new, topk)


def _rows(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values[rows]


def _pooled(
    site: LatentSite, cache: Any, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor
) -> Tensor:
    """[B, q, K + p - 1] int32 tokens: those of the chosen pools, and of the pool that is not complete yet.

    A pool is p tokens of a sequence in a row; its key is the mean of theirs under learned weights, and is
    stored once the last of them is. The states that it is made of are stored too, a row a token, because a
    crop may open any pool again. Pages of tokens and of pools have the same ids.
    """
    module, size = site.indexer, site.pool_size
    keys = module.k_norm(module.wk(hidden_states))
    states = torch.cat(
        (keys, torch.nn.functional.linear(hidden_states, module.index_kpool_compress_gate)), -1
    )
    pages = _begin(site, cache, keys, attention_mask)
    step, (num_seqs, new, width) = pages.step, keys.shape
    own = _rows(states.flatten(0, 1), step.rows)
    name = canonical_name(str(own.dtype))
    tokens = pages.pool.store(("states", pages.index), own, own[:, :0], name, pages.pool.block_size)
    if step.batch is not None:
        steps.write(site, own, own[:, :0], tokens, step.slot_mapping)
    first = _slots_of_completed(pages, size)
    slots = first[:, None] + torch.arange(size, device=first.device)
    made, gates = torch.split(tokens.read(slots.flatten()).view(-1, size, 2 * width), width, dim=2)
    share = (gates + module.index_kpool_compress_ape.float()).softmax(dim=1).to(own.dtype)
    pooled = (share * made.to(own.dtype)).sum(dim=1)
    store = pages.store(pooled, first // size, pages.pool.block_size // size)
    if step.tokens <= module.index_topk and module.index_kpool_always_select_tail:
        return step.everything()
    topk = module.index_topk // size
    tail = size - 1 if module.index_kpool_always_select_tail else 0
    chosen = torch.full((num_seqs * new, topk * size + tail), -1, dtype=torch.int32, device=keys.device)
    if step.batch is not None:
        seen, batch = _pools_of_rows(step, size)
        queries = _rows(module.wq_b(q_resid).view(num_seqs * new, -1, width), step.rows)
        weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float()
        weights = weights * (module.n_heads**-0.5 * module.softmax_scale)
        best = pages.best(batch, queries, _rows(weights.flatten(0, 1), step.rows), store, topk)
        inside = torch.arange(size, dtype=torch.int32, device=keys.device)
        found = torch.where(best[..., None] >= 0, best[..., None] * size + inside, -1).flatten(1)
        last = (seen // size * size)[:, None] + inside[:tail]
        found = torch.cat((found, torch.where(last < seen[:, None], last, -1)), dim=1)
        chosen[slice(None) if step.rows is None else step.rows] = step.in_grid(found, step.rows)
    return chosen.view(num_seqs, new, -1)


def _slots_of_completed(pages: _Pages, size: int) -> Tensor:
    """[N] int64 slots of the first tokens of the pools that this step completes, found once a step."""
    step, pool = pages.step, pages.pool
    key = ("completed", size)
    if key not in step.plans:
        slots, batch = [torch.zeros(0, dtype=torch.int64)], step.batch
        if batch is not None:
            assert batch.seq_lens_host is not None and batch.context_lens_host is not None
            lengths = zip(batch.context_lens_host, batch.seq_lens_host, strict=True)
            for table, (before, now) in zip(pool.tables, lengths, strict=True):
                first = torch.arange(before // size, now // size) * size
                page = torch.tensor(table, dtype=torch.int64)[first // pool.block_size]
                slots.append(page * pool.block_size + first % pool.block_size)
        step.plans[key] = torch.cat(slots).to(step.slot_mapping.device)
    found: Tensor = step.plans[key]
    return found


def _pools_of_rows(step: steps.Step, size: int) -> tuple[Tensor, Batch]:
    """[T] int32 tokens that each stored row sees, and the rows as sequences of pools, once a step."""
    key = ("pools", size)
    if key not in step.plans:
        batch = step.batch
        assert batch is not None and batch.seq_lens_host is not None and batch.qo_indptr_host is not None
        context, bounds = batch.context_lens_host, batch.qo_indptr_host
        assert context is not None
        counts = torch.tensor(bounds).diff()
        sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
        seen = torch.arange(bounds[-1]) - torch.tensor(bounds[:-1])[sequence] + 1
        seen = (seen + torch.tensor(context)[sequence]).int()
        lens, device = seen // size, batch.seq_lens.device
        rows = Batch.of(
            seq_lens=lens.to(device),
            block_table=batch.block_table[sequence.to(device)],
            block_size=batch.block_size // size,
            seq_lens_host=lens.tolist(),
        )
        step.plans[key] = seen.to(device), rows
    seen_and_rows: tuple[Tensor, Batch] = step.plans[key]
    return seen_and_rows
