"""Options that several verbs have, each declared once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from zoo_core.cli.references import place

F = TypeVar("F", bound=Callable[..., Any])

_PLACE = "DIRECTORY|OWNER/NAME[@REVISION]"
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


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """One decorator for several options, which the help shows in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


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


def samples(default: int, least: int = 1) -> Callable[[F], F]:
    """How many samples are measured."""
    known = click.IntRange(min=least)
    return click.option("--limit", type=known, default=default, show_default=True, help="Samples.")


def batch_size(default: int) -> Callable[[F], F]:
    """How many samples run together."""
    return click.option(
        "--batch-size", type=click.IntRange(min=1), default=default, show_default=True
    )


mechanism_option = click.option(
    "--option",
    "options",
    metavar="KEY=VALUE",
    multiple=True,
    callback=assignments,
    help="An option of the mechanism, such as rank=64; may be repeated.",
)
host_setting = click.option(
    "--set",
    "model_kwargs",
    metavar="KEY=VALUE",
    multiple=True,
    callback=settings,
    help="A setting of the host model, such as num_hidden_layers=4; may be repeated.",
)
max_length = click.option(
    "--max-length", type=click.IntRange(min=1), help="Longest input, in tokens."
)
column = click.option("--column", help="Which column of a dataset holds the inputs.")
seed = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
tokenizer = click.option(
    "--tokenizer",
    metavar=_PLACE,
    callback=place,
    help="Where a tokenizer or image processor is. Default: the checkpoint's own.",
)

#: Which model is meant, for verbs that build or plan one.
model_options = together(
    mechanism_option,
    click.option("--layers", help="Where: 3, 0-3, 4-, 0,2,5-7, self, cross:0-3. Default: all."),
    click.option("--task", help="A head, such as sequence-classification or masked-lm."),
    max_length,
    host_setting,
)
#: What a model is fed, for verbs that run one on data beside its original.
data_options = together(
    click.option(
        "--teacher",
        metavar=_PLACE,
        callback=place,
        help="Checkpoint or stock weights of the original. Default: the model without its patches.",
    ),
    tokenizer,
    max_length,
    column,
)
