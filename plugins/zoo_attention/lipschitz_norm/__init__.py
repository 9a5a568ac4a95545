"""LipschitzNorm: attention scores divided by the norms of what they are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.lipschitz_norm.attention import LipschitzNormAttention


@dataclass(frozen=True, kw_only=True)
class LipschitzNormOptions(Options):
    """Which norm of the queries divides the scores."""

    query_norm: str = option(
        "token",
        choices=("token", "all"),
        help="each query's own norm, or the Frobenius norm of all the sample's queries, as in the "
        "paper, which makes weights the more alike the more tokens there are",
    )


def build(site: Site, options: LipschitzNormOptions) -> LipschitzNormAttention:
    """Build the module for one site."""
    from zoo_attention.lipschitz_norm.attention import LipschitzNormAttention

    return LipschitzNormAttention(site, options)


LIPSCHITZ_NORM = Mechanism(
    name="lipschitz_norm",
    aliases=("lipschitznorm",),
    summary="Dot products divided by the norms of queries, keys and values: bounded scores.",
    family="softmax",
    formula="softmax(scale q_i . k_j / max(|q_i| K, |q_i| V, K V)) v, K = max_j |k_j|, "
    "V = max_j |v_j|",
    paper=Paper(
        title="Lipschitz Normalization for Self-Attention Layers with Application to Graph Neural "
        "Networks",
        year=2021,
        arxiv="2103.04886",
    ),
    time="n**2*d",
    memory="n*d",
    supports=Supports(key_padding=True, cross=True, linear_in_v=False),
    options=LipschitzNormOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "a query's own norm stands for that of all queries (query_norm); the host's scale is "
        "kept, as in the authors' transformer, so that scores lie within it and pretrained "
        "weights get nearly uniform attention; norms are those of each head's vectors"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer lipschitz_norm."""
    return [LIPSCHITZ_NORM]
