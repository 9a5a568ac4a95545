"""Read TOML strictly: every key is asked for with its form, and no other key is allowed."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from zoo_core.errors import CatalogueError, did_you_mean
from zoo_core.mechanism import NAME


class Form(NamedTuple):
    """How a string must look: in words for the error, and as a pattern for the check."""

    words: str
    pattern: re.Pattern[str]


TEXT = Form("a text", re.compile(r"\S(.*\S)?", re.DOTALL))
RECORD = Form("a lower_snake name of at most 64 characters", NAME)


class Table:
    """One table of a file, read key by key. Every error names file, table and key."""

    def __init__(self, path: Path, name: str, data: Mapping[str, Any]) -> None:
        self.path = path
        self.name = name
        self.data = data
        self.asked: dict[str, None] = {}

    def fail(self, reason: str) -> NoReturn:
        """Raise CatalogueError."""
        where = f"[{self.name}] " if self.name else ""
        raise CatalogueError(f"{self.path}: {where}{reason}")

    def close(self) -> None:
        """Refuse the keys that nobody asked for."""
        for key in self.data:
            if key not in self.asked:
                known = ", ".join(self.asked)
                self.fail(f"has no key {key!r} (has: {known}){did_you_mean(key, self.asked)}")

    def value(self, key: str, default: Any = None) -> Any:
        """Whatever stands there; without a default the key is required."""
        self.asked[key] = None
        if key not in self.data and default is None:
            self.fail(f"{key} is missing")
        return self.data.get(key, default)

    def text(self, key: str, form: Form = TEXT, default: str | None = None) -> str:
        """A string of that form; the default need not have it."""
        value = self.value(key, default)
        return self.formed(key, value, form) if key in self.data else str(value)

    def integer(self, key: str) -> int | None:
        """A positive integer, or None where the key is absent."""
        value = self.value(key, default=1)
        if type(value) is not int or value < 1:
            self.fail(f"{key} = {value!r} must be a positive integer")
        return value if key in self.data else None

    def names(self, key: str) -> tuple[str, ...]:
        """A list of record names, empty where the key is absent."""
        value = self.value(key, default=[])
        if not isinstance(value, list):
            self.fail(f"{key} = {value!r} must be a list of names")
        return tuple(self.formed(key, name, RECORD) for name in value)

    def mapping(self, key: str) -> dict[str, Any]:
        """A table of JSON values, empty where the key is absent."""
        value = self._table(key)
        self._check_json(key, value)
        return value

    def numbers(self, key: str) -> dict[str, float]:
        """A table of numbers, empty where the key is absent."""
        for name, value in self.mapping(key).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.fail(f"{key}: {name} = {value!r} must be a number")
        return {name: float(value) for name, value in self._table(key).items()}

    def tables(self, key: str, form: Form = RECORD) -> list[Table]:
        """The tables [key.<name>], none where the key is absent."""
        found = []
        for name, data in self._table(key).items():
            table = Table(self.path, f"{key}.{name}", data)
            self.formed(key, name, form)
            if not isinstance(data, dict):
                table.fail(f"must be a table, not {data!r}")
            found.append(table)
        return found

    def _table(self, key: str) -> dict[str, Any]:
        value = self.value(key, default={})
        if not isinstance(value, dict):
            self.fail(f"{key} = {value!r} must be a table")
        return value

    def formed(self, key: str, value: Any, form: Form) -> str:
        """`value` if it is a string of that form."""
        if not isinstance(value, str) or not form.pattern.fullmatch(value):
            self.fail(f"{key}: {value!r} must be {form.words}")
        return value

    def _check_json(self, key: str, value: Any) -> None:
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                self._check_json(key, part)
        elif not isinstance(value, str | int | float) or not _is_finite(value):
            self.fail(f"{key}: {value!r} must be a string, a finite number, a boolean or a list")


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def read(path: Path, text: str | None = None) -> Table:
    """The top table of a file, or of the text that is to stand in it.

    Raises CatalogueError where it cannot be read as TOML.
    """
    try:
        found = path.read_text(encoding="utf-8") if text is None else text
        return Table(path, "", tomllib.loads(found))
    except (OSError, ValueError) as error:
        raise CatalogueError(f"{path}: cannot be read: {error}") from error
