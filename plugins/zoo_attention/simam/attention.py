"""SimAM: softmax attention, then a gate that opens for numbers unlike the rest of their channel.

    t_i = sum_j softmax_j(scale * q_i . k_j) v_j,   o_i = t_i sigmoid(1 / e_i),  for each channel
    1 / e_i = (t_i - mean)^2 / (4 (var + lambda)) + 1/2,   var = sum_i (t_i - mean)^2 / (M - 1)

e_i is the least energy at which a linear unit tells t_i from the channel's M numbers: the fewer
it takes, the more the number stands out.

Yang, Zhang, Li, Xie, "SimAM: A Simple, Parameter-Free Attention Module for Convolutional Neural
Networks", ICML 2021, https://proceedings.mlr.press/v139/yang21o.html.
Deviations: the gate follows softmax attention, not a convolution; a channel's M numbers are those
of the sample's real tokens outside the prefix, and prefix tokens pass without a gate; `strength`
mixes the gate with 1. As in the paper the mean and the variance are of all M numbers, where the
least energy would leave out t_i itself.
Exact when: strength = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import masks, softmax

if TYPE_CHECKING:
    from zoo_attention.simam import SimamOptions


class SimamAttention(nn.Module):
    """Softmax attention with a gate on its outputs; it has no parameters."""

    def __init__(self, site: Site, options: SimamOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.strength = options.strength
        self.regularisation = options.regularisation

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        dropout = self.dropout if self.training else 0.0
        out = softmax.attend(q, k, v, ctx, scale=self.scale, dropout=dropout)
        if self.strength == 0:
            return out
        gated = gated_tokens(ctx, out)
        x = out.to(torch.promote_types(out.dtype, torch.float32)).masked_fill(~gated, 0)
        count = gated.sum(-2, keepdim=True)
        mean = x.sum(-2, keepdim=True) / count.clamp(min=1)
        squares = (x - mean).square().masked_fill(~gated, 0)
        variance = squares.sum(-2, keepdim=True) / (count - 1).clamp(min=1)
        share = inverse_energy(squares, variance, self.regularisation).sigmoid()
        return torch.where(gated, x * (1 + self.strength * (share - 1)), out).to(v.dtype)


def gated_tokens(ctx: Context, x: Tensor) -> Tensor:
    """Which of the tokens of x (B, H, N, E) are real and outside the prefix, (B or 1, 1, N, 1)."""
    if ctx.key_padding is None:
        gated = (torch.arange(x.shape[-2], device=x.device) >= ctx.prefix)[None]
    else:
        gated = ctx.key_padding & (masks.rank(ctx.key_padding) >= ctx.prefix)
    return gated[:, None, :, None]


def inverse_energy(squares: Tensor, variance: Tensor, regularisation: float) -> Tensor:
    """1 / e of numbers by their squared distance from the mean, in the paper's closed form."""
    return squares / (4 * (variance + regularisation)) + 0.5
