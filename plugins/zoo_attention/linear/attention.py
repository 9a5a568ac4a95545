"""Linear attention: weights are inner products of positive features of queries and keys.

    o_i = phi(q_i) . sum_j phi(k_j) v_j / (phi(q_i) . sum_j phi(k_j)),   phi(x) = elu(x) + 1

Katharopoulos, Vyas, Pappas, Fleuret, "Transformers are RNNs: Fast Autoregressive Transformers
with Linear Attention", 2020, arXiv:2006.16236.
Deviations: a query whose weights are all zero gets zeros, where the paper adds 1e-6 to every
normaliser; the host's attention dropout is not applied, since no weights exist to drop. As in the
paper the features are not scaled, so that the host's scale has no effect.
Exact when: never; it is another kernel.
"""

from __future__ import annotations

from torch import Tensor, nn

from zoo_core import Context
from zoo_core.nn import kernels


class LinearAttention(nn.Module):
    """Kernel attention with elu(x) + 1; it has no parameters."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        return kernels.attend(kernels.elu_plus_one, q, k, v, ctx)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        return kernels.weights(kernels.elu_plus_one, q, k, ctx)
