"""Factorised dot-product attention: some heads attend in space, the others in time.

    spatial heads:  o_tp = sum_p' softmax_p'(scale * q_tp . k_tp') v_tp'   within the frame t
    temporal heads: o_tp = sum_t' softmax_t'(scale * q_tp . k_t'p) v_t'p   at the place p

Arnab, Dehghani, Heigold, Sun, Lucic, Schmid, "ViViT: A Video Vision Transformer", 2021,
arXiv:2103.15691, its model 4: the one that needs no weights beyond those of joint attention.
Deviations: prefix tokens, which the paper's models of this kind do not have, see and are seen by
every token in every head; on a (rows, cols) grid the rows take the place of frames, so that half
of the heads attend along a row and half along a column. The first heads are the spatial ones.
Exact when: there is a single frame, in the spatial heads: all of them at temporal = 0.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo_core import Site
from zoo_core.nn.grid import GridAttention, attend_along

if TYPE_CHECKING:
    from zoo_attention.factorised import FactorisedOptions

TIME, SPACE = 0, 1


class FactorisedAttention(GridAttention):
    """Softmax attention within frames and across frames; it has no parameters."""

    name = "factorised"

    def __init__(self, site: Site, options: FactorisedOptions) -> None:
        super().__init__(site)
        self.spatial = site.heads - int(site.heads * options.temporal)

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
        places = q.shape[3:-1]
        cells = [x.flatten(3, -2) for x in (q, k, v)]  # (B, H, frames, places, width)
        parts = []
        for axis, heads in ((SPACE, slice(self.spatial)), (TIME, slice(self.spatial, None))):
            own = [x[:, heads] for x in cells]
            if own[0].shape[1]:
                seen = None if prefix is None else (prefix[0][:, heads], prefix[1][:, heads])
                parts.append(attend(axis, *own, seen))
        return torch.cat(parts, 1).unflatten(3, places)
