"""What reports are made of for people and for programs: text that fits, and values fit for JSON."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_GAP = "  "


def terminal_width() -> int | None:
    """Columns of the terminal; None where there is none: what is piped keeps its lines whole."""
    return shutil.get_terminal_size((0, 0)).columns or None


def paragraph(text: str, width: int | None = None) -> list[str]:
    """A text as lines of at most `width` columns, broken between words only."""
    if width is None:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None
) -> list[str]:
    """Aligned lines: the first column to the left, the others to the right.

    width: columns of the terminal. A table that is wider breaks its headings between words; columns
    that still find no room follow below, beside the first one again. No cell is cut.
    """
    columns = list(zip(heads, *rows, strict=True))
    lines = _aligned(columns)
    if width is None or max(map(len, lines)) <= width:
        return lines
    pieces = [_aligned(_folded(piece)) for piece in _pieces(columns, width)]
    return [line for piece in pieces for line in ("", *piece)][1:]


def _aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in columns]
    return [
        _GAP.join(
            cell.ljust(wide) if index == 0 else cell.rjust(wide)
            for index, (cell, wide) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in zip(*columns, strict=True)
    ]


def _pieces(columns: Sequence[Sequence[str]], width: int) -> list[list[Sequence[str]]]:
    """The columns in groups that fit, each begun by the first column."""
    first, *others = columns
    pieces = [[first]]
    for column in others:
        taken = sum(_least(one) + len(_GAP) for one in pieces[-1])
        if taken + _least(column) > width and len(pieces[-1]) > 1:
            pieces.append([first])
        pieces[-1].append(column)
    return pieces


def _least(column: Sequence[str]) -> int:
    """The width of a column whose heading is broken wherever it can be."""
    head, *cells = column
    return max(map(len, (*head.split(), *cells)))


def _folded(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """The columns with headings of as many lines as the longest takes."""
    heads = [paragraph(column[0], _least(column)) for column in columns]
    deep = max(map(len, heads))
    return [
        [*[""] * (deep - len(head)), *head, *column[1:]]
        for head, column in zip(heads, columns, strict=True)
    ]


def finite(value: Any) -> Any:
    """The same for JSON, which has no NaN: null stands for it."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
