"""Small models learn the tasks, with any mechanism, with and without guidance of their heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zoo_core.builder import build
from zoo_core.errors import OptionError, ZooError
from zoo_core.isolation import describe
from zoo_core.mechanism import Options, option
from zoo_core.modes import evaluating
from zoo_core.patching import auxiliary_loss, seeded
from zoo_core.plan import Attention, rules
from zoo_core.rasp.guidance import Guide
from zoo_core.rasp.tasks import IGNORED, Sample, Task, find
from zoo_core.rasp.words import Words

_HELD_OUT = 1 << 32

#: Told after each step how many there were.
Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Lesson(Options):
    """How large the model is and how long it learns."""

    steps: int = option(600, low=0, help="optimiser steps, each on fresh words")
    batch_size: int = option(64, low=1, help="words of a step")
    length: int = option(16, low=1, help="symbols of the longest word")
    layers: int | None = option(None, low=1, help="layers; None: as many as the program takes")
    heads: int | None = option(None, low=1, help="heads; None: as many as the program takes")
    width: int = option(32, low=1, help="width of a head")
    learning_rate: float = option(3e-3, low=0, help="of AdamW at its peak")
    guidance: float = option(3.0, low=0, help="weight of the heads' mismatch, where guided")
    examined: int = option(512, low=1, help="held-out words to measure on")
    seed: int = option(0, low=0, help="of the weights, the words and all noise")

    @classmethod
    def of(cls, settings: Mapping[str, Any], task: Task) -> Self:
        """Check keyword arguments, and size the model for the task where they do not.

        Raises OptionError, with a suggestion.
        """
        lesson = cls.parse(settings, owner="the lesson")
        return replace(
            lesson, layers=lesson.layers or task.layers, heads=lesson.heads or task.heads
        )

    @property
    def hidden(self) -> int:
        """Width of the model. Only a lesson `of` a task has one."""
        return (self.heads or 1) * self.width

    def refuse_guidance(self, task: Task) -> None:
        """Raise OptionError where the model lacks layers or heads that the program takes."""
        for name in ("layers", "heads"):
            has, takes = getattr(self, name), getattr(task, name)
            if has < takes:
                raise OptionError(
                    f"the program of {task.name} takes {takes} {name}, and guidance a model of as "
                    f"many; it has {has}"
                )


@dataclass(frozen=True)
class Score:
    """What is right on held-out words.

    tokens: share of right labels. words: share of words without a wrong one.
    floor: share of right labels for the best single answer.
    """

    tokens: float
    words: float
    floor: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One lesson. parameters: of the model. mismatch: of its heads at the end, where guided.

    refused: why there is no score, in words; only `try_to_learn` returns such.
    """

    task: str
    attention: str
    guided: bool
    lesson: Lesson
    score: Score | None = None
    parameters: int = 0
    mismatch: float | None = None
    seconds: float = 0.0
    refused: str | None = None
    model: nn.Module | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """All but the model, for JSON."""
        found = {name: value for name, value in vars(self).items() if name != "model"}
        score = None if self.score is None else asdict(self.score)
        return {**found, "lesson": self.lesson.as_dict(), "score": score}


