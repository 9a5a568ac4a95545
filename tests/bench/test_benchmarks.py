"""examples/benchmarks.py: which races it runs, and how it goes on after an interruption."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from zoo_core import bench, registry
from zoo_core.bench.cases import Case


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return import_module("benchmarks")


@pytest.fixture
def records():
    return registry.mechanisms(distribution="zoo-core")


def test_every_mechanism_is_measured_and_the_quadratic_ones_not_at_the_longest(
    benchmarks, records
) -> None:
    measured: dict[tuple[int, str], set[str]] = {}
    for heat in benchmarks.heats(records):
        if not heat.model:
            measured.setdefault((heat.case.length, heat.case.mode), set()).update(heat.names)
    names = {record.name for record in records}
    longest = measured.pop((16384, "forward"))
    assert measured.pop((8192, "backward")) == longest
    assert measured.pop((4096, "compiled")) == longest
    assert set(measured) == {
        *((n, "forward") for n in (128, 512, 1024, 4096, 8192)),
        *((n, "backward") for n in (512, 1024, 4096)),
    }
    assert all(found == names for found in measured.values())
    assert {"linear", "axial"} <= longest
    assert not longest & {"softmax", "dam", "yoso"}


def test_what_is_measured_or_would_take_for_ever_is_left_out(benchmarks, row) -> None:
    heat = benchmarks.Heat(Case(length=4096), ("linear", "dam", "lie", "gpsa"))
    rows = [
        row("linear", 4096, seconds=0.1),
        row("dam", 1024, seconds=1.0),  # 16 s at 4096
        row("lie", 1024, seconds=0.01, peak=10**9),  # 16 GB
        row("gpsa", 1024, seconds=0.01),
        row("gpsa", 4096, model="bert"),
    ]
    assert heat.left(rows).names == ("gpsa",)
    assert heat.left([*rows, row("gpsa", 4096)]) is None
    backward = replace(heat, case=Case(length=4096, mode="backward"))
    assert backward.left([row("linear", 4096, seconds=3.0)]).names == ("dam", "lie", "gpsa")


def test_it_goes_on_where_it_stopped(benchmarks, row, tmp_path, monkeypatch) -> None:
    path, ran = tmp_path / "kept.json", []
    heats = [benchmarks.Heat(Case(length=n), ("linear",)) for n in (512, 1024)]

    def run(heat):
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(heat.case.length)
        sdpa = row("sdpa", heat.case.length, role="reference", ratios={})
        return [sdpa, row("linear", heat.case.length)]

    monkeypatch.setattr(benchmarks, "heats", lambda records: heats)
    monkeypatch.setattr(benchmarks.Heat, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmarks.py", "--output", str(path)])
    with pytest.raises(KeyboardInterrupt):
        benchmarks.main()
    assert ran == [512]
    ran[:] = [1, 2]  # lets the second one run
    benchmarks.main()
    assert ran == [1, 2, 1024]
    rows = bench.load(path).rows
    assert [(one.name, one.case.length) for one in rows] == [
        (name, n) for n in (512, 1024) for name in ("sdpa", "linear")
    ]
    monkeypatch.setattr(bench, "describe_machine", lambda *_: {"device": "other"})
    with pytest.raises(SystemExit, match="another machine"):
        benchmarks.main()
