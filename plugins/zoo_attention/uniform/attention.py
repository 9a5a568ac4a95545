"""Uniform attention: the mean of the values a query may see, whatever the query and keys are.

    o_i = 1 / |S_i| sum_{j in S_i} v_j,   S_i = the real keys (causal: up to i + query_offset)

No paper: it is the floor that shows how much of a score the attention pattern itself earns.
Deviations: the host's attention dropout is not applied; there are no learned weights to drop.
Exact when: never; it is softmax attention with all scores equal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo_core import Context
from zoo_core.nn import kernels, masks, precision


class UniformAttention(nn.Module):
    """Mean of the values; it has no parameters."""

    unused = frozenset({"query", "key"})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        length = q.shape[-2]
        values = masks.hide(v, ctx.key_padding).to(precision.sum_dtype(v))
        real = masks.hide(values.new_ones(v.shape[0], 1, v.shape[-2], 1), ctx.key_padding)
        if kernels.sees_all(ctx, k):
            sums, count = (x.sum(-2, keepdim=True) for x in (values, real))
        else:
            last = (torch.arange(length, device=v.device) + ctx.query_offset).clamp(
                max=v.shape[-2] - 1
            )
            sums, count = (x.cumsum(-2).index_select(-2, last) for x in (values, real))
        return precision.divide(sums, count).to(v.dtype).expand(-1, -1, length, -1)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        return kernels.weights(lambda x: x.new_ones(*x.shape[:-1], 1), q, k, ctx)
