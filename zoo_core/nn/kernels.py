"""Kernel attention: weights that are inner products of features, in time linear in the tokens.

    o_i = phi(q_i) . sum_j phi(k_j) v_j / (phi(q_i) . sum_j phi(k_j))

A feature map takes (..., D) to (..., M), is never negative, and is finite at 0: padded keys are
zeroed before it, and leave both sums after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.nn import gpu, masks
from zoo_core.nn.feature_maps import elu_and_slope, elu_plus_one
from zoo_core.nn.parts import fits_parts, samples, spans, streams

FeatureMap = Callable[[Tensor], Tensor]

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
        if streams(q):
            return _attend_in_parts(phi, q, k, v, ctx, wide)[0]
        if not learned and sees_all(ctx, k) and fits_parts(q):
            out: Tensor = _InParts.apply(q, k, v, ctx.key_padding, phi, wide)[0]
            return out
        return _attend_at_once(phi, q, k, v, ctx, wide)


def _attend_at_once(
    phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, ctx: Context, wide: torch.dtype
) -> Tensor:
    queries = phi(q.to(wide))
    if sees_all(ctx, k):
        sums = queries @ _memory(phi, k, v, ctx.key_padding, wide)
    else:
        keys, values = _written(phi, k, v, ctx.key_padding, wide)
        sums = causal_product(queries, keys, values, offset=ctx.query_offset, like=v)
    return divide(*torch.split(sums, [v.shape[-1], 1], -1)).to(v.dtype)


def _attend_in_parts(
    phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, ctx: Context, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The same part by part, so that no features leave the cache.

    And what `_gradients` needs: the normalisers (B, H, L, 1) and `_memory`.
    """
    batch, heads, length, width = *q.shape[:3], v.shape[-1]
    # In the layout of hosts, to whom merging the heads then costs nothing.
    out = v.new_empty(batch, length, heads, width).transpose(1, 2)
    total = q.new_empty(batch, heads, length, 1, dtype=wide)
    memories = []
    for few in samples(q):
        padding = None if ctx.key_padding is None else ctx.key_padding[few]
        own = replace(ctx, key_padding=padding)
        memories.append(_fill(out[few], total[few], phi, q[few], k[few], v[few], own))
    return out, total, torch.cat(memories)


def _fill(
    out: Tensor, total: Tensor, phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, ctx: Context
) -> Tensor:
    """Write to out and total what a few samples attend to; gives their memory."""
    causal, wide = not sees_all(ctx, k), total.dtype
    before = ctx.query_offset if causal else k.shape[-2]
    memory = _memory_in_parts(phi, *_tokens(slice(0, before), k, v, ctx.key_padding), wide)
    for part in spans(q.shape[-2], q, most=CHUNK if causal else None):
        queries = phi(q[..., part, :].to(wide))
        sums = queries @ memory
        if causal:
            now = slice(part.start + ctx.query_offset, part.stop + ctx.query_offset)
            keys, values = _written(phi, *_tokens(now, k, v, ctx.key_padding), wide)
            sums = sums + (queries @ keys.mT).tril_() @ values
            memory = memory + keys.mT @ values
        sums, total[..., part, :] = torch.split(sums, [v.shape[-1], 1], -1)
        divide(sums, total[..., part, :], out=out[..., part, :])
    return memory


class _InParts(torch.autograd.Function):
    """`_attend_in_parts` where queries see all keys: keeps no features, but makes them anew."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding: Tensor | None,
        phi: FeatureMap,
        wide: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _attend_in_parts(phi, q, k, v, Context(key_padding=key_padding), wide)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, key_padding, *ctx.how = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(q, k, v, key_padding, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (q, k, v, key_padding, *found), (phi, wide) = ctx.saved_tensors, ctx.how
        with torch.autocast(q.device.type, enabled=False):
            if not torch.is_grad_enabled():
                grads = _gradients(phi, grad, (q, k, v), key_padding, *found)
                return *grads, None, None, None
            # A derivative of the derivative is wanted: through single operations.
            out = _attend_at_once(phi, q, k, v, Context(key_padding=key_padding), wide)
            wanted = [x for x in (q, k, v) if x.requires_grad]
            given = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            return *(next(given) if x.requires_grad else None for x in (q, k, v)), None, None, None


def _gradients(
    phi: FeatureMap,
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    key_padding: Tensor | None,
    out: Tensor,
    total: Tensor,
    memory: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v from that of the output, and what `_attend_in_parts` gave."""
    grads = tuple(torch.empty_like(x) for x in inputs)
    for few in samples(out):
        (q, k, v), (grad_q, grad_k, grad_v) = ([x[few] for x in xs] for xs in (inputs, grads))
        padding = None if key_padding is None else key_padding[few]
        of_memory = _pull_queries(grad_q, phi, q, grad[few], out[few], total[few], memory[few])
        _pull_keys(grad_k, grad_v, phi, k, v, padding, of_memory)
    return grads


