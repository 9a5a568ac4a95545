"""Attention by way of M learned inducing points, which the order of the tokens does not touch.

    A = softmax(scale * I k^T),   o = softmax(scale * q (A k + R)^T) A v,   I, R in R^{M x D}

Lee, Lee, Kim, Kosiorek, Choi, Teh, "Set Transformer: A Framework for Attention-based
Permutation-Invariant Neural Networks", 2019, arXiv:1810.00825: the block ISAB.
Deviations: the second step has no projections of its own. What attention averages may be
projected before or after, so that they would merge with the host's; the residual in front of them
would not, and is R, apart from I and zero at the start. Values get no residual, so that the
output remains a mean of them; the feed-forward layer within each step is left to the host's; the
scale is that of one head, the paper's that of all; dropout acts on the second softmax.
Exact when: never in general; points that each single out one key, one for every key, are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import latents, scores, softmax

if TYPE_CHECKING:
    from zoo_attention.induced import InducedOptions


class InducedAttention(nn.Module):
    """Attention through inducing points, whose number does not depend on that of the tokens.

    points: I, (H, M, D). offsets: R, of the same shape.
    """

    def __init__(self, site: Site, options: InducedOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.points = nn.Parameter(latents.spread_out(site.heads, options.points, site.head_dim))
        self.offsets = nn.Parameter(torch.zeros_like(self.points))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        points = self.points[None]
        keys, values = latents.gather(points, k, v, ctx.key_padding, scale=self.scale)
        keys = keys + self.offsets.to(keys.dtype)
        dropout = self.dropout if self.training else 0.0
        out = softmax.attend(q, keys, values, Context(), scale=self.scale, dropout=dropout)
        return out.to(v.dtype)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S), the product of both steps; of rank M at most."""
        points = self.points[None]
        gathered, keys = latents.gather_weights(points, k, ctx.key_padding, scale=self.scale)
        reading = softmax.weights(q, keys + self.offsets, Context(), scale=self.scale)
        return scores.mix(reading, gathered, None)
