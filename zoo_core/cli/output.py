"""How verbs print: tables and text for people, JSON for programs.

Tables are made here rather than by Rich, whose import and layout of two hundred rows alone take
longer than `zoo list` may.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import click

from zoo_core import words

_PIPED_WIDTH = 160
_WIDE = 110
_READABLE = 30
_NARROWEST = 10
_GAP = "  "


class Cell(NamedTuple):
    """A text in a colour of `click.style`; bold or dim where it says so."""

    text: str
    colour: str | None = None
    bold: bool = False
    dim: bool = False

    def painted(self, line: str) -> str:
        """One line of the text with its style."""
        if not (line and (self.colour or self.bold or self.dim)):
            return line
        return click.style(line, fg=self.colour, bold=self.bold or None, dim=self.dim or None)


def say(*texts: str | Cell, stderr: bool = False) -> None:
    """Print a line; colours only on a terminal, and not where NO_COLOR is set."""
    cells = map(_harmless, texts)
    _print("".join(cell.painted(cell.text) for cell in cells), stderr=stderr)


def _harmless(text: str | Cell) -> Cell:
    """A text of which a terminal obeys no part: it may come out of a stranger's file."""
    cell = Cell(text) if isinstance(text, str) else text
    plain = "".join(c if c.isprintable() or c in "\n\t" else " " for c in cell.text)
    return cell._replace(text=plain)


def _print(line: str, *, stderr: bool = False) -> None:
    click.echo(line, err=stderr, color=False if os.environ.get("NO_COLOR") else None)


def warn(text: str) -> None:
    """Print a remark on stderr, which leaves stdout to the answer."""
    say(Cell(text, "yellow"), stderr=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal's stderr that something takes its time."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield


def as_json(value: Any) -> None:
    """Print one JSON document."""
    import json

    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def width() -> int:
    """Columns of the terminal; a pipe gets long lines instead of broken ones."""
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns


def is_wide() -> bool:
    """Whether there is room for columns that can be spared."""
    return width() >= _WIDE


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str | Cell]], *, cut: bool = False
) -> None:
    """Print aligned columns below their headers; what does not fit is wrapped in its column.

    cut: shorten the last column to the room that the others leave, one line for each row.
    """
    body = [[_harmless(one) for one in row] for row in rows]
    head = [Cell(header, bold=True) for header in headers]
    widths = _widths([head, *body] if headers else body, cut=cut)
    if cut:
        body = [[*row[:-1], _shortened(row[-1], widths[-1])] for row in body]
    if headers:
        _print_row(head, widths)
        rule = "─" if is_fancy() else "-"
        say(Cell(rule * (sum(widths) + len(_GAP) * (len(widths) - 1)), dim=True))
    for row in body:
        _print_row(row, widths)


def _widths(rows: Sequence[Sequence[Cell]], *, cut: bool) -> list[int]:
    """The natural width of each column; the last, then the widest give way until all fit."""
    limit = width()
    natural = [
        max(min(len(line), limit) for cell in column for line in cell.text.split("\n"))
        for column in zip(*rows, strict=True)
    ]
    excess = sum(natural) + len(_GAP) * (len(natural) - 1) - limit
    if excess > 0:
        spared = min(excess, max(natural[-1] - (_NARROWEST if cut else _READABLE), 0))
        natural[-1] -= spared
        for _ in range(excess - spared):
            if max(natural) > _NARROWEST:
                natural[natural.index(max(natural))] -= 1
    return natural


def _shortened(cell: Cell, wide: int) -> Cell:
    text = " ".join(cell.text.split())
    if len(text) <= wide:
        return cell._replace(text=text)
    mark = "…" if is_fancy() else "..."
    return cell._replace(text=text[: wide - len(mark)].rstrip(" ,;:.-") + mark)


def _print_row(row: Sequence[Cell], widths: Sequence[int]) -> None:
    wrapped = [_wrap(cell.text, wide) for cell, wide in zip(row, widths, strict=True)]
    for lines in zip_longest(*wrapped, fillvalue=""):
        padded = [
            cell.painted(line) + " " * (wide - len(line))
            for cell, line, wide in zip(row, lines, widths, strict=True)
        ]
        _print(_GAP.join(padded).rstrip())


def _wrap(text: str, wide: int) -> list[str]:
    if len(text) <= wide and "\n" not in text:
        return [text]
    return [part for line in text.split("\n") for part in textwrap.wrap(line, wide) or [""]]


def is_fancy() -> bool:
    """Whether stdout can encode more than ASCII."""
    try:
        "─·²…".encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def growth(text: str) -> str:
    """`n**2*d` as people write it: n²·d."""
    return words.growth(text) if is_fancy() else text
