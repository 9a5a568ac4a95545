"""Bipartite attention (GANformer): tokens and a few latents attend to one another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.bipartite.attention import BipartiteAttention


@dataclass(frozen=True, kw_only=True)
class BipartiteOptions(Options):
    """How many latents there are, what their keys are, and what tokens do with what they read."""

    latents: int = option(32, low=1, at_most="max_len", help="learned latents per head")
    form: str = option(
        "duplex",
        choices=("duplex", "simplex"),
        help="tokens find a latent by the centroid of the tokens it holds, or by the latent itself",
    )
    iterations: int = option(
        1, low=1, high=16, help="k-means steps of duplex, from the keys that the latents attend to"
    )
    integration: str = option(
        "both",
        choices=("both", "add"),
        help="what a token reads also scales its own normalised value, or is all there is",
    )


def build(site: Site, options: BipartiteOptions) -> BipartiteAttention:
    """Build the module for one site."""
    from zoo_attention.bipartite.attention import BipartiteAttention

    return BipartiteAttention(site, options)


BIPARTITE = Mechanism(
    name="bipartite",
    aliases=("ganformer",),
    summary="Latents gather the tokens, as soft clusters or by attention, and modulate each token.",
    family="low-rank",
    formula="a + gain a * norm(v), a = softmax(scale q K^T + log n) V, K, V, n by soft k-means",
    paper=Paper(title="Generative Adversarial Transformers", year=2021, arxiv="2103.01209"),
    time="n*latents*d",
    memory="n*(latents+d)",
    supports=Supports(key_padding=True, linear_in_v=False),
    options=BipartiteOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "latents are parameters that gather the tokens in every layer, where a generator maps them "
        "from noise; centroids are found anew in each layer; clusters count by their mass; the "
        "gain is one number per head and starts at zero; dropout acts on what tokens read"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer bipartite."""
    return [BIPARTITE]
