"""Pooling attention (Poolingformer): a window over tokens, then a wider one over pooled tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.pooling.attention import PoolingAttention


@dataclass(frozen=True, kw_only=True)
class PoolingOptions(Options):
    """How far the two levels reach, and how the second one pools."""

    window: int = option(
        64, low=1, at_most="max_len", help="reach of the first level to each side, in tokens"
    )
    outer: int = option(
        256,
        low=1,
        at_most="max_len",
        help="reach of the second level to each side, in tokens, down to a multiple of stride",
    )
    pool: str = option(
        "dynamic",
        choices=("dynamic", "mean", "max", "none"),
        help="weights from the token in the middle, which start equal; mean; maximum; no level 2",
    )
    kernel: int = option(5, low=1, at_most="max_len", help="tokens that are pooled into one")
    stride: int = option(4, low=1, at_most="max_len", help="tokens from one pooled one to the next")
    # Measured by swapping a pretrained BERT at 256 tokens without training: -2 keeps as much as -4
    # or a little more, and its gradient is larger.
    gate: float = option(
        -2.0,
        low=-40.0,
        high=40.0,
        help="logit at which the share of the second level starts: -2 is 12 %, 0 half",
    )


def build(site: Site, options: PoolingOptions) -> PoolingAttention:
    """Build the module for one site."""
    from zoo_attention.pooling.attention import PoolingAttention

    return PoolingAttention(site, options)


def exact_at(site: Site) -> PoolingOptions:
    """A window that spans the longest input, and no second level."""
    return PoolingOptions(window=site.max_len, pool="none")


POOLING = Mechanism(
    name="pooling",
    aliases=("poolingformer",),
    summary="Softmax within a window, then within a wider one over what the first gave, pooled.",
    family="sparse",
    formula="(1 - g) y + g z, y = softmax_window(q k^T) v, z = softmax_outer(q P(k)^T) P(y)",
    paper=Paper(
        title="Poolingformer: Long Document Modeling with Pooling Attention",
        year=2021,
        arxiv="2105.04371",
    ),
    time="n*(window+outer/stride)*d",
    memory="n*(window+outer/stride+d)",
    supports=Supports(key_padding=True, linear_in_v=False),
    options=PoolingOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations=(
        "the second level uses the host's queries and keys, and pools the first one's output as "
        "values; a gate per head in place of a sum; dynamic weights come from keys and serve "
        "values too; prefix tokens see and are seen by all, and are not pooled"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer pooling."""
    return [POOLING]
