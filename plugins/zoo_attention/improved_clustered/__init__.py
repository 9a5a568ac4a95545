"""Improved clustered attention: clusters of queries, exact weights for a cluster's top keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.improved_clustered.attention import ImprovedClusteredAttention


@dataclass(frozen=True, kw_only=True)
class ImprovedClusteredOptions(Options):
    """How the queries are clustered, and how many keys each of them sees exactly."""

    clusters: int = option(32, low=1, at_most="max_len", help="clusters of queries per head")
    topk: int = option(
        32, low=1, at_most="max_len", help="keys of each cluster that its queries weigh exactly"
    )
    iterations: int = option(3, low=0, high=100, help="steps of k-means")


def build(site: Site, options: ImprovedClusteredOptions) -> ImprovedClusteredAttention:
    """Build the module for one site."""
    from zoo_attention.improved_clustered.attention import ImprovedClusteredAttention

    return ImprovedClusteredAttention(site, options)


def exact_at(site: Site) -> ImprovedClusteredOptions:
    """Every key is among the top keys."""
    return ImprovedClusteredOptions(topk=site.max_len)


IMPROVED_CLUSTERED = Mechanism(
    name="improved_clustered",
    aliases=("i_clustered",),
    summary="Queries attend as clusters, but weigh their cluster's top keys one by one.",
    family="clustering",
    formula="s softmax_T(scale q k_T^T) v_T + A_rest v_rest, A = softmax(scale q_mean k^T)",
    paper=Paper(title="Fast Transformers with Clustered Attention", year=2020, arxiv="2007.04825"),
    time="((2*n + iterations*min(n, 16*clusters))*clusters + n*topk)*d",
    memory="(n + 800)*(clusters+d)",
    supports=Supports(key_padding=True, weights=True),
    options=ImprovedClusteredOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations="k-means on the queries, not on 63 sign bits of them; 3 steps, not 10, from evenly "
    "spaced tokens and on at most 16 tokens per cluster; dropout on the exact weights only",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer improved_clustered."""
    return [IMPROVED_CLUSTERED]