def learner(
    task: Task | str,
    attention: Attention = "softmax",
    *,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> nn.Module:
    """An untrained BERT for a task that labels tokens: as large as the lesson says, no dropout."""
    task = _task(task)
    lesson = Lesson.of(settings, task)
    return build(
        "bert",
        attention,
        options=options,
        task="token-classification",
        max_length=lesson.length + 1,
        seed=lesson.seed,
        vocab_size=task.vocabulary,
        num_labels=task.classes(lesson.length),
        num_hidden_layers=lesson.layers,
        num_attention_heads=lesson.heads,
        hidden_size=lesson.hidden,
        intermediate_size=4 * lesson.hidden,
        # BERT's 0.02 is for widths of hundreds; at these, attention would start out blind.
        initializer_range=lesson.hidden**-0.5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        type_vocab_size=1,
    )


def learn(
    task: Task | str,
    attention: Attention = "softmax",
    *,
    options: Mapping[str, Any] | None = None,
    guided: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Outcome:
    """Train a small BERT on a task and examine it on words it has not seen.

    task: a Task, or the name of one. attention, options: as in `zoo.build`.
    guided: add to the loss how far the heads are from the patterns of the task's program.
    settings: the fields of Lesson; layers and heads are the program's own unless given.
    The same seed gives the same outcome; torch's global generator is left alone.
    Raises what `zoo.build` raises, UnsupportedCall for a mechanism that cannot mask padding or,
    guided, has no map, and OptionError for fewer layers or heads than guidance needs.
    """
    task = _task(task)
    lesson = Lesson.of(settings, task)
    if guided:
        lesson.refuse_guidance(task)
    model = learner(task, attention, options=options, **settings)
    start = time.perf_counter()
    with seeded(lesson.seed):
        mismatch = _train(model, task, lesson, guided=guided, progress=progress)
        score = examine(model, task, count=lesson.examined, length=lesson.length, seed=lesson.seed)
    return Outcome(
        task=task.name,
        attention=_name(attention),
        guided=guided,
        lesson=lesson,
        score=score,
        parameters=sum(p.numel() for p in model.parameters()),
        mismatch=mismatch,
        seconds=time.perf_counter() - start,
        model=model,
    )


def try_to_learn(
    task: Task | str,
    attention: Attention = "softmax",
    *,
    options: Mapping[str, Any] | None = None,
    guided: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Outcome:
    """`learn`, with what a mechanism raises as an outcome, so that one stops no comparison.

    Raises all the same for a name, an option or a setting that is wrong.
    """
    task = _task(task)
    lesson = Lesson.of(settings, task)
    if guided:
        lesson.refuse_guidance(task)
    rules(attention, options=options)
    try:
        return learn(task, attention, options=options, guided=guided, progress=progress, **settings)
    except Exception as error:
        words = str(error) if isinstance(error, ZooError) else f"failed: {describe(error)}"
        return Outcome(
            task=task.name,
            attention=_name(attention),
            guided=guided,
            lesson=lesson,
            refused=words,
        )


@torch.no_grad()
def examine(
    model: nn.Module, task: Task | str, *, count: int = 512, length: int = 16, seed: int = 0
) -> Score:
    """Score a model on `count` held-out words of at most `length` symbols, in evaluation mode."""
    task = _task(task)
    sample = task.sample(count, length, _generator(seed + _HELD_OUT))
    with evaluating(model):
        answers = torch.cat([_logits(model, part).argmax(-1) for part in _parts(sample)])
    asked = sample.labels != IGNORED
    right = (answers == sample.labels) & asked
    labels = sample.labels[asked]
    return Score(
        tokens=float(right.sum() / asked.sum()),
        words=float((right | ~asked).all(-1).float().mean()),
        floor=float(labels.bincount().max() / len(labels)),
    )


def _train(
    model: nn.Module, task: Task, lesson: Lesson, *, guided: bool, progress: Progress | None
) -> float | None:
    """Run the steps; the mismatch of the last one where guided."""
    generator = _generator(lesson.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lesson.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, lesson.learning_rate, total_steps=lesson.steps + 1, pct_start=0.1
    )
    mismatch = None
    model.train()
    with Guide(model) if guided else nullcontext() as guide:
        for step in range(lesson.steps):
            sample = task.sample(lesson.batch_size, lesson.length, generator)
            logits = _logits(model, sample.words)
            loss = cross_entropy(logits.flatten(0, 1), sample.labels.flatten())
            loss = loss + auxiliary_loss(model)
            if guide is not None:
                distance = guide.loss(sample.trace.layers)
                loss = loss + lesson.guidance * distance
                mismatch = distance.item()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            if progress is not None:
                progress(step + 1)
    return mismatch


def _logits(model: nn.Module, words: Words) -> Tensor:
    logits: Tensor = model(input_ids=words.tokens, attention_mask=words.real.long()).logits
    return logits


def _parts(sample: Sample, size: int = 256) -> Iterator[Words]:
    """The words in batches that fit any memory."""
    words = sample.words
    for start in range(0, len(words.tokens), size):
        part = slice(start, start + size)
        yield Words(words.tokens[part], words.real[part])


def _task(task: Task | str) -> Task:
    return find(task) if isinstance(task, str) else task


def _name(attention: Attention) -> str:
    return attention if isinstance(attention, str) else repr(attention)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
