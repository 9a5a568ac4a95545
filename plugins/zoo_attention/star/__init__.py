"""Star attention: a ring of neighbours around a hub that sees, and is seen by, every token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.star.attention import StarAttention


@dataclass(frozen=True, kw_only=True)
class StarOptions(Options):
    """Whether the chain of neighbours is closed."""

    ring: bool = option(
        True, help="the last token and the first one behind the hub see one another; never causal"
    )


def build(site: Site, options: StarOptions) -> StarAttention:
    """Build the module for one site."""
    from zoo_attention.star.attention import StarAttention

    return StarAttention(site, options)


STAR = Mechanism(
    name="star",
    aliases=("star_transformer",),
    summary="Each token attends to its two neighbours and to a hub that attends to all.",
    family="sparse",
    formula="softmax over {j : |i - j| <= 1, or i or j a hub} (scale q k^T) v",
    paper=Paper(title="Star-Transformer", year=2019, arxiv="1902.09113"),
    time="n*d",
    memory="n*d",
    supports=Supports(key_padding=True, causal=True, weights=True),
    options=StarOptions,
    swap="needs-training",
    factory=build,
    deviations="as a mask of one softmax, with the prefix (without one the first token) as the "
    "hub, not a relay node and cyclic updates of its own; distances count real tokens only",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer star."""
    return [STAR]
