"""Performer: the softmax kernel estimated by positive random features (FAVOR+)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.performer.attention import PerformerAttention


@dataclass(frozen=True, kw_only=True)
class PerformerOptions(Options):
    """How many random features, of which kind."""

    features: int = option(
        256, low=1, high=65536, help="random features; the error falls as 1/sqrt(features)"
    )
    kind: str = option(
        "positive",
        choices=("positive", "hyperbolic", "relu"),
        help="exp(w.x); exp(w.x) and exp(-w.x) for half as many w; or relu(w.x), another kernel",
    )
    norms: str = option(
        "sqrt_d",
        choices=("chi", "sqrt_d"),
        help="lengths of w: of Gaussian vectors, unbiased; or all sqrt(d), closer at few features",
    )


def build(site: Site, options: PerformerOptions) -> PerformerAttention:
    """Build the module for one site."""
    from zoo_attention.performer.attention import PerformerAttention

    return PerformerAttention(site, options)


PERFORMER = Mechanism(
    name="performer",
    aliases=("favor",),
    summary="The softmax kernel estimated by positive orthogonal random features (FAVOR+).",
    family="kernel",
    formula="phi(q) (phi(k)^T v) / (phi(q) sum_j phi(k_j)), phi(x)_f = exp(w_f x - |x|^2 / 2)",
    paper=Paper(title="Rethinking Attention with Performers", year=2020, arxiv="2009.14794"),
    time="n*features*d",
    memory="n*features",
    supports=Supports(key_padding=True, causal=True, cross=True, weights=True),
    options=PerformerOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "no epsilon in exp features, whose scale cancels exactly instead; the directions change "
        "only by zoo.redraw(model); the host's attention dropout is not applied"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer performer."""
    return [PERFORMER]
