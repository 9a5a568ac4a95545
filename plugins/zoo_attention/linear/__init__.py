"""Linear attention: softmax replaced by the feature map elu + 1, which makes it recurrent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.linear.attention import LinearAttention


@dataclass(frozen=True, kw_only=True)
class LinearOptions(Options):
    """Which feature map."""

    feature_map: str = option(
        "elu",
        choices=("elu", "hedgehog"),
        help="elu(x) + 1 as in the paper; or learned, [softmax(Wx), softmax(-Wx)], to imitate "
        "softmax attention",
    )


def build(site: Site, options: LinearOptions) -> LinearAttention:
    """Build the module for one site."""
    from zoo_attention.linear.attention import LinearAttention

    return LinearAttention(site, options)


LINEAR = Mechanism(
    name="linear",
    aliases=("elu", "linear_transformer"),
    summary="Kernel attention with features elu(x) + 1: linear in n, and recurrent when causal.",
    family="kernel",
    formula="phi(q) (phi(k)^T v) / (phi(q) sum_j phi(k_j)), phi(x) = elu(x) + 1",
    paper=Paper(
        title="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        year=2020,
        arxiv="2006.16236",
    ),
    time="n*d**2",
    memory="(n + 350)*d",
    supports=Supports(key_padding=True, causal=True, cross=True, weights=True),
    options=LinearOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "a query without weights gets zeros, where the paper adds 1e-6 to every normaliser; the "
        "host's scale and attention dropout are not applied: features are not scaled in the "
        "paper, and there are no weights to drop"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer linear."""
    return [LINEAR]
