"""The options that say which model is meant, for every verb that builds or plans one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


# Keyword arguments of zoo.build that have an option of their own.
_NAMED = (
    "architecture",
    "attention",
    "options",
    "layers",
    "pretrained",
    "task",
    "max_length",
    "seed",
    "softmax_where_faster",
)


def assignments(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, Any]:
    """Parse KEY=VALUE pairs; a value is JSON where it can be read as JSON, else a text."""
    found: dict[str, Any] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not (key and equals):
            raise click.BadParameter(f"{value!r} must be KEY=VALUE")
        if key in found:
            raise click.BadParameter(f"{key!r} is given twice")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def settings(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, Any]:
    """Parse KEY=VALUE pairs that become keyword arguments of zoo.build."""
    found = assignments(context, parameter, values)
    for key in found:
        if key in _NAMED:
            raise click.BadParameter(f"{key!r} is not a setting of the host model")
    return found


_OPTIONS = (
    click.option(
        "--option",
        "options",
        metavar="KEY=VALUE",
        multiple=True,
        callback=assignments,
        help="An option of the mechanism, such as rank=64; may be repeated.",
    ),
    click.option("--layers", help="Where: 3, 0-3, 4-, 0,2,5-7, self, cross:0-3. Default: all."),
    click.option("--task", help="A head, such as sequence-classification or masked-lm."),
    click.option("--max-length", type=click.IntRange(min=1), help="Longest input, in tokens."),
    click.option(
        "--set",
        "model_kwargs",
        metavar="KEY=VALUE",
        multiple=True,
        callback=settings,
        help="A setting of the host model, such as num_hidden_layers=4; may be repeated.",
    ),
)


def model_options(command: F) -> F:
    """Add options, layers, task, max_length and model_kwargs to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
