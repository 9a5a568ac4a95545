"""What a verb is pointed at: a checkpoint directory, or a checkpoint on the Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo_core.cli.data_options import tokenizer_of
from zoo_core.errors import HubError, UnknownName
from zoo_core.hub.reference import look_up, parse

if TYPE_CHECKING:
    from torch import nn


def checkpoint(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """A callback for a directory that is there, or what may be on the Hub: only a request can tell.

    Raises BadParameter saying why a text is neither.
    """
    return _checked(value, look_up)


def checkpoints(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Like `checkpoint` for several, and the names in the catalogue will not do."""
    return tuple(_checked(value, parse) for value in values)


def _checked(value: str, resolve: Callable[[str], object]) -> str:
    if Path(value).is_dir():
        return value
    if Path(value).exists():
        raise click.BadParameter(f"{value} is a file, and a checkpoint a directory")
    try:
        resolve(value)
    except UnknownName as error:
        raise click.BadParameter(f"there is no directory {value!r}; {error}") from error
    except HubError as error:
        raise click.BadParameter(
            f"there is no directory {value!r}; one on the Hub is written owner/name or "
            "owner/name@revision"
        ) from error
    return value


def is_here(reference: str) -> bool:
    """Whether a reference is a directory; else it is one of the Hub."""
    return Path(reference).is_dir()


@contextmanager
def asking_the_hub(reference: str) -> Iterator[None]:
    """Say, where the Hub has no answer, that there is no such directory: that may be a typo."""
    try:
        yield
    except HubError as error:
        raise HubError(f"{error} (nor is there a directory {reference!r})") from error


def opened(reference: str, tokenizer: Path | None) -> tuple[nn.Module, Any]:
    """The model of a checkpoint, and what prepares its inputs: from `tokenizer`, or its own.

    Raises ZooError where `tokenizer` holds neither a tokenizer nor an image processor.
    """
    if is_here(reference):
        from zoo_core.checkpoint import load

        return load(reference), tokenizer_of(tokenizer or reference, needed=tokenizer is not None)
    from zoo_core.fidelity.preparing import place_of
    from zoo_core.hub.pulling import pull

    with asking_the_hub(reference):
        model = pull(reference)
    return model, tokenizer_of(tokenizer or place_of(model), needed=tokenizer is not None)
