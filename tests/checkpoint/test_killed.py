"""kill -9 at any moment of a save leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kill_every_step import put
from killing import forked
from safetensors.torch import load_file
from tiny_models import BERT, bert, output
from torch import nn
from transformers import BertConfig, BertModel

import zoo_core as zoo
from zoo_core.checkpoint import layout, read_manifest, verify

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, nn.Module]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # A forked process has no thread pool.
    torch.manual_seed(0)
    stock = BertModel(BertConfig(**BERT)).eval()
    yield {"one": bert(), "sharded": bert("uniform"), "stock": stock}
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoints(
    models: dict[str, nn.Module], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Saved models; those of "one" and "sharded" have weight files that supersede each other's."""
    places = {name: tmp_path_factory.mktemp("saved") / name for name in models}
    for name, place in places.items():
        saved(name, models, place)
    return places


def saved(name: str, models: dict[str, nn.Module], directory: Path) -> None:
    zoo.save(models[name], directory, max_shard_size="20KB" if name == "sharded" else "1GB")


def every_kill(new: Path, before: Path | None, scratch: Path) -> list[Path]:
    """The directories that a kill at each step of putting `new` over `before` leaves."""
    program = Path(__file__).parent / "kill_every_step.py"
    importable = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, program, new, before or "", scratch]
    subprocess.run(arguments, env=importable, check=True)
    directories = [path / "new" / "place" for path in sorted(scratch.iterdir())]
    assert len(directories) > 10
    return directories


def holds(directory: Path, checkpoints: dict[str, Path]) -> str:
    """Whose checkpoint is there, every byte of it; "" if none is."""
    if verify(directory):
        with pytest.raises(zoo.ZooError, match=r"is not a directory|not a zoo checkpoint"):
            zoo.load(directory)
        return ""
    found = read_manifest(directory)
    return next(name for name, path in checkpoints.items() if read_manifest(path) == found)


@pytest.mark.parametrize(
    ("new", "old"),
    [("one", "sharded"), ("sharded", "one"), ("one", "one"), ("one", None)],
    ids=lambda name: name or "nothing",
)
def test_killed_before_every_step(
    new: str, old: str | None, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    before = checkpoints[old] if old else None
    left = every_kill(checkpoints[new], before, tmp_path)
    seen = [holds(directory, checkpoints) for directory in left]
    # The commit is one step: all before it leave the old checkpoint, all after it the new one.
    assert seen == sorted(seen, key=[old or "", new].index)
    assert set(seen) == {old or "", new}
    assert sorted(path.name for path in left[-1].iterdir()) == sorted(
        path.name for path in checkpoints[new].iterdir()
    )


def test_the_next_save_clears_up(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for directory in every_kill(checkpoints["sharded"], checkpoints["one"], tmp_path):
        put(checkpoints["one"], directory)
        assert holds(directory, checkpoints) == "one"
        names = sorted(path.name for path in directory.iterdir())
        assert names == ["README.md", "config.json", "model.safetensors", "zoo.json"]


@pytest.mark.parametrize(("new", "old"), [("one", "stock"), ("stock", "one")])
def test_stock_readers_never_meet_patched_weights_under_a_stock_config(
    new: str, old: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """They do not know where a save that was killed is complete; they read what is in place."""
    for directory in every_kill(checkpoints[new], checkpoints[old], tmp_path):
        patched = any(".zoo." in name for name in load_file(directory / layout.WEIGHTS))
        refuses = '"attn_implementation": "zoo"' in (directory / layout.CONFIG).read_text()
        assert refuses or not patched


def test_killed_at_random_moments(
    models: dict[str, nn.Module], tmp_path: Path, fault: Callable[..., None]
) -> None:
    expected = [output(models[name]) for name in ("one", "sharded")]
    saved("one", models, tmp_path)

    def work() -> None:
        while True:
            saved("sharded", models, tmp_path)
            saved("one", models, tmp_path)

    for number, moment in enumerate(torch.rand(20).tolist(), start=1):
        process = forked(work)
        time.sleep(0.02 + 0.4 * moment)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert verify(tmp_path) == []
        found = output(zoo.load(tmp_path))
        assert any(torch.equal(found, one) for one in expected)
        fault("save", "a whole checkpoint is there", f"kill -9, {number:02} of 20")


def test_two_savers_take_turns(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    names = ("one", "sharded")
    savers = [forked(lambda: [put(checkpoints[n], tmp_path) for _ in range(20)]) for n in names]  # noqa: B023
    for process in savers:
        assert os.waitpid(process, 0)[1] == 0
    assert holds(tmp_path, checkpoints) in names
