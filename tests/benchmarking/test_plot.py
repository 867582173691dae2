"""Figures from records: PNG files, and one page that needs nothing else."""

import json
from html.parser import HTMLParser

import pytest

from benchmarks import plot

MADE = {
    "chip": "H200 <test>",
    "arch": "sm90",
    "date": "2026-11-29T10:00:00+00:00",
    "commit": "abc",
    "torch": "2.11",
    "copy_bytes_a_second": 4.25e12,
    "product_flop_a_second": 6.8e14,
}


def timed(case, *, heads=16, batch=1, context=1024, copy=0.5, product=0.1, **more):
    figures = {"median_us": 100.0, "bandwidth_share": copy, "product_share": product}
    shape = {"num_heads": heads, "batch": batch, "context": context}
    return {"case": case, "passed": True, **shape, **figures, **more}


SWEEP = {
    **MADE,
    "suite": "sweep",
    "cases": [
        *(
            timed(f"sweep-{b}x{h}x{n}", heads=h, batch=b, context=n, copy=b / 10, product=h / 200)
            for h in (16, 128)
            for b in (1, 4)
            for n in (1024, 4096)
        ),
        {"case": "sweep-64x16x1024", "passed": False, "reasons": ["out of memory"]},
    ],
}
TARGETS = {
    **MADE,
    "suite": "targets",
    "cases": [
        timed("a", copy=0.92, target={"of": "copy_rate", "bound": 0.9, "than": ""}, value=0.92, met=True),
        timed("b", copy=0.7, target={"of": "times_slower", "bound": 1.05, "than": "a"}, value=1.3, met=False),
        timed("write", product=0.0),
        {"case": "c", "passed": False, "reasons": ["wrong"]},
    ],
}
COMPARE = {
    **MADE,
    "suite": "compare",
    "libraries": {"FlashMLA": "1.0"},
    "cases": [
        {
            "case": "a",
            "anymla": {"median_us": 100.0, "share_of_ceiling": 0.8},
            "FlashMLA": {"median_us": 90.0, "share_of_ceiling": 0.9},
        },
        {
            "case": "b",
            "anymla": {"median_us": 10.0, "share_of_ceiling": 0.4},
            "FlashMLA": {"reason": "no dense decode from fp8"},
        },
    ],
}


class Page(HTMLParser):
    """What a page says and asks for."""

    def __init__(self, text):
        super().__init__()
        self.words, self.addresses, self.shapes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.shapes.append(tag)
        self.words += [found["data-words"]] if "data-words" in found else []
        self.addresses += [found[name] for name in ("src", "href") if name in found]


@pytest.fixture
def drawn(tmp_path):
    """The folder of figures of all three records."""
    files = []
    for record in (SWEEP, TARGETS, COMPARE):
        files.append(tmp_path / f"{record['suite']}.json")
        files[-1].write_text(json.dumps(record))
    assert plot.main([*map(str, files), "--out", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def test_each_figure_is_a_png_and_the_page_has_them_all(drawn):
    assert {path.name for path in drawn.iterdir()} == {
        *("length.png", "batch.png", "cases.png", "compare.png"),
        "figures.html",
    }
    for path in drawn.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_the_page_says_the_values_of_every_point_and_fetches_nothing(drawn):
    page = Page((drawn / "figures.html").read_text())
    assert page.addresses == [] and "http" not in (drawn / "figures.html").read_text()
    points = 2 * 8 + 3 + 3
    assert len(page.words) == points == page.shapes.count("circle") + page.shapes.count("rect")
    rates = "b: 100.0 µs, 70.0% of the copy rate, 10.0% of the matrix rate"
    assert f"{rates}; times_slower a 1.3, target 1.05, missed" in page.words
    assert "a, FlashMLA: 90.0 µs, 90.0% of the ceiling" in page.words


def test_lines_go_over_length_for_each_batch_and_over_batch_for_each_length():
    length, batch = plot.figures([SWEEP])
    sixteen, many = length.panels
    assert sixteen.title == "H200 <test>, 16 heads"
    assert {name: [p.x for p in points] for name, points in sixteen.series.items()} == {
        "batch 1": [1024, 4096],
        "batch 4": [1024, 4096],
    }
    assert [p.share for p in sixteen.series["batch 4"]] == [0.4, 0.4]
    assert [p.share for p in many.series["batch 1"]] == [0.64, 0.64], "the nearer ceiling"
    assert list(batch.panels[0].series) == ["1024 tokens", "4096 tokens"]


def test_only_a_target_of_the_ceiling_is_drawn_on_its_axis():
    (cases,) = plot.figures([TARGETS])
    assert [p.target for p in cases.panels[0].series["anymla"]] == [0.9, None, None]


def test_lengths_are_written_in_binary_thousands():
    assert plot._number(1024) == "1K" and plot._number(65536) == "64K" and plot._number(16) == "16"


def test_records_without_a_time_draw_nothing(tmp_path, capsys):
    record = tmp_path / "targets.json"
    record.write_text(json.dumps(TARGETS | {"cases": TARGETS["cases"][-1:]}))
    other = tmp_path / "attend.json"
    other.write_text(json.dumps({"records": []}))
    assert plot.main([str(record), str(other), "--out", str(tmp_path / "out")]) == 1
    assert "no case with a time" in capsys.readouterr().out and not (tmp_path / "out").exists()
