"""Time and memory over N, both axes logarithmic: a power law is a line, its exponent the slope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zoo_core.bench.cases import Case
from zoo_core.bench.rows import Row
from zoo_core.errors import BenchError
from zoo_core.targets import FORMATS, check_file, figure_class, save_figure

#: Inches: of a figure, of a row of panels, of a line's name.
_WIDTH, _HEIGHT, _LABEL = 13.0, 5.2, 0.13
_DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)))  # dotted: peers
_REFERENCE = {"color": "black", "linewidth": 2.4, "zorder": 5}
_GUIDE = {"color": "0.75", "linewidth": 0.9, "linestyle": (0, (2, 3)), "zorder": 0}


def plot(rows: Sequence[Row], path: Path, *, title: str = "") -> None:
    """Draw every competitor that was measured at two lengths or more.

    The reference is black, a public implementation dotted in the colour of its mechanism. The grey
    lines show slopes 1 and 2. Raises BenchError where there is nothing to draw, ZooError without
    matplotlib or where `path` cannot be written.
    """
    check_file(path, FORMATS)
    lines = _lines(rows)
    if not lines:
        raise BenchError("a plot over N needs something measured at two lengths or more")
    modes = list(dict.fromkeys(case.mode for _, case in lines))
    height = max(_HEIGHT, _LABEL * len(lines) / len(modes) + 1)
    figure = figure_class()(figsize=(_WIDTH, height * len(modes)), layout="constrained")
    grid = figure.subplots(len(modes), 2, squeeze=False)
    styles = _styles(lines)
    for mode, (time, memory) in zip(modes, grid, strict=True):
        chosen = {key: group for key, group in lines.items() if key[1].mode == mode}
        _panel(time, chosen, styles, lambda row: row.seconds and row.seconds * 1e3)
        _panel(memory, chosen, styles, lambda row: row.peak and row.peak / 1e6)
        time.set_title(f"{mode}: time of a call, ms")
        memory.set_title(f"{mode}: peak memory of a call, MB")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    save_figure(figure, path)


Key = tuple[str, Case]


def _lines(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """The rows of each line: one competitor at cases that differ in their length only."""
    lines: dict[Key, list[Row]] = {}
    for row in rows:
        if row.seconds is not None:
            label = f"{row.name} (peer)" if row.role == "peer" else row.name
            lines.setdefault((label, replace(row.case, length=1)), []).append(row)
    found = {key: sorted(group, key=lambda row: row.case.length) for key, group in lines.items()}
    return {key: group for key, group in found.items() if len(group) > 1}


def _styles(lines: dict[Key, list[Row]]) -> dict[Key, dict[str, Any]]:
    """One colour for each mechanism: ten, then again with another dash."""
    from matplotlib import colormaps

    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]
    names = [key[0] for key, group in lines.items() if group[0].role == "mechanism"]
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    styles: dict[Key, dict[str, Any]] = {}
    for key, group in lines.items():
        index = number.get(group[0].of or key[0])
        if index is None:
            dashed = "--" if group[0].role == "floor" else "-"
            styles[key] = {**_REFERENCE, "linestyle": dashed}
        else:
            dash = _DASHES[index // len(palette) % len(_DASHES)]
            styles[key] = {"color": palette[index % len(palette)], "linestyle": dash}
        if group[0].role == "peer":
            styles[key] |= {"linestyle": ":", "alpha": 0.8}
    return styles


def _panel(
    axes: Any,
    lines: dict[Key, list[Row]],
    styles: dict[Key, dict[str, Any]],
    measure: Callable[[Row], float | None],
) -> None:
    """Lines with markers, their guides, and every measured length as a tick."""
    lengths: set[int] = set()
    values: list[float] = []
    ends: list[tuple[str, float, float, Any]] = []
    for (label, case), group in lines.items():
        points = [(row.case.length, measure(row)) for row in group]
        drawn = [(length, value) for length, value in points if value]
        if drawn:
            x, y = zip(*drawn, strict=True)
            style = styles[label, case]
            axes.plot(x, y, marker="o", markersize=3.5, **style)
            ends.append((_label(label, case, lines), x[-1], y[-1], style["color"]))
            lengths |= set(x)
            values += y
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens")
    ticks = sorted(lengths)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(visible=True, which="major", color="0.93")
    axes.spines[["top", "right"]].set_visible(False)
    if values:
        axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
        _guides(axes, ticks, min(values), max(values))
        _name(axes, ends)


def _name(axes: Any, ends: Sequence[tuple[str, float, float, Any]]) -> None:
    """Each line's name beside its end, in its colour; names keep apart and point to their line."""
    ends = sorted(ends, key=lambda end: end[2])
    inverse = axes.transAxes.inverted()
    heights = [inverse.transform(axes.transData.transform((x, y)))[1] for _, x, y, _ in ends]
    room = axes.get_figure().get_figheight() / axes.get_subplotspec().get_gridspec().nrows
    places = spread(heights, _LABEL / (room - 1))
    for (label, x, y, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            label,
            xy=(x, y),
            xytext=(1.04, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.5,
                "relpos": (0, 0.5),
            },
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Growing places in 0 .. 1, moved as little as keeps them `gap` apart, if they fit."""
    moved = list(places)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], 1 - gap * (len(moved) - 1 - i))
    return moved


def _guides(axes: Any, ticks: Sequence[int], low: float, high: float) -> None:
    """Slopes 1 and 2 through the middle of the panel."""
    middle = (low * high) ** 0.5
    start, stop = ticks[0], ticks[-1]
    centre = (start * stop) ** 0.5
    for power, name in ((1, "n"), (2, "n²")):
        y = [middle * (x / centre) ** power for x in (start, stop)]
        axes.plot((start, stop), y, **_GUIDE)
        inside = min(stop, centre * (high / middle) ** (1 / power))
        axes.annotate(
            name,
            (inside, middle * (inside / centre) ** power),
            color="0.55",
            fontsize=8,
            ha="right",
            va="bottom",
        )


def _label(label: str, case: Case, lines: dict[Key, list[Row]]) -> str:
    """The name; with what differs between two lines of the same name."""
    others = [other for name, other in lines if name == label and other != case]
    axes = ("batch", "heads", "width", "dtype", "device", "padded", "native")
    differing = [
        f"{axis} {getattr(case, axis)}"
        for axis in axes
        if any(getattr(other, axis) != getattr(case, axis) for other in others)
    ]
    return ", ".join([label, *differing])
