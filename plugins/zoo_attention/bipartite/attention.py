"""Tokens attend to M latents, which hold what they gathered from the tokens, and are modulated.

    o_i = a_i + gain * a_i * norm(v_i)

simplex, with Y the latents:

    a = softmax(scale * q Y^T) softmax(scale * Y k^T) v

duplex, with K the centroids of the keys, found by soft k-means from K = softmax(scale * Y k^T) k:

    R_ic = softmax_c(scale * (k_i . K_c - |K_c|^2 / 2)),   n_c = sum_i R_ic
    K = R^T k / n,   V = R^T v / n,   a = softmax(scale * q K^T + log n) V

Hudson, Zitnick, "Generative Adversarial Transformers", 2021, arXiv:2103.01209.
Deviations: a generator's latents come from noise and scale an image's features; here they are
parameters, and gather the tokens of each layer first, since a drop-in layer has no other source.
Duplex finds its centroids anew in each layer, because keys of two layers have nothing in common.
Assignments go by distance; n, the mass of a cluster, lets it weigh what its tokens would.
Modulation has one gain per head, 0 at the start, and norm is over the channels of a head. Dropout
acts on what tokens read, cell by cell.
Exact when: never in general; duplex is where equal keys, far from all others, make the clusters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import latents, masks, precision, softmax

if TYPE_CHECKING:
    from zoo_attention.bipartite import BipartiteOptions


class BipartiteAttention(nn.Module):
    """Attention through latents. latents: Y, (H, M, D). gain: (H, 1, 1), or None to only add."""

    gain: nn.Parameter | None

    def __init__(self, site: Site, options: BipartiteOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.duplex = options.form == "duplex"
        self.iterations = options.iterations
        self.latents = nn.Parameter(latents.spread_out(site.heads, options.latents, site.head_dim))
        modulates = options.integration == "both"
        self.gain = nn.Parameter(torch.zeros(site.heads, 1, 1)) if modulates else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        real, v = Context(key_padding=ctx.key_padding), masks.hide(v, ctx.key_padding)
        keys, mass = self.latents.to(k.dtype).expand(k.shape[0], -1, -1, -1), None
        if self.duplex:
            keys, values, mass = self._clusters(keys, k, v, ctx.key_padding)
        else:
            values = softmax.attend(keys, k, v.to(k.dtype), real, scale=self.scale)
        seen = Context(bias=mass)
        dropout = self.dropout if self.training else 0.0
        out = softmax.attend(q, keys, values, seen, scale=self.scale, dropout=dropout)
        if self.gain is not None:
            out = out + self.gain.to(out.dtype) * out * F.layer_norm(v, v.shape[-1:])
        return out.to(v.dtype)

    def _clusters(
        self, y: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Centroids (B, H, M, D), means of values (B, H, M, E), log of mass (B, H, 1, M)."""
        dtype = k.dtype
        k = masks.hide(k, key_padding)
        with torch.autocast(k.device.type, enabled=False):
            wide = precision.sum_dtype(k, v)
            y, k, v = y.to(wide), k.to(wide), v.to(wide)
            centroids = softmax.attend(y, k, k, Context(key_padding=key_padding), scale=self.scale)
            shares = self._shares(k, centroids, key_padding)
            for _ in range(self.iterations - 1):
                centroids = self._means(shares, k)
                shares = self._shares(k, centroids, key_padding)
            mass = shares.sum(-1)[..., None, :].clamp_min(precision.negligible(wide)).log()
            both = (self._means(shares, x).to(dtype) for x in (k, v))
            return (*both, mass)

    def _shares(self, k: Tensor, centroids: Tensor, key_padding: Tensor | None) -> Tensor:
        """R^T, (B, H, M, N): how the tokens are shared out; padding has no share."""
        offset = centroids.square().sum(-1, keepdim=True) / 2
        shares = ((centroids @ k.mT - offset) * self.scale).softmax(-2)
        return shares if key_padding is None else shares * key_padding[:, None, None]

    @staticmethod
    def _means(shares: Tensor, x: Tensor) -> Tensor:
        """Means of x (B, H, N, D) by shares (B, H, M, N); zero where there is none."""
        return precision.divide(shares @ x, shares.sum(-1, keepdim=True))
