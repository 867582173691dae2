"""Work shared out to processes: on a GPU, a case takes longer to compile than to run."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def shared_out(
    work: Callable[[Item], Result],
    items: Sequence[Sequence[Item]],
    processes: int,
    lost: Callable[[Item, str], Result],
) -> Iterator[Result]:
    """Do all work, in the order in which it gets done.

    Args:
        work: A function of a module, for processes that import it anew.
        items: Groups of items; those of a group are done by one process, one after another.
        processes: How many; with 1, all is done in this one.
        lost: The result of an item whose process died, and why.

    Yields:
        One result for each item.
    """
    if processes <= 1:
        for group in items:
            yield from map(work, group)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _one_thread) as pool:
        left: dict[Future[list[Result]], Sequence[Item]] = {
            pool.submit(_done, work, group): group for group in items
        }
        while left:
            for future in wait(left, return_when=FIRST_COMPLETED).done:
                group = left.pop(future)
                try:
                    yield from future.result()
                except BrokenProcessPool as death:
                    yield from (lost(item, f"its process, or one beside it, died: {death}") for item in group)


def _done(work: Callable[[Item], Result], group: Sequence[Item]) -> list[Result]:
    import torch

    results = [work(item) for item in group]
    # Other processes need the memory of the device as well.
    torch.cuda.empty_cache()
    return results


def _one_thread() -> None:
    """Processes that each take every core would wait for one another."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
