"""The options that say what a model is fed, for every verb that runs one on data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from zoo_core.errors import ZooError

F = TypeVar("F", bound=Callable[..., Any])

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_OPTIONS = (
    click.option(
        "--teacher",
        type=_DIRECTORY,
        help="Checkpoint or stock weights of the original. Default: the model without its patches.",
    ),
    click.option(
        "--tokenizer",
        type=_DIRECTORY,
        help="Directory of a tokenizer or image processor. Default: the checkpoint's own.",
    ),
    click.option("--max-length", type=click.IntRange(min=1), help="Longest text, in tokens."),
    click.option("--column", help="Which column of a dataset holds the inputs."),
)


def data_options(command: F) -> F:
    """Add teacher, tokenizer, max_length and column to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def tokenizer_of(directory: str | Path, *, needed: bool) -> Any:
    """The tokenizer or image processor of a directory; None where it has none.

    Raises ZooError where one is needed.
    """
    from zoo_core.fidelity.preparing import from_directory

    found = from_directory(Path(directory))
    if found is None and needed:
        raise ZooError(f"{directory} holds neither a tokenizer nor an image processor")
    return found
