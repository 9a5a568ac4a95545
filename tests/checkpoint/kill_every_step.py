"""Put a checkpoint over another one, again and again, each time killed one step later.

    python kill_every_step.py NEW BEFORE SCRATCH

For each step leaves a directory SCRATCH/<step>/new/place as the kill left it; the last one is
whole. BEFORE may be "" for none. A program of its own because forking a process that holds torch
is slow.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from zoo_core.checkpoint.atomic import replacing

# All by which a save changes the disk, except writing into a file that nobody knows yet.
STEPS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


def put(checkpoint: Path, directory: Path) -> None:
    """What zoo.save does to a directory, without the time to make the files."""
    with replacing(directory) as folder:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Run `work` in a fork, killed before its `step`-th change of the disk; False if it has fewer.

    Raises RuntimeError if the work fails in another way.
    """
    process = os.fork()
    if process == 0:
        try:
            _count_to(step)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    if status not in (0, signal.SIGKILL):
        raise RuntimeError(f"step {step} ended with status {status}")
    return status == signal.SIGKILL


def _count_to(step: int) -> None:
    count = 0

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


def main(new: str, before: str, scratch: str) -> None:
    for step in range(1, 1000):
        directory = Path(scratch, f"{step:03d}", "new", "place")
        if before:
            shutil.copytree(before, directory)
        if not killed_at(step, lambda: put(Path(new), directory)):  # noqa: B023
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
