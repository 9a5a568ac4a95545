"""Put a checkpoint over another one, again and again, each time killed one step later.

    python kill_every_step.py NEW BEFORE SCRATCH

For each step leaves a directory SCRATCH/<step>/new/place as the kill left it; the last one is
whole. BEFORE may be "" for none. A program of its own because forking a process that holds torch
is slow.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from killing import Change, killed_at

from zoo_core.checkpoint.atomic import replacing

# All by which a save changes the disk, except writing into a file that nobody knows yet.
NAMES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
STEPS = [Change(os, name) for name in NAMES]


def put(checkpoint: Path, directory: Path) -> None:
    """What zoo.save does to a directory, without the time to make the files."""
    with replacing(directory) as folder:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)


def main(new: str, before: str, scratch: str) -> None:
    for step in range(1, 1000):
        directory = Path(scratch, f"{step:03d}", "new", "place")
        if before:
            shutil.copytree(before, directory)
        if not killed_at(step, lambda: put(Path(new), directory), STEPS):  # noqa: B023
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
