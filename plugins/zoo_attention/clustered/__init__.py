"""Clustered attention: queries in clusters, each of which attends once, with its mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.clustered.attention import ClusteredAttention


@dataclass(frozen=True, kw_only=True)
class ClusteredOptions(Options):
    """How the queries are clustered."""

    clusters: int = option(64, low=1, at_most="max_len", help="clusters of queries per head")
    iterations: int = option(3, low=0, high=100, help="steps of k-means")


def build(site: Site, options: ClusteredOptions) -> ClusteredAttention:
    """Build the module for one site."""
    from zoo_attention.clustered.attention import ClusteredAttention

    return ClusteredAttention(site, options)


def exact_at(site: Site) -> ClusteredOptions:
    """Every query is a cluster of its own."""
    return ClusteredOptions(clusters=site.max_len)


CLUSTERED = Mechanism(
    name="clustered",
    summary="Queries attend as clusters: all queries of one get the attention of their mean.",
    family="clustering",
    formula="softmax(scale q_mean k^T) v, q_mean = mean of the queries in the cluster",
    paper=Paper(title="Fast Transformers with Clustered Attention", year=2020, arxiv="2007.04825"),
    time="(2*n + iterations*min(n, 16*clusters))*clusters*d",
    memory="n*(clusters+d)",
    supports=Supports(key_padding=True, weights=True),
    options=ClusteredOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations="k-means on the queries, not on 63 sign bits of them; 3 steps, not 10, from evenly "
    "spaced tokens and on at most 16 tokens per cluster",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer clustered."""
    return [CLUSTERED]
