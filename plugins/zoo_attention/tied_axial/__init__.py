"""Tied axial attention (MSA Transformer): one map for all rows, then along the columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.tied_axial.attention import TiedAxialAttention


@dataclass(frozen=True, kw_only=True)
class TiedAxialOptions(Options):
    """Whether attention along the columns follows."""

    columns: bool = option(
        True, help="attend along the columns after the rows; without, no cell sees another row"
    )


def build(site: Site, options: TiedAxialOptions) -> TiedAxialAttention:
    """Build the module for one site."""
    from zoo_attention.tied_axial.attention import TiedAxialAttention

    return TiedAxialAttention(site, options)


def exact_at(site: Site) -> TiedAxialOptions | None:
    """A single row."""
    return TiedAxialOptions() if site.grid is not None and site.grid[0] == 1 else None


TIED_AXIAL = Mechanism(
    name="tied_axial",
    aliases=("msa",),
    summary="All rows of the grid attend by one common map; then each cell attends to its column.",
    family="grid",
    formula="softmax_column(scale q k^T) (softmax(scale sum_rows q k^T / sqrt(rows)) v)",
    paper=Paper(
        title="MSA Transformer", year=2021, url="https://doi.org/10.1101/2021.02.12.430858"
    ),
    # 24: 4 passes over memory (see `Mechanism`), of a token's query, key, value and output.
    time="n*(n**0.5 + 24)*d",
    memory="n*d",
    supports=Supports(grid="required"),
    options=TiedAxialOptions,
    swap="needs-training",
    factory=build,
    exact_at=exact_at,
    deviations="both steps share the host's projections (the paper has a sublayer for each); "
    "prefix tokens see every token and stand in every row; no padding within rows",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer tied_axial."""
    return [TIED_AXIAL]
