"""L2 attention: weights fall with the squared distance of query and key; certifiably Lipschitz."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option
from zoo_core.errors import OptionError

if TYPE_CHECKING:
    from zoo_attention.l2.attention import L2Attention


@dataclass(frozen=True, kw_only=True)
class L2Options(Options):
    """How much of the Lipschitz form to use."""

    form: str = option(
        "untied",
        choices=("untied", "tied", "contractive"),
        help="distances only; one projection for queries and keys, which the values pass too, so "
        "that a Lipschitz bound exists; or that, divided by its bound",
    )
    contraction: float = option(
        0.9, low=0.01, high=0.99, help="Lipschitz constant of the contractive form, at most"
    )


def build(site: Site, options: L2Options) -> L2Attention:
    """Build the module for one site.

    Raises OptionError for a tied form in cross-attention, and for the contractive one in a decoder.
    """
    from zoo_attention.l2.attention import L2Attention

    if options.form != "untied" and site.kind == "cross":
        raise OptionError(
            f"l2: form={options.form!r} reads queries and keys by one projection, which "
            'cross-attention has no use for; use form="untied" there'
        )
    if options.form == "contractive" and site.causal:
        raise OptionError(
            'l2: form="contractive" divides by a bound that counts all tokens, the later ones too, '
            'so that it has no causal form, and this model is a decoder; use form="tied" there'
        )
    return L2Attention(site, options)


L2 = Mechanism(
    name="l2",
    aliases=("l2_distance",),
    summary="Softmax over negative squared distances; tied, it has a certified Lipschitz bound.",
    family="softmax",
    formula="softmax(-scale |q_i - k_j|^2) v; tied: q = k = x W, v = scale x W W^T W_v",
    paper=Paper(title="The Lipschitz Constant of Self-Attention", year=2021, arxiv="2006.04710"),
    time="n**2*d",
    memory="n*d",
    supports=Supports(
        key_padding=True,
        causal=True,
        cross=True,
        linear_in_v=False,
        needs=frozenset({"projections"}),
    ),
    options=L2Options,
    swap="needs-training",
    factory=build,
    deviations=(
        "tied forms read queries by the key projection, so that a cache of keys will do; the "
        "host's biases are kept, which the bound does not feel; it holds where the host neither "
        "rotates nor normalises keys; tied forms replace the host's values, so that no map applies "
        "to them; the contractive form is never causal, since its bound counts all tokens"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer l2."""
    return [L2]
