"""Retention by layer, drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo_core.errors import ZooError
from zoo_core.fidelity.reports import Estimate, LayerScore, Retention


def draw(measured: Mapping[str, Retention], path: str | Path) -> None:
    """Write a picture of one or more measurements of one model, by name, to `path`.

    Raises ZooError without matplotlib, or where there is nothing by layer to show.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ZooError("pictures need matplotlib: pip install 'zoo-core[plots]'") from error
    if not all(retention.layers for retention in measured.values()):
        raise ZooError("there is nothing to draw by layer: the two models are built differently")
    # Without pyplot, which would choose a window system and keep the figure.
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, measured, "error", "error of the attention output")
    _panel(right, measured, "cosine", "cosine of the tokens that enter")
    left.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, measured: Mapping[str, Retention], score: str, title: str) -> None:
    floor: tuple[LayerScore, ...] = ()
    for name, retention in measured.items():
        floor = retention.layers
        estimates = [_of(layer, score) for layer in floor]
        numbers = range(len(estimates))
        axes.plot(numbers, [one.value for one in estimates], marker="o", label=name or "patched")
        axes.fill_between(
            numbers, [one.low for one in estimates], [one.high for one in estimates], alpha=0.2
        )
    lowest = [_of(layer, score).floor for layer in floor]
    axes.plot(range(len(lowest)), lowest, color="grey", linestyle=":", label="uniform attention")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("attention layer")
    axes.set_xticks(range(len(lowest)))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _of(layer: LayerScore, score: str) -> Estimate:
    return layer.error if score == "error" else layer.cosine
