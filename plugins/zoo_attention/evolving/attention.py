"""Softmax attention whose scores evolve from layer to layer through a convolution.

    o_i = sum_j softmax_j(A_ij) v_j
    A = (1 - alpha) M + alpha relu(conv(M)),   M = (1 - beta) scale q k^T + beta A'

A' are the scores of the layer before, and conv is 3 x 3 over (query, key), from all heads to all
heads. The first layer has neither: A = scale q k^T.

Wang, Yang, Bai, Zhang, Bai, Yu, Zhang, Huang, Tong, "Evolving Attention with Residual
Convolutions", 2021, arXiv:2102.12895.
Deviations: alpha and beta are learned, from 0, where the paper fixes them (0.1 to 0.4 for BERT);
conv starts as the identity and has no bias; neighbours are neighbours among the sample's real
tokens, and what lies beyond the first and the last is 0. A layer whose predecessor did not run,
or ran at another shape, is plain. There is no causal form: with a cache the scores of the queries
before the first one are gone.
Exact when: alpha = beta = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import masks, scores, softmax

if TYPE_CHECKING:
    from zoo_attention.evolving import EvolvingOptions


class EvolvingAttention(nn.Module):
    """Evolving attention; one layer of a chain.

    alpha, beta: the shares, scalars. conv: the kernel (H, H, 3, 3). All None in the first layer.
    """

    alpha: nn.Parameter | None
    beta: nn.Parameter | None
    conv: nn.Parameter | None

    def __init__(self, site: Site, options: EvolvingOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.path, self.previous = site.path, site.previous
        self.alpha = self.beta = self.conv = None
        if site.previous is not None:
            self.alpha = nn.Parameter(torch.tensor(options.alpha))
            self.beta = nn.Parameter(torch.tensor(options.beta))
            self.conv = nn.Parameter(nn.init.dirac_(torch.empty(site.heads, site.heads, 3, 3)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        tokens = masks.align(ctx.key_padding)
        evolved = self._evolved(q, k, tokens, ctx)
        if ctx.carry is not None:
            ctx.carry[self.path] = evolved
        weights = softmax.masked_softmax(evolved, keys_of(tokens))
        dropout = self.dropout if self.training else 0.0
        return tokens.back(scores.mix(weights, tokens.front(v), None, dropout=dropout))

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, N, N)."""
        tokens = masks.align(ctx.key_padding)
        weights = softmax.masked_softmax(self._evolved(q, k, tokens, ctx), keys_of(tokens))
        return tokens.back(tokens.back(weights).mT).mT

    def _evolved(self, q: Tensor, k: Tensor, tokens: masks.Alignment, ctx: Context) -> Tensor:
        """A (B, H, N, N) in at least fp32, real tokens first; 0 in rows and columns of padding."""
        plain = scores.dot_product(tokens.front(q), tokens.front(k), None, scale=self.scale)
        before = None if ctx.carry is None else ctx.carry.get(self.previous)
        if self.conv is None or before is None or before.shape != plain.shape:
            return plain
        with torch.autocast(q.device.type, enabled=False):
            alpha, beta, conv = (x.to(plain.dtype) for x in (self.alpha, self.beta, self.conv))
            mixed = torch.lerp(plain, before, beta)
            convolved = nn.functional.conv2d(mixed, conv, padding=1).relu()
            evolved = torch.lerp(mixed, convolved, alpha)
        if tokens.key_padding is None:
            return evolved
        real = tokens.key_padding[:, None]
        return evolved.masked_fill(~(real[..., None] & real[:, :, None]), 0)


def keys_of(tokens: masks.Alignment) -> Tensor | None:
    """Which keys, real tokens first, may be attended, (B, 1, 1, N); None = all."""
    return None if tokens.key_padding is None else tokens.key_padding[:, None, None]
