"""Softmax attention by the fused kernel.

    o_i = sum_j softmax_j(scale * q_i . k_j) v_j

Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762.
Deviations: none. Exact when: always.
"""

from __future__ import annotations

from zoo_core import Site
from zoo_core.nn.softmax import Softmax


class SoftmaxAttention(Softmax):
    """Scaled dot-product attention; it has no parameters."""

    def __init__(self, site: Site) -> None:
        super().__init__(scale=site.scale, dropout=site.dropout)
