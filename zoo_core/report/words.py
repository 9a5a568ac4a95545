"""Numbers as the page writes them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo_core.bench.rows import Ratio

NOT_ASKED = "not asked for"
INTERRUPTED = "interrupted before it was done"


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


def listed(names: Sequence[str], most: int = 6) -> str:
    """`a, b and c`; of many the first ones and how many more."""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def plural(count: int, noun: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
