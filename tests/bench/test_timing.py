"""Turns and ratios; no test here reads a clock."""

from __future__ import annotations

import pytest

from zoo_core.bench.timing import Race, Timing, quartile_distance, ratio, standard_error


def order(calls: list[str]) -> list[str]:
    """The calls with repetitions in a row left out."""
    return [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]


def test_competitors_take_turns_in_alternating_order() -> None:
    calls: list[str] = []
    race = Race({n: lambda n=n: calls.append(n) for n in "abc"}, threads=1, seconds=1e-9)
    steps: list[int] = []
    race.run(3, lambda: steps.append(len(calls)))
    assert order(calls) == list("abc" + "acb" + "cab")  # and nobody twice in a row
    assert len(steps) == 3
    assert {name: len(timing.rounds) for name, timing in race.timings().items()} == {
        "a": 3,
        "b": 3,
        "c": 3,
    }


def test_an_interrupted_race_keeps_its_complete_rounds() -> None:
    turns: list[int] = []

    def stop() -> None:
        turns.append(1)
        if len(turns) == 2:
            raise KeyboardInterrupt

    race = Race({"a": int, "b": int}, threads=1, seconds=1e-9)
    with pytest.raises(KeyboardInterrupt):
        race.run(5, stop)
    assert [len(timing.rounds) for timing in race.timings().values()] == [2, 2]


def test_one_round_is_no_measurement() -> None:
    race = Race({"a": int}, threads=1, seconds=1e-9)
    race.run(1)
    assert race.timings() == {}


def test_a_ratio_pairs_rounds_so_that_drift_cancels() -> None:
    drift = (1.0, 5.0, 2.0, 9.0)
    ours, theirs = Timing(tuple(2 * t for t in drift)), Timing(drift)
    assert ratio(ours, theirs).value == 2.0
    assert ratio(ours, theirs).error == 0.0
    assert ratio(ours, theirs.scaled(4)).value == 0.5


def test_the_error_of_a_median_follows_from_the_quartiles() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert quartile_distance(values) == 2.0
    assert standard_error(values) == pytest.approx(1.253 * (2 / 1.349) / 5**0.5)
