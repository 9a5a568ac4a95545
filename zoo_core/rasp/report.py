"""What models learned, as the cells of a table."""

from __future__ import annotations

from collections.abc import Sequence

from zoo_core.rasp.learning import Outcome
from zoo_core.words import plural

HEADINGS = ("mechanism", "heads", "tokens", "words", "mismatch", "parameters")
LEGEND = (
    "tokens and words: share of right labels, and of words without a wrong one, on words not seen "
    "in training; floor: right labels of the best single answer. guided: heads are supervised by "
    "the program; mismatch: squared distance of their weights from its patterns at the end."
)


def cells(outcome: Outcome) -> tuple[str, ...]:
    """One row below HEADINGS."""
    name = outcome.attention.rpartition("/")[-1]
    how = "guided" if outcome.guided else "free"
    score = outcome.score
    if score is None:
        return (name, how, "-", "-", "-", "-")
    mismatch = "-" if outcome.mismatch is None else f"{outcome.mismatch:.3f}"
    shares = (f"{score.tokens:.1%}", f"{score.words:.1%}")
    return (name, how, *shares, mismatch, f"{outcome.parameters:,}")


def caption(outcomes: Sequence[Outcome]) -> str:
    """What the rows have in common, in one line: the task, the model, the lesson, the floor."""
    shown = next(outcome for outcome in outcomes if outcome.score)
    lesson, score = shown.lesson, shown.score
    floor = "" if score is None else f", floor {score.floor:.1%}"
    size = f"{plural(lesson.layers or 0, 'layer')} and {plural(lesson.heads or 0, 'head')}"
    return (
        f"{shown.task}: words of up to {lesson.length}, BERT of {size} of {lesson.width}, "
        f"{lesson.steps} steps of {lesson.batch_size}{floor}"
    )
