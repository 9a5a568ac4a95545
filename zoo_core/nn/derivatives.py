"""Derivatives of derivatives that were written by hand, and cannot be differentiated themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def through(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of inputs, from those of function(*inputs), with a graph of their own.

    For the backward of an autograd.Function `if torch.is_grad_enabled()`, that is where the graph
    of the gradient is to be made; `function` computes the same by single operations. None for an
    input that wants no gradient, or is None.
    """
    # One input may have been made from another: their gradients are to end here, not there.
    inputs = [None if x is None else x.view_as(x) for x in inputs]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    with torch.autocast(grads[0].device.type, enabled=False):
        found = torch.autograd.grad(function(*inputs), wanted, grads, create_graph=True)
    given = iter(found)
    return tuple(next(given) if x is not None and x.requires_grad else None for x in inputs)
