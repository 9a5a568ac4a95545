"""A page as HTML that needs nothing but itself, and as Markdown for a card. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from zoo_core.errors import ZooError
from zoo_core.report import charts, heat
from zoo_core.report.blocks import Block, Bullets, Facts, Gallery, Page, Table, Text
from zoo_core.targets import check_file
from zoo_core.words import markdown_table

#: What a page is written as.
SUFFIXES = {".html": "html", ".htm": "html", ".md": "markdown"}
#: Cells that start with a digit and are shorter than this are not wrapped.
_NUMBER = 24
_SPECIAL = str.maketrans({"|": "\\|", "<": "&lt;", ">": "&gt;", "*": "\\*", "`": "'", "\n": " "})


def html(page: Page) -> str:
    """The whole page. It loads nothing, runs no script, and its policy says so to the browser."""
    return _environment().get_template("page.html.jinja").render(page=page)


def markdown(page: Page) -> str:
    """Sections from `##` on, without those of pictures, and without long tables."""
    parts = [f"## {_plain(page.title)}", _plain(page.subtitle), *map(_plain, page.verdict)]
    for section in page.sections:
        if any(isinstance(block, Gallery) for block in section.blocks):
            continue
        blocks = [text for block in section.blocks if (text := "\n".join(_markdown(block)))]
        if blocks:
            parts += [f"### {_plain(section.title)}", *blocks]
    return "\n\n".join([*parts, _plain(page.footer)]) + "\n"


def write(page: Page, path: str | Path) -> Path:
    """Write a page as its suffix says: .html or .md. Raises ZooError where it cannot be."""
    path = check_file(path, SUFFIXES)
    text = html(page) if SUFFIXES[path.suffix.lower()] == "html" else markdown(page)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ZooError(f"{path} could not be written: {error}") from error
    return path


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("zoo_core.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": lambda block: type(block).__name__.lower(),
        "lines": charts.lines,
        "ranges": charts.ranges,
        "png": heat.png,
        "is_number": lambda cell: cell[:1] in "0123456789-" and len(cell) < _NUMBER,
    }
    # The two colour scales of all maps: from 0 to the largest weight, and of both signs.
    environment.globals["scale"] = heat.png((tuple(n / 63 for n in range(64)),))
    environment.globals["signed_scale"] = heat.png((tuple(n / 32 - 1 for n in range(65)),))
    environment.tests["signed"] = _is_signed
    return environment


def _is_signed(gallery: Gallery) -> bool:
    """Whether a map of it is shown in the colours for both signs."""
    pictures = (picture for figure in gallery.figures for picture in figure.pictures)
    return any(heat.is_signed(picture.cells) for picture in pictures)


def _markdown(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield _plain(block.text)
    elif isinstance(block, Bullets):
        yield from (f"- {_plain(item)}" for item in block.items)
    elif isinstance(block, Facts):
        yield from (f"- {_plain(term)}: {_plain(value)}" for term, value in block.rows)
    elif isinstance(block, Table) and not block.detail:
        heads, *rows = ([_plain(cell) for cell in row] for row in (block.heads, *block.rows))
        yield markdown_table(heads, rows)


def _plain(text: str) -> str:
    """Text in which Markdown finds nothing to read."""
    return " ".join(text.translate(_SPECIAL).split())
