"""`zoo bench` on tiny inputs; no test here looks at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest

from zoo_core import registry
from zoo_core.bench import layers, yardsticks
from zoo_core.cli import bench

QUICK = "--length 16,24 --heads 2 --width 8 --rounds 2 --seconds 1e-9 --no-peers".split()


@pytest.fixture(autouse=True)
def small_yardsticks(monkeypatch) -> None:
    monkeypatch.setattr(yardsticks, "SIZE_ON_CPU", 8)
    monkeypatch.setattr(yardsticks, "COPIED_BYTES", 64)


def test_a_table_and_its_machine(zoo) -> None:
    run = zoo("bench", "linear", "uniform", "--length", "16,24,32", *QUICK[2:], "--threads", "1")
    assert run.code == 0, run.err
    assert run.out.startswith("batch 1, 2 heads, width 8, float32, forward\n")
    assert "1 thread on" in run.out
    assert run.out.count("linear") == 4  # three lengths, one line of exponents
    assert "pays from" in run.out
    assert max(map(len, run.out.splitlines())) <= 80


def test_json_lines(zoo) -> None:
    run = zoo("bench", "linear", "--batch", "1,2", "--padded", "--json", *QUICK)
    assert run.code == 0, run.err
    lines = [json.loads(line) for line in run.out.splitlines()]
    assert lines[0]["kind"] == "machine"
    rows = [line for line in lines if line["kind"] == "row"]
    assert [(row["name"], row["length"], row["batch"]) for row in rows] == [
        (name, length, batch)
        for length in (16, 24)
        for batch in (1, 2)
        for name in ("sdpa", "linear")
    ]
    assert rows[1]["padded"]
    assert rows[1]["ratios"]["sdpa"].keys() == {"value", "error"}
    assert [line["kind"] for line in lines[9:]] == ["break_even"] * 2


def test_markdown_for_a_readme(zoo) -> None:
    run = zoo("bench", "linear", "uniform", "--markdown", *QUICK)
    assert run.code == 0, run.err
    lines = run.out.splitlines()
    assert lines[0] == "forward, batch 1, float32:"
    assert lines[2].startswith("| mechanism | pays from | / sdpa at 16 | / sdpa at 24 | MB at 24")
    assert [line.split()[1] for line in lines[4:6]] == ["`linear`", "`uniform`"]
    assert "torch" in lines[-1]


def test_a_run_is_kept_and_compared(zoo, tmp_path, monkeypatch) -> None:
    path = tmp_path / "kept.json"
    arguments = ["bench", "linear", *QUICK]
    run = zoo(*arguments, "--save", str(path))
    assert run.code == 0, run.err
    document = json.loads(path.read_text())
    assert [row["name"] for row in document["rows"]] == ["sdpa", "linear"] * 2
    for row in document["rows"]:
        for ratio in row["ratios"].values():
            ratio["value"] /= 1e6  # it was a million times as fast
            ratio["error"] /= 1e6
    path.write_text(json.dumps(document))
    run = zoo(*arguments, "--against", str(path))
    assert run.code == 1
    assert "slower than the baseline: linear" in run.err
    for row in document["rows"]:
        for ratio in row["ratios"].values():
            ratio["value"] *= 1e12
            ratio["error"] *= 1e12
    path.write_text(json.dumps(document))
    run = zoo(*arguments, "--against", str(path), "--json")
    assert run.code == 0, run.err
    changes = [line for line in map(json.loads, run.out.splitlines()) if line["kind"] == "change"]
    assert [change["verdict"] for change in changes] == ["faster", "faster"]


def test_what_comes_with_the_package_can_be_compared_with(zoo) -> None:
    run = zoo("bench", "linear", "uniform", *QUICK, "--against", "shipped")
    assert run.code == 1
    assert "no row in common with the baseline:" in run.err
    assert "linear, uniform: length 128 then, 24 now; heads 12 then, 2 now; width" in run.err


def fails(*arguments: object) -> None:
    raise RuntimeError("out of order")


def test_a_mechanism_that_broke_fails_the_comparison(zoo, tmp_path, monkeypatch) -> None:
    path = tmp_path / "kept.json"
    assert zoo("bench", "linear", "uniform", "local", "--save", str(path), *QUICK).code == 0
    broken = replace(registry.mechanism("linear"), factory=fails)
    monkeypatch.setattr(bench, "_mechanisms", lambda names: [broken, registry.mechanism("uniform")])
    against = [*QUICK, "--against", str(path), "--tolerance", "1e9"]
    run = zoo("bench", "x", *against)
    assert run.code == 1
    table = run.out.partition("before and now:")[0]
    assert table.count("broken") == 2  # two lengths
    assert run.err.rstrip().endswith("broken: measured in the baseline, refused now: linear")
    run = zoo("bench", "x", "--json", *against)
    lines = [json.loads(line) for line in run.out.splitlines()]
    changes = [line for line in lines if line["kind"] == "change"]
    assert [(one["name"], one["verdict"]) for one in changes] == [
        *[("uniform", "same")] * 2,
        *[("linear", "broken")] * 2,
    ]


def test_what_the_baseline_lacks_is_named(zoo, tmp_path) -> None:
    path = tmp_path / "kept.json"
    assert zoo("bench", "linear", "--save", str(path), *QUICK).code == 0
    run = zoo(
        *("bench", "linear", "uniform", "--length", "16,24,32", *QUICK[2:]),
        *("--against", str(path), "--tolerance", "1e9"),
    )
    assert run.code == 0, run.err
    assert (
        "without a counterpart in the baseline: uniform at 16, 24, 32 tokens, forward; "
        "linear at 32 tokens, forward\n"
    ) in run.err


def test_a_plot(zoo, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "costs.png"
    run = zoo("bench", "uniform", "--plot", str(path), *QUICK)
    assert run.code == 0, run.err
    assert path.stat().st_size > 10_000
    assert f"drawn in {path}" in run.err


def test_a_model(zoo) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50}
    run = zoo(
        *("bench", "--model", "bert", "--attention", "linear,gpsa", "--length", "16", "--no-peers"),
        *("--rounds", "2", "--seconds", "1e-9", *(f"--set={k}={v}" for k, v in sizes.items())),
    )
    assert run.code == 0, run.err
    assert run.out.startswith("bert: batch 1, 2 heads, width 8, float32, forward\n")
    assert "tax" in run.out
    assert "not measured: gpsa: does not fit BertModel" in run.err
    assert "--length" not in run.err


def test_lengths_of_an_image_model_are_not_dropped_silently(zoo) -> None:
    sizes = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 32}
    run = zoo(
        *("bench", "--model", "vit", "--attention", "uniform", "--length", "5,64", "--no-peers"),
        *("--rounds", "2", "--seconds", "1e-9", *(f"--set={k}={v}" for k, v in sizes.items())),
    )
    assert run.code == 0, run.err
    assert "--length 64 was left out: the images of vit make 5 tokens" in run.err


@pytest.fixture
def interrupt(monkeypatch) -> Callable[[int], None]:
    """Ctrl-C after so many rows."""
    measure = layers.measure

    def interrupt(after: int) -> None:
        def interrupted(*arguments, **how):
            yield from islice(measure(*arguments, **how), after)
            raise KeyboardInterrupt

        monkeypatch.setattr(layers, "measure", interrupted)

    return interrupt


def test_interruption_keeps_what_is_complete_and_exits_with_1(zoo, interrupt, tmp_path) -> None:
    path = tmp_path / "kept.json"
    interrupt(2)
    run = zoo("bench", "linear", "--save", str(path), *QUICK)
    assert run.code == 1
    assert "interrupted; 2 rows complete" in run.err
    assert "linear" in run.out
    assert len(json.loads(path.read_text())["rows"]) == 2


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (0, "no mechanism was measured"),
        (1, "no mechanism was measured"),
        (2, "the 2 rows of this interrupted run are not kept"),
    ],
)
def test_an_interrupted_run_replaces_no_baseline(
    zoo, interrupt, tmp_path, rows: int, why: str
) -> None:
    path = tmp_path / "kept.json"
    path.write_text("good")
    interrupt(rows)
    run = zoo("bench", "linear", "--save", str(path), *QUICK)
    assert run.code == 1
    assert f"{path} is left as it was: {why}" in run.err
    assert path.read_text() == "good"


def test_a_run_that_measured_nothing_keeps_nothing(zoo, tmp_path, monkeypatch) -> None:
    path = tmp_path / "kept.json"
    broken = replace(registry.mechanism("linear"), factory=fails)
    monkeypatch.setattr(bench, "_mechanisms", lambda names: [broken])
    run = zoo("bench", "linear", "--save", str(path), *QUICK)
    assert run.code == 1
    assert f"{path} is not written: no mechanism was measured" in run.err
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "name mechanisms, a pattern such as '*former', or all"),
        (["linear", "--json", "--markdown"], 2, "choose one of --json and --markdown"),
        (["linear", "--set", "hidden_size=8"], 2, "--set belongs to --model"),
        (["linear", "--steps", "3"], 2, "--steps belongs to --task without --model"),
        (["linear", "--model", "bert", "--heads", "3"], 2, "--heads and --width are the model's"),
        (["linear", "--length", "0"], 2, "0 is not in the range"),
        (["linear", "--mode", "sideways"], 2, "sideways"),
        (["linfomer"], 1, "linformer"),
        (["xyz*"], 1, "no mechanism fits 'xyz*'"),
        (["linformer", "--option", "rnk=3"], 1, "linformer has no option 'rnk'"),
        (["linear", "--plot", "costs.gif"], 2, "must end with one of"),
        (["linear", "--against", "none.json"], 1, "could not be read"),
        (["linear", "--save", "no/x.json"], 2, "no/x.json could not be written"),
        (["linear", "--save", "/"], 2, "/ could not be written: it is a directory"),
        (["linear", "--tolerance", "nan"], 2, "nan is not a finite number"),
        (["linear", "--seconds", "nan"], 2, "nan is not a finite number"),
        (["linear", "--seconds", "inf"], 2, "inf is not a finite number"),
        (["linear", "--plot", "no/costs.png"], 2, "no is no directory, make it first"),
        (["linear", "--threads", "100000"], 2, "100000 is not in the range"),
        (["linear", "--device", "nowhere"], 1, "device 'nowhere' cannot be used"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_misuse_is_said_at_once(zoo, arguments, code: int, words: str) -> None:
    run = zoo("bench", *arguments)
    assert (run.code, words in " ".join(run.err.split())) == (code, True), run.err
