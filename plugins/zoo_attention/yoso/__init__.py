"""YOSO: a key's weight is the chance that random hashing puts it in the query's bucket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.yoso.attention import YosoAttention


@dataclass(frozen=True, kw_only=True)
class YosoOptions(Options):
    """How sharp the weights are, whether they are sampled, and how the output is scaled."""

    form: str = option(
        "expectation",
        choices=("expectation", "sampled"),
        help="the chance of meeting itself, n x n; or how often `hashes` hashes meet, linear in n",
    )
    bits: int = option(
        10,
        low=1,
        high=16,
        help="bits of one hash: more make the weights sharper, and their sampling noisier",
    )
    hashes: int = option(
        32, low=1, high=1024, help="hashes of the sampled form; its error falls as 1/sqrt(hashes)"
    )
    normalise: str = option(
        "rows",
        choices=("rows", "l2"),
        help="weights that sum to one; or outputs of length one, as in the paper",
    )


def build(site: Site, options: YosoOptions) -> YosoAttention:
    """Build the module for one site."""
    from zoo_attention.yoso.attention import YosoAttention

    return YosoAttention(site, options)


YOSO = Mechanism(
    name="yoso",
    summary="Weights are the chance that random hashing gives a query and a key the same code.",
    family="clustering",
    formula="normalise(w v), w_ij = (1 - acos(q_i k_j / (|q_i| |k_j|)) / pi) ** bits",
    paper=Paper(
        title="You Only Sample (Almost) Once: Linear Cost Self-Attention Via Bernoulli Sampling",
        year=2021,
        arxiv="2111.09714",
    ),
    time="n**2*d",
    memory="n*d",
    supports=Supports(key_padding=True, cross=True, linear_in_v=False),
    options=YosoOptions,
    swap="approximate",
    factory=build,
    deviations="cost is that of the default, the expectation; form='sampled' takes n*hashes*d. "
    "Weights sum to one by default, which keeps the size of the values; the expectation has its "
    "true derivative; the hashes are drawn once; no convolution of the values; no dropout, as in "
    "the authors' code",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer yoso."""
    return [YOSO]
