"""Kernel attention: weights that are inner products of features, in time linear in the tokens.

    o_i = phi(q_i) . sum_j phi(k_j) v_j / (phi(q_i) . sum_j phi(k_j))

A feature map takes (..., D) to (..., M), is never negative, and is finite at 0: padded keys are
zeroed before it, and leave both sums after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.nn import gpu, kernels_in_parts, masks, memories
from zoo_core.nn.feature_maps import FeatureMap
from zoo_core.nn.parts import fits_parts, streams
from zoo_core.nn.precision import divide, sum_dtype

#: Tokens that a causal product handles at once: their scores and states then cost alike.
CHUNK = 128


def attend(
    phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, learned: bool = False
) -> Tensor:
    """Kernel attention, (B, H, L, E) in v's dtype; sums are in at least fp32.

    phi is called in that precision too, on a CPU for some tokens at a time: it must treat tokens
    alike. A query whose weights are all zero, because it sees no real key, gets zeros. Padded keys
    and values may hold anything.
    learned: whether phi has parameters, to which gradients have to flow.
    """
    with torch.autocast(q.device.type, enabled=False):
        wide = sum_dtype(q, k, v)
        whole = sees_all(ctx, k)
        in_parts = fits_parts(q) or kernels_in_parts.kernel_of(phi, q, k, v) is not None
        if streams(q) or (not learned and whole and in_parts):
            chunk = None if whole else CHUNK
            return kernels_in_parts.attend(phi, q, k, v, ctx, wide, chunk=chunk)
        return _attend_at_once(phi, q, k, v, ctx, wide)


def _attend_at_once(
    phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, ctx: Context, wide: torch.dtype
) -> Tensor:
    queries = phi(q.to(wide))
    if sees_all(ctx, k):
        sums = queries @ memories.memory(phi, k, v, ctx.key_padding, wide)
    else:
        keys, values = memories.written(phi, k, v, ctx.key_padding, wide)
        sums = causal_product(queries, keys, values, offset=ctx.query_offset, like=v)
    return memories.quotient(sums).to(v.dtype)


def weights(phi: FeatureMap, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
    """The attention map (B, H, L, S) of `attend`, dense: for looking, not for running."""
    wide = sum_dtype(q, k)
    with torch.autocast(q.device.type, enabled=False):
        scores = phi(q.to(wide)) @ phi(masks.hide(k, ctx.key_padding).to(wide)).mT
        mask = masks.scores_mask(ctx, q.shape[-2], k.shape[-2], q.device)
        if mask is not None:
            scores = scores.masked_fill(~mask, 0)
        return divide(scores, scores.sum(-1, keepdim=True))


def causal_product(
    queries: Tensor, keys: Tensor, values: Tensor, *, offset: int, like: Tensor | None = None
) -> Tensor:
    """sum_{j <= i + offset} (queries_i . keys_j) values_j without an L x S tensor.

    queries (B, H, L, M), keys (B, H, S, M), values (B, H, S, E) -> (B, H, L, E). Within a chunk of
    tokens by their scores, across chunks by the running sum of keys^T values.
    like: what the caller was given; where `gpu` has a kernel for such tensors, that computes it.
    """
    length = queries.shape[-2]
    if like is not None and offset == 0 and keys.shape[-2] == length:
        out = gpu.causal_product(queries, keys, values, like=like)
        if out is not None:
            return out
    cached = keys[..., :offset, :].mT @ values[..., :offset, :]
    q = chunks(queries, length)
    k, v = chunks(keys[..., offset:, :], length), chunks(values[..., offset:, :], length)
    states = torch.cat([cached[:, :, None], (k.mT @ v)[:, :, :-1]], 2).cumsum(2)
    within = (q @ k.mT).tril_() @ v
    return joined(within.add_(q @ states), length)


def chunks(x: Tensor, length: int, *, size: int | None = None, fill: float = 0) -> Tensor:
    """Cut the first `length` tokens of x (B, H, N, D) into chunks: (B, H, C, W, D).

    size: W, CHUNK if not given. `fill` stands in for missing tokens; what is beyond `length` in
    the last chunk has no meaning.
    """
    size = min(size or CHUNK, length)
    missing = -(-length // size) * size - x.shape[-2]
    if missing:
        x = F.pad(x, (0, 0, 0, missing), value=fill)  # a negative number cuts
    return torch.unflatten(x, 2, (-1, size))


def joined(x: Tensor, length: int) -> Tensor:
    """Undo `chunks`: x (B, H, C, W, D) to (B, H, length, D)."""
    return x.flatten(2, 3)[..., :length, :]


def sees_all(ctx: Context, k: Tensor) -> bool:
    """Whether every query may see every key of k (B, H, S, D), as without causality."""
    return not ctx.causal or ctx.query_offset + 1 >= k.shape[-2]
