"""Gated positional self-attention: a head is softmax attention, a convolution, or between them.

    A = (1 - g_h) softmax_j(scale * q_i . k_j) + g_h softmax_j(w_h . [dy, dx, dy^2 + dx^2])
    o_i = sum_j A_ij v_j,   (dy, dx) = cell j - cell i,   g_h = sigmoid(gate_h)

d'Ascoli, Touvron, Leavitt, Morcos, Biroli, Sagun, "ConViT: Improving Vision Transformers with Soft
Convolutional Inductive Biases", 2021, arXiv:2103.10697.
Deviations: prefix tokens lie outside the grid, so that g = 0 in their rows and the positional
attention is 0 in their columns (the paper inserts CLS after these layers instead); gates start at
-4, not at 1, and the host's values stay, for pretrained weights; heads beyond the largest square
number start with w = 0; w has no bias, since the softmax cancels it; dropout acts on the softmax
attention only.
Exact when: gate -> -inf, in float64 at -40. At gate -> inf and locality -> inf nine heads are a
3 x 3 convolution wherever the grid has all neighbours; at its border a head looks at what is there.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import softmax
from zoo_core.nn.grid import Grid, layout
from zoo_core.nn.precision import sum_dtype

if TYPE_CHECKING:
    from zoo_attention.gpsa import GpsaOptions


class GatedPositionalAttention(nn.Module):
    """GPSA over a grid of any (rows, cols), which may change from call to call.

    gate: (H,), before the sigmoid. position: w, (H, 3), weights of dy, dx and dy^2 + dx^2.
    """

    def __init__(self, site: Site, options: GpsaOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.gate = nn.Parameter(torch.full((site.heads,), options.gate))
        self.position = nn.Parameter(options.locality * neighbours(site.heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        grid = layout(ctx, k.shape[-2], owner="gpsa", planar=True)
        dropout = self.dropout if self.training else 0.0
        content = softmax.attend(q, k, v, Context(), scale=self.scale, dropout=dropout)
        first, content_cells = grid.split(content)
        _, value_cells = grid.split(v)
        rows, cols = (x.to(v.dtype) for x in self._by_position(grid))
        # The positional map of a head is a Kronecker product: first along rows, then along columns.
        near = _mix_first(rows, _mix_first(cols, value_cells.transpose(2, 3)).transpose(2, 3))
        gate = self.gate.sigmoid().view(-1, 1, 1, 1).to(content.dtype)
        return grid.join(first, torch.lerp(content_cells, near, gate)).to(v.dtype)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, N, N)."""
        grid = layout(ctx, k.shape[-2], owner="gpsa", planar=True)
        content = softmax.weights(q, k, Context(), scale=self.scale)
        rows, cols = self._by_position(grid)
        near = torch.einsum("hij,hkl->hikjl", rows, cols).reshape(-1, grid.cells, grid.cells)
        gate = self.gate.sigmoid().view(-1, 1, 1)
        first, cells = content[:, :, : grid.prefix], content[:, :, grid.prefix :]
        near = nn.functional.pad(near, (grid.prefix, 0))
        return torch.cat([first, (1 - gate) * cells + gate * near], 2)

    def _by_position(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """The positional map's factors: (H, rows, rows) and (H, cols, cols), in at least fp32.

        w . [dy, dx, dy^2 + dx^2] is a sum of a term in dy and one in dx, so that the softmax over
        the cells is the product of one over rows and one over columns.
        """
        weights = self.position.to(sum_dtype(self.position))
        by_row, by_col, square = (w[:, None, None] for w in weights.unbind(-1))
        dy, dx = (offsets(length, weights) for length in grid.shape)
        return (
            (by_row * dy + square * dy.square()).softmax(-1),
            (by_col * dx + square * dx.square()).softmax(-1),
        )


def _mix_first(table: Tensor, cells: Tensor) -> Tensor:
    """A head's table (H, R, R) times the cells (B, H, R, C, E) along R: one product a head."""
    return (table @ cells.flatten(-2)).view(cells.shape)


def offsets(length: int, like: Tensor) -> Tensor:
    """j - i for all i (rows) and j (columns) below `length`."""
    line = torch.arange(length, device=like.device, dtype=like.dtype)
    return line - line[:, None]


def neighbours(heads: int) -> Tensor:
    """w (H, 3) at which a head looks at the cell `c` away: its scores are -|d - c|^2 + |c|^2.

    The first isqrt(heads)^2 heads share out a square around the cell; w of the others is 0.
    """
    side = isqrt(heads)
    line = torch.arange(side) - (side - 1) / 2
    to = torch.cartesian_prod(line, line)
    near = torch.cat([2 * to, -torch.ones(len(to), 1)], 1)
    return nn.functional.pad(near, (0, 0, 0, heads - len(to)))
