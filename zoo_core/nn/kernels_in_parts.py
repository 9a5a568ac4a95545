"""Kernel attention part by part, so that features never leave the cache.

Under gradients no features are kept either: the backward makes them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.nn import derivatives, masks, memories, native
from zoo_core.nn.feature_maps import FeatureMap, dpfp, elu_and_slope, elu_plus_one
from zoo_core.nn.parts import samples, spans
from zoo_core.nn.precision import divide


def attend(
    phi: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Context,
    wide: torch.dtype,
    *,
    chunk: int | None,
) -> Tensor:
    """`kernels.attend` on a CPU, by a phi without parameters if there are gradients.

    wide: the dtype to sum in. chunk: in a causal call, which must not have gradients, the tokens to
    handle at once; None = every query sees all keys. Autocast is off.
    """
    if torch.is_grad_enabled():
        out: Tensor = _InParts.apply(q, k, v, ctx.key_padding, phi, wide)[0]
        return out
    return _attend(phi, q, k, v, ctx, wide, chunk)[0]


def _attend(
    phi: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Context,
    wide: torch.dtype,
    chunk: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and what `_gradients` needs: normalisers (B, H, L, 1) and the memory."""
    if chunk is None and (kernel := kernel_of(phi, q, k, v)):
        out, total, memory = kernel("", q, k, v, ctx.key_padding)
        return out, total, memory
    batch, heads, length, width = *q.shape[:3], v.shape[-1]
    # In the layout of hosts, to whom merging the heads then costs nothing.
    out = v.new_empty(batch, length, heads, width).transpose(1, 2)
    total = q.new_empty(batch, heads, length, 1, dtype=wide)
    kept = []
    for few in samples(q):
        padding = None if ctx.key_padding is None else ctx.key_padding[few]
        own = replace(ctx, key_padding=padding)
        kept.append(_fill(out[few], total[few], phi, q[few], k[few], v[few], own, chunk))
    return out, total, torch.cat(kept)


def _fill(
    out: Tensor,
    total: Tensor,
    phi: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Context,
    chunk: int | None,
) -> Tensor:
    """Write to out and total what a few samples attend to; gives their memory."""
    causal, wide = chunk is not None, total.dtype
    before = ctx.query_offset if causal else k.shape[-2]
    memory = _memory_in_parts(phi, *_tokens(slice(0, before), k, v, ctx.key_padding), wide)
    for part in spans(q.shape[-2], q, most=chunk):
        queries = phi(q[..., part, :].to(wide))
        sums = queries @ memory
        if causal:
            now = slice(part.start + ctx.query_offset, part.stop + ctx.query_offset)
            keys, values = memories.written(phi, *_tokens(now, k, v, ctx.key_padding), wide)
            sums = sums + (queries @ keys.mT).tril_() @ values
            memory = memory + keys.mT @ values
        sums, total[..., part, :] = torch.split(sums, [v.shape[-1], 1], -1)
        divide(sums, total[..., part, :], out=out[..., part, :])
    return memory


class _InParts(torch.autograd.Function):
    """`_attend` where queries see all keys: keeps no features, but makes them anew."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding: Tensor | None,
        phi: FeatureMap,
        wide: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _attend(phi, q, k, v, Context(key_padding=key_padding), wide, None)

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
            # A derivative of the derivative is wanted.
            at_once = partial(_at_once, phi=phi, key_padding=key_padding, wide=wide)
            return *derivatives.through(at_once, (q, k, v), (grad,)), None, None, None


def _at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    phi: FeatureMap,
    key_padding: Tensor | None,
    wide: torch.dtype,
) -> Tensor:
    """The same by single operations."""
    sums = phi(q.to(wide)) @ memories.memory(phi, k, v, key_padding, wide)
    return memories.quotient(sums).to(v.dtype)


def _gradients(
    phi: FeatureMap,
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    key_padding: Tensor | None,
    out: Tensor,
    total: Tensor,
    memory: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v from that of the output, and what `_attend` gave."""
    if kernel := kernel_of(phi, *inputs):
        return kernel("_backward", grad, *inputs, key_padding, out, total, memory)
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


def _memory_in_parts(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> Tensor:
    """`memories.memory`, summed in place over parts of the keys."""
    first, *others = spans(k.shape[-2], k) or [slice(0, 0)]
    keys, values, total = memories.gathered(phi, *_tokens(first, k, v, key_padding), wide)
    products = keys.mT @ values
    for part in others:
        keys, values, more = memories.gathered(phi, *_tokens(part, k, v, key_padding), wide)
        products.flatten(0, 1).baddbmm_(keys.flatten(0, 1).mT, values.flatten(0, 1))
        total += more
    return torch.cat([products, total.mT], -1)


def kernel_of(
    phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor
) -> Callable[..., tuple[Tensor, ...]] | None:
    """The native kernel of such features, if there is one to be taken; see `_call`."""
    if not native.suits(q, k, v):
        return None
    if phi is elu_plus_one:
        return partial(_call, "linear", ())
    if isinstance(phi, partial) and phi.func is dpfp:
        return partial(_call, "dpfp", (phi.keywords["nu"],))
    return None


def _call(
    name: str, options: tuple[int, ...], pass_: str, *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """A kernel's forward ("") or "_backward"."""
    found: tuple[Tensor, ...] = native.call(name + pass_, *tensors, *options)
    return found
