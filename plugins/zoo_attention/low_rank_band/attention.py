"""Softmax within a band around the diagonal, mixed with attention of low rank to all tokens.

    o = (1 - g) softmax_{|i - j| <= band}(scale * q k^T) v
        + g softmax(scale * q U^T) softmax(scale * U k^T) v,   U in R^{rank x D},  g in (0, 1)

Guo, Qiu, Xue, Zhang, "Low-Rank and Locality Constrained Self-Attention for Sequence Modeling",
2019, IEEE/ACM Transactions on Audio, Speech, and Language Processing.
Deviations: this keeps the paper's two parts, a band and a matrix of low rank, but not its
factorisation, which was not at hand: here `rank` learned anchors U gather from the tokens and are
read by them, so that rows of the matrix sum to one. One gate per head mixes both parts and starts
near the band; prefix tokens see, and are seen by, all, as in other windows of this zoo; i and j
count real tokens.
Exact when: band >= N and g = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import latents, scores, softmax
from zoo_core.nn.windows import Window

if TYPE_CHECKING:
    from zoo_attention.low_rank_band import LowRankBandOptions


class LowRankBandAttention(nn.Module):
    """A band and a low-rank part. anchors: U, (H, rank, D). gate: logits of g, (H, 1, 1)."""

    def __init__(self, site: Site, options: LowRankBandOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.band = options.band
        self.anchors = nn.Parameter(latents.spread_out(site.heads, options.rank, site.head_dim))
        self.gate = nn.Parameter(torch.full((site.heads, 1, 1), options.gate))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        dropout = self.dropout if self.training else 0.0
        window = Window(self.band, prefix=ctx.prefix)
        band = window.attend(q, k, v, ctx.key_padding, scale=self.scale, dropout=dropout)
        anchors = self.anchors.to(q.dtype).expand(q.shape[0], -1, -1, -1)
        seen = Context(key_padding=ctx.key_padding)
        content = softmax.attend(anchors, k, v, seen, scale=self.scale)
        rest = softmax.attend(q, anchors, content, Context(), scale=self.scale, dropout=dropout)
        return torch.lerp(band, rest, self.gate.sigmoid().to(band.dtype)).to(v.dtype)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, N, N)."""
        window = Window(self.band, prefix=ctx.prefix)
        band = window.weights(q, k, ctx.key_padding, scale=self.scale)
        anchors = self.anchors[None]
        gathered, _ = latents.gather_weights(anchors, k, ctx.key_padding, scale=self.scale)
        reading = softmax.weights(q, anchors, Context(), scale=self.scale)
        rest = scores.mix(reading, gathered, None)
        gate = self.gate.sigmoid()
        return (1 - gate) * band + gate * rest
