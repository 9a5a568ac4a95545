"""Latents: a few rows that gather from the tokens what every token then reads.

    gathered = softmax(scale * y k^T) [k, v],   o = softmax(scale * q k_gathered^T) v_gathered

Padding is hidden from the latents, once; what they have gathered holds real tokens only. Latents
are no keys: a sample without a real token gathers, and reads, zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.nn import masks, random_features, scores, softmax
from zoo_core.nn.precision import sum_dtype


def spread_out(heads: int, number: int, width: int) -> Tensor:
    """Draw latents (heads, number, width), each row N(0, I), a head's as orthogonal as can be."""
    return torch.stack([random_features.orthogonal(number, width) for _ in range(heads)])


def gather(
    latents: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """What latents (B or 1, H, M, D) gather: keys (B, H, M, D) and values (B, H, M, E).

    k (B, H, S, D) and v (B, H, S, E), whose padding may hold anything.
    """
    k, v = masks.hide(k, key_padding), masks.hide(v, key_padding)
    dots = (latents.to(k.dtype) * scale) @ k.mT
    seen = None if key_padding is None else key_padding[:, None, None]
    # Once for both: fused attention would weigh twice, or copy keys and values side by side.
    weights = softmax.masked_softmax(dots.to(sum_dtype(dots)), seen)
    return weights.to(k.dtype) @ k, (weights.to(v.dtype) @ v).to(v.dtype)


def gather_weights(
    latents: Tensor, k: Tensor, key_padding: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """The map (B, H, M, S) of `gather`, in at least fp32, and the keys it gathers."""
    weights = softmax.weights(latents, k, Context(key_padding=key_padding), scale=scale)
    return weights, scores.mix(weights, k.to(weights.dtype), key_padding)
