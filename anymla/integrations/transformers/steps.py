"""One forward pass over a cache: what its mask keeps, where it goes, and the plans that all layers share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anymla.api import write_cache
from anymla.contract import Batch
from anymla.errors import InvalidInput, Reasons
from anymla.indices import compacted, to_slots
from anymla.integrations.transformers import problems
from anymla.integrations.transformers.cache import PagedLatentLayer
from anymla.integrations.transformers.families import Site
from anymla.integrations.transformers.pages import PagePool
from anymla.kv_cache import KVCache
from anymla.planned import DecodePlan, PrefillPlan, SparsePlan
from anymla.plans import plan_decode, plan_prefill, plan_sparse_decode
from anymla.problem import canonical_name

_MASK_ROWS = 1024
"""Rows of a mask that are compared at a time, so that a long prefill needs no second mask."""

_SLOTS = 1 << 19
"""Chosen tokens that are turned into slots at a time: 32 MiB beside the result, at 64 bytes a token."""


@dataclass
class Step:
    """What the first layer of a forward pass decides for all of them.

    The model's tokens form a grid [B, q]. Stored tokens are packed, sequence by sequence. A hidden token
    whose mask row is not blank (right padding) sees the keys stored before it; it is computed apart, as a
    sequence of its own, because its row does not advance. All other rows of the grid come out 0.

    Attributes:
        grid: (B, q).
        rows: [T] int64 places of the stored tokens in the flattened grid; None: all of them, in order.
        slot_mapping: [T] int64.
        batch: The stored tokens as a step; None: there are none.
        hidden_rows: [N] int64 places of hidden tokens that see keys; None: there are none.
        hidden: Those as a decode step of N sequences.
        table: [B, max_blocks] int32 pages of all sequences.
        tokens: Of each sequence, hidden ones and those of this step included.
        places: [B, tokens] int64 of each token so far its place among the stored ones, -1 for a hidden one;
            None: its own.
        positions: [B, tokens] int64 the other way: of each stored token its place in the grid; None: its own.
        has_gap: Whether a hidden token lies between stored ones.
        plans: By the facts of the layer that asked first.
        chosen: The last indices that were turned into slots, with these and their counts: layers that share
            a choice share all of it.
    """

    grid: tuple[int, int]
    rows: Tensor | None
    slot_mapping: Tensor
    batch: Batch | None
    hidden_rows: Tensor | None
    hidden: Batch | None
    table: Tensor
    tokens: int
    places: Tensor | None
    positions: Tensor | None
    has_gap: bool = False
    plans: dict[tuple[object, ...], Any] = field(default_factory=dict)
    chosen: tuple[Tensor, Tensor, Tensor] | None = None

    def slots(self, indices: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Slots [B·q, K] and counts [B·q] of chosen tokens [B, q, K] that their row may see.

        A model chooses among all tokens of its grid; those that are hidden or come later are left out, and
        one that it names twice, in a pool and again after the last whole one, counts once.
        """
        if self.chosen is None or self.chosen[0] is not indices:
            ids = indices.flatten(0, 1)
            slots = torch.empty_like(ids, dtype=torch.int32)
            counts = torch.empty(len(ids), dtype=torch.int32, device=ids.device)
            size = max(1, _SLOTS // ids.shape[1])
            for first in range(0, len(ids), size):
                rows = slice(first, first + size)
                slots[rows], counts[rows] = self._slots(ids[rows], first, block_size)
            self.chosen = indices, slots, counts
        return self.chosen[1:]

    def _slots(self, ids: Tensor, first: int, block_size: int) -> tuple[Tensor, Tensor]:
        """The same of the chosen tokens [n, K] of some rows of the flattened grid, from `first` on."""
        (num_seqs, new), device = self.grid, ids.device
        row = torch.arange(first, first + len(ids), device=device)
        seen = self.tokens - new + row % new
        ids = torch.where((ids >= 0) & (ids <= seen[:, None]), ids, -1)
        if self.places is not None:
            places = self.places[(row // new)[:, None], ids.clamp(min=0).long()]
            ids = torch.where(ids >= 0, places, -1)
        ends = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * new
        slots = to_slots(ids.int(), self.table, (ends - first).clamp(0, len(ids)), block_size)
        if self.has_gap:
            slots = slots.sort(dim=1).values
            slots[:, 1:].masked_fill_(slots[:, 1:] == slots[:, :-1], -1)
        return compacted(slots)

    def in_grid(self, stored: Tensor, rows: Tensor | None) -> Tensor:
        """Stored tokens [T, K] int32, of rows [T] of the flattened grid, as a model names them; -1 stays."""
        if self.positions is None:
            return stored
        row = torch.arange(stored.shape[0], device=stored.device) if rows is None else rows
        places = self.positions[row // self.grid[1]].gather(1, stored.long().clamp(min=0))
        return torch.where(stored >= 0, places, -1).to(torch.int32)

    def everything(self) -> Tensor:
        """[B, q, tokens] int32: a choice of every token."""
        every = torch.arange(self.tokens, dtype=torch.int32, device=self.table.device)
        return every.expand(*self.grid, self.tokens)

    def decode_plan(self, site: Site, query: Tensor, kv_format: str, batch: Batch) -> DecodePlan:
        """The plan of this step's absorbed form for layers like this one."""
        key = ("decode", batch is self.hidden, *_facts(site, query))
        if key not in self.plans:
            self.plans[key] = plan_decode(
                batch,
                num_heads=query.shape[1],
                kv_lora_rank=site.kv_lora_rank,
                qk_rope_head_dim=site.qk_rope_head_dim,
                q_dtype=query.dtype,
                kv_format=kv_format,
                sinks=site.has_sinks,
                backend=site.settings.backend,
            )
        plan: DecodePlan = self.plans[key]
        return plan

    def prefill_plan(self, site: Site, query: Tensor, kv_format: str, batch: Batch) -> PrefillPlan:
        """The plan of this step's decompressed form for layers like this one."""
        key = ("prefill", *_facts(site, query))
        if key not in self.plans:
            asked = problems.prefill(site, query.dtype, kv_format, batch.max_q_len)
            self.plans[key] = plan_prefill(
                batch,
                num_heads=query.shape[1],
                kv_lora_rank=site.kv_lora_rank,
                qk_rope_head_dim=site.qk_rope_head_dim,
                qk_nope_head_dim=site.qk_nope_head_dim,
                v_head_dim=site.v_head_dim,
                q_dtype=query.dtype,
                kv_format=kv_format,
                sinks=site.has_sinks,
                backend=site.settings.asked(asked),
            )
        plan: PrefillPlan = self.plans[key]
        return plan

    def sparse_plan(self, site: Site, query: Tensor, store: KVCache, topk: int) -> SparsePlan:
        """The plan of this step's chosen keys, a row of the grid each, for layers like this one."""
        key = ("sparse_decode", topk, *_facts(site, query))
        if key not in self.plans:
            self.plans[key] = plan_sparse_decode(
                query.shape[0],
                topk=topk,
                num_heads=query.shape[1],
                kv_lora_rank=site.kv_lora_rank,
                qk_rope_head_dim=site.qk_rope_head_dim,
                block_size=store.block_size,
                q_dtype=query.dtype,
                kv_format=store.format.name,
                device=query.device,
                sinks=site.has_sinks,
                backend=site.settings.backend,
            )
        plan: SparsePlan = self.plans[key]
        return plan


def begun(site: Site, layer: PagedLatentLayer, grid: tuple[int, int], mask: Tensor | None) -> Step:
    """The step that runs, begun here if this layer is the first to need it; see `begin`."""
    pool = layer.pool
    if site.owns_tokens and layer.tokens == pool.tokens:
        try:
            pool.step = begin(site, pool, grid, mask)
        except InvalidInput:
            layer.settle(stored=False)
            raise
    step: Step = pool.step
    return step


def write(
    site: Site, kv_c: Tensor, k_pe: Tensor, store: KVCache, slots: Tensor, *, power_of_two: bool = False
) -> None:
    """Put rows [S, L] and [S, R], latents or index keys of this layer, into slots [S] of their pages."""
    widths = store.kv_lora_rank, store.qk_rope_head_dim
    asked = problems.write(kv_c.dtype, store.format.name, *widths, store.block_size)
    backend = site.settings.asked(asked)
    write_cache(kv_c, k_pe, store, slots, power_of_two=power_of_two, backend=backend)


def scratch(site: Site, like: Tensor) -> PagePool:
    """Pages for a forward without a cache: of this layer only, and unquantised."""
    kv_format = canonical_name(str(like.dtype))
    return PagePool(kv_format=kv_format, block_size=site.settings.block_size, device=like.device)


def begin(site: Site, pool: PagePool, grid: tuple[int, int], mask: Tensor | None) -> Step:
    """Give the tokens of a forward pass their pages, or refuse it with the cache as it was.

    Args:
        site: The layer that asks first.
        pool: Of the cache.
        grid: (B, q), the new tokens.
        mask: What transformers hands on: None (causal), or [B or 1, H or 1, q, kv], bool or additive; or
            [B, q] bool, which new tokens are not hidden.

    Returns:
        The step.

    Raises:
        InvalidInput: the mask is not causal but for hidden tokens, contradicts earlier steps, or has a gap
            where we make pools; or no page is free.
    """
    num_seqs, num_tokens = grid
    reasons = Reasons("attention")
    reasons.found.extend(pool.refusals(num_seqs, num_tokens))
    if mask is None:
        kept, blank = torch.ones(grid, dtype=torch.bool), None
        missing = None if pool.kept is None else (~pool.kept).nonzero()
        if missing is not None and missing.numel() and not reasons.found:
            _note_contradiction(reasons, *missing[0].tolist(), hides=False)
    elif mask.dim() == 2:
        kept = mask.bool().cpu()
        blank = ~kept
    else:
        kept, blank = _read_mask(reasons, mask, pool, grid)
    reasons.raise_if_any()
    gap = _gap(pool, kept)
    got = f"hidden tokens between seen ones in sequence {gap}"
    needs = "them at either end, as a pool is of tokens in a row; or attach(model, index_format=None)"
    reasons.need(gap is None or not (site.scores and site.pool_size), "attention_mask", got, needs)
    reasons.raise_if_any()
    starts = pool.lengths or [0] * num_seqs
    slots = pool.append(kept)
    step = _step(pool, kept, blank, starts, slots)
    step.has_gap = gap is not None
    return step


def _gap(pool: PagePool, kept: Tensor) -> int | None:
    """A sequence that has a hidden token between stored ones, with the new tokens [B, q], or None."""
    if pool.kept is None and bool(kept.all()):
        return None
    every = torch.cat((pool.kept_so_far(), kept), 1) if pool.tokens else kept
    runs = (every[:, 1:] & ~every[:, :-1]).sum(1) + every[:, 0]
    found = (runs > 1).nonzero()
    return int(found[0]) if found.numel() else None


def _step(pool: PagePool, kept: Tensor, blank: Tensor | None, starts: Sequence[int], slots: Tensor) -> Step:
    grid, device = (kept.shape[0], kept.shape[1]), pool.device
    table = pool.block_table().to(device)
    whole = bool(kept.all())
    q_lens = kept.sum(1)
    ends = torch.tensor(pool.lengths, dtype=torch.int32)
    indptr = torch.zeros(grid[0] + 1, dtype=torch.int32)
    indptr[1:] = q_lens.cumsum(0)
    batch = hidden = hidden_rows = None
    if slots.numel():
        batch = Batch.of(
            seq_lens=ends.to(device),
            block_table=table,
            qo_indptr=indptr.to(device),
            block_size=pool.block_size,
            seq_lens_host=ends.tolist(),
            qo_indptr_host=indptr.tolist(),
        )
    if not whole and blank is not None:
        seen = torch.tensor(starts)[:, None] + kept.cumsum(1)
        apart = (~kept & ~blank & (seen > 0)).nonzero()
        if apart.numel():
            hidden_rows = (apart[:, 0] * grid[1] + apart[:, 1]).to(device)
            lengths = seen[apart[:, 0], apart[:, 1]].to(torch.int32)
            hidden = Batch.of(
                seq_lens=lengths.to(device),
                block_table=pool.block_table(apart[:, 0].tolist()).to(device),
                block_size=pool.block_size,
                seq_lens_host=lengths.tolist(),
            )
    rows = None if whole else kept.flatten().nonzero().flatten().to(device)
    places = positions = None
    if pool.kept is not None:
        places = torch.where(pool.kept, pool.kept.cumsum(1) - 1, -1).to(device)
        positions = (~pool.kept).to(torch.uint8).argsort(dim=1, stable=True).to(device)
    places_of = places, positions
    return Step(grid, rows, slots.to(device), batch, hidden_rows, hidden, table, pool.tokens, *places_of)


def _read_mask(
    reasons: Reasons, mask: Tensor, pool: PagePool, grid: tuple[int, int]
) -> tuple[Tensor, Tensor | None]:
    """[B, q] bool each, on the host: which new tokens are stored, and which rows see nothing."""
    num_seqs, num_tokens = grid
    before, total = pool.tokens, pool.tokens + num_tokens
    kept, nothing = torch.ones(grid, dtype=torch.bool), None
    shape = tuple(mask.shape)
    fits = len(shape) == 4 and shape[0] in (1, num_seqs) and shape[2] == num_tokens and shape[3] >= total
    wanted = f"({num_seqs}, 1, {num_tokens}, at least {total})"
    if not reasons.need(fits, "attention_mask", f"shape {shape}", wanted) or reasons.found:
        return kept, nothing
    visible = torch.zeros(shape[0], shape[3], dtype=torch.bool, device=mask.device)
    blanks = []
    for part in torch.split(mask, _MASK_ROWS, dim=2):
        allowed = _as_bool(reasons, part)
        if allowed is None:
            return kept, nothing
        visible |= allowed.any(1)
        blanks.append(~allowed.any(2))
    # A key that any row sees is one that the mask keeps, for under a causal mask its own row sees it.
    blank = torch.cat(blanks, dim=1)
    positions = torch.arange(shape[3], device=mask.device)
    row = before
    for part in torch.split(mask, _MASK_ROWS, dim=2):
        allowed = _as_bool(reasons, part)
        assert allowed is not None
        size = allowed.shape[1]
        rows = torch.arange(row, row + size, device=mask.device)
        expected = visible[:, None, :] & (positions[None, :] <= rows[:, None])
        same = (allowed == expected).all(2) | (
            blank[:, row - before : row - before + size] & ~visible[:, rows]
        )
        if not bool(same.all()):
            b, i = (~same).nonzero()[0].tolist()
            needs = (
                "every earlier key that the mask keeps and no later one: causal attention with hidden tokens"
            )
            reasons.need(False, "attention_mask", f"row {row - before + i} of sequence {b}", needs)
            return kept, nothing
        row += size
    visible, blank = (t.expand(num_seqs, -1).cpu() for t in (visible, blank))
    if before:
        # A sequence whose rows are all blank says nothing about its earlier tokens.
        silent = blank.all(1, keepdim=True)
        _check_stored(reasons, torch.where(silent, pool.kept_so_far(), visible[:, :before]), pool)
    return visible[:, before:total], blank


def _as_bool(reasons: Reasons, part: Tensor) -> Tensor | None:
    """[B, rows, kv] bool of mask rows that are the same for every head, or None if they are not a mask."""
    head = part[:, 0]
    if part.shape[1] > 1 and not bool((part == part[:, :1]).all()):
        reasons.need(False, "attention_mask", "rows that differ by head", "the same rows for every head")
        return None
    if head.dtype == torch.bool:
        return head
    allowed = head == 0
    if not head.is_floating_point() or not bool((allowed | (head <= torch.finfo(head.dtype).min)).all()):
        needs = "bool, or additive with 0 where a key is seen and the least number or -inf where not"
        reasons.need(False, "attention_mask", f"{head.dtype} with other values", needs)
        return None
    return allowed


def _check_stored(reasons: Reasons, visible: Tensor, pool: PagePool) -> None:
    """Note a mask that changes its mind about tokens of earlier steps."""
    if pool.kept is None and bool(visible.all()):
        return
    wrong = (visible != pool.kept_so_far()).nonzero()
    if wrong.numel():
        b, position = wrong[0].tolist()
        _note_contradiction(reasons, b, position, hides=not bool(visible[b, position]))


def _note_contradiction(reasons: Reasons, b: int, position: int, *, hides: bool) -> None:
    got = f"token {position} of sequence {b} {'hidden' if hides else 'seen'}"
    needs = f"it {'seen' if hides else 'hidden'}, as in the step that {'stored' if hides else 'skipped'} it"
    reasons.need(False, "attention_mask", got, needs)


def _facts(site: Site, query: Tensor) -> tuple[object, ...]:
    widths = site.kv_lora_rank, site.qk_rope_head_dim, site.qk_nope_head_dim, site.v_head_dim
    return (*widths, query.shape[1], query.dtype, site.has_sinks)
