"""SimAM: softmax attention, then a parameter-free gate on what stands out of its channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.simam.attention import SimamAttention


@dataclass(frozen=True, kw_only=True)
class SimamOptions(Options):
    """How much the gate counts, and what keeps its energy bounded."""

    strength: float = option(
        1.0, low=0.0, high=1.0, help="share of the gate: 0 is softmax attention, 1 the paper's gate"
    )
    regularisation: float = option(
        1e-4, low=1e-8, high=1e4, help="lambda, added to the variance of a channel"
    )


def build(site: Site, options: SimamOptions) -> SimamAttention:
    """Build the module for one site."""
    from zoo_attention.simam.attention import SimamAttention

    return SimamAttention(site, options)


def exact_at(site: Site) -> SimamOptions:
    """No gate."""
    return SimamOptions(strength=0.0)


SIMAM = Mechanism(
    name="simam",
    summary="Softmax attention whose outputs are gated by how far they stand out of their channel.",
    family="grid",
    formula="t sigmoid((t - mean)^2 / (4 (var + lambda)) + 1/2), t = softmax(scale q k^T) v",
    paper=Paper(
        title="SimAM: A Simple, Parameter-Free Attention Module for Convolutional Neural Networks",
        year=2021,
        url="https://proceedings.mlr.press/v139/yang21o.html",
    ),
    # 168: the nine operations of the gate take as long as 28 passes over memory (see `Mechanism`),
    # its sigmoid alone as long as seven.
    time="n*(n + 168)*d",
    memory="n*d",
    supports=Supports(key_padding=True, bias=True, linear_in_v=False),
    options=SimamOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations="the gate follows softmax attention (the paper's follows a convolution); a feature "
    "map is the real tokens outside the prefix, whatever their layout; prefix tokens have no gate",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer simam."""
    return [SIMAM]
