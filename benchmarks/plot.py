"""Draws records: the share of the ceiling over length and batch, of named cases, and beside other libraries.

    python -m benchmarks.plot benchmarks/results/sm90/*.json --out benchmarks/results/sm90

Writes a PNG for each figure, and all of them into figures.html, one file in which every point says its
values. The ceiling of a case is the nearer one: what a large copy moves, or what a large matrix product
multiplies.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#444444")
WIDTH, HEIGHT = 640, 360
"""Of a panel of lines in HTML, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 56, 110, 34, 44
BAR, GAP, NAMES = 15, 9, 250
"""Height of a bar, gap between cases, room for names."""


@dataclass(frozen=True)
class Point:
    """A case.

    Attributes:
        x: Where it stands: a number on a logarithmic axis, or the name of a bar.
        share: Of its ceiling.
        words: What it says of itself.
        target: Share that it has to reach, or None.
    """

    x: float | str
    share: float
    words: str
    target: float | None = None


@dataclass(frozen=True)
class Panel:
    """Series of points on common axes; of bars if `x_label` is empty."""

    title: str
    x_label: str
    series: Mapping[str, Sequence[Point]]


@dataclass(frozen=True)
class Figure:
    """Panels side by side, a file of its own."""

    name: str
    title: str
    panels: Sequence[Panel]


def figures(records: Sequence[Record]) -> list[Figure]:
    """What there is to draw.

    Args:
        records: Of suites and comparisons, of any chips.

    Returns:
        Figures that have a point at all.
    """
    over_length, over_batch, cases, libraries = [], [], [], []
    for record in records:
        chip = record["chip"]
        swept = [c for c in record["cases"] if str(c["case"]).startswith("sweep-") and _timed(c)]
        for heads in sorted({c["num_heads"] for c in swept}):
            own, title = [c for c in swept if c["num_heads"] == heads], f"{chip}, {heads} heads"
            over_length.append(Panel(title, "cached tokens", _lines(own, "context", "batch")))
            over_batch.append(Panel(title, "sequences", _lines(own, "batch", "context")))
        if record["suite"] == "compare":
            libraries.append(Panel(chip, "", _beside(record)))
        elif not swept and (points := [_point(c, c["case"]) for c in record["cases"] if _timed(c)]):
            cases.append(Panel(chip, "", {"anymla": points}))
    share = "share of the ceiling"
    found = [
        Figure("length", f"Dense decode, bf16: {share} over length", over_length),
        Figure("batch", f"Dense decode, bf16: {share} over batch", over_batch),
        Figure("cases", f"Named cases: {share}, and where it has to be", cases),
        Figure("compare", f"Beside other libraries: {share}", libraries),
    ]
    return [figure for figure in found if figure.panels]


def _timed(case: Record) -> bool:
    """Whether a case of a suite has a time."""
    return bool(case.get("passed") and case.get("median_us"))


def _lines(cases: Sequence[Record], x: str, line: str) -> dict[str, list[Point]]:
    """A line for each value of a field, over another."""
    word = {"batch": "batch {}", "context": "{} tokens"}[line]
    return {
        word.format(value): [
            _point(c, c[x]) for c in sorted(cases, key=lambda c: float(c[x])) if c[line] == value
        ]
        for value in sorted({c[line] for c in cases})
    }


def _point(case: Record, x: float | str) -> Point:
    copy, product = case["bandwidth_share"], case["product_share"]
    goal = case.get("target") or {}
    words = (
        f"{case['case']}: {case['median_us']:.1f} µs, {copy:.1%} of the copy rate, "
        f"{product:.1%} of the matrix rate"
    )
    if goal and case.get("value") is not None:
        against = f" {goal['than']}" if goal["than"] else ""
        words += f"; {goal['of']}{against} {case['value']:g}, target {goal['bound']:g}, "
        words += "met" if case["met"] else "missed"
    target = goal["bound"] if goal.get("of") in ("copy_rate", "matrix_rate") else None
    return Point(x, max(copy, product), words, target)


def _beside(record: Record) -> dict[str, list[Point]]:
    """The cases of a comparison, by library."""
    names = ["anymla", *record.get("libraries", {})]
    found: dict[str, list[Point]] = {}
    for case in record["cases"]:
        for name in names:
            figures_of = case.get(name, {})
            if "median_us" in figures_of:
                share = figures_of["share_of_ceiling"]
                words = (
                    f"{case['case']}, {name}: {figures_of['median_us']:.1f} µs, {share:.1%} of the ceiling"
                )
                found.setdefault(name, []).append(Point(case["case"], share, words))
    return found


