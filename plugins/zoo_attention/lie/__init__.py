"""LieSelfAttention: softmax attention plus a learned function of where the key lies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.lie.attention import LieAttention


@dataclass(frozen=True, kw_only=True)
class LieOptions(Options):
    """The group whose motions change nothing, and the network of the location."""

    group: str = option(
        "translations",
        choices=("translations", "p4"),
        help="T(1) on text, T(2) on a grid; p4: translations and quarter turns of a grid",
    )
    hidden: int = option(16, low=1, help="width of the network's hidden layer")
    start: str = option(
        "zero",
        choices=("zero", "random"),
        help="the location starts without effect, fit for pretrained weights; or at random",
    )


def build(site: Site, options: LieOptions) -> LieAttention:
    """Build the module for one site."""
    from zoo_attention.lie.attention import LieAttention

    return LieAttention(site, options)


def exact_at(site: Site) -> LieOptions:
    """A location without effect, which is where it starts."""
    return LieOptions(start="zero")


LIE = Mechanism(
    name="lie",
    aliases=("lie_transformer", "relpos_lie"),
    summary="Softmax attention plus a learned function of the motion from the query to the key.",
    family="grid",
    formula="softmax_j(scale q_i . k_j + mlp(log(g_i^-1 g_j))) v",
    paper=Paper(
        title="LieTransformer: Equivariant Self-Attention for Lie Groups",
        year=2021,
        arxiv="2012.10885",
    ),
    time="n**2*d",
    memory="n**2",
    supports=Supports(key_padding=True, causal=True, bias=True, weights=True, grid="optional"),
    options=LieOptions,
    swap="exact",
    factory=build,
    exact_at=exact_at,
    deviations="of the paper's kernels the sum of dot product and location, over all keys; offsets "
    "enter the network as sign(x) log(1 + |x|); p4 lifts and averages in each layer; prefix "
    "tokens of a grid have no location",
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer lie."""
    return [LIE]
