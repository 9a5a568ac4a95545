"""Sparse Transformer: tokens nearby, and a regular sample of those far away."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.sparse_transformer.attention import SparseTransformerAttention


@dataclass(frozen=True, kw_only=True)
class SparseTransformerOptions(Options):
    """Which of the two patterns, and its period."""

    pattern: str = option(
        "strided",
        choices=("strided", "fixed"),
        help="tokens within the stride and a multiple of it away; or the token's own block and the "
        "last tokens of every block",
    )
    stride: int | None = option(
        None, low=1, help="length of the reach and of a block; None = the root of max_len"
    )
    summary: int = option(
        1, low=1, help="tokens at the end of a block that all see, if fixed; at most the stride"
    )
    global_prefix: bool = option(
        True, help="the prefix tokens (CLS and the like) see every token and are seen by every one"
    )

    def stride_at(self, site: Site) -> int:
        """The stride that is built."""
        return min(self.stride or math.isqrt(site.max_len - 1) + 1, site.max_len)

    def clamped(self, site: Site) -> Self:
        """No stride beyond the longest input, and no summary beyond its block."""
        stride = self.stride_at(site)
        summary = min(self.summary, stride)
        return replace(self, stride=self.stride and stride, summary=summary)


def build(site: Site, options: SparseTransformerOptions) -> SparseTransformerAttention:
    """Build the module for one site."""
    from zoo_attention.sparse_transformer.attention import SparseTransformerAttention

    return SparseTransformerAttention(site, options)


def exact_at(site: Site) -> SparseTransformerOptions:
    """A stride that spans the longest input."""
    return SparseTransformerOptions(stride=site.max_len)


SPARSE_TRANSFORMER = Mechanism(
    name="sparse_transformer",
    summary="Softmax over the tokens nearby and every stride-th token; prefix tokens stay global.",
    family="sparse",
    formula="softmax over {j : |i - j| < stride or stride divides i - j} (scale q k^T) v; fixed: "
    "{j : i // stride = j // stride or j mod stride >= stride - summary}",
    paper=Paper(
        title="Generating Long Sequences with Sparse Transformers", year=2019, arxiv="1904.10509"
    ),
    # Keys: three blocks of the root of n tokens, and one key in each block. 96: 16 passes over
    # memory (see `Mechanism`), of q, k, v, output and copies of three blocks of k and v.
    time="n*(4*n**0.5 + 96)*d",
    memory="n**1.5 + n*d",
    supports=Supports(key_padding=True, causal=True, weights=True),
    options=SparseTransformerOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations="both directions unless causal; every head sees both parts of the pattern; the "
    "prefix is global; distances count real tokens only",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer sparse_transformer."""
    return [SPARSE_TRANSFORMER]
