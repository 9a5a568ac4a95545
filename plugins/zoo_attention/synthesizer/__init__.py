"""Synthesizer: attention scores that are learned, or made from one token, not from pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.synthesizer.attention import SynthesizerAttention

# At sigmoid(-40) = 4e-18 the synthetic scores are below the rounding of float64.
CLOSED = -40.0


@dataclass(frozen=True, kw_only=True)
class SynthesizerOptions(Options):
    """Where the scores come from, and how far a mixture starts from dot products."""

    kind: str = option(
        "random+content",
        choices=(
            "random",
            "factorised",
            "dense",
            "random+content",
            "factorised+content",
            "dense+content",
        ),
        help="scores are a table, a table of low rank, or made from the query alone; "
        "+content mixes them with dot products, which keeps pretrained weights",
    )
    rank: int = option(8, low=1, at_most="max_len", help="rank of a factorised table")
    gate: float = option(
        -4.0,
        low=CLOSED,
        high=-CLOSED,
        help="start of the learned gate of a mixture: sigmoid(gate) is the share of its synthetic "
        "scores, 0.018 at -4",
    )


def build(site: Site, options: SynthesizerOptions) -> SynthesizerAttention:
    """Build the module for one site."""
    from zoo_attention.synthesizer.attention import SynthesizerAttention

    return SynthesizerAttention(site, options)


def exact_at(site: Site) -> SynthesizerOptions:
    """A mixture whose gate is closed."""
    return SynthesizerOptions(kind="random+content", gate=CLOSED)


SYNTHESIZER = Mechanism(
    name="synthesizer",
    summary="Scores from a learned table or from the query alone, or a mixture with dot products.",
    family="synthetic",
    formula="softmax((1 - g) scale q k^T + g R) v, R = a table | R1 R2^T | relu(q) W; g = 1, or "
    "sigmoid(gate) in a mixture",
    paper=Paper(
        title="Synthesizer: Rethinking Self-Attention in Transformer Models",
        year=2020,
        arxiv="2005.00743",
    ),
    time="n**2*d",
    memory="n**2",
    supports=Supports(key_padding=True, causal=True, weights=True, lengths="fixed"),
    options=SynthesizerOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations=(
        "rows and columns of R are ranks among a sample's real tokens; the first layer of the "
        "dense form is the host's query projection; mixtures start near dot products, not at half"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer synthesizer."""
    return [SYNTHESIZER]
