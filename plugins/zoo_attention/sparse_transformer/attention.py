"""Sparse Transformer: each token sees those nearby, and a regular sample of all others.

    o_i = sum_{j in A(i)} softmax_{j in A(i)}(scale * q_i . k_j) v_j
    strided: A(i) = {j : |i - j| < l, or l divides i - j}
    fixed:   A(i) = {j : i // l = j // l, or j mod l >= l - c},  l = stride, c = summary

Child, Gray, Radford, Sutskever, "Generating Long Sequences with Sparse Transformers", 2019,
arXiv:1904.10509.
Deviations: the paper's is causal, this one looks both ways unless the call is causal; each head
sees the union of both parts (the paper's merged head); the prefix sees, and is seen by, all; i and
j count real tokens only. The stride is a property of the site, not of the sample's length, whose
root it would follow: no sample depends on its batch mates, and one batch has one layout.
Exact when: stride >= N, or in the fixed pattern summary >= stride.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo_core import Site
from zoo_core.nn import tiles
from zoo_core.nn.patterns import Columns, Common, Neighbours, Pattern
from zoo_core.nn.sparse import Extent, PatternAttention

if TYPE_CHECKING:
    from zoo_attention.sparse_transformer import SparseTransformerOptions


class SparseTransformerAttention(PatternAttention):
    """Softmax over about 2 * stride + N / stride keys per query; it has no parameters."""

    def __init__(self, site: Site, options: SparseTransformerOptions) -> None:
        options = options.clamped(site)
        stride = options.stride_at(site)
        super().__init__(
            site,
            few=stride,
            short=3 * stride,
            multiple=stride,
            global_prefix=options.global_prefix,
        )
        self.stride = stride
        self.summary = options.summary
        self.strided = options.pattern == "strided"

    def sees(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        """Whether the query of rank i sees the key of rank j, by the pattern."""
        if self.strided:
            return ((i - j).abs() < self.stride) | ((i - j) % self.stride == 0)
        same = i // self.stride == j // self.stride
        return same | (j % self.stride >= self.stride - self.summary)

    def runs(self, length: int, begin: Tensor, stop: Tensor, extent: Extent) -> Tensor:
        """The tokens nearby, and the summaries if there are any, (B or 1, 1, R, P, 6)."""
        if self.strided:
            return self._reach(begin, stop, extent)
        return torch.cat([self._own(begin, extent), self._summaries(length, begin, extent)], -2)

    def apart(self, length: int, extent: Extent) -> list[tiles.Part]:
        """The columns, each token itself among them: runs of the tokens of one residue."""
        if not self.strided:
            return []
        residue = torch.arange(self.stride, device=extent.count.device)[:, None]
        # Of each residue: how many are hubs, and how many are the sample's own.
        hubs, own = (
            -(-(x - residue).clamp(min=0) // self.stride) for x in (extent.hubs, extent.count)
        )
        borders = tiles.borders(-(-length // self.stride), 0, residue.device)
        begin, stop = borders[:-1], borders[1:]
        past = int(extent.causal)
        end = own.minimum(stop) if past else own
        runs = tiles.run(hubs, end - hubs, first=hubs - begin, first_step=past)
        return [tiles.Part(runs, borders, self.stride)]

    def _reach(self, begin: Tensor, stop: Tensor, extent: Extent) -> Tensor:
        """Those less than the stride away, (B or 1, 1, R, 1 or 2, 6); not the token itself."""
        reach = self.stride - 1
        low = (begin - reach).clamp(min=0)
        first, last = low + 1 - begin, low + reach - begin
        count = stop.minimum(extent.count) - low
        past = tiles.run(low, count, first=first, first_step=1, last=last, last_step=1)
        if extent.causal:
            return past
        count = (stop + reach).minimum(extent.count) - begin
        after = tiles.run(begin, count, first=-reach, first_step=1, last=-1, last_step=1)
        return torch.cat([past, after], -2)

    def _own(self, begin: Tensor, extent: Extent) -> Tensor:
        """The blocks of a tile's own queries, (B or 1, 1, R, P, 6)."""
        most = (tiles.TILE - 2) // self.stride + 2
        blocks = begin[:, None] // self.stride + torch.arange(most, device=begin.device)
        start = blocks * self.stride
        count = (extent.count[..., None] - start).clamp(max=self.stride)
        first = start - begin[:, None]
        last = first + self.stride - 1
        runs = tiles.run(start, count, first=first, first_step=int(extent.causal), last=last)
        return runs.flatten(-3, -2)

    def _summaries(self, length: int, begin: Tensor, extent: Extent) -> Tensor:
        """The last tokens of every block, (B or 1, 1, R, blocks, 6)."""
        blocks = torch.arange(0, length, self.stride, device=begin.device)
        start = blocks + self.stride - self.summary
        count = (extent.count[..., None] - start).clamp(max=self.summary)
        first = (start - begin[:, None]) if extent.causal else torch.zeros_like(begin)[:, None]
        return tiles.run(start, count, first=first, first_step=int(extent.causal)).flatten(-3, -2)

    def layout(
        self, length: int, extent: Extent, device: torch.device
    ) -> list[tuple[Pattern, Tensor]]:
        """The blocks nearby, and beyond them the columns or the summaries."""
        near, far = self._strided(extent) if self.strided else self._fixed(length, device)
        i = torch.arange(length, device=device)[:, None]
        j = far.positions(length, device)
        beyond = j.masked_fill(near.reach(i, j), -1)
        return [(near, near.positions(length, device)), (far, beyond)]

    def _strided(self, extent: Extent) -> tuple[Neighbours, Pattern]:
        after = 0 if extent.causal else 1
        return Neighbours(self.stride, before=1, after=after), Columns(self.stride)

    def _fixed(self, length: int, device: torch.device) -> tuple[Neighbours, Pattern]:
        blocks = torch.arange(length, device=device).view(1, -1, self.stride)
        summaries = Common(blocks[..., self.stride - self.summary :].flatten(1))
        return Neighbours(self.stride, before=0, after=0), summaries
