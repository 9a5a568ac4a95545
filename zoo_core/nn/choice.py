"""Whether kernels may stand in for plain torch where they compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_allowed = True


def kernels_allowed() -> bool:
    """Whether a kernel may be taken: not within `plain_only`."""
    return _allowed


@contextmanager
def plain_only() -> Iterator[None]:
    """Take the plain path within the block, backward included where it runs within.

    For the whole process: also for threads, like those in which a backward recomputes.
    """
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before
