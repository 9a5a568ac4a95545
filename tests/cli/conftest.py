from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from zoo_core.cli import main


@dataclass
class Run:
    code: int
    out: str
    err: str


@pytest.fixture
def zoo(live_site, capsys, monkeypatch) -> Callable[..., Run]:
    """Run the command in this process, on an 80 column terminal, with no plugins but ours."""
    monkeypatch.setenv("COLUMNS", "80")

    def zoo(*arguments: str) -> Run:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        out, err = capsys.readouterr()
        return Run(stop.value.code or 0, out, err)

    return zoo
