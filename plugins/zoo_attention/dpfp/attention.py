"""DPFP: kernel attention with deterministic parameter-free projections as features.

    o_i = phi(q_i) . sum_j phi(k_j) v_j / (phi(q_i) . sum_j phi(k_j))
    phi(x) = [r(x) * roll(r(x), i) for i = 1 ... nu],   r(x) = [relu(x), relu(-x)]

Schlag, Irie, Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", 2021,
arXiv:2102.11174. This is the paper's sum rule; its delta rule is the mechanism `delta`.
Deviations: a query whose weights are all zero gets zeros, where the authors' code adds 1e-5 to
every normaliser; the host's attention dropout is not applied, since no weights exist to drop. The
host's scale has no effect: phi(c x) = c^2 phi(x), which cancels.
Exact when: never; it is another kernel.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from zoo_core import Context
from zoo_core.nn import feature_maps, kernels

if TYPE_CHECKING:
    from zoo_attention.dpfp import DPFPOptions


class DPFPAttention(nn.Module):
    """Kernel attention with DPFP features; it has no parameters."""

    def __init__(self, options: DPFPOptions) -> None:
        super().__init__()
        self.phi = partial(feature_maps.dpfp, nu=options.nu)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        return kernels.attend(self.phi, q, k, v, ctx)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        return kernels.weights(self.phi, q, k, ctx)
