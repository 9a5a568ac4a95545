"""Memory-compressed attention: one key and value for every few consecutive tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.memory_compressed.attention import MemoryCompressedAttention


@dataclass(frozen=True, kw_only=True)
class MemoryCompressedOptions(Options):
    """How many tokens share a key, and how theirs are combined."""

    factor: int = option(
        3, low=1, at_most="max_len", help="consecutive tokens that share one key and value"
    )
    pool: str = option(
        "conv",
        choices=("conv", "mean"),
        help="a strided convolution in each head that starts as the mean, or the mean itself",
    )
    null_key: bool = option(
        False, help="one more key of zeros with a value of zeros, to attend to nothing"
    )


def build(site: Site, options: MemoryCompressedOptions) -> MemoryCompressedAttention:
    """Build the module for one site."""
    from zoo_attention.memory_compressed.attention import MemoryCompressedAttention

    return MemoryCompressedAttention(site, options)


def exact_at(site: Site) -> MemoryCompressedOptions:
    """Each token has a key of its own."""
    return MemoryCompressedOptions(factor=1, pool="mean", null_key=False)


MEMORY_COMPRESSED = Mechanism(
    name="memory_compressed",
    summary="Softmax over blocks of consecutive keys, each compressed to one by a convolution.",
    family="low-rank",
    formula="softmax(scale q (C k)^T) (C v), C a convolution of stride = width = factor",
    paper=Paper(
        title="Generating Wikipedia by Summarizing Long Sequences", year=2018, arxiv="1801.10198"
    ),
    # d: the convolutions of k and v, on the scale of a key, 2 d multiplications. 200: 10 passes
    # over memory (see `Mechanism`), of q, k, v, copies of their blocks, sums and the output; they
    # take three times as long as passes that neither gather rows nor fill fresh memory (measured).
    time="n*(n/factor + d + 200)*d",
    memory="n*d",
    supports=Supports(key_padding=True, causal=True, cross=True),
    options=MemoryCompressedOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations=(
        "blocks hold a sample's real tokens only; prefix tokens stay uncompressed; the convolution "
        "has no bias and starts as the mean; causal, a token sees those of its own block as they "
        "are and complete blocks compressed, and dropout drops its own block as a whole"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer memory_compressed."""
    return [MEMORY_COMPRESSED]
