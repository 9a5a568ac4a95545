"""Dot-product attention whose scores are divided by the norms of queries, keys and values.

    o_i = sum_j softmax_j(scale * q_i . k_j / max(u_i K, u_i V, K V)) v_j
    u_i = |q_i|,   K = max_j |k_j|,   V = max_j |v_j|   (in each sample and head)

Dasoulas, Scaman, Virmaux, "Lipschitz Normalization for Self-Attention Layers with Application to
Graph Neural Networks", 2021, arXiv:2103.04886: the form for transformers.
Deviations: u_i is the query's own norm; the paper's, over all queries, is query_norm="all". The
host's scale is kept, as in the authors' code, so that scores lie in [-scale, scale] and weights
differ by no more than a factor of exp(2 scale): without training that is nearly the mean of v.
The maxima look at all keys, so that there is no causal form; they depend on v, so that there is
no attention map.
Exact when: never; the scores are bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import masks, scores, softmax
from zoo_core.nn.precision import divide, sum_dtype

if TYPE_CHECKING:
    from zoo_attention.lipschitz_norm import LipschitzNormOptions


class LipschitzNormAttention(nn.Module):
    """Softmax attention with normalised queries; it has no parameters."""

    def __init__(self, site: Site, options: LipschitzNormOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.cross = site.kind == "cross"
        self.over_all_queries = options.query_norm == "all"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        k, v = masks.hide(k, ctx.key_padding), masks.hide(v, ctx.key_padding)
        normalised = divide(q, self._normaliser(q, k, v, ctx)).to(q.dtype)
        dropout = self.dropout if self.training else 0.0
        out = softmax.attend(normalised, k, v, ctx, scale=self.scale, dropout=dropout)
        return out.to(v.dtype)

    def _normaliser(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """max(u_i K, u_i V, K V), (B, H, L or 1, 1), in at least fp32, for hidden k and v."""
        if self.over_all_queries:
            if not self.cross:
                q = masks.hide(q, scores.real_queries(ctx.key_padding, q.shape[-2]))
            own = length(q, dim=(-2, -1))
        else:
            own = length(q)
        key, value = (length(x).amax(-2, keepdim=True) for x in (k, v))
        return torch.maximum(own * torch.maximum(key, value), key * value)


def length(x: Tensor, dim: int | tuple[int, int] = -1) -> Tensor:
    """The Euclidean norm of x (B, H, N, D) over `dim`, which stays as 1, in at least fp32."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=sum_dtype(x))
    return norm
