"""Attention on two levels: within a window, and within a wider one over pooled tokens.

    y_i = sum_{|i - j| <= window} softmax_j(scale * q_i . k_j) v_j
    z_i = sum_{|i // stride - c| <= outer // stride} softmax_c(scale * q_i . P_c(k)) P_c(y)
    o_i = (1 - g) y_i + g z_i,   g in (0, 1)

P_c pools the `kernel` tokens from c * stride on: their mean, their maximum, or a mean of weights
softmax(W^T k_m) by the key k_m in their middle, W in R^{D x kernel}.

Zhang, Gong, Shen, Li, Lv, Duan, Chen, "Poolingformer: Long Document Modeling with Pooling
Attention", 2021, arXiv:2105.04371.
Deviations: the paper's second level projects y to queries, keys and values of its own; here it
takes the host's queries and keys, and y as values. g, one per head and small at the start, stands
for the paper's sum y + z, which would double what pretrained weights expect. Dynamic weights come
from the keys, also those of the values. Prefix tokens see, and are seen by, all on the first level
and stay out of the second. i, j and c count real tokens only.
Exact when: window >= N and there is no second level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import masks, softmax
from zoo_core.nn.precision import sum_dtype
from zoo_core.nn.windows import Window

if TYPE_CHECKING:
    from zoo_attention.pooling import PoolingOptions


class PoolingAttention(nn.Module):
    """Two levels of windows.

    gate: logits of g, (H, 1, 1), or None without a second level. taps: W, (H, D, kernel), or None.
    """

    gate: nn.Parameter | None
    taps: nn.Parameter | None

    def __init__(self, site: Site, options: PoolingOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.window = options.window
        self.outer = options.outer
        self.kernel = options.kernel
        self.stride = options.stride
        self.takes_maximum = options.pool == "max"
        pools, dynamic = options.pool != "none", options.pool == "dynamic"
        self.gate = nn.Parameter(torch.full((site.heads, 1, 1), options.gate)) if pools else None
        shape = (site.heads, site.head_dim, options.kernel)
        self.taps = nn.Parameter(torch.zeros(shape)) if dynamic else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        tokens = masks.align(ctx.key_padding)
        real = None if ctx.key_padding is None else ctx.key_padding.sum(-1)
        q, k, v = (tokens.front(x) for x in (q, k, v))
        prefix = min(ctx.prefix, k.shape[-2])
        out = self._attend(Window(self.window, prefix=prefix), q, k, v, real)
        if self.gate is not None and prefix < k.shape[-2]:
            first = masks.hide(out, tokens.key_padding).to(q.dtype)
            behind = None if real is None else (real - prefix).clamp(min=0)
            second = self._second_level(*(x[:, :, prefix:] for x in (q, k, first)), behind)
            mixed = torch.lerp(out[:, :, prefix:], second, self.gate.sigmoid().to(out.dtype))
            # Put together as hosts store it, tokens before heads.
            parts = [out.transpose(1, 2)[:, :prefix], mixed.transpose(1, 2)]
            out = torch.cat(parts, 1).transpose(1, 2)
        return tokens.back(out).to(v.dtype)

    def _attend(
        self, window: Window, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return window.attend_front(q, k, v, real, scale=self.scale, dropout=dropout)

    def _second_level(self, q: Tensor, k: Tensor, y: Tensor, real: Tensor | None) -> Tensor:
        """z (B, H, N, E) of the N tokens behind the prefix; their padding is zero."""
        cells_k, cells_y = self._cells(k), self._cells(y)
        members = self._members(k, real)
        if self.takes_maximum:
            short_k, short_y = maximum(cells_k, members), maximum(cells_y, members)
        else:
            weights = self._weights(cells_k, members)
            short_k, short_y = mean(cells_k, weights), mean(cells_y, weights)
        pooled = None if real is None else members[:, 0, :, 0].sum(-1)
        window = Window(self.outer // self.stride, stride=self.stride)
        return self._attend(window, q, short_k, short_y, pooled)

    def _cells(self, x: Tensor) -> Tensor:
        """What is pooled into one of x (B, H, N, D): (B, H, C, D, kernel), a view."""
        number = -(-x.shape[-2] // self.stride)
        missing = (number - 1) * self.stride + self.kernel - x.shape[-2]
        return F.pad(x, (0, 0, 0, missing)).unfold(2, self.kernel, self.stride)

    def _members(self, k: Tensor, real: Tensor | None) -> Tensor:
        """Which tokens of the cells are real, (B or 1, 1, C, kernel)."""
        number = -(-k.shape[-2] // self.stride)
        first = torch.arange(number, device=k.device)[:, None] * self.stride
        place = first + torch.arange(self.kernel, device=k.device)
        end = k.shape[-2] if real is None else real[:, None, None, None]
        return (place < end).view(-1, 1, number, self.kernel)

    def _weights(self, cells: Tensor, members: Tensor) -> Tensor:
        """The weights of the tokens in each cell, (B or 1, H or 1, C, kernel), in at least fp32."""
        wide = sum_dtype(cells)
        if self.taps is None:
            return softmax.masked_softmax(torch.zeros_like(members, dtype=wide), members)
        # The token in the middle, or the last real one of a cell that ends before it.
        last = members.sum(-1)[..., None, None] - 1
        middle = last.clamp(min=0, max=self.kernel // 2).expand(*cells.shape[:-1], 1)
        scores = cells.gather(-1, middle).squeeze(-1) @ self.taps.to(cells.dtype)
        return softmax.masked_softmax(scores.to(wide), members)


def mean(cells: Tensor, weights: Tensor) -> Tensor:
    """Mean of cells (B, H, C, D, kernel) by weights (B or 1, H or 1, C, kernel): (B, H, C, D)."""
    return (cells.to(weights.dtype) @ weights[..., None]).squeeze(-1).to(cells.dtype)


def maximum(cells: Tensor, members: Tensor) -> Tensor:
    """Maximum over the members of cells (B, H, C, D, kernel), 0 where a cell has none."""
    members = members[..., None, :]
    highest = cells.masked_fill(~members, -torch.inf).amax(-1)
    return highest.masked_fill(~members.any(-1), 0)
