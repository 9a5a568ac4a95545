"""Hydra attention: as many heads as there are features. The card; it imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl

if TYPE_CHECKING:
    from zoo_hydra.attention import HydraAttention


@dataclass(frozen=True, kw_only=True)
class HydraOptions(Options):
    """None: the number of heads is the number of features."""


def build(site: Site, options: HydraOptions) -> HydraAttention:
    """Build the module for one site."""
    from zoo_hydra.attention import HydraAttention

    return HydraAttention()


HYDRA = Mechanism(
    name="hydra",
    summary="Each feature is a head of its own: one gate for all tokens, linear in n and in d.",
    family="kernel",
    formula="o_i = q_i / |q_i| * sum_j (k_j / |k_j| * v_j), feature by feature",
    paper=Paper(
        title="Hydra Attention: Efficient Attention with Many Heads",
        year=2022,
        arxiv="2209.07484",
    ),
    time="n*d",
    memory="n*d",
    supports=Supports(key_padding=True, causal=True, cross=True),
    options=HydraOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "padding, causality and cross-attention are added; values wider or narrower than the "
        "queries, which the paper does not have, take its features in turn; the host's scale "
        "(lost in the norm) and attention dropout (no weights exist) are not applied"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer hydra."""
    return [HYDRA]
