"""AITER's indexer and cache writers, shuffled and not, behind the operations that ours serve."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from double_index import IndexDouble
from double_stages import Aborted
from torch import Tensor

from anymla import api, plans, reference, select
from anymla.backends.aiter_mla import cache_write, facts, index, manifest
from anymla.contract import Batch, IndexArgs
from anymla.errors import InvalidInput, NoBackend
from anymla.hardware.probe import Machine
from anymla.hardware.quirks import QUIRKS, Quirk
from anymla.indices import quantise_queries
from anymla.kv_cache import KVCache, convert
from anymla.problem import Problem
from anymla.verification import eager
from anymla.verification.cases import Case, cases
from anymla.verification.checks import check_case
from anymla.verification.judge import judge_topk, judge_written

CHIPS = ("gfx942", "gfx950")
LENGTHS = {
    "one token each": ((300, 1, 0, 17), (1, 1, 1, 1)),
    "ragged tokens": ((300, 9, 33), (3, 0, 4)),
    "fewer keys than tokens": ((2, 40), (3, 2)),
    "empty": ((0, 0), (2, 1)),
}
"""Keys and query tokens of each sequence."""


def machine(arch: str = "gfx942", release: str = "HEAD") -> Machine:
    """A chip with a release."""
    packages = (("aiter", release), ("torch", ""), ("triton", ""))
    return Machine(arch, packages, assumed=True, multiprocessors=64)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., IndexDouble]]:
    """Make this process a chip with a release of AITER."""

    def place(arch: str, release: str = "HEAD") -> IndexDouble:
        where = machine(arch, release)
        monkeypatch.setattr(plans, "machine_of", lambda device: where)
        monkeypatch.setattr(cache_write, "this_machine", lambda device: where)
        cache_write._call.cache_clear()
        return IndexDouble(release, arch).install(monkeypatch)

    yield place
    cache_write._call.cache_clear()


def format_of(arch: str, shuffled: bool) -> str:
    """The format of index keys that a chip's AITER reads."""
    return "index_k" + "_shuffled" * shuffled + "_fnuz" * (arch == "gfx942")


def exact_keys(total: int, arch: str) -> Tensor:
    """Small whole numbers with a largest one that makes each scale a power of two."""
    keys = torch.randint(-2, 3, (total, 128)).float()
    keys[:, 0] = 7.5 if arch == "gfx942" else 7.0
    return keys


