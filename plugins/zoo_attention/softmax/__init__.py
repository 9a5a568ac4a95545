"""Softmax attention, the reference that every other mechanism is measured against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl

if TYPE_CHECKING:
    from zoo_attention.softmax.attention import SoftmaxAttention


@dataclass(frozen=True, kw_only=True)
class SoftmaxOptions(Options):
    """None: the host decides scale and dropout."""


def build(site: Site, options: SoftmaxOptions) -> SoftmaxAttention:
    """Build the module for one site."""
    from zoo_attention.softmax.attention import SoftmaxAttention

    return SoftmaxAttention(site)


def exact_at(site: Site) -> SoftmaxOptions:
    """Always: it is softmax attention."""
    return SoftmaxOptions()


SOFTMAX = Mechanism(
    name="softmax",
    aliases=("full", "sdpa", "vanilla"),
    summary="Scaled dot-product attention by the fused kernel, bit-identical to the stock model.",
    family="softmax",
    formula="softmax(q k^T / sqrt(d)) v",
    paper=Paper(title="Attention Is All You Need", year=2017, arxiv="1706.03762"),
    time="n**2*d",
    memory="n*d",
    supports=Supports(key_padding=True, causal=True, cross=True, bias=True, weights=True),
    options=SoftmaxOptions,
    swap="exact",
    factory=build,
    exact_at=exact_at,
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer softmax."""
    return [SOFTMAX]
