"""Attention of clusters of queries, and of each query to the top keys of its cluster, by kernels.

The native kernels, see `zoo_core.nn.native`, find the clusters and their top keys, and attend, one
head after the other; the plain form of the same is in the mechanisms that call this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo_core.nn import derivatives, native
from zoo_core.nn.clustering import find_clusters

#: q, k and v (B, H, N, ...) to the output (B, H, N, E).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class How:
    """What to compute, and how else.

    clusters, iterations: as in `clustering.cluster`. topk: keys of each cluster that its queries
    weigh by themselves; 0 = they all get what their mean attends to.
    plain: the same by single operations, for the derivative of the derivative.
    """

    clusters: int
    iterations: int
    topk: int
    scale: float
    plain: Attend


def attend(q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, how: How) -> Tensor:
    """What `how.plain` gives, (B, H, N, E); for q, k and v that `native.suits`.

    Padding may hold anything, and gets zeros, as do its gradients.
    """
    out: Tensor = _Native.apply(q, k, v, key_padding, how)[0]
    return out


class _Native(torch.autograd.Function):
    """The output, and what its derivative needs: clusters, means, and what `clustered` keeps."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, how: How
    ) -> tuple[Tensor, ...]:
        found = find_clusters(q, key_padding, how.clusters, how.iterations)
        out, *kept = native.call("clustered", q, k, v, key_padding, *found, *_sizes(k, how))
        return out, *found, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.how = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, *found = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *derivatives.through(ctx.how.plain, (q, k, v), (grad,)), None, None
        grads = native.call("clustered_backward", grad, q, k, v, *found, *_sizes(k, ctx.how))
        return *grads, None, None


def _sizes(k: Tensor, how: How) -> tuple[int, float]:
    return min(how.topk, k.shape[-2]), how.scale
