"""Self-modulating attention: weights times the intensity of a process in continuous time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.self_modulating.attention import SelfModulatingAttention


@dataclass(frozen=True, kw_only=True)
class SelfModulatingOptions(Options):
    """How much the intensity is trained to tell when the next token comes."""

    likelihood_weight: float = option(
        0.1, low=0.0, help="weight of the tokens' negative log-likelihood in the auxiliary loss"
    )


def build(site: Site, options: SelfModulatingOptions) -> SelfModulatingAttention:
    """Build the module for one site."""
    from zoo_attention.self_modulating.attention import SelfModulatingAttention

    return SelfModulatingAttention(site, options)


def exact_at(site: Site) -> SelfModulatingOptions:
    """As it starts: every intensity is 1."""
    return SelfModulatingOptions()


SELF_MODULATING = Mechanism(
    name="self_modulating",
    aliases=("time_modulated",),
    summary="Softmax weights times learned intensities, which read when each token came.",
    family="softmax",
    formula="(softmax(scale q k^T) * intensity) v, intensity_ij = s log(1 + exp(x_ij / s)), "
    "x_ij = (k_j M) . sigmoid([h_i, dt_i] W + b), h = softmax(scale q k^T) k",
    paper=Paper(
        title="Learning Self-Modulating Attention in Continuous Time Space with Applications to "
        "Sequential Recommendation",
        year=2021,
        arxiv="2204.06517",
    ),
    time="n**2*d",
    memory="n**2",
    supports=Supports(key_padding=True, weights=True, needs=frozenset({"times"})),
    options=SelfModulatingOptions,
    swap="exact",
    factory=build,
    exact_at=exact_at,
    deviations=(
        "a call without times takes tokens to be one unit of time apart, and images are refused; a "
        "key's mark is a projection of the key, not one of a fixed number of kinds; h averages the "
        "keys, not a fourth projection; intensities start at 1"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer self_modulating."""
    return [SELF_MODULATING]
