"""Luna: tokens packed into a short sequence, which travels from layer to layer, and unpacked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.luna.attention import LunaAttention


@dataclass(frozen=True, kw_only=True)
class LunaOptions(Options):
    """How long the packed sequence is."""

    packed: int = option(
        16, low=1, at_most="max_len", help="length of the packed sequence, the same in all layers"
    )


def build(site: Site, options: LunaOptions) -> LunaAttention:
    """Build the module for one site."""
    from zoo_attention.luna.attention import LunaAttention

    return LunaAttention(site, options)


LUNA = Mechanism(
    name="luna",
    summary="A short sequence, handed from layer to layer, packs the tokens; they attend to it.",
    family="low-rank",
    formula="softmax(scale q (A k)^T) A v, A = softmax(scale P W k^T), P' = LayerNorm(P + A k)",
    paper=Paper(title="Luna: Linear Unified Nested Attention", year=2021, arxiv="2106.01540"),
    time="n*packed*d",
    memory="n*(packed+d)",
    supports=Supports(key_padding=True, weights=True, needs=frozenset({"carry"})),
    options=LunaOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "packs with the host's key and value projections, where the paper ties both to one; W "
        "starts as the identity and P as N(0, 1); no causal form; dropout acts on the second "
        "softmax"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer luna."""
    return [LUNA]
