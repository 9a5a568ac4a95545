"""Progress of a run on a terminal: stage, loss, retention so far, time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zoo_core.fidelity.training import Progress


@contextmanager
def bar(steps: int, score: str, *, shown: bool | None) -> Iterator[Callable[[Progress], None]]:
    """Show a bar on stderr while the block runs; yields what to call after each step.

    score: what the score of a run is called. shown: None = where stderr is a terminal.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda now: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as shown_bar:
        task = shown_bar.add_task("starting", total=steps, told="")

        def tell(now: Progress) -> None:
            told = describe(now, score)
            shown_bar.update(task, completed=now.step, description=now.stage, told=told)

        yield tell


def describe(now: Progress, score: str) -> str:
    """Loss, retention so far and time left, in words."""
    kept = "" if now.score is None else f"  {score} {now.score:.3f}"
    minutes, seconds = divmod(int(now.seconds_left), 60)
    return f"loss {now.loss:.4f}{kept}  {minutes}:{seconds:02d} left"
