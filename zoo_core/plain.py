"""What reports are made of for people and for programs: aligned text, and values fit for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned lines: the first column to the left, the others to the right."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(wide) if index == 0 else cell.rjust(wide)
            for index, (cell, wide) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def finite(value: Any) -> Any:
    """The same for JSON, which has no NaN: null stands for it."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
