"""Factorised dot-product attention (ViViT): heads within a frame, and heads across frames."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.factorised.attention import FactorisedAttention


@dataclass(frozen=True, kw_only=True)
class FactorisedOptions(Options):
    """How the heads are shared out."""

    temporal: float = option(
        0.5,
        low=0.0,
        high=1.0,
        help="share of the heads that attend across frames, rounded down; the others within them",
    )


def build(site: Site, options: FactorisedOptions) -> FactorisedAttention:
    """Build the module for one site."""
    from zoo_attention.factorised.attention import FactorisedAttention

    return FactorisedAttention(site, options)


def exact_at(site: Site) -> FactorisedOptions | None:
    """A single row, whose heads all attend within it."""
    return FactorisedOptions(temporal=0.0) if site.grid is not None and site.grid[0] == 1 else None


FACTORISED = Mechanism(
    name="factorised",
    aliases=("vivit",),
    summary="Half of the heads attend within a frame, the others across frames at one place.",
    family="grid",
    formula="concat(softmax_space(scale q k^T) v, softmax_time(scale q k^T) v) over the heads",
    paper=Paper(title="ViViT: A Video Vision Transformer", year=2021, arxiv="2103.15691"),
    # 24: 4 passes over memory (see `Mechanism`), of a token's query, key, value and output.
    time="n*(n**0.5 + 24)*d",
    memory="n*d",
    supports=Supports(grid="required"),
    options=FactorisedOptions,
    swap="needs-training",
    factory=build,
    exact_at=exact_at,
    deviations="the paper's model 4; prefix tokens, which it has none of, see and are seen by all; "
    "on a (rows, cols) grid rows take the place of frames",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer factorised."""
    return [FACTORISED]
