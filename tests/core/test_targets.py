"""Whether a file may be put somewhere: one answer for all that write one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from zoo_core import targets
from zoo_core.bench import baseline, plots
from zoo_core.diagnose.pictures import draw_on_image
from zoo_core.errors import ZooError
from zoo_core.fidelity import picture
from zoo_core.report import rendering

WRITERS = {
    "baseline": lambda path: baseline.save(path, [], {}),
    "plot": lambda path: plots.plot([], path),
    "map": lambda path: draw_on_image(__import__("torch").rand(2, 2), path),
    "layers": lambda path: picture.draw({}, path),
    "page": lambda path: rendering.write(None, path.with_suffix(".md")),
}


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "file").touch()
    return tmp_path


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("folder.png", "it is a directory, name a file in it"),
        ("no/a.png", r"no is no directory, make it first"),
        ("file/a.png", "file is a file"),
    ],
    ids=["directory", "missing", "file"],
)
def test_every_writer_refuses_the_same_in_the_same_words(place, writer, name, why) -> None:
    if writer in ("plot", "map", "layers"):
        pytest.importorskip("matplotlib")
    with pytest.raises(ZooError, match=f"could not be written: .*{why}"):
        WRITERS[writer](place / name)


def test_no_regular_file(tmp_path) -> None:
    os.mkfifo(tmp_path / "queue")
    with pytest.raises(ZooError, match="queue could not be written: it is no regular file"):
        targets.check_file(tmp_path / "queue")


def test_permissions(tmp_path, monkeypatch) -> None:
    (tmp_path / "there").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    for check in (targets.check_file, targets.check_folder):
        with pytest.raises(ZooError, match=f"no permission for {tmp_path}"):
            check(tmp_path / "new")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == tmp_path)
    with pytest.raises(ZooError, match="no permission to change it"):
        targets.check_file(tmp_path / "there")


def test_the_files_of_a_picture(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    assert targets.check_picture(tmp_path / "a.pdf") == [tmp_path / "a.pdf"]
    assert targets.check_picture(tmp_path / "a") == [tmp_path / "a.png", tmp_path / "a.svg"]
    with pytest.raises(ZooError, match=r"a\.gif must end with one of \.png, \.svg, \.pdf"):
        targets.check_picture(tmp_path / "a.gif")


def test_without_matplotlib_it_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ZooError, match=r"pip install 'zoo-core\[plots\]'"):
        targets.figure_class()


def test_a_disk_that_is_full(tmp_path) -> None:
    class Full:
        def savefig(self, path: Path, **how: object) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(ZooError, match=r"a\.png could not be written: No space left on device$"):
        targets.save_figure(Full(), tmp_path / "a.png")
