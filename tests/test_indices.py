"""Token ids of a sequence become slots of the cache."""

import pytest
import torch

from anymla.errors import InvalidInput
from anymla.indices import to_slots


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = ints([[7, 2, 10**8], [5, 0, 3]])


def test_a_slot_is_page_times_block_size_plus_offset():
    got = to_slots(ints([[0, 63, 64, 127], [128, 1, 65, 191]]), TABLE, None, 64)
    assert got.dtype == torch.int32
    assert got.tolist() == [[448, 511, 128, 191], [192, 321, 1, 255]]


def test_minus_one_stays_minus_one_and_is_not_slot_zero():
    assert to_slots(ints([[-1, 0], [-1, -1]]), TABLE, None, 4).tolist() == [[-1, 28], [-1, -1]]


def test_each_row_uses_the_pages_of_its_sequence():
    got = to_slots(ints([[0], [0], [0], [0]]), ints([[7], [9], [5]]), ints([0, 3, 3, 4]), 2)
    assert got.flatten().tolist() == [14, 14, 14, 10]


def test_rows_past_the_last_sequence_have_no_keys():
    assert to_slots(ints([[0], [1], [2]]), TABLE, ints([0, 1, 2]), 4).flatten().tolist() == [28, 21, -1]


def test_duplicates_are_kept():
    assert to_slots(ints([[1, 1, 1], [0, 2, 0]]), TABLE, None, 4).tolist() == [[29, 29, 29], [20, 22, 20]]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=str)
def test_nothing_gives_nothing(shape):
    indptr = ints([0, shape[0], shape[0]])
    assert to_slots(torch.zeros(shape, dtype=torch.int32), TABLE, indptr, 4).shape == shape


@pytest.mark.parametrize("table", [torch.zeros(0, 3), torch.zeros(2, 0)], ids=["no sequences", "no pages"])
def test_without_pages_there_are_no_keys(table):
    table = table.int()
    indptr = torch.zeros(table.shape[0] + 1, dtype=torch.int32)
    assert to_slots(ints([[-1, -1]]), table, indptr, 4).tolist() == [[-1, -1]]


def test_strided_tables_and_indices_are_read_in_place():
    table = TABLE.repeat_interleave(2, 1)[:, ::2]
    indices = ints([[0, 9], [5, 9]])[:, :1]
    assert to_slots(indices, table, None, 4).flatten().tolist() == [28, 1]


def test_slots_up_to_the_end_of_int32_are_exact():
    assert to_slots(ints([[127]]), ints([[2**24 - 1]]), None, 128).item() == 2**31 - 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            (ints([[12], [0]]), TABLE, None, 4),
            r"indices got 12 for indices\[0, 0\]; needs -1 \(no key\) or a token id below 12",
        ),
        ((ints([[0], [-2]]), TABLE, None, 4), r"indices got -2 for indices\[1, 0\]; needs -1 \(no key\)"),
        (
            (ints([[0]]), ints([[-3]]), None, 4),
            r"block_table got -3 for indices\[0, 0\]; needs the page of a token that is named",
        ),
        (
            (ints([[0]]), ints([[2**24]]), None, 128),
            r"slots got 2147483648 for indices\[0, 0\]; needs at most 2147483647",
        ),
        (
            (ints([[0]]), TABLE, None, 4),
            r"indices got shape \(1, 1\); needs \(2, any\), B from block_table: no qo_indptr",
        ),
        (
            (ints([[0]]), TABLE, ints([0, 1]), 4),
            r"qo_indptr got shape \(2,\); needs \(3,\), B \+ 1 from block_table",
        ),
        ((ints([[0], [0]]), TABLE, None, 0), "block_size got 0; needs at least 1"),
        (
            (ints([[0], [0]]).long(), TABLE.float(), None, 4),
            "indices got dtype int64.*block_table got dtype float32",
        ),
    ],
    ids=["past the table", "-2", "negative page", "int32", "rows", "indptr", "block size", "dtypes"],
)
def test_what_names_no_slot_is_refused(arguments, reason):
    with pytest.raises(InvalidInput, match=reason):
        to_slots(*arguments)


def test_no_value_of_a_device_tensor_is_looked_at():
    got = to_slots(ints([[0, 99]]).to("meta"), TABLE[:1].to("meta"), None, 4)
    assert got.shape == (1, 2) and got.dtype == torch.int32
