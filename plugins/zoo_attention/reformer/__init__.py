"""Reformer's attention: shared queries and keys, hashed, sorted, and cut into chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.reformer.attention import ReformerAttention


@dataclass(frozen=True, kw_only=True)
class ReformerOptions(Options):
    """How tokens are hashed, and how many keys a query sees."""

    rounds: int = option(4, low=1, high=64, help="independent hashes; a query sees their union")
    buckets: int = option(16, low=1, high=4096, help="buckets of one hash")
    chunk: int = option(
        32,
        low=1,
        at_most="max_len",
        help="sorted tokens that see each other and as many before them",
    )


def build(site: Site, options: ReformerOptions) -> ReformerAttention:
    """Build the module for one site."""
    from zoo_attention.reformer.attention import ReformerAttention

    return ReformerAttention(site, options)


REFORMER = Mechanism(
    name="reformer",
    summary="Queries serve as keys too; each sees those near it in the order by their hash.",
    family="clustering",
    formula="softmax over {j != i : near i in the order by hash, in any round} (q q_j / |q_j|) v",
    paper=Paper(title="Reformer: The Efficient Transformer", year=2020, arxiv="2001.04451"),
    time="n*rounds*(chunk+buckets)*d",
    memory="(n + 600)*rounds*(chunk+buckets+d)",
    supports=Supports(key_padding=True, weights=True),
    options=ReformerOptions,
    swap="needs-training",
    factory=build,
    deviations="the number of buckets is an option, not a function of the length; the first chunk "
    "sees the second instead of the last; no causal form, where the sorting would see the future; "
    "no reversible layers, which are a matter of the model",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer reformer."""
    return [REFORMER]
