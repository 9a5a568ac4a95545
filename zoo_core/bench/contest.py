"""One race between competitors at one case, from entering to rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from zoo_core.bench import counting
from zoo_core.bench.cases import Case
from zoo_core.bench.competitors import Work
from zoo_core.bench.machine import kernels
from zoo_core.bench.rows import Ratio, Row
from zoo_core.bench.timing import FEWEST_ROUNDS, Call, Race, Timing, ratio
from zoo_core.bench.yardsticks import Yardsticks
from zoo_core.errors import BenchError, ZooError
from zoo_core.isolation import describe

Ratios = dict[str, Ratio]
#: Told how many steps of how many are done, and what is being done.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure.

    rounds: how often every competitor has its turn. seconds: the least of one turn.
    threads: of torch within an operation; None leaves the number as it is.
    """

    rounds: int = 5
    seconds: float = 0.1
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < FEWEST_ROUNDS:
            raise BenchError(f"rounds {self.rounds} must be at least {FEWEST_ROUNDS}")

    @property
    def in_use(self) -> int:
        """The number of threads."""
        return self.threads or torch.get_num_threads()


class Steps:
    """Counts what is done of the whole run, and tells."""

    def __init__(self, total: int, tell: Progress | None) -> None:
        self.total, self.tell, self.done = total, tell, 0

    def say(self, what: str) -> None:
        """Tell what is being done now."""
        if self.tell:
            self.tell(self.done, self.total, what)

    def step(self, what: str) -> None:
        """One more is done."""
        self.done += 1
        self.say(what)


@dataclass(eq=False)
class Entry:
    """A competitor: its row so far, and what is timed; None where it is refused."""

    row: Row
    call: Call | None = None
    twin: Call | None = None

    def refuse(self, error: Exception) -> None:
        """Leave it out of the race, for what it raised."""
        words = str(error) if isinstance(error, ZooError) else f"failed: {describe(error)}"
        named = words if words.startswith(self.row.name) else f"{self.row.name}: {words}"
        self.row, self.call, self.twin = replace(self.row, refused=named), None, None


@dataclass(eq=False)
class Contest:
    """The competitors of one case. moved: bytes in and out, for the floor; None without one."""

    case: Case
    effort: Effort
    moved: int | None = None
    entries: list[Entry] = field(default_factory=list)
    yardsticks: Yardsticks | None = field(init=False, default=None)

    def enter(self, row: Row, make: Callable[[], Work]) -> Entry:
        """Build a competitor, count what it costs, and warm it up.

        Whatever it raises becomes the refusal in its row, which names it; the others go on.
        """
        entry = Entry(row)
        self.entries.append(entry)
        try:
            with warnings.catch_warnings(), kernels(self.case):
                # A race trains nothing, and so nothing is amiss.
                warnings.filterwarnings("ignore", ".* trains without its auxiliary loss")
                self._prepare(entry, make())
        except Exception as error:
            entry.refuse(error)
        return entry

    def _prepare(self, entry: Entry, work: Work) -> None:
        mode, device = self.case.mode, torch.device(self.case.device)
        eager = work.eager(mode)
        call = work.call(mode) if work.compiled else eager
        entry.row = replace(
            entry.row,
            options=work.options,
            flops=counting.flops(eager),
            peak=counting.peak_bytes(call, device),
        )
        entry.call, entry.twin = call, eager if work.compiled else None

    def run(self, steps: Steps, what: str) -> Iterator[Row]:
        """Race, and give the rows in the order of entry.

        Interrupted, it gives the rows of the rounds that are complete, and stops.
        """
        race = self._race()
        try:
            with kernels(self.case):
                race.run(self.effort.rounds, lambda: steps.step(what))
        except KeyboardInterrupt:
            yield from self._results(race)
            raise
        yield from self._results(race)

    def _race(self) -> Race:
        calls: dict[str, Call] = {}
        for index, entry in enumerate(self.entries):
            if entry.call:
                calls[str(index)] = entry.call
            if entry.twin:
                calls[f"{index} eager"] = entry.twin
        if self.moved is not None:
            self.yardsticks = Yardsticks.of(self.case)
            calls |= self.yardsticks.calls
        return Race(calls, threads=self.effort.in_use, seconds=self.effort.seconds)

    def _results(self, race: Race) -> Iterator[Row]:
        """The rows of a race; of who failed in it, why."""
        failed = dict(race.failed)
        for index, entry in enumerate(self.entries):
            for name in (str(index), f"{index} eager"):
                if (error := failed.pop(name, None)) is not None:
                    entry.refuse(error)
        for error in failed.values():  # of a yardstick, without which no ratio means anything
            raise error
        yield from self._rows(race.timings())

    def _rows(self, timings: dict[str, Timing]) -> Iterator[Row]:
        for index, entry in enumerate(self.entries):
            timing = timings.get(str(index))
            if entry.call is None:
                yield entry.row
            elif timing is not None:
                yield replace(
                    entry.row,
                    seconds=timing.median,
                    spread=timing.spread,
                    rounds=len(timing.rounds),
                    ratios=self._ratios(index, entry.row, timing, timings),
                )

    def _ratios(self, index: int, row: Row, timing: Timing, timings: dict[str, Timing]) -> Ratios:
        """To references, to this mechanism's peers, to its own eager form, and to the floors."""
        rivals = {
            other.row.name: timings[str(number)]
            for number, other in enumerate(self.entries)
            if number != index and str(number) in timings and _compares(row, other.row)
        }
        if (twin := timings.get(f"{index} eager")) is not None:
            rivals["eager"] = twin
        if self.yardsticks and self.moved is not None:
            rivals |= self.yardsticks.floors(timings, flops=row.flops, moved=self.moved)
        return {name: ratio(timing, other) for name, other in rivals.items()}


def _compares(row: Row, other: Row) -> bool:
    """Everything to the reference and the floor; a mechanism to implementations of it."""
    if other.role in ("reference", "floor"):
        return True
    return row.role == "mechanism" and other.role == "peer" and other.of == row.name
