"""Low-rank and band attention: a window around each token, and a few anchors for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.low_rank_band.attention import LowRankBandAttention


@dataclass(frozen=True, kw_only=True)
class LowRankBandOptions(Options):
    """How wide the band is, of which rank the rest, and where the gate between them starts."""

    band: int = option(
        64,
        low=1,
        at_most="max_len",
        help="reach to each side: token i sees the keys j with |i - j| <= band",
    )
    rank: int = option(32, low=1, at_most="max_len", help="anchors per head, the rank of the rest")
    # Measured by swapping a pretrained BERT at 256 tokens without training: -2 keeps as much as -4
    # or a little more, and its gradient is larger.
    gate: float = option(
        -2.0,
        low=-40.0,
        high=40.0,
        help="logit at which the share of the low-rank part starts: -2 is 12 %, -40 none",
    )


def build(site: Site, options: LowRankBandOptions) -> LowRankBandAttention:
    """Build the module for one site."""
    from zoo_attention.low_rank_band.attention import LowRankBandAttention

    return LowRankBandAttention(site, options)


def exact_at(site: Site) -> LowRankBandOptions:
    """A band that spans the longest input, and a closed gate."""
    return LowRankBandOptions(band=site.max_len, gate=-40.0)


LOW_RANK_BAND = Mechanism(
    name="low_rank_band",
    summary="A gated mean of softmax within a band and of attention of low rank to all tokens.",
    family="low-rank",
    formula="(1 - g) softmax_band(scale q k^T) v + g softmax(scale q U^T) softmax(scale U k^T) v",
    paper=Paper(
        title="Low-Rank and Locality Constrained Self-Attention for Sequence Modeling", year=2019
    ),
    time="n*(band+rank)*d",
    memory="n*(band+rank+d)",
    supports=Supports(key_padding=True, weights=True),
    options=LowRankBandOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations=(
        "in the spirit of the paper, whose factorisation was not at hand: the low-rank part goes "
        "through learned anchors U, a gate per head starts near the band, and prefix tokens see "
        "and are seen by all"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer low_rank_band."""
    return [LOW_RANK_BAND]
