"""What a page is made of, whatever it is written as. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zoo_core.plain import table as aligned
from zoo_core.report.records import Cells

#: How a line looks: what the page is about, the two ends of its scale, and others.
Style = Literal["ours", "floor", "stock", "other"]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences. folded: those after the first `folded` are shown on request."""

    items: Sequence[str]
    folded: int = 12


@dataclass(frozen=True)
class Facts:
    """Terms and what they are."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first cell names the row. detail: long, shown on request only."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    detail: bool = False

    def lines(self, width: int | None = None) -> list[str]:
        """The table for a terminal of so many columns."""
        return aligned(self.heads, self.rows, width)


@dataclass(frozen=True)
class Series:
    """One line of a chart: a value for each place; NaN leaves a gap. band: (low, high) of each."""

    label: str
    values: Sequence[float]
    style: Style = "ours"
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Lines:
    """A chart of lines over places in a row. logarithmic: of the values' axis."""

    title: str
    places: Sequence[str]
    across: str
    series: Sequence[Series]
    logarithmic: bool = False


@dataclass(frozen=True)
class Range:
    """One row of a chart of ranges: a value, its interval, and marks on the scale."""

    label: str
    value: float
    low: float
    high: float
    floor: float | None = None


@dataclass(frozen=True)
class Ranges:
    """A chart of values on one scale, a row each. goal: where the line of the stock model is."""

    title: str
    rows: Sequence[Range]
    goal: float
    goal_label: str
    floor_label: str = ""
    logarithmic: bool = False


@dataclass(frozen=True)
class Picture:
    """A heat map. description: what it shows, for those who do not see it."""

    cells: Cells
    description: str


@dataclass(frozen=True)
class Figure:
    """Pictures side by side with one caption."""

    pictures: Sequence[Picture]
    title: str
    caption: str


@dataclass(frozen=True)
class Gallery:
    """Figures in a row that wraps."""

    figures: Sequence[Figure]


Block = Text | Bullets | Facts | Table | Lines | Ranges | Gallery


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it. key: unique on its page."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A whole page. verdict: the answer in a few sentences."""

    title: str
    subtitle: str
    verdict: Sequence[str]
    sections: Sequence[Section]
    footer: str
