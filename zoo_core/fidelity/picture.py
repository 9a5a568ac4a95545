"""Retention by layer, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo_core.errors import ZooError
from zoo_core.fidelity.reports import Estimate, LayerScore, Retention
from zoo_core.targets import figure_class, save_figure
from zoo_core.words import layer_numbers

_NEAR = 0.95  # Where every cosine is above it, the axis begins here: nothing less is to be seen.


def draw(measured: Mapping[str, Retention], path: str | Path) -> None:
    """Write a picture of one or more measurements of one model, by name, to `path`.

    Raises ZooError without matplotlib, where there is nothing by layer to show, and where the
    picture cannot be written.
    """
    if not all(retention.layers for retention in measured.values()):
        raise ZooError("there is nothing to draw by layer: the two models are built differently")
    figure = figure_class()(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, measured, "error", "error of the attention output")
    left.set_ylim(bottom=0)
    _panel(right, measured, "cosine", "cosine of the tokens that enter")
    lowest = min(right.get_ylim()[0], _NEAR)
    right.set_ylim(lowest, 1 + 0.04 * (1 - lowest))
    lines, names = left.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(lines), frameon=False)
    save_figure(figure, path)


def _panel(axes: Any, measured: Mapping[str, Retention], score: str, title: str) -> None:
    floor: tuple[LayerScore, ...] = ()
    for name, retention in measured.items():
        floor = retention.layers
        estimates = [_of(layer, score) for layer in floor]
        numbers = _numbers(floor)
        axes.plot(
            numbers,
            [one.value for one in estimates],
            marker="o",
            markersize=4,
            label=name or "patched",
        )
        axes.fill_between(
            numbers, [one.low for one in estimates], [one.high for one in estimates], alpha=0.2
        )
    lowest = [_of(layer, score).floor for layer in floor]
    style = {"color": "grey", "linestyle": ":", "marker": ".", "label": "uniform attention"}
    axes.plot(_numbers(floor), lowest, **style)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("attention layer")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _numbers(layers: Sequence[LayerScore]) -> list[int]:
    """The numbers of the layers; their places, where their paths do not tell."""
    return layer_numbers([layer.path for layer in layers]) or list(range(len(layers)))


def _of(layer: LayerScore, score: str) -> Estimate:
    return layer.error if score == "error" else layer.cosine
