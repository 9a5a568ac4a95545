"""Where the progress of work of minutes goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str], None]


@contextmanager
def told(doing: str, progress: Progress | None = None) -> Iterator[Progress]:
    """Tell what is done to `progress`, else to a terminal's stderr, else to nobody.

    doing: what stands on the terminal until there is news, such as "measuring".
    """
    if progress is not None or not sys.stderr.isatty():
        yield progress or silent
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{doing} ...") as status:
        yield lambda text: status.update(f"{text} ...")


def silent(text: str) -> None:
    """Tell nobody."""
