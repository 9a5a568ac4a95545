"""Axial attention: each cell attends along one axis of the grid, then along the next.

    u_rc = sum_c' softmax_{c' in row r}(scale * q_rc . k_rc') v_rc'
    o_rc = sum_r' softmax_{r' in column c}(scale * q_rc . k_r'c) u_r'c
    combine="mean": the mean of attention to v along the row and along the column

Ho, Kalchbrenner, Weissenborn, Salimans, "Axial Attention in Multidimensional Transformers", 2019,
arXiv:1912.12180.
Deviations: both steps use the host's one projection, where the paper has a layer, a residual and
weights of its own for each; frames are a third axis, attended last; prefix tokens see every token,
and every cell sees them in its step along the row ("mean": along every axis); no masked axes.
Exact when: the grid has a single row ("sequence").
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from zoo_core import Site
from zoo_core.nn.grid import GridAttention, attend_along

if TYPE_CHECKING:
    from zoo_attention.axial import AxialOptions


class AxialAttention(GridAttention):
    """Softmax attention along each axis of a grid; it has no parameters."""

    name = "axial"

    def __init__(self, site: Site, options: AxialOptions) -> None:
        super().__init__(site)
        self.in_sequence = options.combine == "sequence"

    def attend_cells(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        dropout: float,
    ) -> Tensor:
        """Attend for the cells: q, k, v (B, H, *shape, width) -> (B, H, *shape, E)."""
        attend = partial(attend_along, scale=self.scale, dropout=dropout)
        last, *others = reversed(range(q.dim() - 3))
        out = attend(last, q, k, v, prefix)
        if self.in_sequence:
            for axis in others:
                out = attend(axis, q, k, out)
            return out
        for axis in others:
            out = out + attend(axis, q, k, v, prefix)
        return out / (1 + len(others))
