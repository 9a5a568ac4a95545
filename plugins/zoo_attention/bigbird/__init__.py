"""BigBird: a window of blocks, random blocks from anywhere, and global tokens at the front."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.bigbird.attention import BigBirdAttention


@dataclass(frozen=True, kw_only=True)
class BigBirdOptions(Options):
    """How large the blocks are, and which of them a block sees."""

    block: int = option(64, low=1, at_most="max_len", help="tokens per block")
    window: int = option(1, low=0, help="blocks seen to each side of the token's own")
    random: int = option(3, low=1, help="blocks seen elsewhere, drawn when the model is built")
    global_tokens: int = option(
        1,
        low=0,
        at_most="max_len",
        help="first tokens that see every token and are seen by every one; the whole prefix "
        "(CLS and the like) always is",
    )

    def blocks_at(self, site: Site) -> int:
        """Blocks of the longest input."""
        return -(-site.max_len // self.block)

    def clamped(self, site: Site) -> Self:
        """Also no more blocks in the window, or drawn, than there are."""
        options = super().clamped(site)
        blocks = options.blocks_at(site)
        window, random = min(options.window, blocks), min(options.random, blocks)
        return replace(options, window=window, random=random)


def build(site: Site, options: BigBirdOptions) -> BigBirdAttention:
    """Build the module for one site."""
    from zoo_attention.bigbird.attention import BigBirdAttention

    return BigBirdAttention(site, options)


def exact_at(site: Site) -> BigBirdOptions:
    """One block holds the longest input."""
    return BigBirdOptions(block=site.max_len)


BIGBIRD = Mechanism(
    name="bigbird",
    aliases=("big_bird",),
    summary="Softmax over neighbouring blocks, random blocks from anywhere, and global tokens.",
    family="sparse",
    formula="softmax over {j : block of j near that of i, or drawn for it, or i or j global} "
    "(scale q k^T) v",
    paper=Paper(title="Big Bird: Transformers for Longer Sequences", year=2020, arxiv="2007.14062"),
    time="n*(window+random)*block*d",
    memory="n*(window+random)*(block+d)",
    supports=Supports(key_padding=True, causal=True, weights=True),
    options=BigBirdOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations="global are the prefix and the first tokens, not the first and last block; one "
    "random block from each of `random` equal stretches of a sample, begun anywhere, so that they "
    "differ; blocks count real tokens only; causal calls draw from the past",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer bigbird."""
    return [BIGBIRD]
