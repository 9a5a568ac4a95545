"""Reformer's attention: a token sees those whose hash is near its own, with queries for keys.

    o_i = sum_{j in P(i)} softmax_{j in P(i)}(q_i . q_j / |q_j|) v_j,   P(i) = union of P_r(i)
    h_r(x) = argmax [x R_r; -x R_r],   R_r random: the bucket of x in round r

In each round tokens are sorted by bucket and cut into chunks; P_r(i) is the chunk of i and the one
before it. A token sees itself only where it sees no other.

Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer", 2020, arXiv:2001.04451.
Deviations: the number of buckets is an option, not a function of the length. The first chunk sees
the second, where the authors' code goes round to the last. As in that code, scores are not divided
by sqrt(D), keys being of length one, and chunks see each other across buckets. No causal form: the
order by hash, and so the borders of chunks, depend on later tokens. Reversible layers are a matter
of the model.
Exact when: never, since queries serve as keys; with N <= 2 * chunk it is softmax attention that
does so, over all tokens but the query's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import hashing, masks, rounds
from zoo_core.nn.precision import sum_dtype

if TYPE_CHECKING:
    from zoo_attention.reformer import ReformerOptions


class ReformerAttention(nn.Module):
    """Softmax over windows of the tokens sorted by hash, with queries for keys.

    rotations: (H, R, D, ceil(buckets / 2)), a persistent buffer.
    """

    unused = frozenset({"key"})
    rotations: Tensor

    def __init__(self, site: Site, options: ReformerOptions) -> None:
        super().__init__()
        self.dropout = site.dropout
        self.buckets = options.buckets
        self.chunk = options.chunk
        shape = (site.heads, options.rounds, site.head_dim, -(-options.buckets // 2))
        self.register_buffer("rotations", torch.randn(shape))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k unused, v (B, H, N, E) -> (B, H, N, E)."""
        q, v = masks.hide(q, ctx.key_padding), masks.hide(v, ctx.key_padding)
        dropout = self.dropout if self.training else 0.0
        with torch.autocast(q.device.type, enabled=False):
            keys = _unit(q)
            seen = self._windows(keys, ctx)
            out = rounds.attend(q, keys, v, seen, scale=1.0, spare_self=True, dropout=dropout)
        return out.to(v.dtype)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, N, N)."""
        q = masks.hide(q, ctx.key_padding)
        keys = _unit(q)
        seen = self._windows(keys, ctx)
        return hashing.weights(q, keys, seen, ctx.key_padding, scale=1.0, spare_self=True)

    @torch.no_grad()
    def _windows(self, keys: Tensor, ctx: Context) -> hashing.Windows:
        found = hashing.buckets(keys, self.rotations, self.buckets)
        return hashing.windows(
            found,
            found,
            ctx.key_padding,
            number=self.buckets,
            chunk=self.chunk,
            before=1,
            after=0,
        )


def _unit(x: Tensor) -> Tensor:
    """x (..., D) scaled to length one, in at least fp32; zeros stay."""
    return F.normalize(x.to(sum_dtype(x)), dim=-1)
