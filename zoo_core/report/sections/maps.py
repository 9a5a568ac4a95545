"""What the attention of a model looks like. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zoo_core import words
from zoo_core.report import heat
from zoo_core.report.blocks import Block, Bullets, Figure, Gallery, Picture, Text
from zoo_core.report.records import LayerMap, Report
from zoo_core.report.sections.wording import absent, sentence

#: Weights below 0 that are smaller than this share of the largest are rounding.
_ROUNDING = 1e-3


def maps(report: Report) -> Iterator[Block]:
    """A picture of each layer, and of the rollout; why there is none where there is none."""
    found = report.maps
    if found is None:
        yield absent(report, "maps")
        return
    figures = [
        _figure(one, f"layer {n}") for n, one in enumerate(found.layers) if one.undefined is None
    ]
    if found.rollout is not None:
        figures.append(_figure(found.rollout, "rollout"))
    if figures:
        yield Text(
            "Who looks (rows) at whom (columns), on one sample, the mean of the heads, padding "
            "left out. Each map has its own scale. Where tokens are many they are joined into "
            "groups. The effective map of a mechanism without weights may hold negative numbers."
        )
        if found.rollout is not None:
            yield Text(
                "The rollout follows the maps through all layers and skip connections: how much of "
                "each token that enters (columns) reaches each token that leaves (rows)."
            )
        yield Gallery(figures)
    if found.undefined:
        yield Bullets([sentence(text) for text in found.undefined])


def _figure(one: LayerMap, title: str) -> Figure:
    """The picture of one layer, and that over the image where there is one."""
    pictures = [Picture(one.cells, map_words(one, title))]
    if one.over_image is not None:
        seen = f"What the class token looks at in the image, {title}; most at {_place(one)}"
        pictures.append(Picture(one.over_image, seen))
    most, lowest = heat.peak(one.cells), heat.least(one.cells)
    facts = [one.mechanism, f"largest {words.number(most)}"]
    if -lowest > _ROUNDING * most:
        facts.append(f"lowest {words.number(lowest)}")
    if not math.isnan(one.near):
        facts.append(f"{words.percent(one.near)} within 2 tokens")
    facts.append(f"{words.percent(one.prefix)} on the prefix")
    return Figure(pictures, title, ", ".join(facts))


def map_words(one: LayerMap, title: str) -> str:
    """A map for those who do not see it."""
    rows, columns = len(one.cells), len(one.cells[0]) if one.cells else 0
    size = f"{one.queries} queries by {one.keys} keys"
    joined = f" in {rows} by {columns} groups" if (rows, columns) != (one.queries, one.keys) else ""
    near = "" if math.isnan(one.near) else f", {words.percent(one.near)} of the weight near by"
    return f"Attention map of {title}, {one.mechanism}: {size}{joined}{near}"


def _place(one: LayerMap) -> str:
    cells = one.over_image or ()
    best = max((value, r, c) for r, row in enumerate(cells) for c, value in enumerate(row))
    return f"row {best[1] + 1} of {len(cells)}, column {best[2] + 1} of {len(cells[0])}"