def call_of(arch: str, lens: tuple[int, ...], q_lens: tuple[int, ...], size: int, shuffled: bool, heads: int):
    """Queries, weights, a cache written by torch whose dead slots are NaN, and the options of a top-k."""
    torch.manual_seed(5)
    tokens, pages = sum(q_lens) + 1, [-(-n // size) for n in lens]
    blocks = sum(pages) + 2
    form = format_of(arch, shuffled)
    cache = KVCache.allocate(blocks, size, kv_lora_rank=128, qk_rope_head_dim=0, kv_format=form)
    # 0x80 is NaN in e4m3fnuz, 0x7F in e4m3fn; as a scale either is a number.
    cache.data.fill_(0x80 if arch == "gfx942" else 0x7F)
    ids = torch.randperm(blocks).int().tolist()
    table = torch.full((len(lens), max(pages) + 2), -7, dtype=torch.int32)
    for row, (n, count) in enumerate(zip(lens, pages, strict=True)):
        table[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
        key = torch.arange(n)
        cache.write(
            exact_keys(n, arch), torch.zeros(n, 0), table[row, key // size].long() * size + key % size
        )
    q = torch.randint(-2, 3, (tokens, heads, 128)).float()
    # A largest value of 1 or 7 halves keeps the scales of queries exact too.
    q[..., 0] = 3.75 if arch == "gfx942" else 3.5
    weights = torch.randint(-4, 5, (tokens, heads)).float() / 4
    q8, weights = quantise_queries(q, weights, kv_format=form)
    options = {
        "block_table": table,
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "qo_indptr": torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
    }
    return (q8, weights, cache), options


def require_right(tensors: tuple, options: dict[str, Tensor], topk: int) -> None:
    """Choose by AITER, and judge what was chosen."""
    got = api.index_topk(*tensors, **options, topk=topk, backend="aiter")
    judge_topk(
        got,
        reference.index_topk(*tensors, **options, topk=topk),
        reference.index_logits(*tensors, **options),
        eager.index_logits(*tensors, **options),
    ).require_pass()


PAGES = {"of one token": (1, False), "of several": (64, False), "shuffled": (64, True)}


@pytest.mark.parametrize(("size", "shuffled"), PAGES.values(), ids=PAGES)
@pytest.mark.parametrize(("lens", "q_lens"), LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("arch", CHIPS)
def test_any_step_is_right(here, arch: str, lens, q_lens, size: int, shuffled: bool) -> None:
    double = here(arch)
    require_right(*call_of(arch, lens, q_lens, size, shuffled, 32), topk=20)
    wanted = "deepgemm_fp8_paged_mqa_logits" + "_stage1" * (size > 1 and not shuffled)
    assert set(double.launched) == {wanted}


@pytest.mark.parametrize("heads", [1, 8, 31, 32, 33, 64])
@pytest.mark.parametrize(("size", "shuffled"), PAGES.values(), ids=PAGES)
def test_any_number_of_heads_is_right(here, heads: int, size: int, shuffled: bool) -> None:
    here("gfx942")
    require_right(*call_of("gfx942", (70, 3), (2, 1), size, shuffled, heads), topk=5)


@pytest.mark.parametrize("size", [16, 32, 128, 256])
def test_shuffled_pages_of_any_size_are_right(here, size: int) -> None:
    here("gfx950")
    require_right(*call_of("gfx950", (270, 5), (1, 2), size, True, 64), topk=40)


@pytest.mark.parametrize("release", ["0.1.10.post1", "0.1.16.post2", "0.1.19.post2", "0.1.20.post1"])
@pytest.mark.parametrize(("size", "shuffled"), PAGES.values(), ids=PAGES)
def test_a_release_is_right_or_refused(here, release: str, size: int, shuffled: bool) -> None:
    here("gfx942", release)
    tensors, options = call_of("gfx942", (70, 3), (1, 1), size, shuffled, 32)
    if size > 1 and not shuffled and release < "0.1.20":
        with pytest.raises(NoBackend, match="reads pages of one token, or shuffled keys"):
            require_right(tensors, options, topk=5)
    else:
        require_right(tensors, options, topk=5)


def test_a_sample_of_all_releases_chips_heads_and_lengths_is_right_or_refused(here) -> None:
    rng, outcomes = random.Random(2), Counter[str]()
    for _ in range(100):
        release, arch = rng.choice(facts.releases()), rng.choice(CHIPS)
        size, shuffled = rng.choice(
            ((1, False), (16, True), (64, True), (256, True), (3, False), (64, False))
        )
        lens = tuple(rng.choice((0, 1, 15, 64, 257)) for _ in range(rng.randrange(1, 4)))
        q_lens = tuple(rng.choice((0, 1, 2, 5)) for _ in lens)
        here(arch, release)
        tensors, options = call_of(arch, lens, q_lens, size, shuffled, rng.choice((4, 16, 32, 64)))
        try:
            require_right(tensors, options, topk=rng.choice((1, 7, 300)))
        except NoBackend as refusal:
            assert any(reason for reason in refusal.verdicts[0].reasons)
            outcomes["refused"] += 1
        else:
            outcomes["right"] += 1
    assert outcomes["right"] > 30 and outcomes["refused"] > 15


def test_rows_are_scored_in_parts_that_fit_into_memory(here, monkeypatch: pytest.MonkeyPatch) -> None:
    double = here("gfx942")
    monkeypatch.setattr(index, "LOGITS_BYTES", 3 * 512 * 4)
    require_right(*call_of("gfx942", (300, 20), (5, 4), 1, False, 32), topk=7)
    assert len(double.launched) == 4


def test_more_wanted_than_there_are_keys(here) -> None:
    here("gfx942")
    tensors, options = call_of("gfx942", (3, 0), (1, 1), 1, False, 32)
    got = api.index_topk(*tensors, **options, topk=300, backend="aiter")
    assert sorted(got[0, :3].tolist()) == [0, 1, 2] and (got[0, 3:] == -1).all() and (got[1:] == -1).all()


def test_the_largest_are_chosen_with_ties_and_without_numbers() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[0.0, -0.0, 1.0, nan, -inf, 1.0], [nan, nan, 9.0, 9.0, 9.0, 9.0]])
    chosen = torch.empty(2, 4, dtype=torch.int32)
    index.write_largest(logits, torch.tensor([6, 2], dtype=torch.int32), chosen)
    assert chosen.tolist() == [[2, 5, 0, 1], [0, 1, -1, -1]]
    wide = torch.empty(2, 8, dtype=torch.int32)
    index.write_largest(logits, torch.tensor([6, 0], dtype=torch.int32), wide)
    assert wide.tolist() == [[2, 5, 0, 1, 4, 3, -1, -1], [-1] * 8]


def test_a_cache_beyond_its_offsets_is_refused_before_a_launch(here) -> None:
    double = here("gfx942")
    tensors, options = call_of("gfx942", (3,), (1,), 1, False, 32)
    huge = torch.empty(1 << 24, 1, 132, dtype=torch.uint8, device="meta")
    knobs = select.choose(problem("index_topk"), machine()).knobs
    args = IndexArgs(*tensors[:2], replace(tensors[2], data=huge), 4, torch.empty(2, 4, dtype=torch.int32))
    batch = Batch.of(**options, num_tokens=2, block_size=1)
    state = index.plan_index_topk(batch, problem("index_topk"), machine(), knobs)
    with pytest.raises(InvalidInput, match="index_cache got 2214592512 bytes; needs at most 2147483648"):
        index.index_topk(args, state)
    assert not double.launched


def problem(op: str, **changed: object) -> Problem:
    """What the indexer of a model of 32 heads asks of gfx942."""
    q = "fp8_e4m3fnuz" if op == "index_topk" else "bf16"
    asked = Problem(op, q, "index_k_fnuz", 32 if op == "index_topk" else 1, 128, 0)
    return replace(asked, topk=16 if op == "index_topk" else 0, **changed)


@pytest.mark.parametrize("arch", CHIPS)
def test_every_hostile_case_is_right_where_live_keys_are_numbers(
    here, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(arch)
    made = Case.inputs

    def with_finite_keys(self, device="cpu"):
        call = made(self, device)
        (_, _, cache), size = call.tensors, call.cache.block_size
        for pages, n in zip(call.options["block_table"], call.options["seq_lens"].tolist(), strict=True):
            key = torch.arange(n)
            slots = pages.long()[key // size] * size + key % size
            rows = cache.read(slots)
            bad = rows.isnan().any(1)
            cache.write(rows[bad].nan_to_num(), torch.zeros(int(bad.sum()), 0), slots[bad])
        return call

    monkeypatch.setattr(Case, "inputs", with_finite_keys)
    where = machine(arch)
    found = [case for case in cases("aiter", where) if case.problem.op == "index_topk"]
    judged = {case.id: check_case(case, "aiter", where, torch.device("cpu")) for case in found[::2]}
    assert sum(case.check != "refusal" for case in found) > 80
    assert {name: one.reasons for name, one in judged.items() if not one.passed} == {}


# Writers


def keys_of(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Keys of mixed magnitudes."""
    return (torch.randn(count, 128) * torch.logspace(-2, 3, count)[:, None]).to(dtype)


@pytest.mark.parametrize("power_of_two", [False, True], ids=["scales", "powers of two"])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("arch", CHIPS)
def test_index_keys_are_written_right(here, arch: str, shuffled: bool, power_of_two: bool) -> None:
    double = here(arch)
    torch.manual_seed(1)
    form = format_of(arch, shuffled)
    cache = KVCache.allocate(3, 32, kv_lora_rank=128, qk_rope_head_dim=0, kv_format=form)
    keys, none, slots = keys_of(40), torch.zeros(40, 0, dtype=torch.bfloat16), torch.randperm(96)[:40]
    slots[3::7] = -1
    api.write_cache(keys, none, cache, slots, power_of_two=power_of_two, backend="aiter")
    kept = slots >= 0
    expected = reference.write_cache(keys, none, cache, slots, power_of_two=power_of_two)[kept]
    judge_written(cache.read(slots[kept], torch.float64), expected, keys[kept]).require_pass()
    unused = torch.ones(96, dtype=torch.bool)
    unused[slots[kept]] = False
    assert (cache.gather(unused.nonzero().flatten()) == 0).all()
    assert double.launched == ["indexer_k_quant_and_cache"]


def test_latents_are_written_right_and_into_pages_that_lie_apart(here) -> None:
    here("gfx942")
    whole = torch.zeros(3, 24, 600, dtype=torch.bfloat16)
    tagged = KVCache.allocate(3, 16, kv_lora_rank=512, qk_rope_head_dim=64, kv_format="bf16")
    cache = replace(tagged, data=whole[:, :16, :576])
    kv_c, k_pe, slots = (
        torch.randn(9, 512).bfloat16(),
        torch.randn(9, 128).bfloat16()[:, ::2],
        torch.randperm(48)[:9],
    )
    kv_c[0], kv_c[1], slots[4] = torch.nan, torch.inf, -1
    api.write_cache(kv_c, k_pe, cache, slots, backend="aiter")
    kept = slots >= 0
    assert torch.equal(
        cache.data.view(-1, 16, 576)[slots[kept] // 16, slots[kept] % 16].view(torch.int16),
        torch.cat((kv_c, k_pe), -1)[kept].view(torch.int16),
    )
    assert (whole[:, 16:] == 0).all() and (whole[..., 576:] == 0).all()


def test_nothing_to_write_launches_nothing(here) -> None:
    double = here("gfx950")
    cache = KVCache.allocate(1, 16, kv_lora_rank=128, qk_rope_head_dim=0, kv_format="index_k_shuffled")
    empty = torch.zeros(0, 128, dtype=torch.bfloat16)
    api.write_cache(empty, empty[:, :0], cache, torch.zeros(0, dtype=torch.int64), backend="aiter")
    assert not double.launched


def test_pages_of_index_keys_that_lie_apart_are_refused(here) -> None:
    here("gfx942")
    form = KVCache.allocate(1, 16, kv_lora_rank=128, qk_rope_head_dim=0, kv_format="index_k_fnuz")
    cache = replace(form, data=torch.zeros(4, 16, 132, dtype=torch.uint8)[::2])
    with pytest.raises(InvalidInput, match="needs pages one after another for AITER's writer"):
        api.write_cache(
            keys_of(1), torch.zeros(1, 0).bfloat16(), cache, torch.zeros(1).long(), backend="aiter"
        )


@pytest.mark.parametrize("release", ["0.1.6.post1", "0.1.12"])
def test_a_release_that_cannot_shuffle_is_refused_by_the_parameter(release: str) -> None:
    asked = problem("write_cache", kv_format="index_k_shuffled_fnuz", block_size=64)
    with pytest.raises(NoBackend, match=r"has no (indexer_k_quant_and_cache|parameter 'preshuffle')"):
        select.choose(asked, machine(release=release), "aiter")
    assert select.choose(asked, machine(release="0.1.13"), "aiter")


@pytest.mark.parametrize(("arch", "fnuz"), [("gfx942", "_fnuz"), ("gfx950", "")])
def test_auto_leaves_index_keys_to_our_own_writer_unless_only_aiter_knows_the_format(
    arch: str, fnuz: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, here = problem("write_cache", kv_format=f"index_k{fnuz}"), machine(arch)
    choice = select.choose(plain, here)
    assert choice.backend.name == "triton"
    assert "sets coarse_tiny_keys=1, so auto prefers another backend" in str(choice)
    assert select.choose(plain, here, "aiter").backend.name == "aiter"
    shuffled = replace(plain, kv_format=f"index_k_shuffled{fnuz}", block_size=64)
    assert select.choose(shuffled, here).backend.name == "aiter"
    with monkeypatch.context() as unaware:
        unaware.setattr(select, "QUIRKS", tuple(quirk for quirk in QUIRKS if not quirk.yields))
        select.explain.cache_clear(), select.choose.cache_clear()
        assert select.choose(plain, here).backend.name == "aiter"
    select.explain.cache_clear(), select.choose.cache_clear()


@pytest.mark.parametrize(("q_len", "backend"), [(8, "aiter"), (9, "triton"), (4096, "triton")])
def test_a_prefill_of_the_indexer_is_left_to_our_own_which_reads_keys_once(q_len: int, backend: str) -> None:
    assert select.choose(replace(problem("index_topk"), q_len=q_len), machine()).backend.name == backend
    shuffled = replace(problem("index_topk"), q_len=q_len, kv_format="index_k_shuffled_fnuz", block_size=64)
    assert select.choose(shuffled, machine()).backend.name == "aiter"


def test_fp8_latents_are_left_to_our_own_writer_which_keeps_nan() -> None:
    asked = Problem("write_cache", "bf16", "fp8_e4m3fnuz", 1, 512, 64, block_size=64)
    with pytest.raises(NoBackend, match="kv_format got fp8_e4m3fnuz; needs bf16"):
        select.choose(asked, machine(), "aiter")
    assert select.choose(asked, machine()).backend.name == "triton"


# The shuffled format


def test_shuffled_keys_lie_in_tiles_of_sixteen_tokens_by_sixteen_values() -> None:
    plain = KVCache.allocate(2, 32, kv_lora_rank=128, qk_rope_head_dim=0, kv_format="index_k")
    slots = torch.randperm(64)[:50]
    plain.write(keys_of(50), torch.zeros(50, 0), slots)
    shuffled = convert(plain, "index_k_shuffled")
    assert torch.equal(shuffled.gather(slots), plain.gather(slots))
    assert torch.equal(convert(shuffled, "index_k").data, plain.data)
    for page, at, d in ((0, 0, 0), (0, 17, 5), (1, 31, 127), (1, 16, 64)):
        place = at // 16 * 16 * 128 + d // 16 * 256 + at % 16 * 16 + d % 16
        assert shuffled.data[page].flatten()[place] == plain.data[page].flatten()[at * 128 + d]
    values = torch.empty(2, 32, 128)
    shuffled.dequantise_pages(shuffled.storage, values)
    assert torch.equal(values.view(64, 128), plain.read(torch.arange(64)))


def test_shuffled_pages_have_whole_tiles() -> None:
    with pytest.raises(InvalidInput, match="block_size got 24; needs a multiple of 16 for index_k_shuffled"):
        KVCache.allocate(1, 24, kv_lora_rank=128, qk_rope_head_dim=0, kv_format="index_k_shuffled")


def test_a_shuffled_cache_is_refused_by_every_other_backend() -> None:
    asked = replace(
        problem("index_topk"), q_dtype="fp8_e4m3fnuz", kv_format="index_k_shuffled_fnuz", block_size=64
    )
    with pytest.raises(NoBackend, match="triton: kv_format got index_k_shuffled_fnuz"):
        select.choose(asked, replace(machine(), packages=(("torch", ""), ("triton", ""))))


# Quirks


OPS = ("index_topk", "write_cache")
ROWS = ("#2563", "#4774", "of NaN and 0 the larger is 0", "it makes -448", "the scale of 1e-4")
"""Words of the source of each row."""


def row_of(words: str) -> Quirk:
    """The one row whose source says that."""
    (row,) = (q for q in QUIRKS if q.backend == "aiter" and words in q.source)
    return row


def test_every_row_of_the_indexer_is_asked_for() -> None:
    held = [q for q in QUIRKS if q.backend == "aiter" and any(map(q.when["op"].accepts, OPS))]
    assert {id(row_of(words)) for words in ROWS} == {id(row) for row in held}


def wrong_without(row: Quirk, here) -> None:
    """Do what a row is about, as if it were not there; raises what AITER does then."""
    if row.knob == "chunk_q":
        here("gfx942")
        require_right(*call_of("gfx942", (70,), (1,), 64, False, 32), topk=5)
    elif row.knob == "max_cache_gib":
        assert select.choose(problem("index_topk"), machine()).knobs["max_cache_gib"] == 2
    elif row.when["op"].accepts("write_cache"):
        here("gfx942")
        assert row.knob in select.choose(problem("write_cache"), machine(), "aiter").knobs
        cache = KVCache.allocate(1, 1, kv_lora_rank=128, qk_rope_head_dim=0, kv_format="index_k_fnuz")
        key = torch.randn(1, 128).bfloat16()
        key = key * 1e-6 if row.knob == "coarse_tiny_keys" else key.masked_fill_(key > 1, torch.nan)
        none, slot = torch.zeros(1, 0).bfloat16(), torch.zeros(1).long()
        api.write_cache(key, none, cache, slot, backend="aiter")
        expected = reference.write_cache(key, none, cache, slot)
        judge_written(cache.read(slot, torch.float64), expected, key).require_pass()
    else:
        assert row.knob == "finite_keys"
        here("gfx942")
        assert select.choose(problem("index_topk"), machine()).knobs["finite_keys"]
        tensors, options = call_of("gfx942", (9,), (1,), 1, False, 32)
        slot = options["block_table"][0, 4].long()[None]
        tensors[2].write(torch.full((1, 128), torch.nan), torch.zeros(1, 0), slot)
        tensors[1].neg_().abs_().neg_()
        require_right(tensors, options, topk=1)


@pytest.mark.parametrize("words", ROWS)
def test_a_row_is_needed(words: str, here, monkeypatch: pytest.MonkeyPatch) -> None:
    row, caches = row_of(words), (select.explain, select.choose)
    # What a caller has to keep is only named, so what it is about fails with the row as well.
    named = row.knob in ("finite_keys", "coarse_tiny_keys")
    for present in (True, False):
        for cache in caches:
            cache.cache_clear()
        if not present:
            monkeypatch.setattr(select, "QUIRKS", tuple(q for q in QUIRKS if q is not row))
        try:
            if present and named:
                with pytest.raises(AssertionError, match="got"):
                    wrong_without(row, here)
            elif present:
                wrong_without(row, here)
            else:
                with pytest.raises((AssertionError, ZeroDivisionError, Aborted, KeyError)):
                    wrong_without(row, here)
        finally:
            for cache in caches:
                cache.cache_clear()


def test_pages_of_several_tokens_are_refused_where_the_source_reads_them_as_of_one(
    here, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, caches = call_of("gfx942", (200,), (1,), 64, False, 64), (select.explain, select.choose)
    here("gfx942", "0.1.19")
    with pytest.raises(NoBackend, match="reads pages of one token"):
        require_right(*call, topk=5)
    with monkeypatch.context() as unaware:
        unaware.setattr(manifest, "_reads_index_pages", lambda aiter: True)
        for cache in caches:
            cache.cache_clear()
        with pytest.raises((AssertionError, Aborted)):
            require_right(*call, topk=5)
    for cache in caches:
        cache.cache_clear()
