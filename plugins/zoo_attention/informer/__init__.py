"""Informer (ProbSparse): the queries that stand out attend, the others get the mean value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.informer.attention import InformerAttention


@dataclass(frozen=True, kw_only=True)
class InformerOptions(Options):
    """How many queries attend."""

    factor: int = option(
        5,
        low=1,
        at_most="max_len",
        help="of n tokens, factor * ceil(ln n) queries attend, chosen by as many sampled keys",
    )


def build(site: Site, options: InformerOptions) -> InformerAttention:
    """Build the module for one site."""
    from zoo_attention.informer.attention import InformerAttention

    return InformerAttention(site, options)


def exact_at(site: Site) -> InformerOptions:
    """Every query attends."""
    return InformerOptions(factor=site.max_len)


INFORMER = Mechanism(
    name="informer",
    aliases=("probsparse",),
    summary="Softmax attention for the few queries that stand out; the others get the mean value.",
    family="clustering",
    formula="softmax(scale q k^T) v for the u queries of largest max_s q k_s - mean_s q k_s",
    paper=Paper(
        title="Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting",
        year=2020,
        arxiv="2012.07436",
    ),
    time="n*log(n)*factor*d",
    memory="n*(log(n)*factor+d)",
    supports=Supports(key_padding=True, weights=True),
    options=InformerOptions,
    swap="needs-training",
    factory=build,
    exact_at=exact_at,
    deviations="the sampled keys are the same for every query and every call: one out of each of "
    "as many even ranges of ranks, not drawn anew; prefix tokens (CLS and the like) always attend; "
    "no causal form, where the choice of queries would see the future",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer informer."""
    return [INFORMER]
