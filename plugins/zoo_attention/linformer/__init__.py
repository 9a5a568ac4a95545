"""Linformer: keys and values compressed to a fixed number of rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.linformer.attention import LinformerAttention


@dataclass(frozen=True, kw_only=True)
class LinformerOptions(Options):
    """How many rows the keys and values are compressed to, and who shares the compression."""

    rank: int = option(
        256, low=1, at_most="max_len", help="rows that keys and values are compressed to"
    )
    share: str = option(
        "heads",
        choices=("none", "heads", "kv", "layers"),
        help="one E and F per head; E and F for all heads; E = F as well; one E in all layers",
    )
    # Measured in the same way (rank 256 of 512), "front" keeps 1.00 of the embeddings' cosine up to
    # 128 tokens, 0.97 at 256 and 0.90 at 512, where "segments" keeps 0.71 to 0.79 at all lengths.
    start: str = option(
        "front",
        choices=("front", "segments", "gaussian"),
        help="three quarters of the rows hold the first tokens, one each, and the rest average "
        "segments of what follows; all rows average segments; or N(0, 1/rank) as in the paper",
    )
    # Measured in the same way at 32, 128, 256 and 448 tokens: masked rows keep 1.00, 1.00, 0.98 and
    # 0.92, null rows 0.77, 0.92, 0.96 and 0.92. At rank 64 they differ by 0.04 at 32 tokens and by
    # nothing beyond; from start="segments" null is better by up to 0.13, and both are poor.
    empty_rows: str = option(
        "masked",
        choices=("masked", "null"),
        help="rows whose segment lies beyond the sample: left out of the softmax, or kept",
    )


def build(site: Site, options: LinformerOptions) -> LinformerAttention:
    """Build the module for one site."""
    from zoo_attention.linformer.attention import LinformerAttention

    return LinformerAttention(site, options)


def exact_at(site: Site) -> LinformerOptions:
    """One row per token: E = F = I."""
    return LinformerOptions(rank=site.max_len, start="front", empty_rows="masked")


LINFORMER = Mechanism(
    name="linformer",
    summary="Softmax over keys and values compressed to a fixed number of learned combinations.",
    family="low-rank",
    formula="softmax(q (E k)^T / sqrt(d)) (F v)",
    paper=Paper(
        title="Linformer: Self-Attention with Linear Complexity", year=2020, arxiv="2006.04768"
    ),
    time="n*rank*d",
    memory="n*d + n*rank",
    supports=Supports(key_padding=True, cross=True, lengths="fixed"),
    options=LinformerOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations=(
        "column j of E belongs to the sample's j-th real token; rows start as single tokens and "
        "segment means (start); rows beyond a short sample are left out of the softmax (empty_rows)"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer linformer."""
    return [LINFORMER]
