"""DPFP: kernel attention whose sparse features hold more keys than elu + 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.dpfp.attention import DPFPAttention


@dataclass(frozen=True, kw_only=True)
class DPFPOptions(Options):
    """How many features."""

    nu: int = option(
        1, choices=(1, 2, 3), help="features per head: 2 * head_dim * nu; more hold more keys"
    )


def build(site: Site, options: DPFPOptions) -> DPFPAttention:
    """Build the module for one site."""
    from zoo_attention.dpfp.attention import DPFPAttention

    return DPFPAttention(options)


DPFP = Mechanism(
    name="dpfp",
    summary="Kernel attention with sparse product features: linear in n, more keys than elu + 1.",
    family="kernel",
    formula=(
        "phi(q) (phi(k)^T v) / (phi(q) sum_j phi(k_j)), "
        "phi(x) = [r(x) * roll(r(x), i) for i = 1..nu], r(x) = [relu(x), relu(-x)]"
    ),
    paper=Paper(
        title="Linear Transformers Are Secretly Fast Weight Programmers",
        year=2021,
        arxiv="2102.11174",
    ),
    time="n*nu*d**2",
    memory="(n + 1450*nu)*d",
    supports=Supports(key_padding=True, causal=True, cross=True, weights=True),
    options=DPFPOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "a query without weights gets zeros, where the authors' code adds 1e-5 to every "
        "normaliser; the host's attention dropout is not applied: no weights exist to drop. The "
        "host's scale has no effect: it cancels"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer dpfp."""
    return [DPFP]
