"""Kernel attention: weights that are inner products of features, in time linear in the tokens.

    o_i = phi(q_i) . sum_j phi(k_j) v_j / (phi(q_i) . sum_j phi(k_j))

A feature map takes (..., D) to (..., M), is never negative, and is finite at 0: padded keys are
zeroed before it, and leave both sums after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.nn import masks

FeatureMap = Callable[[Tensor], Tensor]

#: Tokens that a causal product handles at once: their scores and states then cost alike.
CHUNK = 128


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1: x + 1 above zero, exp(x) below."""
    return F.elu(x).add_(1)  # in place: elu's backward needs its input only


def dpfp(x: Tensor, nu: int) -> Tensor:
    """Deterministic parameter-free projection: (..., D) -> (..., 2 D nu).

    Products of r(x) = [relu(x), relu(-x)] with itself rolled by 1 ... nu places, which are sparse:
    two vectors share a feature only where the same two entries of r are positive in both.
    """
    r = torch.cat([x, -x], -1).relu()
    return torch.cat([r * r.roll(places, -1) for places in range(1, nu + 1)], -1)


def attend(phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """Kernel attention, (B, H, L, E) in v's dtype; sums are in at least fp32.

    phi is called in that precision too. A query whose weights are all zero, because it sees no
    real key, gets zeros. Padded keys and values may hold anything.
    """
    wide = sum_dtype(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        queries, keys = phi(q.to(wide)), phi(masks.hide(k, ctx.key_padding).to(wide))
        # The column of ones makes one product yield numerator and denominator; zeroed with its
        # padded value, it takes the key out of both.
        values = masks.hide(F.pad(v.to(wide), (0, 1), value=1), ctx.key_padding)
        if sees_all(ctx, k):
            sums = queries @ (keys.mT @ values)
        else:
            sums = causal_product(queries, keys, values, offset=ctx.query_offset)
        return divide(sums[..., :-1], sums[..., -1:]).to(v.dtype)


def weights(phi: FeatureMap, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
    """The attention map (B, H, L, S) of `attend`, dense: for looking, not for running."""
    wide = sum_dtype(q, k)
    with torch.autocast(q.device.type, enabled=False):
        scores = phi(q.to(wide)) @ phi(masks.hide(k, ctx.key_padding).to(wide)).mT
        mask = masks.scores_mask(ctx, q.shape[-2], k.shape[-2], q.device)
        if mask is not None:
            scores = scores.masked_fill(~mask, 0)
        return divide(scores, scores.sum(-1, keepdim=True))


def causal_product(queries: Tensor, keys: Tensor, values: Tensor, *, offset: int) -> Tensor:
    """sum_{j <= i + offset} (queries_i . keys_j) values_j without an L x S tensor.

    queries (B, H, L, M), keys (B, H, S, M), values (B, H, S, E) -> (B, H, L, E). Within a chunk of
    tokens by their scores, across chunks by the running sum of keys^T values.
    """
    length = queries.shape[-2]
    cached = keys[..., :offset, :].mT @ values[..., :offset, :]
    q = chunks(queries, length)
    k, v = chunks(keys[..., offset:, :], length), chunks(values[..., offset:, :], length)
    states = torch.cat([cached[:, :, None], (k.mT @ v)[:, :, :-1]], 2).cumsum(2)
    within = (q @ k.mT).tril_() @ v
    return joined(within.add_(q @ states), length)


def chunks(x: Tensor, length: int, *, fill: float = 0) -> Tensor:
    """Cut the first `length` tokens of x (B, H, N, D) into chunks: (B, H, C, W, D).

    `fill` stands in for missing tokens; what is beyond `length` in the last chunk has no meaning.
    """
    size = min(CHUNK, length)
    missing = -(-length // size) * size - x.shape[-2]
    if missing:
        x = F.pad(x, (0, 0, 0, missing), value=fill)  # a negative number cuts
    return torch.unflatten(x, 2, (-1, size))


def joined(x: Tensor, length: int) -> Tensor:
    """Undo `chunks`: x (B, H, C, W, D) to (B, H, length, D)."""
    return x.flatten(2, 3)[..., :length, :]


def divide(sums: Tensor, total: Tensor) -> Tensor:
    """sums / total of weights; a negligible total leaves sums, as negligible, as they are."""
    return sums / total.where(total > negligible(total.dtype), 1)


def negligible(dtype: torch.dtype) -> float:
    """The total weight that counts as zero: 1 / total, and its gradient, stay finite above it."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps


def sees_all(ctx: Context, k: Tensor) -> bool:
    """Whether every query may see every key of k (B, H, S, D), as without causality."""
    return not ctx.causal or ctx.query_offset + 1 >= k.shape[-2]


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to sum in: the widest of the tensors', and at least fp32."""
    wide = torch.float32
    for tensor in tensors:
        wide = torch.promote_types(wide, tensor.dtype)
    return wide
