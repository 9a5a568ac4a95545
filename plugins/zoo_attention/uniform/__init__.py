"""Uniform attention, the floor under every other mechanism's scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Site, Supports, hookimpl

if TYPE_CHECKING:
    from zoo_attention.uniform.attention import UniformAttention


@dataclass(frozen=True, kw_only=True)
class UniformOptions(Options):
    """None: a mean has nothing to choose."""


def build(site: Site, options: UniformOptions) -> UniformAttention:
    """Build the module for one site."""
    from zoo_attention.uniform.attention import UniformAttention

    return UniformAttention()


UNIFORM = Mechanism(
    name="uniform",
    aliases=("average", "mean"),
    summary="Every query gets the mean of the values it may see: what is left without attention.",
    family="baseline",
    formula="mean(v)",
    paper=None,
    time="n*d",
    memory="n + 2*h*d",
    supports=Supports(key_padding=True, causal=True, cross=True, weights=True),
    options=UniformOptions,
    swap="needs-training",
    factory=build,
    deviations="ignores the host's attention dropout: there are no learned weights to drop",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer uniform."""
    return [UNIFORM]
