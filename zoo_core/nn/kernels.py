"""Kernel attention: weights that are inner products of features, in time linear in the tokens.

    o_i = phi(q_i) . sum_j phi(k_j) v_j / (phi(q_i) . sum_j phi(k_j))

A feature map takes (..., D) to (..., M), is never negative, and is finite at 0: padded keys are
zeroed before it, and leave both sums after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.nn import masks

FeatureMap = Callable[[Tensor], Tensor]

#: Tokens that a causal product handles at once: their scores and states then cost alike.
CHUNK = 128

#: Rows of features, of all heads together, that are worked on at once where nothing has to be kept
#: for a backward: about as many as a core's own cache holds.
ROWS = 2048


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1: x + 1 above zero, exp(x) below."""
    if not x.requires_grad:
        return _elu_plus_one(x)
    features: Tensor = _EluPlusOne.apply(x)
    return features


def _elu_plus_one(x: Tensor) -> Tensor:
    return x.clamp(max=0).exp_().add_(x.relu())  # far faster than elu, which needs expm1


class _EluPlusOne(torch.autograd.Function):
    """Keeps its output, which products keep as well, and not its input: the slope is min(y, 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        features = _elu_plus_one(x)
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        slope: Tensor = features.clamp(max=1)
        return slope.mul_(grads[0])


def dpfp(x: Tensor, nu: int) -> Tensor:
    """Deterministic parameter-free projection: (..., D) -> (..., 2 D nu).

    Products of r(x) = [relu(x), relu(-x)] with itself rolled by 1 ... nu places, which are sparse:
    two vectors share a feature only where the same two entries of r are positive in both.
    """
    r = torch.cat([x, -x], -1).relu_()
    if nu == 1:
        return r * r.roll(1, -1)
    return torch.cat([r * r.roll(places, -1) for places in range(1, nu + 1)], -1)


def attend(phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """Kernel attention, (B, H, L, E) in v's dtype; sums are in at least fp32.

    phi is called in that precision too, and without gradients on some tokens at a time: it must
    treat tokens alike. A query whose weights are all zero, because it sees no real key, gets zeros.
    Padded keys and values may hold anything.
    """
    with torch.autocast(q.device.type, enabled=False):
        attended = _attend_in_parts if streams(q) else _attend_at_once
        return attended(phi, q, k, v, ctx, sum_dtype(q, k, v))


def _attend_at_once(
    phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, ctx: Context, wide: torch.dtype
) -> Tensor:
    queries = phi(q.to(wide))
    if sees_all(ctx, k):
        sums = queries @ _memory(phi, k, v, ctx.key_padding, wide)
    else:
        keys, values = _written(phi, k, v, ctx.key_padding, wide)
        sums = causal_product(queries, keys, values, offset=ctx.query_offset)
    return divide(*torch.split(sums, [v.shape[-1], 1], -1)).to(v.dtype)


def _attend_in_parts(
    phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, ctx: Context, wide: torch.dtype
) -> Tensor:
    """The same part by part, so that no features leave the cache."""
    batch, heads, length, width = *q.shape[:3], v.shape[-1]
    # In the layout of hosts, to whom merging the heads then costs nothing.
    out = v.new_empty(batch, length, heads, width).transpose(1, 2)
    causal = not sees_all(ctx, k)
    memory = _memory(phi, *_tokens(slice(0, 0), k, v, ctx.key_padding), wide)
    for part in spans(ctx.query_offset if causal else k.shape[-2], q):
        memory = memory + _memory(phi, *_tokens(part, k, v, ctx.key_padding), wide)
    for part in spans(length, q, most=CHUNK if causal else None):
        queries = phi(q[..., part, :].to(wide))
        sums = queries @ memory
        if causal:
            now = slice(part.start + ctx.query_offset, part.stop + ctx.query_offset)
            keys, values = _written(phi, *_tokens(now, k, v, ctx.key_padding), wide)
            sums = sums + (queries @ keys.mT).tril_() @ values
            memory = memory + keys.mT @ values
        out[..., part, :] = divide(*torch.split(sums, [width, 1], -1))
    return out


def _tokens(
    part: slice, k: Tensor, v: Tensor, key_padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    padding = None if key_padding is None else key_padding[:, part]
    return k[..., part, :], v[..., part, :], padding


def _memory(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> Tensor:
    """sum_j phi(k_j) [v_j, 1] over the real keys, (B, H, M, E + 1)."""
    keys = phi(masks.hide(k, key_padding).to(wide))
    values = masks.hide(v, key_padding).to(wide)
    if key_padding is None:
        total = keys.sum(-2, keepdim=True)
    else:
        total = key_padding[:, None, None].to(wide) @ keys
    return torch.cat([keys.mT @ values, total.mT], -1)


def _written(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """phi(k) (B, H, S, M) and [v, 1] (B, H, S, E + 1), the latter zeroed for padding.

    With the ones one product yields numerator and denominator.
    """
    values = masks.hide(F.pad(v.to(wide), (0, 1), value=1), key_padding)
    return phi(masks.hide(k, key_padding).to(wide)), values


def streams(x: Tensor) -> bool:
    """Whether to work on x in parts: not under gradients, which keep every part anyway.

    Nor on accelerators, whose kernels want much work at once, nor in compiled code, which fuses.
    """
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling()) and x.device.type == "cpu"


def spans(length: int, x: Tensor, *, most: int | None = None) -> list[slice]:
    """Cut `length` tokens of x (B, H, N, D) into parts of about ROWS rows, or of `most` tokens."""
    size = most or max(CHUNK, ROWS // max(1, x.shape[0] * x.shape[1]))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


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
