"""Progress of a run: stage, loss, retention so far, time left; a bar, or lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zoo_core.fidelity.training import Progress


@contextmanager
def bar(steps: int, score: str, *, shown: bool | None) -> Iterator[Callable[[Progress], None]]:
    """Tell how far a run is while the block runs; yields what to call after each step.

    A terminal's stderr shows a bar, any other a line after every tenth of the steps.
    score: what the score of a run is called. shown: False = tell nobody.
    """
    if shown is False:
        yield lambda now: None
        return
    if not sys.stderr.isatty():
        yield _lines(score)
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


def _lines(score: str) -> Callable[[Progress], None]:
    """What prints a line whenever another tenth is done; patience may skip some of them."""
    told = 0

    def tell(now: Progress) -> None:
        nonlocal told
        tenths = 10 * now.step // now.steps
        if tenths > told:
            told = tenths
            line = f"{now.stage}  {now.step}/{now.steps}  {describe(now, score)}"
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()  # a log may be read long before a buffer is full

    return tell


def describe(now: Progress, score: str) -> str:
    """Loss, retention so far and time left, in words."""
    kept = "" if now.score is None else f"  {score} {now.score:.3f}"
    minutes, seconds = divmod(int(now.seconds_left), 60)
    return f"loss {now.loss:.4f}{kept}  {minutes}:{seconds:02d} left"
