"""What a model keeps of its original, and what a calibration won. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from zoo_core import words
from zoo_core.checkpoint import calibration as calibrations
from zoo_core.fidelity.reports import SCORES, Estimate, Retention
from zoo_core.report.blocks import Block, Lines, Range, Ranges, Series, Table, Text
from zoo_core.report.records import Report
from zoo_core.report.sections.wording import FLOOR, absent


def kept(report: Report) -> Iterator[Block]:
    """Every score beside the floor, and errors by layer."""
    found = report.retention
    if found is None:
        yield absent(report, "retention")
        return
    yield Text(
        "The model beside its original on the same samples. The floor is the same model whose "
        "attention layers only average what they may see: what a swap keeps lies above it."
    )
    rows = [
        Range(SCORES[name][0], score.value, score.low, score.high, score.floor)
        for name, score in found.scores.items()
        if score.stock == 1
    ]
    yield Ranges("Kept of the original", rows, 1.0, "original", FLOOR)
    yield _scores(found)
    yield from _by_layer(found)


def _scores(found: Retention) -> Table:
    """All scores of one model."""
    rows = [_score(SCORES[name][0], score) for name, score in found.scores.items()]
    if found.probe is not None:
        rows.append(_score("accuracy of a linear probe", found.probe))
    heads = ("score", "kept", "95 % interval", FLOOR, "original")
    return Table(f"Scores on {found.samples} samples", heads, rows)


def _score(label: str, score: Estimate) -> tuple[str, ...]:
    ends = (words.number(score.floor), words.number(score.stock))
    return label, words.number(score.value), words.interval(score.low, score.high), *ends


def _by_layer(found: Retention) -> Iterator[Block]:
    if not found.layers:
        yield Text("By layer nothing can be said: the two models are built differently.")
        return
    places = [str(number) for number in range(len(found.layers))]
    for title, scores in (
        ("Error of the attention output", [layer.error for layer in found.layers]),
        ("Cosine of the tokens that enter", [layer.cosine for layer in found.layers]),
    ):
        ours = Series(
            "this model",
            [score.value for score in scores],
            band=[(score.low, score.high) for score in scores],
        )
        floor = Series(FLOOR, [score.floor for score in scores], "floor")
        yield Lines(title, places, "attention layer", [ours, floor])
    rows = [
        (
            layer.path,
            words.number(layer.error.value),
            words.interval(layer.error.low, layer.error.high),
            words.number(layer.error.floor),
            words.number(layer.cosine.value),
            words.number(layer.cosine.floor),
        )
        for layer in found.layers
    ]
    heads = ("layer", "error", "95 % interval", "its floor", "cosine of its input", "its floor")
    yield Table("By layer", heads, rows, detail=True)


def calibration(report: Report) -> list[Block]:
    """What was done, and the scores before and after."""
    result = report.model.calibration
    if result is None:
        return [Text("The attention was not calibrated.")]
    rows = calibrations.scores(result)
    blocks: list[Block] = [Text(f"The attention was {calibrations.sentence(result)}.")]
    if rows:
        heads = ("score", "before", "after", FLOOR)
        blocks.append(Table("What the calibration won, on samples held out", heads, rows))
    return blocks
