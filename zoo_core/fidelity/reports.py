"""What a retention measurement and a calibration report: tables, JSON and pictures.

Imports no torch, so that a report can be read where nothing is computed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zoo_core.plain import finite, paragraph, table

# What a score is called in tables, and what a model that is not touched gets.
SCORES = {
    "embedding_cosine": ("cosine of embeddings", 1.0),
    "token_cosine": ("cosine of tokens", 1.0),
    "similarity_correlation": ("correlation of similarities", 1.0),
    "neighbours_kept": ("nearest neighbours kept", 1.0),
    "logits_divergence": ("KL of logits, nats", 0.0),
    "top1_agreement": ("top-1 agreement", 1.0),
}


@dataclass(frozen=True)
class Estimate:
    """One score: its value, its 95 % bootstrap interval, and its value at both ends of the scale.

    floor: with uniform attention in the same layers. stock: with the attention left alone.
    """

    value: float
    low: float
    high: float
    floor: float
    stock: float


@dataclass(frozen=True)
class LayerScore:
    """One attention layer.

    error: relative error |ours - stock| / |stock| of its output, fed what the stock model sees.
    cosine: of the tokens that enter the layer, when the whole model runs patched.
    """

    path: str
    error: Estimate
    cosine: Estimate


@dataclass(frozen=True)
class Retention:
    """How much of a model is kept, on `samples` samples described by `data`.

    layers is empty where the two models are built differently. probe: accuracy of a logistic
    regression on frozen embeddings, where labels were given.
    """

    samples: int
    data: str
    scores: dict[str, Estimate]
    layers: tuple[LayerScore, ...] = ()
    probe: Estimate | None = None

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Tables for a terminal of so many columns; None: every line is whole."""
        rows = [(SCORES[name][0], score) for name, score in self.scores.items()]
        if self.probe is not None:
            rows.append(("accuracy of a linear probe", self.probe))
        heads = ("score", "kept", "95 % interval", "uniform", "stock")
        text = [
            *paragraph(f"retention on {self.samples} samples of {self.data}", width),
            "",
            *table(heads, [_row(*row) for row in rows], width),
        ]
        if self.layers:
            heads = ("layer", "error", "95 % interval", "uniform", "cosine of its input")
            text += ["", *table(heads, map(_layer_row, self.layers), width)]
        return "\n".join(text)

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON object; what is not a number is null."""
        plain: dict[str, Any] = finite(asdict(self))
        return plain

    def picture(self, path: str | Path) -> None:
        """Draw retention by layer. Needs matplotlib and a measurement that has layers."""
        from zoo_core.fidelity.picture import draw

        draw({"": self}, path)


@dataclass(frozen=True)
class Report:
    """What a calibration did.

    steps: done, of steps_planned; fewer where patience ended. trained: number of weights trained.
    history: (step, stage, mean loss since the last look, cosine of held-out embeddings).
    notes: what the user should know, in words. undone: whether training made it worse, so that
    the weights are as they were before.
    """

    before: Retention
    after: Retention
    steps: int
    steps_planned: int
    seconds: float
    trained: int
    data: str
    settings: dict[str, Any]
    history: tuple[tuple[int, str, float, float], ...] = ()
    notes: tuple[str, ...] = field(default=())
    undone: bool = False

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Tables and notes for a terminal of so many columns; None: every line is whole."""
        rows = [
            (SCORES[name][0], _number(score.value), *_row("", self.after.scores[name])[1:])
            for name, score in self.before.scores.items()
        ]
        heads = ("score", "before", "after", "95 % interval", "uniform", "stock")
        head = (
            f"{self.steps} of {self.steps_planned} steps in {self.seconds:.0f} s on {self.data}, "
            f"{self.trained:,} weights trained (train={self.settings['train']!r}); measured on "
            f"{self.after.samples} samples that were held out"
        )
        text = [*paragraph(head, width), "", *table(heads, rows, width)]
        if self.after.layers:
            pairs = zip(self.before.layers, self.after.layers, strict=True)
            layers = [(old.path, *_numbers(old.error.value, new.error)) for old, new in pairs]
            shown = ("error of a layer's output", "before", "after", "uniform")
            text += ["", *table(shown, layers, width)]
        for note in self.notes:
            text += ["", *paragraph(f"note: {note}", width)]
        return "\n".join(text)

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON object."""
        plain: dict[str, Any] = finite(
            {**asdict(self), "before": self.before.as_dict(), "after": self.after.as_dict()}
        )
        return plain

    def summary(self) -> dict[str, Any]:
        """What a checkpoint's manifest keeps of it; what is not a number is null."""
        plain: dict[str, Any] = finite(self._kept())
        return plain

    def _kept(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "train": self.settings["train"],
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "trained": 0 if self.undone else self.trained,
            "undone": self.undone,
            "notes": list(self.notes),
            "samples": self.after.samples,
            "before": _values(self.before),
            "after": _values(self.after),
            "floor": {name: round(one.floor, 4) for name, one in self.after.scores.items()},
            "settings": self.settings,
        }

    def picture(self, path: str | Path) -> None:
        """Draw retention by layer, before and after. Needs matplotlib."""
        from zoo_core.fidelity.picture import draw

        draw({"before": self.before, "after": self.after}, path)


def _values(retention: Retention) -> dict[str, float]:
    return {name: round(score.value, 4) for name, score in retention.scores.items()}


def _row(label: str, score: Estimate) -> tuple[str, ...]:
    numbers = (_number(score.value), _interval(score), _number(score.floor), _number(score.stock))
    return (label, *numbers)


def _layer_row(layer: LayerScore) -> tuple[str, ...]:
    error = layer.error
    numbers = (_number(error.value), _interval(error), _number(error.floor))
    return (layer.path, *numbers, _number(layer.cosine.value))


def _numbers(before: float, after: Estimate) -> tuple[str, str, str]:
    return _number(before), _number(after.value), _number(after.floor)


def _interval(score: Estimate) -> str:
    return f"{_number(score.low)} to {_number(score.high)}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
