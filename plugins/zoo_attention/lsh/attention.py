"""LSH attention with keys of their own: softmax over the keys that hash like the query.

    o_i = sum_{j in P(i)} softmax_{j in P(i)}(scale * q_i . k_j) v_j,   P(i) = union of P_r(i)
    h_r(x) = argmax [x R_r; -x R_r],   R_r random: the bucket of x in round r

In each round queries and keys are sorted by bucket; P_r(i) is a window of the sorted keys, three
chunks long, around those of the bucket of i's chunk. It is Reformer's attention without its shared
queries and keys, which lose a pretrained key projection.

Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer", 2020, arXiv:2001.04451.
Deviations: queries and keys are hashed apart. Keys are hashed less their mean, which changes no
softmax weight but lets their buckets tell them apart. A chunk sees, of the keys, the place that
matches its middle, and a chunk's length to each side; at the ends a window moves inwards instead
of going round. A token sees itself like any other. No causal form: sorting sees the future.
Exact when: chunk >= N; from N <= 3 * chunk on, in fact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import hashing, masks, rounds

if TYPE_CHECKING:
    from zoo_attention.lsh import LSHOptions


class LSHAttention(nn.Module):
    """Softmax over windows of the keys sorted by hash.

    rotations: (H, R, D, ceil(buckets / 2)), a persistent buffer.
    """

    rotations: Tensor

    def __init__(self, site: Site, options: LSHOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.buckets = options.buckets
        self.chunk = options.chunk
        shape = (site.heads, options.rounds, site.head_dim, -(-options.buckets // 2))
        self.register_buffer("rotations", torch.randn(shape))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        q, k, v = (masks.hide(x, ctx.key_padding) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        with torch.autocast(q.device.type, enabled=False):
            seen = self._windows(q, k, ctx)
            out = rounds.attend(q, k, v, seen, scale=self.scale, dropout=dropout)
        return out.to(v.dtype)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, N, N)."""
        q, k = masks.hide(q, ctx.key_padding), masks.hide(k, ctx.key_padding)
        return hashing.weights(q, k, self._windows(q, k, ctx), ctx.key_padding, scale=self.scale)

    @torch.no_grad()
    def _windows(self, q: Tensor, k: Tensor, ctx: Context) -> hashing.Windows:
        keys = hashing.centred(k, ctx.key_padding)
        return hashing.windows(
            hashing.buckets(q.to(keys.dtype), self.rotations, self.buckets),
            hashing.buckets(keys, self.rotations, self.buckets),
            ctx.key_padding,
            number=self.buckets,
            chunk=self.chunk,
            before=1,
            after=1,
        )
