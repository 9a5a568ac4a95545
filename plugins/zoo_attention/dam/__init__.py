"""DAM (SparseBERT): softmax attention under a mask that is learned with the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.dam.attention import DamAttention


@dataclass(frozen=True, kw_only=True)
class DamOptions(Options):
    """What a mask is made of, who shares it, and how it is trained."""

    structure: str = option(
        "toeplitz",
        choices=("toeplitz", "free"),
        help="one decision for each distance |i - j|, or one for each pair (i, j); of every head",
    )
    share: str = option(
        "none", choices=("none", "layers"), help="one mask per layer, or one in all layers"
    )
    start: float = option(
        4.0,
        low=0.0,
        high=40.0,
        help="logit by which keeping leads at first: in eval mode all is kept, in training a part "
        "sigmoid(start) of it",
    )
    temperature: float = option(1.0, low=0.01, high=100.0, help="of the Gumbel softmax")
    penalty: float = option(
        1e-2, low=0.0, help="factor of the auxiliary loss, the part of the mask that is kept"
    )


def build(site: Site, options: DamOptions) -> DamAttention:
    """Build the module for one site."""
    from zoo_attention.dam.attention import DamAttention

    return DamAttention(site, options)


def exact_at(site: Site) -> DamOptions:
    """The start: a mask that keeps everything, in eval mode."""
    return DamOptions()


DAM = Mechanism(
    name="dam",
    aliases=("sparsebert",),
    summary="Softmax attention under a learned mask, pushed to be sparse by an auxiliary loss.",
    family="sparse",
    formula="M_ij softmax(scale q k^T)_ij / sum_j M_ij softmax(scale q k^T)_ij v, "
    "M_ij ~ Bernoulli(sigmoid(keep - drop)), in eval mode M_ij = [keep >= drop]",
    paper=Paper(
        title="SparseBERT: Rethinking the Importance Analysis in Self-attention",
        year=2021,
        arxiv="2102.12871",
    ),
    time="n**2*d",
    memory="n**2",
    supports=Supports(key_padding=True, causal=True, bias=True, weights=True, lengths="fixed"),
    options=DamOptions,
    swap="exact",
    factory=build,
    exact_at=exact_at,
    deviations="masks multiply the weights, instead of adding -10000 to the scores; the loss takes "
    "the expected part that is kept, not the sampled one; layers that share a mask draw samples of "
    "their own; a query that is left without a key sees itself; eval mode draws nothing",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer dam."""
    return [DAM]
