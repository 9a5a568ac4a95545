"""Kept measurements, and what got slower."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from zoo_core.bench import baseline
from zoo_core.bench.rows import Ratio, Row
from zoo_core.errors import BenchError, ZooError

MACHINE = {"processor": "one", "device": "cpu", "cores": 2, "threads": 1, "torch": "2"}


def test_rows_survive_saving_and_loading(row, tmp_path) -> None:
    rows = [
        row("linformer", options={"rank": 64}, ratios={"sdpa": 0.5, "linformer": 0.25}),
        row("bert", model="bert", ratios={"floor": 1.25}),
        row("gpsa", seconds=None, refused="gpsa: needs a grid", ratios={}),
    ]
    path = tmp_path / "kept.json"
    baseline.save(path, rows, MACHINE, command="zoo bench all")
    kept = baseline.load(path)
    assert (list(kept.rows), kept.machine, kept.command) == (rows, MACHINE, "zoo bench all")
    assert [one.name for one in tmp_path.iterdir()] == ["kept.json"]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (1.0, "same"),
        (1.08, "same"),
        (1.11, "slower"),
        (0.95, "same"),
        (0.92, "same"),
        (0.89, "faster"),
    ],
)
def test_a_change_within_the_tolerance_is_none(row, change: float, verdict: str) -> None:
    now = row(ratios={"sdpa": 0.5 * change})
    (found,) = baseline.compare([row(ratios={"sdpa": 0.5})], [now], tolerance=0.1)
    assert found.verdict == verdict
    assert found.change == pytest.approx(change)


def test_ratios_are_compared_and_not_times(row) -> None:
    (found,) = baseline.compare([row(seconds=1.0)], [row(seconds=9.0)])
    assert found.verdict == "same"


def test_noise_hides_a_change(row) -> None:
    def noisy(value: float) -> Row:
        return replace(row(), ratios={"sdpa": Ratio(value=value, error=0.1 * value)})

    (found,) = baseline.compare([noisy(1.0)], [noisy(1.4)])
    assert found.verdict == "same"
    assert found.noise == pytest.approx(3 * 0.1 * 2**0.5)
    (found,) = baseline.compare([noisy(1.0)], [noisy(1.5)])
    assert found.verdict == "slower"


def test_whole_models_are_compared_by_their_floor_and_the_worst_comes_first(row) -> None:
    before = [row(n, model="bert", ratios={"floor": 2.0, "stock": 1.0}) for n in ("a", "b")]
    now = [
        row("a", model="bert", ratios={"floor": 2.1, "stock": 9.0}),
        row("b", model="bert", ratios={"floor": 3.0, "stock": 1.0}),
    ]
    found = baseline.compare(before, now)
    assert [(one.row.name, one.verdict) for one in found] == [("b", "slower"), ("a", "same")]


def test_only_the_same_work_is_compared(row) -> None:
    before = [row(options={"rank": 64})]
    others = [
        row(options={"rank": 32}),
        row(options={"rank": 64}, length=1024),
        row(options={"rank": 64}, padded=True),
        row(options={"rank": 64}, role="peer", of="x"),
        row(options={"rank": 64}, ratios={}),
    ]
    assert baseline.compare(before, others) == []
    assert len(baseline.compare(before, [row(options={"rank": 64})])) == 1


def refused(row, **values) -> Row:
    return row(seconds=None, refused="linear: failed: no", ratios={}, **values)


def test_what_was_measured_and_is_refused_now_is_broken(row) -> None:
    before = [row(ratios={"sdpa": 0.5}), row("local"), refused(row, length=1024)]
    now = [refused(row), row("local"), refused(row, length=1024), refused(row, length=64)]
    (found,) = baseline.broken(before, now)
    assert (found.row, found.before.value) == (now[0], 0.5)
    line = found.as_dict()
    assert (line["name"], line["length"], line["verdict"]) == ("linear", 512, "broken")
    assert line["refused"] == "linear: failed: no"
    (change,) = baseline.compare(before, now)
    assert line.keys() - {"refused"} == change.as_dict().keys()


def test_a_whole_model_is_broken_whatever_options_its_layers_had(row) -> None:
    before = [row(model="bert", options={"rank": 8}, ratios={"floor": 1.0})]
    assert baseline.broken(before, [refused(row, model="bert", options={"rank": 64})])
    before = [row(options={"rank": 8})]
    assert baseline.broken(before, [refused(row, options={"rank": 64})]) == []
    assert baseline.broken(before, [refused(row, options={"rank": 8})])


def test_what_has_no_counterpart_is_told_apart(row) -> None:
    before = [row(), row("peer", role="peer", of="linear")]
    now = [row(), row(length=64), row("new"), row("mine", role="peer", of="linear"), refused(row)]
    assert baseline.unmatched(before, now) == [now[1], now[2]]


def test_why_nothing_has_a_counterpart_is_said_by_the_nearest_row(row) -> None:
    before = [row(length=1024, mode="backward"), row(length=1024), row("local")]
    now = [row(width=8), row(length=64), row("new"), row("local", ratios={})]
    assert baseline.why_unmatched(before, now) == {
        "linear": "length 1024 then, 64 now",
        "new": "the baseline has no numbers of it",
        "local": "no ratio to its reference",
    }


def test_another_machine_is_named() -> None:
    assert baseline.other_machine(MACHINE, {**MACHINE, "threads": 2, "memory": 5}) == [
        "threads 1 then, 2 now"
    ]


def damaged(change) -> str:
    document = {"kind": "zoo bench", "schema": 1, "machine": {}, "rows": []}
    return json.dumps({**document, **change})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no", "is not JSON"),
        ("[]", "was not written by `zoo bench --save`"),
        (damaged({"schema": 2}), "has schema 2, this version reads 1"),
        (damaged({"rows": [{"name": "x"}]}), "is damaged: KeyError"),
        (damaged({"rows": 3}), "is damaged"),
    ],
    ids=["text", "array", "newer", "row", "rows"],
)
def test_another_file_is_refused(tmp_path, text: str, words: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=words):
        baseline.load(path)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path) -> None:
    with pytest.raises(BenchError, match="could not be read"):
        baseline.load(tmp_path / "none.json")
    with pytest.raises(ZooError, match="could not be written"):
        baseline.save(tmp_path / "no" / "x.json", [], MACHINE)


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    def full(*places: object) -> None:
        raise OSError(28, "No space left on device", "x.json.new")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ZooError, match=r"x\.json could not be written: No space left on device$"):
        baseline.save(tmp_path / "x.json", [], MACHINE)
    assert list(tmp_path.iterdir()) == []
