"""Linear attention: weights are inner products of positive features of queries and keys.

    o_i = phi(q_i) . sum_j phi(k_j) v_j / (phi(q_i) . sum_j phi(k_j)),   phi(x) = elu(x) + 1

Katharopoulos, Vyas, Pappas, Fleuret, "Transformers are RNNs: Fast Autoregressive Transformers
with Linear Attention", 2020, arXiv:2006.16236.
feature_map="hedgehog" learns phi(x) = [softmax(W x), softmax(-W x)] with a W for each head, whose
weights can be as spiky as those of softmax attention: Zhang, Bhatia, Kumbong, Ré, "The Hedgehog &
the Porcupine: Expressive Linear Attentions with Softmax Mimicry", 2024, arXiv:2402.04347.
Deviations: a query whose weights are all zero gets zeros, where the paper adds 1e-6 to every
normaliser; the host's attention dropout is not applied, since no weights exist to drop. As in the
paper the features of elu are not scaled, so that the host's scale has no effect; W acts on
x / sqrt(scale) and starts as the identity, where pretrained weights lose least.
Exact when: never; it is another kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import feature_maps, kernels

if TYPE_CHECKING:
    from zoo_attention.linear import LinearOptions


class LinearAttention(nn.Module):
    """Kernel attention with a fixed or a learned feature map.

    mix: W, (H, D, D), of the learned one; None for elu(x) + 1.
    """

    mix: nn.Parameter | None

    def __init__(self, site: Site, options: LinearOptions) -> None:
        super().__init__()
        self.scale = site.scale
        start = torch.eye(site.head_dim).expand(site.heads, -1, -1)
        self.mix = nn.Parameter(start.clone()) if options.feature_map == "hedgehog" else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        if self.mix is None:
            return kernels.attend(feature_maps.elu_plus_one, q, k, v, ctx)
        return kernels.attend(self._features, q, k, v, ctx, learned=True)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        return kernels.weights(self._features, q, k, ctx)

    def _features(self, x: Tensor) -> Tensor:
        """phi: (B, H, N, D) to features of the same width, or of twice that if learned."""
        if self.mix is None:
            return feature_maps.elu_plus_one(x)
        mixed = (x * self.scale**-0.5) @ self.mix.to(x.dtype)
        return torch.cat([mixed.softmax(-1), (-mixed).softmax(-1)], -1)
