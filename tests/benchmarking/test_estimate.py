"""Estimates: rooflines from published peaks, LDS passes counted on the emulator, nothing measured."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from anymla.benchmarking.estimate import Roofline, peaks_of
from anymla.benchmarking.estimate_banks import BANKS, WIDE_READS, passes
from anymla.benchmarking.estimate_peers import PEERS
from anymla.benchmarking.workloads import workloads
from anymla.cli import app
from anymla.errors import InvalidInput
from anymla.hardware.arches import ARCHES

LANES = np.arange(64)[None]
ALL = np.ones((1, 64), bool)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.parametrize(
    ("addresses", "num_bytes", "banks", "expected"),
    [
        pytest.param(LANES * 4, 4, 32, (2, 2), id="words side by side meet nowhere"),
        pytest.param(LANES * 4, 4, 64, (1, 1), id="64 banks serve all lanes at once"),
        pytest.param(LANES * 16, 16, 32, (8, 8), id="16 bytes take a phase for eight lanes"),
        pytest.param(LANES * 128, 4, 32, (2, 64), id="a stride of all banks is one bank"),
        pytest.param(LANES * 128, 4, 64, (1, 32), id="which 64 banks halve"),
        pytest.param(LANES * 8, 4, 32, (2, 4), id="every other word is two ways"),
        pytest.param(LANES * 0, 4, 32, (2, 2), id="one word for all is shared"),
        pytest.param(LANES // 2 * 2, 2, 32, (2, 2), id="halves of a word are shared"),
    ],
)
def test_lanes_of_a_phase_that_want_other_words_of_a_bank_take_turns(addresses, num_bytes, banks, expected):
    assert passes(addresses, ALL, num_bytes, banks, reads=False) == expected


def test_lanes_that_take_no_part_want_nothing():
    few = ALL & (LANES < 3)
    assert passes(LANES * 128, few, 4, 32, reads=False) == (1, 3)
    assert passes(LANES * 128, ALL & False, 4, 32, reads=False) == (0, 0)


def test_wide_reads_are_served_in_their_own_order():
    assert sorted(WIDE_READS) == list(range(64))
    # The lanes of each documented group side by side: no conflict for a read, two ways for a write.
    addresses = np.empty((1, 64), np.int64)
    addresses[0, WIDE_READS] = np.arange(64) * 16
    assert passes(addresses, ALL, 16, 32, reads=True) == (8, 8)
    assert passes(addresses, ALL, 16, 32, reads=False) == (8, 16)


@pytest.mark.parametrize(("heads_of_all", "limit"), [(8, "memory"), (1, "matrix")])
def test_few_heads_wait_for_memory_and_many_with_many_tokens_for_products(heads_of_all, limit):
    peaks = peaks_of("gfx942")
    (work,) = workloads("deepseek-v3", tp=heads_of_all, batches=(8,), contexts=(4096,), q_len=4)
    line = Roofline.of(work, peaks)
    assert line.limit == limit
    assert line.memory_us == pytest.approx(work.num_bytes / peaks.bandwidth * 1e6)
    assert line.matrix_us == pytest.approx(work.flops / peaks.rate * 1e6)
    assert (line.intensity > line.ridge) == (limit == "matrix")
    assert line.floor_us == max(line.memory_us, line.matrix_us)


def test_products_of_fp8_are_faster_only_where_the_chip_has_them():
    (work,) = workloads("deepseek-v3", batches=(8,), contexts=(4096,))
    for chip in ("gfx90a", "gfx942"):
        peaks = peaks_of(chip)
        plain, fp8 = Roofline.of(work, peaks), Roofline.of(work, peaks, fp8_products=True)
        assert (fp8.matrix_us < plain.matrix_us) == ARCHES[chip].has_fp8


@pytest.mark.parametrize(
    ("name", "arch"), [(n, a) for n, a in ARCHES.items() if a.peaks], ids=lambda v: str(v)[:8]
)
def test_peaks_name_part_and_source_and_agree_with_the_row(name, arch):
    peaks = arch.peaks
    assert peaks.part and peaks.source and peaks.bandwidth > 1e11 and peaks.rate > 1e13
    assert (peaks.fp8_rate > peaks.rate) == arch.has_fp8


@pytest.mark.parametrize(
    ("chip", "rate", "fp8_rate", "gigahertz"),
    [
        ("gfx90a", 1024, 0, 1.7),
        ("gfx942", 2048, 4096, 2.1),
        ("gfx950", 4096, 8192, 2.4),
        ("gfx1100", 512, 0, 2.5),
        ("gfx1201", 1024, 2048, 2.97),
    ],
)
def test_peaks_of_amd_are_compute_units_times_clock_times_flops_a_clock(chip, rate, fp8_rate, gigahertz):
    peaks, units = ARCHES[chip].peaks, ARCHES[chip].multiprocessors
    for published, a_clock in ((peaks.rate, rate), (peaks.fp8_rate, fp8_rate)):
        # Vendors publish three digits of them.
        assert published == pytest.approx(units * a_clock * gigahertz * 1e9, rel=3e-3)


@pytest.mark.parametrize("chip", ["cpu", "gfx1250", "gfx1"])
def test_a_chip_without_published_peaks_is_refused_with_those_that_have_them(chip):
    with pytest.raises(InvalidInput, match=f"machine got '{chip}'; needs a chip whose peaks .* gfx950"):
        peaks_of(chip)


def test_every_published_figure_says_where_on_what_and_is_of_a_chip_that_we_know():
    parts = {arch.part for arch in ARCHES.values()}
    for row in PEERS:
        assert row.part in parts and row.source and row.on and row.conditions and row.figure


@pytest.fixture(scope="module")
def estimated() -> dict[str, object]:
    pytest.importorskip("triton")
    result = bench("--machine", "gfx942", "--batch", "64", "--context", "4096", "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.output.splitlines()
    found: dict[str, object] = json.loads(line)
    return found


def test_an_estimate_says_that_it_is_none_but_that(estimated):
    assert estimated["is"] == "an estimate, not a measurement"
    assert not {"median_us", "passed", "timing"} & set(estimated)
    assert estimated["peaks"]["source"] and all(row["source"] for row in estimated["published"])


def test_kernels_are_those_of_the_chip_as_compiled(estimated):
    kernels = {row["kernel"]: row for row in estimated["estimate"]["kernels"]}
    attend = kernels["attend"]
    assert attend["row"] and attend["waves"] >= 1 and attend["registers"] and attend["shared_bytes"]
    assert attend["mix"]["matrix"] == sum(attend["matrix"].values()) > 0
    assert sum(attend["mix"].values()) == attend["instructions"]


def test_a_small_call_is_executed_and_its_accesses_of_lds_are_counted(estimated):
    executed = estimated["estimate"]["executed"]
    (attend,) = (row for row in executed["kernels"] if row["kernel"] == "attend")
    assert attend["mix"]["matrix"] > 0 and attend["row"] and "1 sequence" in executed["shape"]
    for row in attend["lds"]:
        assert row["executed"] > 0
        for banks in map(str, BANKS):
            assert row["passes"][banks] >= row["least"][banks] > 0


def test_what_is_estimated_is_not_recorded_nor_a_suite(tmp_path):
    more = ["--record", str(tmp_path / "r"), "--suite", "targets", "--tune", "--device", "cpu"]
    refused = bench("--machine", "gfx942", *more, "--backend", "cpu")
    assert refused.exit_code == 2
    for name in ("record", "suite", "tune", "device", "backend"):
        assert f"{name} got" in refused.output
    assert not list(tmp_path.iterdir())


def test_every_table_for_people_says_what_is_estimated_and_what_published(estimated, monkeypatch):
    made = {name: estimated["estimate"][name] for name in ("kernels", "executed")}
    monkeypatch.setattr("anymla.benchmarking.estimate.read", lambda chip, works: [made for _ in works])
    shown = bench("--machine", "gfx942", "--batch", "64", "--context", "4096")
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    for part in (
        "Estimates, not measurements",
        "Published by its vendor, of MI300X",
        "Roofline (estimate from published peaks)",
        "Kernels as compiled (estimate)",
        "without conflicts (estimate",
        "Published by others, none of it measured here",
    ):
        assert part in words
