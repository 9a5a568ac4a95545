"""Where everything in a chart goes, in units of its view box; the templates draw it.

The charts are SVG in the page itself: their text is text, and their colours are the page's, light
or dark. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zoo_core import words
from zoo_core.report.blocks import Lines, Range, Ranges, Series, Style

WIDTH = 360
_HEIGHT = 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 38
_MOST_PLACES = 9

# Of a chart of ranges: where the scale starts and ends, and the height of a row.
_SCALE = (172, 318)
_ROW = 22
_LONGEST_LABEL = 27
#: A part of the step between two marks.
_UNSEEN = 1e-3

Point = tuple[float, float]


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Stroke:
    """One drawn line, its dots, and the outline of its band. number: which of its style it is."""

    label: str
    style: Style
    number: int
    path: str
    dots: tuple[Point, ...]
    band: str


@dataclass(frozen=True)
class DrawnLines:
    """A chart of lines."""

    title: str
    description: str
    across: str
    width: int
    height: int
    left: int
    right: int
    bottom: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    strokes: tuple[Stroke, ...]


@dataclass(frozen=True)
class Bar:
    """One drawn row of ranges."""

    label: str
    y: float
    at: float
    low: float
    high: float
    floor: float | None
    text: str


@dataclass(frozen=True)
class DrawnRanges:
    """A chart of ranges."""

    title: str
    description: str
    width: int
    height: int
    start: int
    end: int
    goal: float
    goal_label: str
    floor_label: str
    ticks: tuple[Tick, ...]
    bars: tuple[Bar, ...]


def lines(chart: Lines) -> DrawnLines:
    """Lay a chart of lines out."""
    values = [v for one in chart.series for v in _numbers(one) if _can(v, chart.logarithmic)]
    marks, scale = _scale(values, (_HEIGHT - _BOTTOM, _TOP), logarithmic=chart.logarithmic)
    columns = _columns(len(chart.places))
    every = max(1, math.ceil(len(chart.places) / _MOST_PLACES))
    ticks = zip(columns, chart.places, strict=True)
    return DrawnLines(
        title=chart.title,
        description="; ".join(_told(one) for one in chart.series),
        across=chart.across,
        width=WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        bottom=_HEIGHT - _BOTTOM,
        x_ticks=tuple(Tick(x, text) for n, (x, text) in enumerate(ticks) if n % every == 0),
        y_ticks=tuple(Tick(round(scale(mark), 1), _short(mark)) for mark in marks),
        strokes=tuple(
            _stroke(one, number, columns, scale, logarithmic=chart.logarithmic)
            for one, number in _numbered(chart.series)
        ),
    )


def ranges(chart: Ranges) -> DrawnRanges:
    """Lay a chart of ranges out."""
    rows = chart.rows
    values = [1.0 if chart.logarithmic else 0.0, chart.goal]
    for row in rows:
        values += [row.value, row.low, row.high, row.low if row.floor is None else row.floor]
    marks, scale = _scale(values, _SCALE, logarithmic=chart.logarithmic)
    bars = tuple(_bar(row, _TOP + _ROW * (n + 0.5), scale) for n, row in enumerate(rows))
    return DrawnRanges(
        title=chart.title,
        description=_told_ranges(rows, chart.floor_label),
        width=WIDTH,
        height=_TOP + _ROW * len(rows) + _BOTTOM // 2 + 4,
        start=_SCALE[0],
        end=_SCALE[1],
        goal=round(scale(chart.goal), 1),
        goal_label=chart.goal_label,
        floor_label=chart.floor_label,
        ticks=tuple(Tick(round(scale(mark), 1), _short(mark)) for mark in marks),
        bars=bars,
    )


def _bar(row: Range, y: float, scale: Callable[[float], float]) -> Bar:
    return Bar(
        label=_cut(row.label),
        y=y,
        at=round(scale(row.value), 1),
        low=round(scale(row.low), 1),
        high=round(scale(row.high), 1),
        floor=None if row.floor is None else round(scale(row.floor), 1),
        text=words.number(row.value),
    )


def _stroke(
    one: Series,
    number: int,
    columns: Sequence[float],
    scale: Callable[[float], float],
    *,
    logarithmic: bool,
) -> Stroke:
    runs: list[list[Point]] = [[]]
    for x, value in zip(columns, one.values, strict=False):
        if _can(value, logarithmic):
            runs[-1].append((x, round(scale(value), 1)))
        else:
            runs.append([])
    runs = [run for run in runs if run]
    band = ""
    if one.band and all(_can(v, logarithmic) for pair in one.band for v in pair):
        pairs = list(zip(columns, one.band, strict=False))
        outline = [(x, round(scale(high), 1)) for x, (_, high) in pairs]
        outline += [(x, round(scale(low), 1)) for x, (low, _) in reversed(pairs)]
        band = f"{_path(outline)}Z"
    return Stroke(
        label=one.label,
        style=one.style,
        number=number,
        path="".join(map(_path, runs)),
        dots=tuple(point for run in runs for point in run),
        band=band,
    )


def _numbered(series: Sequence[Series]) -> Iterator[tuple[Series, int]]:
    """Each line with its number among those that look alike; ours takes the first of the others."""
    seen: dict[Style, int] = {"other": sum(one.style == "ours" for one in series) - 1}
    for one in series:
        seen[one.style] = seen.get(one.style, -1) + 1
        yield one, seen[one.style]


def _columns(count: int) -> list[float]:
    span = WIDTH - _RIGHT - _LEFT
    step = span / max(1, count - 1)
    return [round(_LEFT + (span / 2 if count == 1 else n * step), 1) for n in range(count)]


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _numbers(one: Series) -> list[float]:
    return [*one.values, *(edge for pair in one.band for edge in pair)]


def _can(value: float, logarithmic: bool) -> bool:
    """Whether a number has a place on the axis."""
    return math.isfinite(value) and (value > 0 or not logarithmic)


def _scale(
    values: Sequence[float], ends: tuple[float, float], *, logarithmic: bool
) -> tuple[list[float], Callable[[float], float]]:
    """Round marks that enclose the values, and where a value lies between the ends."""
    finite = [value for value in values if _can(value, logarithmic)] or [1.0]
    low, high = min(finite), max(finite)
    marks = _powers(low, high) if logarithmic else _steps(low, high)
    first, last = (_log(marks[0]), _log(marks[-1])) if logarithmic else (marks[0], marks[-1])

    def place(value: float) -> float:
        at = _log(max(value, marks[0])) if logarithmic else value
        return ends[0] + (ends[1] - ends[0]) * (at - first) / (last - first)

    return marks, place


def _log(value: float) -> float:
    return math.log10(value)


def _steps(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    size = 10 ** math.floor(math.log10(span / most))
    step = next(size * k for k in (1, 2, 5, 10, 20) if span / (size * k) <= most)
    # A value may lie beyond its mark by what nobody sees, such as a cosine of 1.0000001.
    first, last = math.floor(low / step + _UNSEEN), math.ceil(high / step - _UNSEEN)
    return [round(n * step, 12) for n in range(first, max(last, first + 1) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten; within two of them 1, 2 and 5 times each; at most six marks."""
    first, last = math.floor(_log(low) + 1e-9), math.ceil(_log(high) - 1e-9)
    last = max(last, first + 1)
    if last - first > 2:
        every = math.ceil((last - first) / 5)
        last = first + every * math.ceil((last - first) / every)
        return [10.0**n for n in range(first, last + 1, every)]
    marks = [k * 10.0**n for n in range(first, last) for k in (1, 2, 5)] + [10.0**last]
    start = max(n for n, mark in enumerate(marks) if n == 0 or mark <= low * (1 + 1e-9))
    stop = next(n for n, mark in enumerate(marks) if mark >= high * (1 - 1e-9) and n > start)
    return marks[start : stop + 1]


def _short(mark: float) -> str:
    if mark == 0:
        return "0"
    return f"{mark:g}" if 1e-3 <= abs(mark) < 1e5 else f"1e{round(_log(abs(mark)))}"


def _cut(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"


def _told(one: Series) -> str:
    """A line in words, for those who do not see it."""
    shown = [value for value in one.values if math.isfinite(value)]
    if not shown:
        return f"{one.label}: no numbers"
    first, last = words.number(shown[0]), words.number(shown[-1])
    span = f"between {words.number(min(shown))} and {words.number(max(shown))}"
    return f"{one.label}: from {first} to {last}, {span}"


def _told_ranges(rows: Sequence[Range], floor_label: str) -> str:
    told = []
    for row in rows:
        floor = "" if row.floor is None else f", {floor_label} {words.number(row.floor)}"
        told.append(f"{row.label} {words.number(row.value)}{floor}")
    return "; ".join(told)
