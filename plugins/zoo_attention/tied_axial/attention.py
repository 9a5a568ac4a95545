"""Tied axial attention: one map over the columns, shared by all rows, then each column by itself.

    A_ij = softmax_j(scale / sqrt(R) * sum_r q_ri . k_rj),   u_ri = sum_j A_ij v_rj
    o_ri = sum_s softmax_s(scale * q_ri . k_si) u_si,   R rows: the sequences of an alignment

Rao, Liu, Verkuil, Meier, Canny, Abbeel, Sercu, Rives, "MSA Transformer", 2021,
doi:10.1101/2021.02.12.430858.
Deviations: both steps use the host's one projection, where the paper has a sublayer, a residual and
weights of its own for each; prefix tokens see every token, and stand as further columns in every
row of the first step; padded rows and columns are not supported. Frames are rows, and the cells of
a frame its columns.
Exact when: the grid has a single row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core import Site
from zoo_core.nn.grid import GridAttention, attend_along

if TYPE_CHECKING:
    from zoo_attention.tied_axial import TiedAxialOptions


class TiedAxialAttention(GridAttention):
    """Row attention by one common map, then column attention; it has no parameters."""

    name = "tied_axial"

    def __init__(self, site: Site, options: TiedAxialOptions) -> None:
        super().__init__(site)
        self.columns = options.columns

    def attend_cells(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        dropout: float,
    ) -> Tensor:
        """Attend for the cells: q, k, v (B, H, *shape, width) -> (B, H, *shape, E)."""
        shape = q.shape[2:-1]
        q, k, v = (x.flatten(3, -2) for x in (q, k, v))  # (B, H, rows, cols, width)
        out = self._tied(q, k, v, prefix, dropout)
        if self.columns:
            out = attend_along(0, q, k, out, scale=self.scale, dropout=dropout)
        return out.unflatten(3, shape[1:])

    def _tied(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        dropout: float,
    ) -> Tensor:
        """Attend along the rows by their sum of scores: (B, H, rows, cols, E)."""
        rows, keys, values = q.shape[2], k, v
        if prefix is not None:
            first_k, first_v = (x[:, :, None].expand(-1, -1, rows, -1, -1) for x in prefix)
            keys, values = torch.cat([first_k, k], 3), torch.cat([first_v, v], 3)
        # A sum over rows of products of D numbers is one product of rows * D numbers.
        queries, keys, values = (x.transpose(2, 3).flatten(3) for x in (q, keys, values))
        scale = self.scale * rows**-0.5
        out = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, scale=scale)
        return out.unflatten(3, (rows, -1)).transpose(2, 3)
