"""Softmax attention over scores that a mechanism makes itself, dense (B, H, L, S)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.nn import masks
from zoo_core.nn.precision import sum_dtype


def real_queries(key_padding: Tensor | None, length: int) -> Tensor | None:
    """Which queries of a self-attention call are real, (B, L): they are its last L tokens."""
    return None if key_padding is None else key_padding[:, -length:]


def dot_product(q: Tensor, k: Tensor, key_padding: Tensor | None, *, scale: float) -> Tensor:
    """scale * q . k in at least fp32, also under autocast: (B, H, L, S), finite at padded keys."""
    wide = sum_dtype(q, k)
    with torch.autocast(q.device.type, enabled=False):
        return (q.to(wide) * scale) @ masks.hide(k, key_padding).to(wide).mT


def mask_of(scores: Tensor, ctx: Context) -> Tensor | None:
    """The mask of a call for scores (B, H, L, S), True = may be attended; None = all."""
    return masks.scores_mask(ctx, scores.shape[-2], scores.shape[-1], scores.device)


def mix(weights: Tensor, v: Tensor, key_padding: Tensor | None, *, dropout: float = 0.0) -> Tensor:
    """weights (B or 1, H, L, S) @ v, (B, H, L, E) in v's dtype; padded values may hold anything.

    dropout: probability on the weights; pass 0 outside training.
    """
    if dropout:
        weights = F.dropout(weights.expand(v.shape[0], -1, -1, -1), dropout)
    with torch.autocast(v.device.type, enabled=False):
        return (weights @ masks.hide(v, key_padding).to(weights.dtype)).to(v.dtype)
