"""SPE: relative positions for kernel attention, as random codes that agree in expectation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.spe.attention import SPEAttention


@dataclass(frozen=True, kw_only=True)
class SPEOptions(Options):
    """Which attention, which family of position kernels, and how well they are estimated."""

    base: str = option(
        "linear",
        choices=("linear", "performer"),
        help="attention over the encoded queries and keys: elu + 1, or the softmax kernel",
    )
    kind: str = option(
        "sine",
        choices=("sine", "conv"),
        help="position kernels: sums of sinusoids of any reach, or of finite reach by convolution",
    )
    realizations: int = option(
        64, low=1, high=4096, help="width of encoded queries and keys; errors fall as its root"
    )
    gated: bool = option(
        True, help="learn for each feature how much of it ignores positions; needed on grids"
    )
    sines: int = option(10, low=1, high=1024, help="kind sine: sinusoids per head and feature")
    kernel: int = option(
        128, low=1, at_most="max_len", help="kind conv: reach along each axis of positions"
    )
    features: int = option(
        256, low=1, high=65536, help="base performer: random features of the softmax kernel"
    )


def build(site: Site, options: SPEOptions) -> SPEAttention:
    """Build the module for one site. Raises OptionError for a grid with a prefix, not gated."""
    from zoo_attention.spe.attention import SPEAttention

    return SPEAttention(site, options)


SPE = Mechanism(
    name="spe",
    aliases=("stochastic_positional_encoding",),
    summary="Relative positions in linear time: random codes whose products estimate them.",
    family="kernel",
    formula=(
        "q^_mr = sum_d q_md Q_mdr / sqrt(R), k^_nr = sum_d k_nd K_ndr / sqrt(R), "
        "E[q^_m . k^_n] = sum_d q_md P_d(m - n) k_nd; then linear or performer attention; gated: "
        "g_d + (1 - g_d) P_d for P_d"
    ),
    paper=Paper(
        title="Relative Positional Encoding for Transformers with Linear Complexity",
        year=2021,
        arxiv="2105.08399",
    ),
    time="n*d*realizations",
    memory="(n + 500)*(d+realizations)",
    supports=Supports(key_padding=True, causal=True, weights=True, grid="optional"),
    options=SPEOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "the codes are drawn once, and anew by zoo.redraw, not in every forward; on a grid both "
        "kinds act on (rows, cols), and the prefix tokens have no position; frequencies may have "
        "either sign and follow the length of the input; parameters start near a kernel of 1; the "
        "host's attention dropout is not applied"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer spe."""
    return [SPE]
