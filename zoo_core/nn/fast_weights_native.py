"""The native kernel of the delta rule, which makes DPFP features itself; see `fast_weights`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo_core.nn import derivatives, native

#: What a kernel computes, by plain torch, from q, k, v and strengths.
Plain = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def delta_rule_of_dpfp(
    plain: Plain,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strengths: Tensor,
    key_padding: Tensor | None,
    *,
    nu: int,
    offset: int | None,
) -> Tensor | None:
    """The delta rule of features that sum to 1, for queries after `offset` keys: (B, H, L, E).

    None where `plain` is to be taken; it computes the same, and second derivatives. Both ways if
    offset is None. q (B, H, L, D), k (B, H, S, D), v (B, H, S, E), strengths (B, H, S, 1);
    key_padding (B, S): tokens that are False are not written, whatever they hold.
    """
    if strengths.dtype is not torch.float32 or not native.suits(q, k, v):
        return None
    how = (nu, offset or 0, offset is None)
    if torch.is_grad_enabled():
        out: Tensor = _Rule.apply(q, k, v, strengths, key_padding, plain, how)[0]
        return out
    found: tuple[Tensor, ...] = native.call("delta", q, k, v, strengths, key_padding, *how, False)
    return found[0]


class _Rule(torch.autograd.Function):
    """What its derivative needs are what each key found missing, and W."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        strengths: Tensor,
        key_padding: Tensor | None,
        plain: Plain,
        how: tuple[int, int, bool],
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = native.call(
            "delta", q, k, v, strengths, key_padding, *how, True
        )
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.plain, ctx.how = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of the derivative is wanted
            grads = derivatives.through(ctx.plain, tensors[:4], (grad,))
        else:
            grads = native.call("delta_backward", grad, *tensors, *ctx.how)
        return *grads, None, None, None
