"""LSH attention with keys of their own: what Reformer does, for weights trained with softmax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.lsh.attention import LSHAttention


@dataclass(frozen=True, kw_only=True)
class LSHOptions(Options):
    """How tokens are hashed, and how many keys a query sees."""

    rounds: int = option(4, low=1, high=64, help="independent hashes; a query sees their union")
    buckets: int = option(16, low=1, high=4096, help="buckets of one hash")
    chunk: int = option(
        32,
        low=1,
        at_most="max_len",
        help="queries that share a window of three times as many keys",
    )


def build(site: Site, options: LSHOptions) -> LSHAttention:
    """Build the module for one site."""
    from zoo_attention.lsh.attention import LSHAttention

    return LSHAttention(site, options)


def exact_at(site: Site) -> LSHOptions:
    """All tokens in one chunk."""
    return LSHOptions(chunk=site.max_len)


LSH = Mechanism(
    name="lsh",
    summary="Softmax attention to the keys whose hash is near the query's, for pretrained weights.",
    family="clustering",
    formula="softmax over {j : near i in the order by hash, in any round} (scale q k^T) v",
    paper=Paper(title="Reformer: The Efficient Transformer", year=2020, arxiv="2001.04451"),
    time="n*rounds*(chunk+buckets)*d",
    memory="(n + 600)*rounds*(chunk+buckets+d)",
    supports=Supports(key_padding=True, weights=True),
    options=LSHOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations="queries and keys are hashed apart, keys less their mean, which changes no softmax "
    "weight; a chunk sees the keys around the place among them that matches its middle; no causal "
    "form, where the sorting would see the future",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer lsh."""
    return [LSH]
