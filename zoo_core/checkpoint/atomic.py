"""Replace the files of a checkpoint directory all at once, or not at all.

1. Everything is written to a new folder inside the directory, and synced to the disk.
2. The folder is renamed to `.zoo-pending`. This one rename is the commit: readers look there first
   (`layout.find`), so that before it the old checkpoint is complete, and after it the new one.
3. Its files are moved into place one by one, and the weights they supersede are deleted. Whoever
   saves next finishes this, should the process die in between.

Files that are not the checkpoint's own, a tokenizer or a README, stay.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from zoo_core.checkpoint import host_config, layout
from zoo_core.checkpoint.manifest import Manifest, read_manifest
from zoo_core.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows: two saves into one directory at the same time are not kept apart.
    fcntl = None  # type: ignore[assignment]

_STAGING = ".zoo-staging-"
# Files of tensors and their indices, by the names that stock tools give them.
_TENSORS = re.compile(r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?")


def check_target(directory: Path) -> None:
    """Raise CheckpointError where a save would replace weights that are no checkpoint of the zoo.

    What save_pretrained or Trainer wrote of a patched model is one, since zoo.load reads it.
    """
    pending = directory / layout.PENDING
    if any(os.path.lexists(folder / layout.MANIFEST) for folder in (pending, directory)):
        return
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    foreign = [name for name in names if _TENSORS.fullmatch(name)]
    if foreign and not host_config.tells_of_a_patch(directory):
        raise CheckpointError(
            f"{directory} holds {foreign[0]}, which is no zoo checkpoint's and would be lost; "
            "choose another directory, or move it away first"
        )


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yield an empty folder; when the block ends, its files replace those of the directory.

    The block must leave zoo.json and the weights it names there; if it raises, nothing changes.
    Raises CheckpointError where the directory cannot be written.
    """
    try:
        with _made(directory), _locked(directory):
            finish(directory)
            _sweep(directory)
            staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=directory))
            try:
                yield staging
                _commit(staging, directory)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
            finish(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} could not be written: {error}") from error


def finish(directory: Path) -> None:
    """Move a committed save into place, if one is pending. Safe to repeat after a crash."""
    pending = directory / layout.PENDING
    if not pending.is_dir():
        return
    manifest = read_manifest(directory)
    # Stock readers know nothing of `pending`. As long as files are mixed they must meet the config
    # of whichever checkpoint is patched, because that is what makes them refuse.
    config_first = bool(manifest.attention)
    waiting = [path.relative_to(pending) for path in pending.rglob("*") if path.is_file()]
    waiting.sort(key=lambda name: (name.name == layout.CONFIG) != config_first)
    for name in waiting:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (pending / name).replace(directory / name)
    for old in _superseded(directory, manifest):
        old.unlink()
    _sync(directory)
    shutil.rmtree(pending)


def _superseded(directory: Path, manifest: Manifest) -> list[Path]:
    """The weights of an earlier save, which stock readers might prefer to the new ones."""
    current = {*manifest.files, *([layout.INDEX] if len(manifest.files) > 1 else [])}
    weights = [
        path
        for path in directory.iterdir()
        if (layout.is_weights(path.name) or path.name == layout.INDEX) and not path.is_dir()
    ]
    return [path for path in weights if path.name not in current]


def _check_places(staging: Path, directory: Path) -> None:
    """Raise CheckpointError where `finish` could not move a file into place, ever."""
    for path in staging.rglob("*"):
        target = directory / path.relative_to(staging)
        if target.exists() and target.is_dir() != path.is_dir():
            taken, wanted = ("folder", "file") if target.is_dir() else ("file", "folder")
            raise CheckpointError(
                f"{target} is a {taken}, and the save needs a {wanted} of that name; nothing was "
                "changed, move it away or choose another directory"
            )


def _commit(staging: Path, directory: Path) -> None:
    _check_places(staging, directory)
    for path in staging.rglob("*"):
        _sync(path)
    _sync(staging)
    staging.rename(directory / layout.PENDING)
    _sync(directory)


def _sweep(directory: Path) -> None:
    """Remove what a killed save left behind before its commit."""
    for path in directory.glob(f"{_STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Force a file or a folder to the disk; folders cannot be opened on Windows."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Create the directory; on failure remove what was created and is still empty."""
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other savers out, in this process and in others; a killed one leaves no lock behind."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # A file system without locks is no reason not to save.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
