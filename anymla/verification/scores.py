"""Scores that are hard to choose the largest of: ties of all kinds, no numbers, the largest side by side."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from anymla.contract import Batch, IndexArgs
from anymla.hardware.probe import Machine
from anymla.problem import Problem
from anymla.verification.judge import Judgement, wrong


def hard_scores(width: int, block: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of scores, and how many of each there are.

    Args:
        width: Scores of a row.
        block: Of which a kernel may look at the largest alone: scores so far apart meet in one place.
        seed: Of what is drawn.

    Returns:
        [rows, width] fp32 and [rows] int32, the last rows shorter.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(6, width, generator=generator)
    token = torch.arange(width)
    every, third = torch.ones(width), token % 3
    rows = [
        normal[0],
        normal[1].round(),
        0.0 * every,
        torch.where(token % 2 == 0, -0.0, 0.0),
        # What relu leaves, and the same with weights below 0.
        normal[2].relu(),
        -normal[2].relu(),
        every,
        torch.inf * every,
        -torch.inf * every,
        torch.nan * every,
        torch.where(third == 0, torch.nan, torch.where(third == 1, -torch.inf, normal[3])),
        torch.where(third == 0, torch.inf, torch.where(third == 1, -torch.inf, torch.nan)),
        torch.where(token % 2 == 0, torch.nan, normal[3]),
        torch.where(token // max(width // 16, 1) == 1, 1.0, torch.nan),
        torch.where(token < width // 3, torch.nan, -torch.inf),
        torch.where(token % 7 == 5, -3e38, -torch.inf),
        normal[4].sort().values,
        normal[4].sort(descending=True).values,
        token.float(),
        -token.float(),
        normal[0] * 1e-42,
        normal[1].exp() * 1e30,
        torch.where(token < width // 8, normal[2], -1e9),
        normal[3] + 100 * (token % block < block // 14),
        normal[5] + 50 * (token % (block // 2) < block // 28),
    ]
    shorter = [(normal[5], max(width - 37, 0)), (every, width // 2 + 1), (normal[1].round(), width // 2)]
    shorter += [(normal[0], 700), (every, 1), (torch.nan * every, 9), (every, 0)]
    scores = torch.stack(rows + [row for row, _ in shorter])
    counts = [width] * len(rows) + [min(count, width) for _, count in shorter]
    return scores, torch.tensor(counts, dtype=torch.int32)


def right_choice(scores: Tensor, counts: Tensor, topk: int) -> Tensor:
    """The `topk` largest of each row's first scores, of equal ones the earlier, NaN last.

    [rows, topk] in order of tokens, -1 before the first.
    """
    token = torch.arange(scores.shape[1], device=scores.device)
    kind = scores.isnan().int() + 2 * (token >= counts[:, None]).int()
    value = scores.double().masked_fill(kind > 0, -torch.inf)
    order = value.sort(descending=True, stable=True).indices
    order = order.gather(1, kind.gather(1, order).sort(stable=True).indices)[:, :topk]
    return order.masked_fill(kind.gather(1, order) > 1, -1).sort().values.int()


def judged_choice(
    module: ModuleType, machine: Machine, device: torch.device, width: int, topk: int
) -> Judgement:
    """Choose from hard scores, of blocks of 4096 and of 8192, by `index_choice` of a module of kernels."""
    drawn = [hard_scores(width, block, block) for block in (4096, 8192)]
    scores, counts = (torch.cat(parts).to(device) for parts in zip(*drawn, strict=True))
    args, state = planned_choice(module, machine, scores, counts, topk)
    module.index_choice(args, state)
    off = (args.indices.sort().values != right_choice(scores, counts, topk)).any(1).nonzero()
    rows = off.flatten().tolist()
    return wrong(f"rows {rows} of hard scores got others than the largest") if rows else Judgement(0.0, "ids")


def planned_choice(
    module: ModuleType, machine: Machine, scores: Tensor, counts: Tensor, topk: int
) -> tuple[IndexArgs, Any]:
    """What `index_choice` of a module of kernels takes, its logits these scores; indices are full of -7."""
    rows, width = scores.shape
    batch = Batch.of(
        seq_lens=counts,
        block_table=torch.zeros((rows, width), dtype=torch.int32, device=scores.device),
        max_seq_len=width,
    )
    problem = Problem("index_topk", "bf16", "bf16", 1, 64, 0, topk=topk)
    state = module.plan_index_topk(batch, problem, machine, {})
    state.logits[:, :width] = scores
    indices = torch.full((rows, topk), -7, dtype=torch.int32, device=scores.device)
    # Neither queries nor a cache are read.
    unread: Any = None
    return IndexArgs(scores, scores, unread, topk, indices), state
