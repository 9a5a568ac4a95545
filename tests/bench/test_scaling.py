"""Exponents and break-even, on made-up costs and on those that were measured."""

from __future__ import annotations

import pytest

from zoo_core.bench import baseline, scaling
from zoo_core.bench.cases import LENGTHS
from zoo_core.bench.measured import FILE
from zoo_core.errors import BenchError


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
def test_a_power_law_is_fitted_exactly(power: float) -> None:
    exponent, error = scaling.fit(LENGTHS, [3e-7 * n**power for n in LENGTHS])
    assert exponent == pytest.approx(power, abs=1e-12)
    assert error == pytest.approx(0, abs=1e-8)


def test_the_error_of_a_fit_covers_its_noise() -> None:
    noisy = [n * (1.1 if i % 2 else 0.9) for i, n in enumerate(LENGTHS)]
    exponent, error = scaling.fit(LENGTHS, noisy)
    assert 0.02 < error < 0.2
    assert abs(exponent - 1) < 2 * error


def costs(row, name, *, time, memory, **fields):
    """Rows at LENGTHS whose seconds and bytes follow these functions."""
    return [row(name, n, seconds=time(n), peak=int(memory(n)), **fields) for n in LENGTHS]


def test_fits_are_compared_with_what_the_record_declares(row) -> None:
    laws = {"time": lambda n: n**1.2, "memory": lambda n: 1e3 * n, "options": {"rank": 256}}
    time, _ = scaling.scalings(costs(row, "linformer", **laws))
    _, memory = scaling.scalings(costs(row, "linformer", mode="backward", **laws))
    assert (time.quantity, time.formula) == ("time", "n*rank*d")
    assert time.exponent == pytest.approx(1.2, abs=1e-6)
    assert time.declared == pytest.approx(1.0)
    assert time.off
    assert time.sure
    assert memory.exponent == pytest.approx(1.0, abs=1e-3)
    assert (memory.declared, memory.off) == (pytest.approx(1.0), False)


@pytest.mark.parametrize(("mode", "which"), [("forward", 1), ("backward", 0)])
def test_memory_of_a_forward_or_time_with_a_backward_is_not_declared(row, mode, which) -> None:
    rows = costs(row, "linformer", time=lambda n: n**2, memory=lambda n: n**2, mode=mode)
    found = scaling.scalings(rows)[which]
    assert found.exponent == pytest.approx(2.0, abs=1e-3)
    assert (found.declared, found.off) == (None, False)


def test_a_fit_that_is_off_by_less_than_its_error_is_not_sure(row) -> None:
    noisy = [n**1.1 * (1.4 if i % 2 else 0.7) for i, n in enumerate(LENGTHS)]
    rows = [row("linear", n, seconds=t) for n, t in zip(LENGTHS, noisy, strict=True)]
    time = scaling.scalings(rows)[0]
    assert time.off is (abs(time.exponent - 1) > 0.15)
    assert not time.sure


def test_a_peer_of_the_same_name_is_fitted_by_itself(row) -> None:
    rows = costs(row, "linformer", time=lambda n: n, memory=lambda n: n)
    rows += [
        row("linformer", n, role="peer", of="linformer", seconds=n**2, peak=n) for n in LENGTHS
    ]
    times = [one for one in scaling.scalings(rows) if one.quantity == "time"]
    assert [(one.of, round(one.exponent), one.formula) for one in times] == [
        ("", 1, "n*rank*d"),
        ("linformer", 2, ""),
    ]


def test_clamped_options_count_as_they_were_at_each_length(row) -> None:
    rows = [
        row("linformer", n, seconds=n * min(n, 256), options={"rank": min(n, 256)})
        for n in (64, 128, 256)
    ]
    time = scaling.scalings(rows)[0]
    assert time.exponent == pytest.approx(2.0)
    assert time.declared == pytest.approx(2.0)


def test_short_lengths_whose_fixed_costs_hide_the_growth_are_left_out(row) -> None:
    rows = [row("linear", n, seconds=max(n, 512)) for n in (64, 512, 1024, 2048)]
    time = scaling.scalings(rows)[0]
    assert time.lengths == (512, 1024, 2048)
    assert time.exponent == pytest.approx(1.0)
    assert scaling.scalings(rows[:3])[0].lengths == (64, 512, 1024)


def test_what_nobody_registered_is_fitted_and_compared_with_nothing(row) -> None:
    rows = costs(row, "nobodys", time=lambda n: n**2, memory=lambda n: n)
    assert [(one.declared, one.off) for one in scaling.scalings(rows)] == [(None, False)] * 2


def test_two_lengths_are_too_few_and_modes_are_kept_apart(row) -> None:
    rows = [row("linear", n, mode=mode) for mode in ("forward", "backward") for n in (512, 1024)]
    assert scaling.scalings(rows) == []
    assert [one.case.mode for one in scaling.break_evens(rows)] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("n*rank*d", 10 * 4 * 8),
        ("n*(log(n) + d)/2", 10 * (2.302585092994046 + 8) / 2),
        ("n**1.5", 10**1.5),
        ("n^2 - min(n, rank)", 96),
        ("n*something", 640),
        ("n*flag", 640),
    ],
)
def test_declared_costs_are_evaluated(formula: str, value: float) -> None:
    sizes = {"n": 10, "rank": 4, "d": 8, "flag": True}
    assert scaling.evaluate(formula, sizes) == pytest.approx(value)


@pytest.mark.parametrize("formula", ["linear", "n log n", "__import__('os')", "n.real", "n**9**99"])
def test_nothing_but_arithmetic_is_evaluated(formula: str) -> None:
    if formula == "linear":  # a name alone is a size nobody knows
        assert scaling.evaluate(formula, {"n": 2}) == 64
        return
    with pytest.raises(BenchError, match="cannot be read"):
        scaling.evaluate(formula, {"n": 2.0})


def test_growth_of_an_unreadable_cost_is_feared_to_be_quadratic() -> None:
    assert scaling.growth_between("n*d", 512, 1024, {"d": 64}) == 2
    assert scaling.growth_between("n log n", 512, 1024, {}) == 4


@pytest.mark.parametrize(
    ("ratios", "length", "text"),
    [
        ([2.0, 1.5, 1.2], None, "> 2048"),
        ([0.9, 0.5, 0.3], 512, "<= 512"),
        ([2.0, 0.5, 0.25], 724, "724"),
        ([0.9, 1.25, 0.8], 1448, "1448"),
        ([4.0, 1.0, 0.5], 1024, "1024"),
    ],
    ids=["never", "always", "in the middle", "back and forth", "at a length"],
)
def test_break_even_is_where_it_stays_faster(row, ratios, length, text) -> None:
    lengths = (512, 1024, 2048)
    rows = [row("linear", n, ratios={"sdpa": r}) for n, r in zip(lengths, ratios, strict=True)]
    (found,) = scaling.break_evens(rows)
    assert str(found) == text
    assert found.length == (length and pytest.approx(length, abs=0.5))


def test_what_the_records_declare_is_what_was_measured() -> None:
    # Records declare what plain torch takes.
    plain = [row for row in baseline.load(FILE).rows if not row.case.native]
    shipped = scaling.scalings(plain)
    assert len([one for one in shipped if one.declared is not None]) > 70
    # At 512 tokens the maps of evolving still fit a cache; from 1,024 on it grows as declared.
    assert {one.name for one in shipped if one.off} <= {"evolving"}
    assert not any(one.sure for one in shipped)
