"""GPSA (ConViT): each head mixes softmax attention with attention by position, through a gate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.gpsa.attention import GatedPositionalAttention


@dataclass(frozen=True, kw_only=True)
class GpsaOptions(Options):
    """Where the gates start, and how sharply the heads look at their neighbour."""

    gate: float = option(
        -4.0,
        low=-40.0,
        high=40.0,
        help="start of the gates: sigmoid(gate) is the share of the positional attention, 0.018 "
        "at -4, fit for pretrained weights; the paper starts at 1 (0.73)",
    )
    locality: float = option(
        1.0,
        low=0.0,
        high=100.0,
        help="how sharply a head starts to look at its own neighbour; 0 = at all cells alike",
    )


def build(site: Site, options: GpsaOptions) -> GatedPositionalAttention:
    """Build the module for one site."""
    from zoo_attention.gpsa.attention import GatedPositionalAttention

    return GatedPositionalAttention(site, options)


def exact_at(site: Site) -> GpsaOptions:
    """Closed gates."""
    return GpsaOptions(gate=-40.0)


GPSA = Mechanism(
    name="gpsa",
    aliases=("convit",),
    summary="Each head mixes softmax attention with attention by position on the patch grid.",
    family="grid",
    formula="(1 - g) softmax(scale q k^T) v + g softmax(w [dy, dx, dy^2 + dx^2]) v",
    paper=Paper(
        title="ConViT: Improving Vision Transformers with Soft Convolutional Inductive Biases",
        year=2021,
        arxiv="2103.10697",
    ),
    # 66: the two products of the positional map, with a copy before each, and the mix pass 11 times
    # over memory (see `Mechanism`).
    time="n*(n + n**0.5 + 66)*d",
    memory="n*d",
    supports=Supports(weights=True, grid="required"),
    options=GpsaOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations="prefix tokens neither have nor get positional attention; gates start at -4, not 1; "
    "the host's values stay (the paper starts them as the identity); heads beyond the square "
    "number look at all cells alike at the start; dropout on the softmax attention only",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer gpsa."""
    return [GPSA]
