"""Local attention (Longformer): a sliding window, and a prefix that sees and is seen by all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.local.attention import LocalAttention


@dataclass(frozen=True, kw_only=True)
class LocalOptions(Options):
    """How far a token sees, and whether the prefix is global."""

    window: int = option(
        64,
        low=1,
        at_most="max_len",
        help="reach to each side: token i sees the keys j with |i - j| <= window",
    )
    global_prefix: bool = option(
        True, help="the prefix tokens (CLS and the like) see every token and are seen by every one"
    )


def build(site: Site, options: LocalOptions) -> LocalAttention:
    """Build the module for one site."""
    from zoo_attention.local.attention import LocalAttention

    return LocalAttention(site, options)


def exact_at(site: Site) -> LocalOptions:
    """A window that spans the longest input."""
    return LocalOptions(window=site.max_len)


LOCAL = Mechanism(
    name="local",
    aliases=("longformer",),
    summary="Softmax attention within a window around each token; prefix tokens stay global.",
    family="sparse",
    formula="softmax over {j : |i - j| <= window, or i or j in the prefix} (scale q k^T) v",
    paper=Paper(title="Longformer: The Long-Document Transformer", year=2020, arxiv="2004.05150"),
    time="n*window*d",
    memory="n*(window+d)",
    supports=Supports(key_padding=True, causal=True, weights=True),
    options=LocalOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations="the window is the reach to one side (the paper counts both); distances count real "
    "tokens only; global tokens share the host's projections; no dilation",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer local."""
    return [LOCAL]
