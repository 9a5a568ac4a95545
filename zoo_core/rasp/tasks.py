"""Tasks with exact answers: a program, and words to run it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from zoo_core.errors import UnknownName, did_you_mean
from zoo_core.rasp import drawing, programs
from zoo_core.rasp.programs import Trace
from zoo_core.rasp.words import SYMBOL, Words

#: The label of tokens that are not asked for, as torch's cross entropy and transformers know it.
IGNORED = -100


@dataclass(frozen=True, eq=False)
class Sample:
    """Words and what is right for them. labels: long (B, N), IGNORED at START and at padding."""

    words: Words
    trace: Trace
    labels: Tensor


@dataclass(frozen=True)
class Task:
    """Label every token of a word as the program does.

    draw: (count, longest, symbols, generator) -> Words. symbols: how many there are.
    answers: what labels are: tokens, counts up to the longest word, or FALSE, PARTIAL and TRUE.
    """

    name: str
    summary: str
    program: Callable[[Words], Trace]
    draw: Callable[[int, int, int, Generator], Words]
    symbols: int
    answers: Literal["tokens", "counts", "verdicts"]

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, with PADDING and START."""
        return SYMBOL + self.symbols

    def classes(self, longest: int) -> int:
        """How many labels there are for words of at most `longest` symbols."""
        return {"tokens": self.vocabulary, "counts": longest + 1, "verdicts": 3}[self.answers]

    @property
    def layers(self) -> int:
        """The layers that the program takes."""
        return len(self._shape().layers)

    @property
    def heads(self) -> int:
        """The most heads that the program takes in a layer."""
        return self._shape().heads

    def sample(self, count: int, longest: int, generator: Generator) -> Sample:
        """Draw `count` words of 1 to `longest` symbols and label them."""
        words = self.draw(count, longest, self.symbols, generator)
        trace = self.program(words)
        asked = words.real & (words.indices > 0)
        return Sample(words, trace, trace.output.masked_fill(~asked, IGNORED))

    def _shape(self) -> Trace:
        return self.program(self.draw(1, 1, self.symbols, torch.Generator().manual_seed(0)))


TASKS = {
    task.name: task
    for task in (
        Task(
            "reverse",
            "Read the word backwards.",
            programs.reverse,
            drawing.symbols,
            8,
            "tokens",
        ),
        Task(
            "histogram",
            "Count how often each token occurs.",
            programs.histogram,
            drawing.symbols,
            8,
            "counts",
        ),
        Task(
            "sort",
            "Sort the tokens.",
            programs.sort,
            drawing.symbols,
            8,
            "tokens",
        ),
        Task(
            "most_frequent",
            "Name each symbol once, the most frequent first.",
            programs.most_frequent,
            drawing.symbols,
            8,
            "tokens",
        ),
        Task(
            "dyck1",
            "Say of each prefix of brackets whether it is, or can be, completed.",
            programs.dyck1,
            drawing.brackets,
            2,
            "verdicts",
        ),
        Task(
            "dyck2",
            "The same with two kinds of brackets.",
            programs.dyck2,
            drawing.brackets,
            4,
            "verdicts",
        ),
    )
}


def find(name: str) -> Task:
    """The task of this name, - or _ alike. Raises UnknownName with those there are."""
    task = TASKS.get(name.replace("-", "_"))
    if task is None:
        has, hint = ", ".join(TASKS), did_you_mean(name, TASKS)
        raise UnknownName(f"there is no task {name!r} (there are: {has}){hint}")
    return task
