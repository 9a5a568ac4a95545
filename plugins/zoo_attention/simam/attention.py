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
from zoo_core.nn.parts import ROWS, cut, streams
from zoo_core.nn.precision import sum_dtype

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
        if not streams(out):
            return self._gate(out, gated).to(v.dtype)
        # Some heads at a time, which stay in the cache, into the kernel's own buffer.
        for heads in cut(out.shape[1], ROWS // (out.shape[0] * out.shape[2])):
            out[:, heads] = self._gate(out[:, heads], gated)
        return out

    def _gate(self, out: Tensor, gated: Tensor | None) -> Tensor:
        """Gate the given tokens (B or 1, 1, N, 1) of out (B, H, N, E), in at least fp32."""
        x = out.to(sum_dtype(out))
        count = x.shape[-2] if gated is None else gated.sum(-2, keepdim=True).clamp(min=1)
        mean = _keep(x, gated).sum(-2, keepdim=True) / count
        squares = _keep(x - mean, gated).square()
        others = max(count - 1, 1) if gated is None else (count - 1).clamp(min=1)
        variance = squares.sum(-2, keepdim=True) / others
        share = inverse_energy(squares, variance, self.regularisation).sigmoid()
        if self.strength != 1:
            share = 1 + self.strength * (share - 1)
        return x * share if gated is None else torch.where(gated, x * share, x)


def gated_tokens(ctx: Context, x: Tensor) -> Tensor | None:
    """Which of the tokens of x (B, H, N, E) are real and outside the prefix, (B or 1, 1, N, 1).

    None = all.
    """
    if ctx.key_padding is not None:
        gated = ctx.key_padding & (masks.rank(ctx.key_padding) >= ctx.prefix)
    elif ctx.prefix:
        gated = (torch.arange(x.shape[-2], device=x.device) >= ctx.prefix)[None]
    else:
        return None
    return gated[:, None, :, None]


def _keep(x: Tensor, gated: Tensor | None) -> Tensor:
    """Zero what has no gate."""
    return x if gated is None else x.masked_fill(~gated, 0)


def inverse_energy(squares: Tensor, variance: Tensor, regularisation: float) -> Tensor:
    """1 / e of numbers by their squared distance from the mean, in the paper's closed form."""
    return squares / (4 * (variance + regularisation)) + 0.5
