"""Measurements with and without native kernels."""

from __future__ import annotations

import json

import pytest
import torch

import zoo_core as zoo
from zoo_core import bench
from zoo_core.bench import baseline, machine, measured, tables
from zoo_core.bench.cases import Case
from zoo_core.bench.contest import Contest
from zoo_core.bench.rows import Row
from zoo_core.errors import BenchError
from zoo_core.nn import choice, native

TINY = {"heads": 1, "width": 4}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernels were built."""
    monkeypatch.setattr(native, "loaded", lambda: True)


@pytest.mark.parametrize("wanted", [False, True], ids=["plain", "native"])
def test_a_case_is_measured_with_kernels_only_if_it_says_so(built, quick, wanted: bool) -> None:
    allowed = []

    def build(site: zoo.Site, options: zoo.Options) -> torch.nn.Module:
        return Watches(allowed)

    mechanism = zoo.Mechanism(
        name="watches",
        summary="Notes whether kernels may be taken.",
        family="toy",
        paper=None,
        time="n*d",
        memory="n*d",
        supports=zoo.Supports(key_padding=True),
        options=zoo.Options,
        swap="needs-training",
        factory=build,
    )
    rows = list(bench.measure([mechanism], [Case(length=4, native=wanted, **TINY)], effort=quick))
    assert {row.name for row in rows if row.seconds is not None} == {"sdpa", "watches"}
    # In counting products nothing may be fused, whatever is measured.
    assert set(allowed) == {False, True} if wanted else {False}
    assert allowed[-1] is wanted
    assert choice.kernels_allowed()


class Watches(torch.nn.Module):
    def __init__(self, allowed: list[bool]) -> None:
        super().__init__()
        self.allowed = allowed

    def forward(self, q, k, v, ctx):
        self.allowed.append(choice.kernels_allowed())
        return v


def test_on_a_gpu_its_own_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine.kernels(Case(length=4, device="cuda:0")):
        assert choice.kernels_allowed()


@pytest.mark.parametrize("whole", [False, True], ids=["bare", "model"])
def test_kernels_that_are_not_built_are_refused_at_once(monkeypatch, whole: bool) -> None:
    monkeypatch.setattr(native, "loaded", lambda: False)
    case = Case(length=4, native=True, **TINY)
    rows = bench.measure_models("bert", ["linear"], [case]) if whole else bench.measure([], [case])
    with pytest.raises(BenchError, match="zoo native --build"):
        next(rows)


def test_files_from_before_there_were_kernels_are_read_as_plain(row, tmp_path) -> None:
    path = tmp_path / "kept.json"
    baseline.save(path, [row()], {"processor": "one"})
    document = json.loads(path.read_text())
    del document["rows"][0]["native"]
    path.write_text(json.dumps(document))
    assert baseline.load(path).rows[0].case.native is False


def test_kernels_are_compared_with_kernels(row) -> None:
    before = [row(ratios={"sdpa": 0.5}), row(ratios={"sdpa": 0.2}, native=True)]
    (found,) = baseline.compare(before, [row(ratios={"sdpa": 0.2}, native=True)])
    assert found.verdict == "same"


def test_what_has_no_kernels_is_compared_all_the_same(row) -> None:
    others = [row("local", native=True)]  # of which there are none at this length
    now = [row("linear", ratios={"sdpa": 1.0}, native=True), row("local", 1024, native=True)]
    (found,) = baseline.compare([row("linear"), row("local", 1024), *others], now)
    assert (found.row.name, found.verdict) == ("linear", "same")


def test_kernels_have_a_column_and_a_word(row) -> None:
    one = row(native=True)
    assert tables.caption([one]).endswith("forward, native kernels")
    assert "native" in [c.header for c in tables.layers_table([row(), one]).columns]
    assert "float32, native kernels:" in bench.markdown([one])


def test_a_verdict_tells_where_it_pays_with_kernels(row, tmp_path, monkeypatch) -> None:
    def rows(first: float, second: float, **how: bool) -> list[Row]:
        pairs = ((512, first), (1024, second))
        return [row("linear", n, ratios={"sdpa": ratio}, **how) for n, ratio in pairs]

    kept = tmp_path / "measured.json"
    about = {"processor": "one", "device": "cpu", "cores": 2, "threads": 2, "torch": "2"}
    baseline.save(kept, [*rows(2.0, 0.5), *rows(0.9, 0.4, native=True)], about)
    monkeypatch.setattr(measured, "FILE", kept)
    known = measured.verdict(zoo.mechanisms("linear")[0])
    assert known.summary == (
        "faster than fused softmax from about 724 tokens on, with native kernels from 512 tokens "
        "or fewer on"
    )
    assert not known.pays(600)  # nobody has to build them
    assert known.note(600).startswith("linear pays here with native kernels only: it is faster")
    assert known.note(300).startswith("linear does not pay here")


def test_a_contest_ends_with_kernels_as_they_were(quick, monkeypatch) -> None:
    contest = Contest(Case(length=4, **TINY), quick)
    contest.enter(Row(case=contest.case, name="broken", role="mechanism"), _raise)
    assert contest.entries[0].row.refused
    assert choice.kernels_allowed()


def _raise() -> None:
    raise ValueError("broken")
