"""What a run tells of its progress where there is no terminal."""

from __future__ import annotations

import pytest

from zoo_core.fidelity.training import Progress
from zoo_core.fidelity.watching import bar


def run(shown: bool | None, steps: range) -> None:
    with bar(30, "cosine", shown=shown) as tell:
        for step in steps:
            tell(Progress(step, 30, "layers", 0.5, 0.75, 60 - step))


def test_a_log_gets_a_line_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    run(None, range(1, 31))
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "layers  3/30  loss 0.5000  cosine 0.750  0:57 left"
    assert [line.split()[1] for line in told] == [f"{n}/30" for n in range(3, 31, 3)]


def test_patience_and_a_resumed_run_skip_tenths(capsys: pytest.CaptureFixture[str]) -> None:
    run(None, range(20, 31, 5))
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == [
        "20/30",
        "25/30",
        "30/30",
    ]


def test_it_can_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    run(False, range(1, 31))
    assert capsys.readouterr().err == ""
