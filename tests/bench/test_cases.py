"""The points of a sweep."""

from __future__ import annotations

import pytest

from zoo_core import bench
from zoo_core.bench import Case, sweep
from zoo_core.errors import BenchError


def test_every_public_name_is_there() -> None:
    for name in bench.__all__:
        assert getattr(bench, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'benchmark'"):
        _ = bench.benchmark


def test_a_sweep_is_every_combination_with_growing_lengths() -> None:
    cases = sweep(length=[64, 16], batch=[1, 2], mode="backward", width=8)
    points = [(case.length, case.batch) for case in cases]
    assert points == [(16, 1), (16, 2), (64, 1), (64, 2)]
    assert {(case.mode, case.width, case.dim) for case in cases} == {("backward", 8, 96)}


def test_a_padded_batch_has_half_to_all_of_its_tokens() -> None:
    assert Case(length=128, batch=4, padded=True).real_tokens == [72, 88, 104, 120]
    assert Case(length=128, padded=True).real_tokens == [96]
    assert Case(length=1, batch=3, padded=True).real_tokens == [1, 1, 1]
    assert Case(length=128, batch=2).real_tokens == [128, 128]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"length": 0}, "length 0 must be a whole number"),
        ({"length": 8, "heads": 1.5}, "heads 1.5 must be"),
        ({"length": 8, "dtype": "int8"}, "dtype 'int8' must be one of float32"),
        ({"length": 8, "mode": "fast"}, "mode 'fast' must be one of forward"),
        ({"length": 8, "layers": 3}, "a case has no 'layers'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_cases_are_refused(values, words) -> None:
    with pytest.raises(BenchError, match=words):
        sweep(**values)
