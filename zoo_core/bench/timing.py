"""Times of competitors that take turns, by torch.utils.benchmark.

A machine drifts: a neighbour starts, a clock steps down. So all competitors run once in each round,
in alternating order, and a ratio is the median over the rounds of the ratio within one round. Each
round begins with another one: whoever ran twice in a row would find its own data in the caches.
`Timer` fixes the number of threads, synchronises an accelerator before and after, switches the
garbage collector off, and calls as often as its own overhead asks; the calls by which it finds that
number warm the competitor up after each change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.benchmark import Timer

from zoo_core.bench.rows import Ratio

#: A median of fewer rounds says nothing about its spread.
FEWEST_ROUNDS = 2

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one competitor, one median for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Seconds between the quartiles."""
        return quartile_distance(self.rounds)

    def scaled(self, factor: float) -> Timing:
        """The time that this would take for `factor` times as much work."""
        return Timing(tuple(seconds * factor for seconds in self.rounds))


class Race:
    """Competitors by name, and what they took so far.

    seconds: the least time to spend on one competitor in one round.
    failed: who raised while it was timed, and what; it takes no further part.
    """

    def __init__(self, calls: Mapping[str, Call], *, threads: int, seconds: float) -> None:
        self._timers = {
            name: Timer("call()", globals={"call": call}, num_threads=threads)
            for name, call in calls.items()
        }
        self.failed: dict[str, Exception] = {}
        self._seconds = seconds
        self._rounds: list[dict[str, float]] = []

    def run(self, rounds: int, after_each: Callable[[], None] = lambda: None) -> None:
        """Run some rounds. Interrupted, it keeps those that are complete."""
        for _ in range(rounds):
            self._rounds.append(dict(self._times(self._order())))
            after_each()

    def timings(self) -> dict[str, Timing]:
        """The times so far; empty before FEWEST_ROUNDS are complete."""
        if len(self._rounds) < FEWEST_ROUNDS:
            return {}
        return {name: Timing(tuple(times[name] for times in self._rounds)) for name in self._timers}

    def _order(self) -> list[str]:
        names, number = list(self._timers), len(self._rounds)
        start = number % len(names) if names else 0
        names = names[start:] + names[:start]
        return names[::-1] if number % 2 else names

    def _times(self, names: Sequence[str]) -> Iterator[tuple[str, float]]:
        for name in names:
            try:
                timed = self._timers[name].blocked_autorange(min_run_time=self._seconds)
            except Exception as error:
                self.failed[name] = error
                del self._timers[name]
            else:
                yield name, timed.median


def ratio(of: Timing, to: Timing) -> Ratio:
    """How many times as long one takes as the other in the same round."""
    pairs = [a / b for a, b in zip(of.rounds, to.rounds, strict=True)]
    return Ratio(value=statistics.median(pairs), error=standard_error(pairs))


def quartile_distance(values: Sequence[float]) -> float:
    """The third quartile less the first."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def standard_error(values: Sequence[float]) -> float:
    """Of a median, from the quartiles.

    Of normal values these lie 1.349 deviations apart; their median strays 1.253 / sqrt(n).
    """
    return 1.253 / 1.349 * quartile_distance(values) / math.sqrt(len(values))
