"""The options that say what a model is fed, for every verb that runs one on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from zoo_core.cli.references import place

F = TypeVar("F", bound=Callable[..., Any])

_PLACE = "DIRECTORY|OWNER/NAME[@REVISION]"

tokenizer_option = click.option(
    "--tokenizer",
    metavar=_PLACE,
    callback=place,
    help="Where a tokenizer or image processor is. Default: the checkpoint's own.",
)
_OPTIONS = (
    click.option(
        "--teacher",
        metavar=_PLACE,
        callback=place,
        help="Checkpoint or stock weights of the original. Default: the model without its patches.",
    ),
    tokenizer_option,
    click.option("--max-length", type=click.IntRange(min=1), help="Longest text, in tokens."),
    click.option("--column", help="Which column of a dataset holds the inputs."),
)


def data_options(command: F) -> F:
    """Add teacher, tokenizer, max_length and column to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
