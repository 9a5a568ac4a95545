"""Clustered attention: all queries of a cluster get what the mean of them attends to.

    o_i = sum_j A_cj v_j,   A_c = softmax(scale * mean(q in c) k^T),   c = the cluster of q_i

Two queries' weights differ by at most |q_i - q_j| times the spectral norm of scale * k (the
paper's proposition 1), so that clusters of near queries lose little.

Vyas, Katharopoulos, Fleuret, "Fast Transformers with Clustered Attention", 2020, arXiv:2007.04825.
Deviations: k-means works on the queries, not on 63 sign bits of them; it starts at evenly spaced
tokens and makes 3 steps, not 10, on at most 16 tokens per cluster, since more change little.
Exact when: clusters >= N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import clustered, masks, native, softmax
from zoo_core.nn.clustering import cluster, pick

if TYPE_CHECKING:
    from zoo_attention.clustered import ClusteredOptions


class ClusteredAttention(nn.Module):
    """Softmax attention of the clusters' means; it has no parameters."""

    def __init__(self, site: Site, options: ClusteredOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.clusters = options.clusters
        self.iterations = options.iterations

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        dropout = self.dropout if self.training else 0.0
        if native.suits(q, k, v) and not dropout:
            how = clustered.How(
                clusters=self.clusters,
                iterations=self.iterations,
                topk=0,
                scale=self.scale,
                plain=lambda q, k, v: self._plain(q, k, v, ctx, 0.0),
            )
            return clustered.attend(q, k, v, ctx.key_padding, how)
        return self._plain(q, k, v, ctx, dropout)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, dropout: float) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            index, means = self._clusters(q, ctx)
            means, k, values = means.to(q.dtype), k.to(q.dtype), v.to(q.dtype)
            out = softmax.attend(means, k, values, ctx, scale=self.scale, dropout=dropout)
            return pick(out, index).to(v.dtype)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, N, N)."""
        index, means = self._clusters(q, ctx)
        return pick(softmax.weights(means, k, ctx, scale=self.scale), index)

    def _clusters(self, q: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """The cluster of each query (B, H, N), and the mean of each cluster (B, H, C, D)."""
        q = masks.hide(q, ctx.key_padding)
        return cluster(q, ctx.key_padding, self.clusters, self.iterations)
