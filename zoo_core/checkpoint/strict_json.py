"""JSON as a checkpoint may contain it: capped in size, no duplicate keys, no NaN, no Infinity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from zoo_core.errors import CheckpointError


def parse(text: bytes, where: str) -> Any:
    """Parse one UTF-8 document. Raises CheckpointError naming `where`."""
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error


def read(path: Path, limit: int) -> Any:
    """Read and parse one file of at most `limit` bytes. Raises CheckpointError naming it."""
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error}") from error
    if len(text) > limit:
        raise CheckpointError(f"{path} is larger than {limit} bytes; it is not a checkpoint's")
    return parse(text, str(path))


def dump(value: Any, where: str) -> bytes:
    """The canonical text of a value: the same value gives the same bytes, in any locale."""
    try:
        return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where} cannot be written as JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
