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
