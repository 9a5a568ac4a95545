"""Star attention: each token sees its two neighbours and a hub, and the hub sees every token.

    o_i = sum_{j in A(i)} softmax_{j in A(i)}(scale * q_i . k_j) v_j
    A(i) = {j : |i - j| <= 1, or i or j is a hub, or i and j are the two ends of the chain}

Guo, Qiu, Liu, Shao, Xue, Zhang, "Star-Transformer", 2019, arXiv:1902.09113; as a mask of softmax
attention: Shi, Gao, Ren, Xu, Liang, Li, Kwok, "SparseBERT", 2021, arXiv:2102.12871.
Deviations: the hub is the prefix of the sample, or its first token where there is none, instead of
a relay node added to the sequence and updated in turn with the ring; its tokens share the host's
projections; i and j count real tokens only. Causal calls leave the ring open, for which token is
the last depends on the future.
Exact when: never, but for samples of at most 4 real tokens, one hub and 3 on the ring, with
ring=True and not causal; of at most 3 tokens otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo_core import Site
from zoo_core.nn.patterns import Common, Distances, Pattern
from zoo_core.nn.sparse import Extent, PatternAttention

if TYPE_CHECKING:
    from zoo_attention.star import StarOptions


class StarAttention(PatternAttention):
    """Softmax over two neighbours and the hubs; it has no parameters."""

    hubs = 1

    def __init__(self, site: Site, options: StarOptions) -> None:
        super().__init__(site, few=16, short=64)
        self.ring = options.ring

    def sees(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        """Whether the query of rank i sees the key of rank j: neighbours, or ends of the chain."""
        near = (i - j).abs() <= 1
        if extent.causal or not self.ring:
            return near
        first, last = extent.hubs, extent.count - 1
        return near | (i == first) & (j == last) | (i == last) & (j == first)

    def layout(
        self, length: int, extent: Extent, device: torch.device
    ) -> list[tuple[Pattern, Tensor]]:
        """The neighbours, and the two ends of the chain where these are no neighbours."""
        neighbours = Distances((-1, 0) if extent.causal else (-1, 0, 1))
        found: list[tuple[Pattern, Tensor]] = [(neighbours, neighbours.positions(length, device))]
        if extent.causal or not self.ring:
            return found
        last = extent.count.flatten(1) - 1
        ends = torch.cat([torch.full_like(last, extent.hubs), last], 1)
        apart = (torch.arange(length, device=device)[:, None] - ends[:, None]).abs() > 1
        return [*found, (Common(ends.clamp(0, length - 1)), ends[:, None].where(apart, -1))]
