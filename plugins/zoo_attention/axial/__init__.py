"""Axial attention: along the rows of the grid, then along its columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.axial.attention import AxialAttention


@dataclass(frozen=True, kw_only=True)
class AxialOptions(Options):
    """How attention along the rows and along the columns come together."""

    combine: str = option(
        "sequence",
        choices=("sequence", "mean"),
        help="columns attend to what the rows gave, so that every cell reaches every other; or "
        "the mean of both, so that a cell sees its own row and column only",
    )


def build(site: Site, options: AxialOptions) -> AxialAttention:
    """Build the module for one site."""
    from zoo_attention.axial.attention import AxialAttention

    return AxialAttention(site, options)


def exact_at(site: Site) -> AxialOptions | None:
    """A single row."""
    return AxialOptions() if site.grid is not None and site.grid[0] == 1 else None


AXIAL = Mechanism(
    name="axial",
    summary="Softmax attention along the rows of the grid, then along its columns.",
    family="grid",
    formula="softmax_column(scale q k^T) (softmax_row(scale q k^T) v)",
    paper=Paper(
        title="Axial Attention in Multidimensional Transformers", year=2019, arxiv="1912.12180"
    ),
    # 24: 4 passes over memory (see `Mechanism`), of a token's query, key, value and output.
    time="n*(n**0.5 + 24)*d",
    memory="n*d",
    supports=Supports(grid="required"),
    options=AxialOptions,
    swap="needs-training",
    factory=build,
    exact_at=exact_at,
    deviations="both steps share the host's projections (the paper has a layer for each); prefix "
    "tokens see every token and are seen along the rows; no masked axes",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer axial."""
    return [AXIAL]
