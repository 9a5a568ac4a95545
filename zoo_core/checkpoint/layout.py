"""The files of a checkpoint directory: their names, and where the last complete save left them."""

from __future__ import annotations

import re
from pathlib import Path

from zoo_core.errors import CheckpointError

MANIFEST = "zoo.json"
CONFIG = "config.json"
CARD = "README.md"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")

# A save that was committed but not yet moved into place; readers look here first (see atomic.py).
PENDING = ".zoo-pending"

MANIFEST_LIMIT = 16 * 2**20
CONFIG_LIMIT = 4 * 2**20
INDEX_LIMIT = 10 * 2**20


def is_weights(name: str) -> bool:
    """Whether a checkpoint may keep tensors under this file name."""
    return name == WEIGHTS or SHARD.fullmatch(name) is not None


def weight_names(count: int) -> list[str]:
    """The file names of `count` shards, in order."""
    if count == 1:
        return [WEIGHTS]
    return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def find(directory: Path, name: str, *, root: Path | None = None) -> Path | None:
    """The path of one regular file of the checkpoint, None where there is none.

    root: the folder that links may not leave; the directory itself unless given.
    Raises CheckpointError for a link out of it, and for what is no regular file.
    """
    for folder in (directory / PENDING, directory):
        path = folder / name
        if not (path.exists() or path.is_symlink()):
            continue
        inside = (root or directory).resolve()
        if not path.resolve().is_relative_to(inside):
            raise CheckpointError(
                f"{path} is a link out of {inside}; put the file itself there (for a Hub cache "
                "use zoo.pull)"
            )
        if not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
        return path
    return None


def require(directory: Path, name: str, *, root: Path | None = None) -> Path:
    """Like `find`, but a missing file is an error."""
    path = find(directory, name, root=root)
    if path is None:
        raise CheckpointError(f"{directory} has no {name}; the checkpoint is incomplete")
    return path
