"""Bayesian attention: weights are random in training, Weibull variables around the softmax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.bayesian.attention import BayesianAttention


@dataclass(frozen=True, kw_only=True)
class BayesianOptions(Options):
    """How much the weights vary in training, and the prior that they are drawn to."""

    shape: float = option(
        10.0,
        low=0.1,
        high=1e6,
        help="shape of the Weibull distributions; the larger, the less the weights vary",
    )
    prior: str = option(
        "constant",
        choices=("constant", "learned", "contextual", "layers"),
        help="shape of the Gamma prior: `alpha`; learned for each head from there; beta times a "
        "softmax over a network of the keys; beta times the previous layer's weights",
    )
    alpha: float = option(1.0, low=1e-3, high=1e3, help="shape of a constant prior")
    beta: float = option(1.0, low=1e-3, high=1e3, help="rate of the Gamma prior")
    kl_weight: float = option(
        1.0, low=0.0, help="weight of the divergence from the prior in the auxiliary loss"
    )


def build(site: Site, options: BayesianOptions) -> BayesianAttention:
    """Build the module for one site."""
    from zoo_attention.bayesian.attention import BayesianAttention

    return BayesianAttention(site, options)


def exact_at(site: Site) -> BayesianOptions:
    """Always in eval mode; weights of this shape are those of softmax in training too."""
    return BayesianOptions(shape=1e6)


BAYESIAN = Mechanism(
    name="bayesian",
    aliases=("babn", "weibull", "bam"),
    summary="Softmax attention whose weights are Weibull variables in training, with a KL loss.",
    family="softmax",
    formula="training: softmax(log p + log(-log(1 - u)) / shape) v, u ~ U(0, 1), "
    "p = softmax(scale q k^T); eval: p v; loss: mean KL(Weibull(shape, p / Gamma(1 + 1/shape)) || "
    "Gamma(alpha, beta))",
    paper=Paper(title="Bayesian Attention Belief Networks", year=2021, arxiv="2106.05251"),
    time="n**2*d",
    memory="n**2",
    supports=Supports(
        key_padding=True, causal=True, cross=True, weights=True, needs=frozenset({"carry"})
    ),
    options=BayesianOptions,
    swap="exact",
    factory=build,
    exact_at=exact_at,
    deviations=(
        "the distributions are those of Bayesian Attention Modules (arXiv:2010.10604), the "
        'predecessor; prior="layers" is a hierarchy from the first layer to the last, without '
        "networks between layers; the divergence is a mean over the pairs of real tokens, and is "
        "annealed by scaling zoo.auxiliary_loss(model) in the training loop"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer bayesian."""
    return [BAYESIAN]
