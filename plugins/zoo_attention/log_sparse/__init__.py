"""LogSparse attention: each token sees the tokens at distances that are powers of two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.log_sparse.attention import LogSparseAttention


@dataclass(frozen=True, kw_only=True)
class LogSparseOptions(Options):
    """How dense the near tokens are, and whether the prefix is global."""

    window: int = option(
        1, low=1, at_most="max_len", help="reach to each side within which every token is seen"
    )
    global_prefix: bool = option(
        True, help="the prefix tokens (CLS and the like) see every token and are seen by every one"
    )


def build(site: Site, options: LogSparseOptions) -> LogSparseAttention:
    """Build the module for one site."""
    from zoo_attention.log_sparse.attention import LogSparseAttention

    return LogSparseAttention(site, options)


def exact_at(site: Site) -> LogSparseOptions:
    """A window that spans the longest input."""
    return LogSparseOptions(window=site.max_len)


LOG_SPARSE = Mechanism(
    name="log_sparse",
    aliases=("logsparse",),
    summary="Softmax over tokens at distance 0, 1, 2, 4, 8, ...; prefix tokens stay global.",
    family="sparse",
    formula="softmax over {j : |i - j| = 0 or a power of two, or i or j in the prefix} "
    "(scale q k^T) v",
    paper=Paper(
        title="Enhancing the Locality and Breaking the Memory Bottleneck of Transformer on Time "
        "Series Forecasting",
        year=2019,
        arxiv="1907.00235",
    ),
    # Near keys are computed in blocks of at least 16, of which a query sees three.
    time="n*(3*max(16, window) + 2*log2(n))*d",
    memory="n*(window+log(n)+d)",
    supports=Supports(key_padding=True, causal=True, weights=True),
    options=LogSparseOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations="both directions unless causal; the prefix is global; distances count real tokens "
    "only; the window (the paper's local attention) does not shift the powers of two; no restarts "
    "and no convolution for queries and keys",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer log_sparse."""
    return [LOG_SPARSE]
