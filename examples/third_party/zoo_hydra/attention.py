"""Hydra attention: the keys and values of all tokens become one gate, which each query applies.

    o_i = phi(q_i) * sum_j phi(k_j) * v_j,   phi(x) = x / |x|, feature by feature

Bolya, Fu, Dai, Zhang, Hoffman, "Hydra Attention: Efficient Attention with Many Heads", 2022,
arXiv:2209.07484. The norm is that of the whole token, over all heads of the host: Hydra has as
many heads as features, however the host splits them.
Deviations: padded keys leave the sum, and a causal query sums up to its own position. Channel e of
values of another width than the queries takes feature e modulo D. The host's scale is lost in the
norm; its attention dropout is not applied, since no weights exist to drop.
Exact when: never; it is another kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo_core import Context
from zoo_core.nn import kernels, masks, precision


class HydraAttention(nn.Module):
    """One elementwise gate for all tokens; it has no parameters."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        wide = precision.sum_dtype(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            keys, values = (masks.hide(x, ctx.key_padding).to(wide) for x in (k, v))
            queries, keys = (_features(x, v.shape[-1]) for x in (q.to(wide), keys))
            return (queries * self._gate(keys * values, q.shape[-2], ctx)).to(v.dtype)

    def _gate(self, products: Tensor, length: int, ctx: Context) -> Tensor:
        """Sum products (B, H, S, E) over the keys each query sees: (B, H, L or 1, E)."""
        if kernels.sees_all(ctx, products):
            return products.sum(-2, keepdim=True)
        last = torch.arange(length, device=products.device) + ctx.query_offset
        return products.cumsum(-2).index_select(-2, last)


def _features(x: Tensor, width: int) -> Tensor:
    """Tokens x (B, H, N, D) of norm 1 over all heads, their features repeated or cut to `width`.

    Of a token of zeros, such as a hidden one, zeros remain.
    """
    norm = torch.linalg.vector_norm(x, dim=(1, 3), keepdim=True)
    unit = x / norm.clamp(min=precision.negligible(x.dtype))
    if width == x.shape[-1]:
        return unit
    return unit[..., torch.arange(width, device=x.device) % x.shape[-1]]
