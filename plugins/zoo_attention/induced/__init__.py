"""Induced attention (Set Transformer): all tokens meet at a few learned inducing points."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.induced.attention import InducedAttention


@dataclass(frozen=True, kw_only=True)
class InducedOptions(Options):
    """How many inducing points there are."""

    points: int = option(
        64, low=1, at_most="max_len", help="learned queries per head that gather from the tokens"
    )


def build(site: Site, options: InducedOptions) -> InducedAttention:
    """Build the module for one site."""
    from zoo_attention.induced.attention import InducedAttention

    return InducedAttention(site, options)


INDUCED = Mechanism(
    name="induced",
    aliases=("isab", "set_transformer"),
    summary="Learned inducing points attend to the tokens, and the tokens to what they gathered.",
    family="low-rank",
    formula="softmax(scale q (A k + R)^T) A v, A = softmax(scale I k^T)",
    paper=Paper(
        title=(
            "Set Transformer: A Framework for Attention-based Permutation-Invariant Neural Networks"
        ),
        year=2019,
        arxiv="1810.00825",
    ),
    time="n*points*d",
    memory="n*(points+d)",
    supports=Supports(key_padding=True, cross=True, weights=True),
    options=InducedOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "the host's projections serve both steps; I's own place in the keys is an offset R that "
        "starts at zero, and values have none; no feed-forward layer between the steps; the "
        "scale is that of a head; dropout acts on the second softmax"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer induced."""
    return [INDUCED]