def made_of(records: Sequence[Record]) -> list[str]:
    """Where each record is from, a line each."""
    lines = []
    for r in records:
        rates = f"copy {r['copy_bytes_a_second'] / 1e12:.2f} TB/s, "
        rates += f"matrix product {r['product_flop_a_second'] / 1e12:.0f} TFLOP/s"
        made = ", ".join(f"{name} {r[name]}" for name in ("torch", "triton") if r.get(name))
        day = str(r["date"])[:10]
        lines.append(f"{r['suite']}: {r['chip']}, {rates}; {made}; commit {r['commit'] or '?'}, {day}")
    return lines


def draw_png(figure: Figure, notes: Sequence[str], path: Path) -> None:
    """Draw a figure with matplotlib."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    tallest = max(len(_rows(panel)) for panel in figure.panels)
    is_bars = not figure.panels[0].x_label
    height = 1.6 + 0.22 * tallest if is_bars else 4.6
    canvas = Canvas(figsize=((9.0 if is_bars else 6.4) * len(figure.panels), height), layout="constrained")
    canvas.suptitle(figure.title)
    for axes, panel in zip(
        canvas.subplots(1, len(figure.panels), squeeze=False)[0], figure.panels, strict=True
    ):
        axes.set_title(panel.title, fontsize=10)
        if panel.x_label:
            for (name, points), colour in zip(panel.series.items(), _colours(panel), strict=True):
                x, y = [float(p.x) for p in points], [p.share for p in points]
                axes.plot(x, y, marker="o", color=colour, label=name)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _number(x)))
            axes.set_xlabel(panel.x_label)
            axes.set_ylim(0, 1.05)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes.legend(fontsize=8)
        else:
            rows = _rows(panel)
            for at, (_, _, point, colour) in enumerate(rows):
                axes.barh(at, point.share, color=colour, height=0.8)
                axes.text(point.share + 0.01, at, f"{point.share:.0%}", va="center", fontsize=7)
                if point.target is not None:
                    axes.plot([point.target] * 2, [at - 0.45, at + 0.45], color="black", linewidth=2)
            axes.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=8)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.set_xlim(0, 1.1)
            axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(alpha=0.3)
    canvas.supxlabel("\n".join(notes), fontsize=6)
    canvas.savefig(path, dpi=130, metadata={"Software": None})


def draw_html(drawn: Sequence[Figure], notes: Sequence[str], path: Path) -> None:
    """Write every figure into one page that needs nothing else: SVG, whose points show their words."""
    body = []
    for figure in drawn:
        svgs = "\n".join(_lines_svg(p) if p.x_label else _bars_svg(p) for p in figure.panels)
        body.append(f"<h2>{escape(figure.title)}</h2>\n<div class=panels>\n{svgs}\n</div>")
    foot = "<br>".join(map(escape, notes))
    path.write_text(_PAGE.format(body="\n".join(body), foot=foot))


_PAGE = """<!doctype html>
<html lang=en><meta charset=utf-8><title>anymla: share of the ceiling</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 24px; color: #222 }}
h2 {{ font-size: 16px }}
.panels {{ display: flex; flex-wrap: wrap; gap: 16px }}
svg {{ font: 11px system-ui, sans-serif; background: #fff }}
.grid {{ stroke: #ddd }} .target {{ stroke: #000; stroke-width: 2 }}
.point {{ cursor: pointer }} .point:hover {{ stroke: #000; stroke-width: 2 }}
#tip {{ position: fixed; display: none; background: #222; color: #fff; padding: 4px 8px; border-radius: 4px;
  max-width: 420px; pointer-events: none }}
footer {{ color: #666; font-size: 12px; margin-top: 24px }}
</style>
{body}
<footer>{foot}</footer>
<div id=tip></div>
<script>
const tip = document.getElementById("tip");
document.addEventListener("mousemove", event => {{
  const words = event.target.dataset && event.target.dataset.words;
  tip.style.display = words ? "block" : "none";
  if (!words) return;
  tip.textContent = words;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - 440) + "px";
  tip.style.top = event.clientY + 14 + "px";
}});
</script>
</html>
"""


def _lines_svg(panel: Panel) -> str:
    """A panel of lines over a logarithmic axis."""
    every = [math.log2(float(p.x)) for points in panel.series.values() for p in points]
    low, high = min(every), max(every)

    def x_of(value: float | str) -> float:
        along = (math.log2(float(value)) - low) / ((high - low) or 1)
        return LEFT + along * (WIDTH - LEFT - RIGHT)

    def y_of(share: float) -> float:
        return HEIGHT - BOTTOM - min(share, 1.05) / 1.05 * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 18, panel.title, weight="bold"), _text(LEFT, HEIGHT - 8, panel.x_label)]
    for tenth in range(0, 11, 2):
        y = y_of(tenth / 10)
        parts += [
            _stroke(LEFT, y, WIDTH - RIGHT, y, "grid"),
            _text(LEFT - 6, y + 4, f"{tenth * 10} %", "end"),
        ]
    for value in sorted({float(p.x) for points in panel.series.values() for p in points}):
        x = x_of(value)
        parts += [_stroke(x, TOP, x, HEIGHT - BOTTOM, "grid")]
        parts += [_text(x, HEIGHT - BOTTOM + 16, _number(value), "middle")]
    for row, ((name, points), colour) in enumerate(zip(panel.series.items(), _colours(panel), strict=True)):
        path = " ".join(f"{x_of(p.x):.1f},{y_of(p.share):.1f}" for p in points)
        parts.append(f'<polyline points="{path}" fill=none stroke="{colour}" stroke-width=2 />')
        for p in points:
            centre = f'cx="{x_of(p.x):.1f}" cy="{y_of(p.share):.1f}"'
            parts.append(f'<circle class=point {centre} r=5 fill="{colour}" {_words(p)} />')
        parts.append(_text(WIDTH - RIGHT + 10, TOP + 12 + 16 * row, name, fill=colour))
    return f"<svg width={WIDTH} height={HEIGHT}>{''.join(parts)}</svg>"


def _bars_svg(panel: Panel) -> str:
    """A panel of bars, one below the other."""
    rows, long = _rows(panel), WIDTH - 90
    parts, y, case = [_text(0, 18, panel.title, weight="bold")], float(TOP), ""
    for label, name, p, colour in rows:
        y += GAP if case not in ("", p.x) else 0
        case = str(p.x)
        length = min(p.share, 1.05) * long
        parts.append(_text(NAMES - 8, y + BAR - 4, label, "end"))
        parts.append(
            f'<rect class=point x={NAMES} y="{y:.1f}" width="{length:.1f}" height={BAR - 2} '
            f'fill="{colour}" data-series="{escape(name)}" {_words(p)} />'
        )
        parts.append(_text(NAMES + length + 6, y + BAR - 4, f"{p.share:.0%}"))
        if p.target is not None:
            x = NAMES + p.target * long
            parts.append(_stroke(x, y - 2, x, y + BAR, "target"))
        y += BAR
    return f"<svg width={NAMES + WIDTH} height={y + 12:.0f}>{''.join(parts)}</svg>"


def _rows(panel: Panel) -> list[tuple[str, str, Point, str]]:
    """Bars in order, case by case: label, series, point, colour."""
    many = len(panel.series) > 1
    order = list(dict.fromkeys(p.x for points in panel.series.values() for p in points))
    return [
        (f"{p.x}, {name}" if many else str(p.x), name, p, colour)
        for x in order
        for (name, points), colour in zip(panel.series.items(), _colours(panel), strict=True)
        for p in points
        if p.x == x
    ]


def _colours(panel: Panel) -> Iterator[str]:
    return (COLOURS[i % len(COLOURS)] for i in range(len(panel.series)))


def _number(value: float) -> str:
    """1024 is 1K."""
    return f"{value / 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def _words(point: Point) -> str:
    return f'data-words="{escape(point.words)}"'


def _text(
    x: float, y: float, words: str, anchor: str = "start", *, fill: str = "#222", weight: str = ""
) -> str:
    bold = ' font-weight="bold"' if weight else ""
    where = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {where} text-anchor="{anchor}" fill="{fill}"{bold}>{escape(words)}</text>'


def _stroke(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class={kind} x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" />'


def main(given: list[str] | None = None) -> int:
    """Draw the records; 1 if there is nothing in them to draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    asked = parser.parse_args(given)
    records = [json.loads(path.read_text()) for path in asked.records]
    records = [record for record in records if record.get("suite") in ("targets", "sweep", "compare")]
    drawn, notes = figures(records), made_of(records)
    if not drawn:
        print("no case with a time in these records")
        return 1
    asked.out.mkdir(parents=True, exist_ok=True)
    for figure in drawn:
        draw_png(figure, notes, asked.out / f"{figure.name}.png")
    draw_html(drawn, notes, asked.out / "figures.html")
    print(f"{asked.out}: {', '.join(figure.name for figure in drawn)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
