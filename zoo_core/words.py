"""Numbers, names and tables as pages, cards and tables write them. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo_core.bench.rows import Ratio


def number(value: float | None) -> str:
    """Three decimals; very large and small ones as powers of ten; "-" where there is none."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "infinite"
    return f"{value:.1e}" if value != 0 and not 1e-3 <= abs(value) < 1e4 else f"{value:.3f}"


def interval(low: float, high: float) -> str:
    """`0.912 to 0.931`."""
    return f"{number(low)} to {number(high)}"


def percent(share: float | None) -> str:
    """A share in whole per cent."""
    return "-" if share is None or math.isnan(share) else f"{share:.0%}".replace("%", " %")


def times(ratio: float | None) -> str:
    """`0.62 times`."""
    return "-" if ratio is None else f"{ratio:.2f} times"


def ratio(value: float | None) -> str:
    """Two decimals."""
    return "-" if value is None else f"{value:.2f}"


def with_error(found: Ratio | None) -> str:
    """`0.62 ± 0.01`."""
    return "-" if found is None else f"{found.value:.2f} ± {found.error:.2f}"


def milliseconds(seconds: float | None) -> str:
    """With three digits that count."""
    return "-" if seconds is None else f"{seconds * 1e3:.3g} ms"


def megabytes(size: int | None) -> str:
    """With one decimal."""
    return "-" if size is None else f"{size / 1e6:,.1f} MB"


def growth(text: str) -> str:
    """`n**2*d` as people write it: n²·d."""
    return text.replace("**2", "²").replace("**3", "³").replace("**", "^").replace("*", "·")


def plural(count: int, noun: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """`a, b and c`; of many the first ones and how many more."""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def layer_numbers(paths: Sequence[str]) -> list[int] | None:
    """The numbers of layers as their paths have them; None where those do not tell."""
    found = [re.search(r"\.(\d+)\.", f".{path}.") for path in paths]
    numbers = [int(one[1]) for one in found if one]
    return numbers if len(set(numbers)) == len(paths) else None


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the cells hold nothing that would be read as more than text."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
