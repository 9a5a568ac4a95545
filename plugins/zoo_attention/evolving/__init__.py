"""Evolving attention: the scores of one layer, convolved, shape those of the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.evolving.attention import EvolvingAttention


@dataclass(frozen=True, kw_only=True)
class EvolvingOptions(Options):
    """Where the two learned shares start; at 0 both leave pretrained weights as they are."""

    alpha: float = option(
        0.0, low=0.0, high=1.0, help="start of the share of the convolved scores, learned"
    )
    beta: float = option(
        0.0, low=0.0, high=1.0, help="start of the share of the previous layer's scores, learned"
    )


def build(site: Site, options: EvolvingOptions) -> EvolvingAttention:
    """Build the module for one site."""
    from zoo_attention.evolving.attention import EvolvingAttention

    return EvolvingAttention(site, options)


def exact_at(site: Site) -> EvolvingOptions:
    """Nothing from the layer before, nothing convolved."""
    return EvolvingOptions(alpha=0.0, beta=0.0)


EVOLVING = Mechanism(
    name="evolving",
    aliases=("evolving_attention", "ea"),
    summary="Softmax over scores mixed with those of the layer before and convolved across heads.",
    family="softmax",
    formula="softmax(A) v, A = (1 - alpha) M + alpha relu(conv3x3(M)), "
    "M = (1 - beta) scale q k^T + beta A of the layer before",
    paper=Paper(
        title="Evolving Attention with Residual Convolutions", year=2021, arxiv="2102.12895"
    ),
    time="n**2*d + n**2*heads",
    memory="n**2",
    supports=Supports(key_padding=True, weights=True, needs=frozenset({"carry"})),
    options=EvolvingOptions,
    swap="exact",
    factory=build,
    exact_at=exact_at,
    deviations=(
        "alpha and beta are learned, from 0, instead of fixed; the convolution starts as the "
        "identity; it sees real tokens only, by rank; there is no form for decoders"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer evolving."""
    return [EVOLVING]
