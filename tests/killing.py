"""Work that is killed in the middle, at every change that it makes on the disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Change(NamedTuple):
    """A function that changes the disk: `owner.name`.

    written: from its arguments, the file that it writes, which a kill leaves written by half.
    Without, the kill comes before the call.
    """

    owner: Any
    name: str
    written: Callable[..., Any] | None = None


def forked(work: Callable[[], object]) -> int:
    """Run in a forked process, which exits with 0 if `work` returns; returns its id."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return process


def killed_at(number: int, work: Callable[[], object], changes: Iterable[Change]) -> bool:
    """Run `work` in a fork that SIGKILL ends at its `number`-th change; False if it has fewer.

    Raises RuntimeError if the work fails in another way.
    """

    def counted() -> None:
        _count_to(number, changes)
        work()

    _, status = os.waitpid(forked(counted), 0)
    if status not in (0, signal.SIGKILL):
        raise RuntimeError(f"change {number} ended with status {status}")
    return status == signal.SIGKILL


def _count_to(number: int, changes: Iterable[Change]) -> None:
    count = 0

    def counted(call: Callable[..., Any], written: Callable[..., Any] | None) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            dies = count == number
            if dies and written is None:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if dies and written is not None:
                path = written(*args, **kwargs)
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    for owner, name, written in changes:
        setattr(owner, name, counted(getattr(owner, name), written))
