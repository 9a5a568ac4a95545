"""Options of verbs that train or measure, made from the same typed settings Python has."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from zoo_core.mechanism import Options

F = TypeVar("F", bound=Callable[..., Any])


def setting_options(kind: type[Options]) -> Callable[[F], F]:
    """Add one option for each field of an options class, under the field's name."""
    hints = typing.get_type_hints(kind)

    def add(command: F) -> F:
        for spec in reversed(fields(kind)):
            command = _option(spec.name, hints[spec.name], spec.default, spec.metadata)(command)
        return command

    return add


def _option(name: str, hint: Any, default: Any, about: typing.Mapping[str, Any]) -> Any:
    flag = name.replace("_", "-")
    kinds = [one for one in typing.get_args(hint) or (hint,) if one is not types.NoneType]
    if kinds == [bool]:
        return click.option(f"--{flag}/--no-{flag}", name, default=default, help=about["help"])
    return click.option(
        f"--{flag}",
        name,
        type=click.Choice(about["choices"]) if about["choices"] else kinds[0],
        default=default,
        show_default=default is not None,
        help=about["help"],
    )