def _pull_queries(
    grad_q: Tensor,
    phi: FeatureMap,
    q: Tensor,
    grad: Tensor,
    out: Tensor,
    total: Tensor,
    memory: Tensor,
) -> Tensor:
    """Write the gradient of q; gives that of the memory."""
    width, of_memory = out.shape[-1], torch.zeros_like(memory)
    for part in spans(q.shape[-2], q):
        # Of [sums, total], whose quotient is the output.
        ends = total.new_empty(*total[..., part, :].shape[:-1], width + 1)
        of_sums = divide(
            grad[..., part, :].to(total.dtype), total[..., part, :], out=ends[..., :width]
        )
        ends[..., width] = (of_sums * out[..., part, :]).sum(-1).neg_()
        queries, pull = _with_pull(phi, q[..., part, :].to(total.dtype))
        of_memory.flatten(0, 1).baddbmm_(queries.flatten(0, 1).mT, ends.flatten(0, 1))
        grad_q[..., part, :] = pull(ends @ memory.mT)
    return of_memory


def _pull_keys(
    grad_k: Tensor,
    grad_v: Tensor,
    phi: FeatureMap,
    k: Tensor,
    v: Tensor,
    key_padding: Tensor | None,
    of_memory: Tensor,
) -> None:
    """Write the gradients of k and v, from that of the memory."""
    wide = of_memory.dtype
    of_products, of_total = torch.split(of_memory, [v.shape[-1], 1], -1)
    of_products, of_total = of_products.contiguous().flatten(0, 1), of_total.mT.flatten(0, 1)
    for part in spans(k.shape[-2], k):
        some_k, some_v, padding = _tokens(part, k, v, key_padding)
        keys, pull = _with_pull(phi, masks.hide(some_k, padding).to(wide))
        values = masks.hide(some_v, padding).to(wide)
        of_keys = torch.baddbmm(of_total, values.flatten(0, 1), of_products.mT).view_as(keys)
        grad_k[..., part, :] = masks.hide(pull(of_keys), padding)
        of_values = (keys.flatten(0, 1) @ of_products).view_as(values)
        grad_v[..., part, :] = masks.hide(of_values, padding)


def _with_pull(phi: FeatureMap, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """phi(x), and what takes a gradient of it to one of x."""
    if phi is elu_plus_one:  # whose slope is known, without a graph for every part
        return elu_and_slope(x)
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        features = phi(x)
    return features.detach(), lambda grad: torch.autograd.grad(features, x, grad)[0]


def _tokens(
    part: slice, k: Tensor, v: Tensor, key_padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    padding = None if key_padding is None else key_padding[:, part]
    return k[..., part, :], v[..., part, :], padding


def _memory(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> Tensor:
    """sum_j phi(k_j) [v_j, 1] over the real keys, (B, H, M, E + 1)."""
    keys, values, total = _gathered(phi, k, v, key_padding, wide)
    return torch.cat([keys.mT @ values, total.mT], -1)


def _memory_in_parts(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> Tensor:
    """The same, summed in place over parts of the keys."""
    first, *others = spans(k.shape[-2], k) or [slice(0, 0)]
    keys, values, total = _gathered(phi, *_tokens(first, k, v, key_padding), wide)
    products = keys.mT @ values
    for part in others:
        keys, values, more = _gathered(phi, *_tokens(part, k, v, key_padding), wide)
        products.flatten(0, 1).baddbmm_(keys.flatten(0, 1).mT, values.flatten(0, 1))
        total += more
    return torch.cat([products, total.mT], -1)


def _gathered(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(k) (B, H, S, M), v zeroed for padding, and the sum of phi(k) over the real keys."""
    keys = phi(masks.hide(k, key_padding).to(wide))
    values = masks.hide(v, key_padding).to(wide)
    if key_padding is None:
        return keys, values, keys.sum(-2, keepdim=True)
    return keys, values, key_padding[:, None, None].to(wide) @ keys


def _written(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """phi(k) (B, H, S, M) and [v, 1] (B, H, S, E + 1), the latter zeroed for padding.

    With the ones one product yields numerator and denominator.
    """
    values = masks.hide(F.pad(v.to(wide), (0, 1), value=1), key_padding)
    return phi(masks.hide(k, key_padding).to(wide)), values


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


def divide(sums: Tensor, total: Tensor, *, out: Tensor | None = None) -> Tensor:
    """sums / total of weights; a negligible total leaves sums, as negligible, as they are.

    out: where to write it, without gradients.
    """
    return torch.div(sums, total.where(total > negligible(total.dtype), 1), out=out)


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
