"""What stands between an indexer and sparse attention: slots of chosen tokens, queries in fp8."""

import pytest
import torch

from anymla.errors import InvalidInput
from anymla.indices import compacted, quantise_queries, to_slots
from anymla.kv_cache import KVCache


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
        ((ints([[0], [0]]), TABLE, None, None), "block_size got None; needs an integer, at least 1"),
        ((ints([[0], [0]]), TABLE, None, 16.0), "block_size got 16.0; needs an integer, at least 1"),
        ((ints([[0], [0]]), TABLE, ints([0, 2, 1]), 4), "qo_indptr got 1 after 2 at 2; needs values that do"),
        ((ints([[0], [0]]), TABLE, ints([1, 1, 2]), 4), "qo_indptr got first value 1; needs 0"),
        ((ints([[0], [0]]), TABLE, ints([0, 1, 3]), 4), "qo_indptr got last value 3; needs at most 2"),
        (
            (ints([[0]] * 3), TABLE, None, 4),
            r"indices got shape \(3, 1\); needs \(2, any\), B from block_table",
        ),
    ],
    ids=[
        "past the table",
        "-2",
        "negative page",
        "int32",
        "rows",
        "indptr",
        "block size",
        "dtypes",
        "no block size",
        "block size of halves",
        "indptr decreases",
        "indptr does not start at 0",
        "indptr past the rows",
        "rows without a sequence",
    ],
)
def test_what_names_no_slot_is_refused(arguments, reason):
    with pytest.raises(InvalidInput, match=reason):
        to_slots(*arguments)


def test_no_value_of_a_device_tensor_is_looked_at():
    got = to_slots(ints([[0, 99]]).to("meta"), TABLE[:1].to("meta"), None, 4)
    assert got.shape == (1, 2) and got.dtype == torch.int32


def test_keys_are_moved_to_the_front_in_order_and_counted():
    indices, counts = compacted(ints([[-1, 7, -1, 3], [-1, -1, -1, -1], [2, 0, 1, 5]]))
    assert indices.tolist() == [[7, 3, -1, -1], [-1, -1, -1, -1], [2, 0, 1, 5]]
    assert counts.tolist() == [2, 0, 4] and counts.dtype == indices.dtype == torch.int32
    assert [t.shape for t in compacted(ints([]).view(0, 4))] == [(0, 4), (0,)]


@pytest.mark.parametrize(
    ("indices", "reason"),
    [
        (ints([[[7, -1]]]), r"indices got shape \(1, 1, 2\); needs \(any, any\)"),
        (ints([7, -1]), r"indices got shape \(2,\); needs \(any, any\)"),
        (ints([[7, -1]]).long(), "indices got dtype int64; needs int32"),
        ([[7, -1]], "indices got list; needs a torch.Tensor"),
    ],
    ids=["three axes", "one axis", "dtype", "a list"],
)
def test_what_has_no_rows_of_indices_is_not_compacted(indices, reason):
    with pytest.raises(InvalidInput, match=reason):
        compacted(indices)


class TestQuantisedQueries:
    q = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = torch.tensor([1.0, -2.0, 0.5]).expand(5, 3)

    @pytest.mark.parametrize("kv_format", ["index_k", "index_k_fnuz", "fp8_e4m3fn"])
    @pytest.mark.parametrize("power_of_two", [False, True])
    def test_a_weight_has_the_scale_of_its_query(self, kv_format, power_of_two):
        codes, weights = quantise_queries(
            self.q, self.weights, kv_format=kv_format, power_of_two=power_of_two
        )
        scales = weights / self.weights
        assert codes.dtype == (torch.float8_e4m3fnuz if "fnuz" in kv_format else torch.float8_e4m3fn)
        assert bool((scales > 0).all())
        assert not power_of_two or bool((scales.log2() % 1 == 0).all())
        largest = torch.finfo(codes.dtype).max
        error = (codes.float() * scales[..., None] - self.q.float()).abs()
        assert bool((error <= self.q.float().abs() / 16 + scales[..., None] * 2**-9).all())
        assert bool((codes.float().abs().amax(-1) >= largest / (2.1 if power_of_two else 1)).all())

    def test_scales_are_those_that_a_cache_stores(self):
        cache = KVCache.allocate(1, 5, kv_lora_rank=64, qk_rope_head_dim=0, kv_format="index_k")
        cache.write(self.q[:, 0], self.q[:, 0, :0], torch.arange(5), power_of_two=True)
        codes, weights = quantise_queries(
            self.q[:, :1], torch.ones(5, 1), kv_format="index_k", power_of_two=True
        )
        assert torch.equal(cache.read(torch.arange(5)), codes[:, 0].float() * weights)

    def test_a_format_without_fp8_and_other_shapes_are_refused(self):
        with pytest.raises(InvalidInput, match="kv_format got bf16; needs a format with fp8 values"):
            quantise_queries(self.q, self.weights, kv_format="bf16")
        with pytest.raises(InvalidInput, match=r"weights got shape \(2, 3\); needs \(5, 3\)"):
            quantise_queries(self.q, self.weights[:2], kv_format="index_k")
        with pytest.raises(InvalidInput, match=r"q got shape \(5, 3, 0\); needs D of at least 1"):
            quantise_queries(self.q[..., :0], self.weights, kv_format="index_k")
        with pytest.raises(InvalidInput, match="power_of_two got None; needs True or False"):
            quantise_queries(self.q, self.weights, kv_format="index_k", power_of_two=None)
