"""Pages as bookkeeping: whatever is appended, taken back, shared or selected, sequences keep their tokens."""

import random
from itertools import count

import pytest
import torch

pytest.importorskip("transformers")

from hosting import make_pages_hostile

from anymla.errors import InvalidInput
from anymla.integrations.transformers.pages import PagePool


@pytest.fixture(autouse=True)
def hostile_pages(monkeypatch):
    make_pages_hostile(monkeypatch)


class Twin:
    """A pool beside what it must hold: for each sequence, one number a token, None where it is hidden."""

    def __init__(self, block_size: int, num_seqs: int) -> None:
        self.pool = PagePool(kv_format="fp32", block_size=block_size, device=torch.device("cpu"))
        self.sequences: list[list[int | None]] = [[] for _ in range(num_seqs)]
        self.numbers = count(1)

    def append(self, kept: list[list[bool]]) -> None:
        slots = self.pool.append(torch.tensor(kept))
        fresh = []
        for sequence, row in zip(self.sequences, kept, strict=True):
            tokens = [next(self.numbers) if keep else None for keep in row]
            sequence += tokens
            fresh += [token for token in tokens if token is not None]
        values = torch.tensor(fresh, dtype=torch.float32)[:, None]
        self.pool.store(0, values, values[:, :0]).write(values, values[:, :0], slots)

    def crop(self, tokens: int) -> None:
        self.pool.crop(tokens)
        self.sequences = [sequence[: len(sequence) - tokens] for sequence in self.sequences]

    def select(self, rows: list[int]) -> None:
        self.pool.select(rows)
        self.sequences = [list(self.sequences[row]) for row in rows]

    def check(self) -> None:
        pool, size = self.pool, self.pool.block_size
        assert pool.tokens == len(self.sequences[0])
        for table, length, sequence in zip(pool.tables, pool.lengths, self.sequences, strict=True):
            positions = torch.arange(length)
            slots = torch.tensor(table, dtype=torch.int64)[positions // size] * size + positions % size
            stored = pool.stores[0].read(slots)[:, 0].tolist() if length else []
            assert stored == [token for token in sequence if token is not None]
        used = {page for table in pool.tables for page in table}
        assert sorted([*used, *pool._free]) == list(range(pool.num_blocks)), (
            "a page was lost, or is used while free"
        )
        assert pool.kept_so_far().tolist() == [[token is not None for token in s] for s in self.sequences]


@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_keeps_its_own_tokens_through_any_operations(block_size, seed):
    draw = random.Random(seed)
    twin = Twin(block_size, num_seqs=draw.randint(1, 4))
    padding = seed % 2
    for _ in range(60):
        length, sequences = twin.pool.tokens, len(twin.sequences)
        operation = draw.choice(["append", "append", "append", "crop", "select"])
        if operation == "append" or not length:
            new = draw.randint(1, 6)
            twin.append([[draw.random() > 0.3 * padding for _ in range(new)] for _ in range(sequences)])
        elif operation == "crop":
            twin.crop(draw.randint(0, min(length, 9)))
        else:
            twin.select([draw.randrange(sequences) for _ in range(draw.randint(1, 5))])
        twin.check()


def test_a_full_pool_of_fixed_size_refuses_and_keeps_what_it_has():
    pool = PagePool(kv_format="fp32", block_size=2, device=torch.device("cpu"), num_blocks=3)
    pool.append(torch.ones(1, 5, dtype=torch.bool))
    tables = [list(table) for table in pool.tables]
    with pytest.raises(InvalidInput, match="num_blocks got 3; needs at least 5"):
        pool.append(torch.ones(1, 5, dtype=torch.bool))
    assert (pool.tables, pool.lengths, pool.tokens) == (tables, [5], 5)
    pool.append(torch.ones(1, 1, dtype=torch.bool))


def test_a_pool_that_grows_doubles_so_that_long_generations_copy_little():
    pool = PagePool(kv_format="fp32", block_size=1, device=torch.device("cpu"))
    sizes = set()
    for _ in range(200):
        pool.append(torch.ones(1, 1, dtype=torch.bool))
        sizes.add(pool.num_blocks)
    assert len(sizes) <= 8
