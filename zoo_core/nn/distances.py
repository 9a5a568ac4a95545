"""Softmax attention whose scores get a term for each distance, without an N x N matrix of them.

    o_i = sum_j softmax_j(scale * q_i . k_j + t_(j - i)) v_j

Positions count a sample's real tokens. One row of terms, a place further from query to query, holds
those of all pairs: a view, as long as no padding lies between. With padding some queries at a time
get their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.nn import masks
from zoo_core.nn.parts import attend_in_parts, rows_of_scores


def fits(ctx: Context, queries: int, keys: int) -> bool:
    """Whether `attend` can serve a call of L queries and S keys; the queries are the last ones."""
    if ctx.bias is not None or (ctx.key_padding is not None and queries != keys):
        return False
    return not ctx.causal or ctx.query_offset == keys - queries


def between(keys: int, device: torch.device) -> Tensor:
    """The distances j - i of S keys in the order that `attend` wants, from 1 - S to S - 1."""
    return torch.arange(1 - keys, keys, device=device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Tensor,
    ctx: Context,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attend: q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

    terms: t, (H, 2 S - 1), by `between`; -inf hides a distance. A query that sees no real key gets
    zeros; padding may hold anything. dropout: probability on the weights; pass 0 outside training.
    """
    keys = k.shape[-2]
    if ctx.causal:
        terms = terms.masked_fill(between(keys, k.device) > 0, -torch.inf)
    tokens = masks.align(ctx.key_padding)
    # From the last query to the first the terms move on by one place, and a view can show it.
    q, k, v = tokens.front(q).flip(-2), tokens.front(k), tokens.front(v)
    shown = terms.to(q.dtype).contiguous().unfold(-1, keys, 1)[:, : q.shape[-2]]

    def fused(heads: slice, span: slice) -> Tensor:
        bias = shown[None, heads, span]
        if tokens.key_padding is not None:
            bias = torch.where(tokens.key_padding[:, None, None], bias, -torch.inf)
        return F.scaled_dot_product_attention(
            q[:, heads, span],
            k[:, heads],
            v[:, heads],
            attn_mask=bias,
            dropout_p=dropout,
            scale=scale,
        )

    if tokens.key_padding is None:
        return fused(slice(None), slice(None)).flip(-2)
    rows = rows_of_scores(keys)
    return tokens.back(attend_in_parts(fused, q, v, rows=rows, dropout=dropout).flip(-2))
