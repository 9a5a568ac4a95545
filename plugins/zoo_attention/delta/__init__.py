"""Delta rule: a fast-weight memory in which a new value replaces what its key held before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option

if TYPE_CHECKING:
    from zoo_attention.delta.attention import DeltaAttention


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(Options):
    """How many features, and what decides how strongly a token is written."""

    nu: int = option(
        1, choices=(1, 2, 3), help="features per head: 2 * head_dim * nu; more hold more keys"
    )
    strength_from: str = option(
        "auto",
        choices=("auto", "hidden", "keys"),
        help="what the write strength is read from: the layer's input, or the keys of all heads, "
        "which a decoder's cache keeps; auto: keys in decoders, hidden elsewhere",
    )


def build(site: Site, options: DeltaOptions) -> DeltaAttention:
    """Build the module for one site. Raises OptionError for a decoder without strengths."""
    from zoo_attention.delta.attention import DeltaAttention

    return DeltaAttention(site, options)


DELTA = Mechanism(
    name="delta",
    aliases=("fast_weight", "delta_net"),
    summary="A fast-weight memory written by the delta rule; in encoders read in both directions.",
    family="kernel",
    formula="W_i = W_{i-1} + b_i (v_i - W_{i-1} k'_i) k'_i^T, o_i = W_i q'_i, "
    "x' = phi(x) / sum phi(x), b_i = sigmoid(w . x_i)",
    paper=Paper(
        title="Linear Transformers Are Secretly Fast Weight Programmers",
        year=2021,
        arxiv="2102.11174",
    ),
    time="n*nu*d**2",
    memory="n*nu*d",
    supports=Supports(key_padding=True, causal=True, needs=frozenset({"hidden"})),
    options=DeltaOptions,
    swap="needs-training",
    factory=build,
    deviations=(
        "in encoders the mean of a pass from the left and one from the right, which share their "
        "write strengths; in decoders these strengths are read from the keys, since a cache keeps "
        "no layer inputs; the host's scale and attention dropout are not applied"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer delta."""
    return [DELTA]
