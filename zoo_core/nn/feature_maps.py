"""Feature maps of kernel attention: (..., D) to (..., M), never negative, finite at zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FeatureMap = Callable[[Tensor], Tensor]


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1: x + 1 above zero, exp(x) below."""
    if not x.requires_grad:
        return _elu_plus_one(x)
    features: Tensor = _EluPlusOne.apply(x)
    return features


def _elu_plus_one(x: Tensor) -> Tensor:
    # Far faster than elu, which needs expm1.
    return x.clamp(max=0).exp_().add_(x.relu())


def elu_and_slope(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """elu(x) + 1 without a graph, and what takes a gradient of it to one of x."""
    features = _elu_plus_one(x)
    return features, lambda grad: features.clamp(max=1).mul_(grad)


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
