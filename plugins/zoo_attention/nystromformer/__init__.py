"""Nyströmformer: softmax attention reconstructed from landmark queries and keys."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo_core import Mechanism, Options, Paper, Site, Supports, hookimpl, option
from zoo_core.errors import OptionError

if TYPE_CHECKING:
    from zoo_attention.nystromformer.attention import NystromformerAttention

# Measured on a pretrained BERT: 6 iterations keep a cosine of 0.9 to the original, 20 only 0.1.
REGULAR_ITERATIONS = 8


@dataclass(frozen=True, kw_only=True)
class NystromformerOptions(Options):
    """How many landmarks, how far their kernel is inverted, and the optional convolution."""

    landmarks: int = option(
        64, low=1, at_most="max_len", help="segments whose means stand for queries and keys"
    )
    iterations: int = option(
        6, low=1, high=64, help="steps towards the inverse; few of them are its regularisation"
    )
    conv: int = option(
        0, low=0, help="odd width in tokens of a convolution of v for each head; 0 = none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv and self.conv % 2 == 0:
            raise OptionError(f"option conv={self.conv} must be odd, or 0 for none")


def build(site: Site, options: NystromformerOptions) -> NystromformerAttention:
    """Build the module for one site."""
    from zoo_attention.nystromformer.attention import NystromformerAttention

    if options.iterations > REGULAR_ITERATIONS and options.landmarks < site.max_len:
        warnings.warn(
            f"nystromformer with iterations={options.iterations}: beyond {REGULAR_ITERATIONS} the "
            f"inverse of {options.landmarks} landmarks amplifies their error, unless the model "
            "was trained so; 6 is usual",
            stacklevel=2,
        )
    return NystromformerAttention(site, options)


def exact_at(site: Site) -> NystromformerOptions:
    """A landmark per token, and enough iterations to invert the kernel."""
    return NystromformerOptions(landmarks=site.max_len, iterations=30, conv=0)


NYSTROMFORMER = Mechanism(
    name="nystromformer",
    aliases=("nystrom",),
    summary="Softmax attention reconstructed from landmarks, the means of segments of the tokens.",
    family="low-rank",
    formula="softmax(q k~^T) softmax(q~ k~^T)^+ softmax(q~ k^T) v",
    paper=Paper(
        title="Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
        year=2021,
        arxiv="2102.03902",
    ),
    # A quarter of all multiplications: 2 n landmarks keys of 2 d, and 4 products in each iteration.
    time="(n*d + iterations*landmarks**2)*landmarks",
    memory="n*d + n*landmarks",
    supports=Supports(key_padding=True),
    options=NystromformerOptions,
    swap="approximate",
    factory=build,
    exact_at=exact_at,
    deviations=(
        "segments hold a sample's real tokens only; the inverse starts from each matrix's own "
        "norm; the convolution starts at zero and skips prefix tokens"
    ),
)


@hookimpl
def zoo_mechanisms() -> Iterable[Mechanism]:
    """Offer nystromformer."""
    return [NYSTROMFORMER]
