"""Checks of parsed JSON values: each returns the value, or raises CheckpointError saying where."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from zoo_core.errors import CheckpointError, did_you_mean


def typed(where: str, value: Any, *types: type) -> Any:
    """`value`, of exactly one of these types (True is no int)."""
    if type(value) not in types:
        wanted = " or ".join("null" if each is type(None) else each.__name__ for each in types)
        raise CheckpointError(f"{where} is {_shown(value)}, must be of type {wanted}")
    return value


def chosen(where: str, value: Any, choices: Collection[str]) -> Any:
    """`value`, one of these texts."""
    if not isinstance(value, str) or value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise CheckpointError(f"{where} is {_shown(value)}, must be one of {allowed}")
    return value


def matched(where: str, value: Any, pattern: re.Pattern[str], wanted: str) -> str:
    """`value`, a text that fits the whole pattern; `wanted` says it in words."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise CheckpointError(f"{where} is {_shown(value)}, must be {wanted}")
    return value


def line(where: str, value: Any) -> str:
    """`value`, a text on one line that no terminal and no card can take for a command."""
    if not typed(where, value, str).isprintable():
        raise CheckpointError(f"{where} is {_shown(value)}, which holds control characters")
    return str(value)


def texts(where: str, value: Any) -> Mapping[str, str]:
    """`value`, an object whose values are texts."""
    for key, text in typed(where, value, dict).items():
        typed(f"{where}: {key!r}", text, str)
    return dict(value)


def keys(
    where: str, value: Any, *, required: Collection[str], optional: Collection[str] = ()
) -> Mapping[str, Any]:
    """`value`, an object with every required key and none beyond the optional ones."""
    for key in typed(where, value, dict):
        if key not in required and key not in optional:
            hint = did_you_mean(key, [*required, *optional])
            raise CheckpointError(f"{where} has an unknown key {key!r}{hint}")
    for key in required:
        if key not in value:
            raise CheckpointError(f"{where} lacks the key {key!r}")
    return dict(value)


def _shown(value: Any) -> str:
    return repr(value)[:80]
