"""Performer: softmax attention estimated by positive orthogonal random features (FAVOR+).

    o_i = phi(q_i) . sum_j phi(k_j) v_j / (phi(q_i) . sum_j phi(k_j))
    phi(x)_f = exp(w_f . x' - |x'|^2 / 2),   x' = sqrt(scale) x,   w_f ~ N(0, I), orthogonal

Choromanski et al., "Rethinking Attention with Performers", 2020, arXiv:2009.14794.
Deviations: the authors' code subtracts a maximum before exp and adds 1e-6 after it, which pulls
towards uniform attention by an amount that depends on the largest key; here the scale of the
features cancels exactly and nothing is added. The directions change only by `redraw()`. The
host's attention dropout is not applied, since no weights exist to drop.
Exact when: never; with norms="chi" the error falls as 1/sqrt(features). norms="sqrt_d" tends to
the paper's regularised kernel instead (on the layers of a pretrained BERT the better estimate up
to 256 features at least), kind="relu" to another kernel altogether.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import kernels, random_features

if TYPE_CHECKING:
    from zoo_attention.performer import PerformerOptions


class PerformerAttention(nn.Module):
    """Attention through random features.

    directions: w, (features, D), the same for queries, keys and heads. A persistent buffer.
    """

    directions: Tensor

    def __init__(self, site: Site, options: PerformerOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.head_dim = site.head_dim
        self.features = options.features
        self.kind = options.kind
        self.norms = cast(random_features.Norms, options.norms)
        self.register_buffer("directions", self._draw())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        if self.kind == "relu":
            return kernels.attend(self._relu, q, k, v, ctx)
        return random_features.attend(self.directions, q, k, v, ctx, scale=self.scale)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        if self.kind == "relu":
            return kernels.weights(self._relu, q, k, ctx)
        return random_features.weights(self.directions, q, k, ctx, scale=self.scale)

    def redraw(self) -> None:
        """Draw new directions from torch's global generator.

        A step of training, every thousand optimiser steps or so; forward never does it. Ranks of
        a distributed run draw alike if seeded alike; DDP also broadcasts buffers from rank 0.
        """
        self.directions.copy_(self._draw())

    def _draw(self) -> Tensor:
        if self.kind != "hyperbolic":
            return random_features.orthogonal(self.features, self.head_dim, norms=self.norms)
        half = random_features.orthogonal(-(-self.features // 2), self.head_dim, norms=self.norms)
        return torch.cat([half, -half])[: self.features]

    def _relu(self, x: Tensor) -> Tensor:
        """relu(w . x') + 1e-3, as in the paper's code: (..., D) -> (..., features)."""
        directions = self.directions.to(x.dtype) * math.sqrt(self.scale)
        return (x @ directions.mT).relu() + 1e-3
