"""The training examples: each can be imported, those without downloads are run the quickest way."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.parametrize("name", ["finetune_bert", "freezing", "longer_context", "pipeline"])
def test_it_can_be_imported(name: str) -> None:
    assert callable(import_module(name).main)


@pytest.mark.parametrize(
    ("name", "printed"),
    [("train_vit", "Digits, 1 epochs from scratch"), ("distil_deit", "one head")],
)
def test_the_quick_path_runs(name: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    import_module(name).main(["--quick"])
    assert printed in capsys.readouterr().out


def test_a_missed_goal_is_an_error() -> None:
    with pytest.raises(SystemExit, match="below 100%: uniform"):
        import_module("train_vit").main(
            ["--mechanisms", "uniform", "--epochs", "1", "--patch", "4", "--goal", "1.0"]
        )
