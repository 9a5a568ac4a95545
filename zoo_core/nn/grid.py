"""Tokens on a grid: the cells apart from the prefix, lines of cells, and attention along them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core.attention import Context, Site
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import softmax


@dataclass(frozen=True)
class Grid:
    """The layout of one call: `prefix` tokens, then the cells of `shape`, row by row.

    shape: (rows, cols) or (frames, rows, cols).
    """

    prefix: int
    shape: tuple[int, ...]

    @property
    def cells(self) -> int:
        """Number of cells."""
        return prod(self.shape)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cut x (B, H, N, D) into its prefix (B, H, P, D) and cells (B, H, *shape, D), views."""
        cells = x[:, :, self.prefix :]
        return x[:, :, : self.prefix], cells.view(*x.shape[:2], *self.shape, x.shape[-1])

    def join(self, prefix: Tensor, cells: Tensor) -> Tensor:
        """Undo `split`."""
        tokens = cells.flatten(2, -2)
        return torch.cat([prefix, tokens], 2) if self.prefix else tokens


def layout(ctx: Context, tokens: int, *, owner: str, planar: bool = False) -> Grid:
    """The layout of a call of N = `tokens` tokens.

    With a key_padding it is the layout of each sample's first real tokens, and N may be larger.
    owner: the mechanism's name, for messages. planar: accept (rows, cols) only.
    Raises UnsupportedCall where the call has no grid, or one that is not made of its tokens.
    """
    if ctx.grid is None:
        raise UnsupportedCall(
            f"{owner} needs the (rows, cols) grid of the {tokens} tokens and this call has none; "
            "call the whole model with images, or give Context(grid=...)"
        )
    grid = Grid(ctx.prefix, tuple(ctx.grid))
    if planar and len(grid.shape) != 2:
        raise UnsupportedCall(f"{owner} works on a grid of (rows, cols), not on {grid.shape}")
    spare = tokens - grid.prefix - grid.cells
    if spare < 0 or (spare > 0 and ctx.key_padding is None):
        raise UnsupportedCall(
            f"{owner} got {tokens} tokens, which are not {grid.prefix} prefix tokens and the "
            f"{grid.cells} cells of a grid {grid.shape}"
        )
    return grid


def lines(cells: Tensor, axis: int) -> Tensor:
    """Cut cells (B, H, *shape, D) into lines along one axis of shape: (B * lines, H, length, D)."""
    return cells.movedim((1, 2 + axis), (-3, -2)).flatten(0, -4)


def cells_of(x: Tensor, axis: int, shape: Sequence[int]) -> Tensor:
    """Undo `lines`: (B * lines, H, length, D) to (B, H, *shape, D), a view."""
    others = [length for i, length in enumerate(shape) if i != axis]
    return x.view(-1, *others, *x.shape[1:]).movedim((-3, -2), (1, 2 + axis))


def attend_along(
    axis: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: tuple[Tensor, Tensor] | None = None,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of each cell over the cells of its own line, (B, H, *shape, E).

    q, k, v: cells (B, H, *shape, width). prefix: keys and values (B, H, P, width) that every line
    has besides its cells. dropout: probability on the weights; pass 0 outside training.
    """
    shape = q.shape[2:-1]
    queries, keys, values = (lines(x, axis) for x in (q, k, v))
    if prefix is not None:
        copies = prod(shape) // shape[axis]
        first_k, first_v = (x[:, None].expand(-1, copies, -1, -1, -1).flatten(0, 1) for x in prefix)
        keys, values = torch.cat([first_k, keys], 2), torch.cat([first_v, values], 2)
    out = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, scale=scale)
    return cells_of(out, axis, shape)


class GridAttention(nn.Module, ABC):
    """Attention whose cells see what a subclass says, and whose prefix sees every token.

    A subclass has `name`, and `attend_cells`. It holds no N x N tensor if `attend_cells` does not.
    """

    name: str

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E).

        Raises UnsupportedCall without a grid that the tokens fill.
        """
        grid = layout(ctx, k.shape[-2], owner=self.name)
        (first_q, q_cells), (first_k, k_cells), (first_v, v_cells) = map(grid.split, (q, k, v))
        dropout = self.dropout if self.training else 0.0
        if not grid.prefix:
            return grid.join(first_v, self.attend_cells(q_cells, k_cells, v_cells, None, dropout))
        prefix = (first_k, first_v)
        cells = self.attend_cells(q_cells, k_cells, v_cells, prefix, dropout)
        first = softmax.attend(first_q, k, v, Context(), scale=self.scale, dropout=dropout)
        return grid.join(first, cells)

    @abstractmethod
    def attend_cells(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        dropout: float,
    ) -> Tensor:
        """Attend for the cells: q, k, v (B, H, *shape, width) -> (B, H, *shape, E).

        prefix: its keys and values (B, H, P, width), None where there is none.
        dropout: probability on the weights, 0 in eval mode.
        """
