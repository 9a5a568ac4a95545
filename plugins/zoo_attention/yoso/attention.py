"""YOSO: a key's weight is the chance that random hashing puts it in the query's bucket.

    o_i = normalise(sum_j w_ij v_j)
    w_ij = (1 - acos(q_i . k_j / (|q_i| |k_j|)) / pi) ** bits         form="expectation"
    w_ij = share of the hashes in which i and j have equal codes      form="sampled"

A code is the sides of `bits` random planes, so that each hash is a Bernoulli trial with the first
w_ij as its probability, and the second has a standard deviation of sqrt(w (1 - w) / hashes). To
sum the values of each bucket takes time and memory linear in the tokens, forward and backward.

Zeng et al., "You Only Sample (Almost) Once: Linear Cost Self-Attention Via Bernoulli Sampling",
2021, arXiv:2111.09714.
Deviations: by default the weights are divided by their sum, where the paper scales outputs to
length one (normalise="l2"): this keeps the size of the values, which a pretrained output
projection expects. The expectation has its true derivative, bounded near |cos| = 1, where that is
infinite; the sampled form has the paper's, with bits / 2 * w_ij for the derivative of w_ij. The
hashes are drawn once, not anew in each forward. No convolution of the values, and no dropout, as
there is none in the authors' code.
Exact when: never; the weights know angles only, not the lengths of queries and keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import collisions, masks, precision

if TYPE_CHECKING:
    from zoo_attention.yoso import YosoOptions


class YosoAttention(nn.Module):
    """Attention by the chance to share a hash; it has no parameters.

    planes: (H, hashes, D, bits), a persistent buffer of the sampled form.
    """

    planes: Tensor

    def __init__(self, site: Site, options: YosoOptions) -> None:
        super().__init__()
        self.bits = options.bits
        self.normalise = options.normalise
        self.form = options.form
        if self.form == "sampled":
            shape = (site.heads, options.hashes, site.head_dim, self.bits)
            self.register_buffer("planes", torch.randn(shape))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        wide = precision.sum_dtype(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            queries = F.normalize(q.to(wide), dim=-1)
            keys = F.normalize(masks.hide(k, ctx.key_padding).to(wide), dim=-1)
            # Zeroed with its padded value, the 1 takes the key out of the sum of weights too.
            values = masks.hide(F.pad(v.to(wide), (0, 1), value=1), ctx.key_padding)
            sums = self._weigh(queries, keys, values)
            return self._normalised(sums[..., :-1], sums[..., -1:]).to(v.dtype)

    def _weigh(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """sum_j w_ij values_j, for queries and keys of length one."""
        if self.form == "sampled":
            codes = [collisions.sign_codes(x.detach(), self.planes) for x in (queries, keys)]
            return collisions.sampled(queries, keys, values, *codes, bits=self.bits)
        return collisions.expected(queries, keys, values, bits=self.bits)

    def _normalised(self, sums: Tensor, total: Tensor) -> Tensor:
        if self.normalise == "l2":
            return F.normalize(sums, dim=-1)
        return precision.divide(sums, total)
