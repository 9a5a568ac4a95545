"""Softmax attention: the fused kernel as hosts call it, and the explicit map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core.attention import Context
from zoo_core.mechanism import Supports
from zoo_core.nn import masks, tiles
from zoo_core.nn.scores import dot_product, mask_of

#: Queries or keys from which on `attend_compressed` takes a native kernel.
MANY = 2048


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Context,
    *,
    scale: float,
    dropout: float = 0.0,
    finite: bool = False,
) -> Tensor:
    """Fused softmax attention, (B, H, L, E); bit-identical to what transformers and timm compute.

    A query that sees no real key gets zeros; padded keys and values may hold anything.
    dropout: probability on the weights; pass 0 outside training.
    finite: promises that padded keys and values are finite, so that the mask alone hides them.
    """
    if not finite:
        k, v = masks.hide(k, ctx.key_padding), masks.hide(v, ctx.key_padding)
    plain = ctx.key_padding is None and ctx.bias is None
    if plain and ctx.causal and ctx.query_offset == 0 and q.shape[-2] == k.shape[-2]:
        # The kernel's own causal mode, which hosts use too; a mask would change the last bits.
        # A branch, not an expression: of a traced length that would be no bool.
        causal = True
        if q.shape[-2] == 1:
            causal = False
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale
        )
    mask = masks.scores_mask(ctx, q.shape[-2], k.shape[-2], q.device)
    if ctx.bias is not None:
        bias = ctx.bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def attend_compressed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Context,
    *,
    scale: float,
    dropout: float = 0.0,
    finite: bool = False,
) -> Tensor:
    """`attend` where few queries, or keys, stand for many, without bias or causality.

    The fused kernel is made for as many queries as keys: without padding, a native one is faster.
    """
    whole = ctx.key_padding is None and not dropout
    if whole and max(q.shape[-2], k.shape[-2]) >= MANY and tiles.suits(q, k, v):
        return tiles.attend_all(q, k, v, scale=scale)
    return attend(q, k, v, ctx, scale=scale, dropout=dropout, finite=finite)


def weights(q: Tensor, k: Tensor, ctx: Context, *, scale: float) -> Tensor:
    """The softmax attention map (B, H, L, S), in at least fp32; rows without a real key are 0."""
    dots = dot_product(q, k, ctx.key_padding, scale=scale)
    if ctx.bias is not None:
        dots = dots + ctx.bias
    return masked_softmax(dots, mask_of(dots, ctx))


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension where mask is True; a row without any True is all zeros."""
    if mask is None:
        return scores.softmax(-1)
    # A finite minimum keeps the gradient of an all-masked row finite; the second fill zeroes it.
    low = torch.finfo(scores.dtype).min
    return scores.masked_fill(~mask, low).softmax(-1).masked_fill(~mask, 0)


def fused_width(width: int) -> int:
    """The next multiple of 8, for heads that are widened: fused kernels on GPUs take no other."""
    return -(-width // 8) * 8


class Softmax(nn.Module):
    """Softmax attention as a module, for a mechanism or wherever stock layers are looked at."""

    supports = Supports(key_padding=True, causal=True, cross=True, bias=True, weights=True)

    def __init__(self, *, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, ctx, scale=self.scale, dropout=dropout)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        return weights(q, k, ctx, scale=self.scale)
