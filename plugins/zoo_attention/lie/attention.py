"""LieSelfAttention: a score is a dot product plus a function of the motion between two tokens.

    o_i = sum_j softmax_j(scale * q_i . k_j + mlp_h(log(g_i^-1 g_j))) v_j
    T(1), text:  log(g_i^-1 g_j) = j - i, positions among the real tokens
    T(2), grid:  log(g_i^-1 g_j) = (row_j - row_i, col_j - col_i)
    p4, grid:    the mean of o_i over the four turns t of the query, log = t^-1 (offset as in T(2))

Hutchinson, Le Lan, Zaidi, Dupont, Teh, Kim, "LieTransformer: Equivariant Self-Attention for Lie
Groups", 2021, arXiv:2012.10885.
Deviations: of the paper's kernels the sum of dot product and location, normalised by a softmax, and
all tokens as neighbourhood; offsets enter the network as sign(x) log(1 + |x|), which keeps far ones
in its range and commutes with the turns; p4 lifts tokens to four turns and averages over them
within a layer, since a host's tokens carry no turn: a key's own turn then leaves a function of the
offset, which the network is; its output has no bias, since the softmax would cancel it; prefix
tokens of a grid have no location (0 from and to them), those of a text stand on its line.
Exact when: the network's last layer is 0, as it is at the start (start="zero").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.errors import OptionError, UnsupportedCall
from zoo_core.nn import distances, masks, softmax
from zoo_core.nn.grid import Grid, layout
from zoo_core.nn.precision import sum_dtype

if TYPE_CHECKING:
    from zoo_attention.lie import LieOptions


class LieAttention(nn.Module):
    """Softmax attention with a location term, equivariant to translations or to p4."""

    def __init__(self, site: Site, options: LieOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.axes = 1 if site.grid is None else len(site.grid)
        if options.group == "p4" and self.axes == 1:
            raise OptionError("lie: group='p4' turns a grid, and these tokens stand on a line")
        self.turns = 4 if options.group == "p4" else 1
        self.location = Location(self.axes, options.hidden, site.heads)
        if options.start == "zero":
            nn.init.zeros_(self.location.outer.weight)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        Raises UnsupportedCall where the call's grid is not of the kind the module was built for.
        """
        how = {"scale": self.scale, "dropout": self.dropout if self.training else 0.0}
        queries, keys = q.shape[-2], k.shape[-2]
        grid = self._grid(ctx, keys)
        if ctx.grid is None and distances.fits(ctx, queries, keys):
            (terms,) = self._scores(grid.shape, q.device)
            return distances.attend(q, k, v, terms.mT, ctx, **how).to(v.dtype)
        turns = [softmax.attend(q, k, v, x, **how) for x in self._located(q, k, grid, ctx)]
        return mean(turns).to(v.dtype)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        contexts = self._located(q, k, self._grid(ctx, k.shape[-2]), ctx)
        return mean([softmax.weights(q, k, located, scale=self.scale) for located in contexts])

    def _located(self, q: Tensor, k: Tensor, grid: Grid, ctx: Context) -> list[Context]:
        """The call with the location as a bias, (B or 1, H, L, S), once for each turn."""
        cell, outside = cells(grid, ctx.key_padding, k)
        index = offset_index(cell, grid.shape)[:, -q.shape[-2] :]
        beyond = (outside[:, :, None] | outside[:, None])[:, None, -q.shape[-2] :]
        contexts = []
        for scores in self._scores(grid.shape, q.device):
            bias = F.embedding(index, scores).permute(0, 3, 1, 2)
            # Rows in one piece, which the fused kernel wants.
            bias = bias.contiguous().masked_fill(beyond, 0)
            contexts.append(
                Context(
                    key_padding=ctx.key_padding,
                    bias=bias if ctx.bias is None else bias + ctx.bias,
                    causal=ctx.causal,
                    query_offset=ctx.query_offset,
                )
            )
        return contexts

    def _grid(self, ctx: Context, keys: int) -> Grid:
        """The grid of this call; where it has none a line of all tokens, prefix included."""
        given = 1 if ctx.grid is None else len(ctx.grid)
        if given != self.axes:
            kinds = [
                "on a line" if n == 1 else f"on a grid of {n} axes" for n in (self.axes, given)
            ]
            raise UnsupportedCall(f"lie was built for tokens {kinds[0]} and got them {kinds[1]}")
        return Grid(0, (keys,)) if ctx.grid is None else layout(ctx, keys, owner="lie")

    def _scores(self, shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
        """The location of every offset within a grid, (offsets, H), once for each turn."""
        offsets = offsets_within(shape, device)
        scores = [self.location(offsets)]
        while len(scores) < self.turns:
            *others, dy, dx = offsets.unbind(-1)
            offsets = torch.stack([*others, -dx, dy], -1)
            scores.append(self.location(offsets))
        return scores


class Location(nn.Module):
    """The network of the location, from the offset along each axis to one score per head."""

    def __init__(self, axes: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.inner = nn.Linear(axes, hidden)
        self.outer = nn.Linear(hidden, heads, bias=False)

    def forward(self, offsets: Tensor) -> Tensor:
        """Offsets (..., axes) to scores (..., H), in at least fp32 under autocast too."""
        wide = sum_dtype(self.outer.weight)
        inner, bias, outer = (
            x.to(wide) for x in (self.inner.weight, self.inner.bias, self.outer.weight)
        )
        offsets = offsets.to(wide)
        near = offsets.sign() * offsets.abs().log1p()
        with torch.autocast(offsets.device.type, enabled=False):
            return F.linear(F.silu(F.linear(near, inner, bias)), outer)


def mean(parts: list[Tensor]) -> Tensor:
    """The mean of tensors of one shape."""
    return torch.stack(parts).mean(0) if len(parts) > 1 else parts[0]


def offsets_within(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Every offset from one cell of a grid to another, (offsets, axes) long, in order."""
    lines = [torch.arange(1 - n, n, device=device) for n in shape]
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), -1).flatten(0, -2)


def cells(grid: Grid, key_padding: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
    """The cell of each of the S tokens, and which of them have none, both (B or 1, S)."""
    cell = masks.positions(key_padding, k) - grid.prefix
    last = grid.cells - 1
    return cell.clamp(0, last), (cell < 0) | (cell > last)


def offset_index(cell: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Where the offset from token i to j stands in `offsets_within`: (B, S, S) of cells (B, S)."""
    place, stride, middle = torch.zeros_like(cell), 1, 0
    for n in reversed(shape):
        place = place + cell % n * stride
        middle += (n - 1) * stride
        cell = cell.div(n, rounding_mode="floor")
        stride *= 2 * n - 1
    return place[:, None] - place[:, :, None] + middle
