"""Softmax attention of tiles of queries to runs of keys, by a native kernel.

TILE consecutive queries, or fewer, share the keys that any of them sees, and each sees some of those:

    o_i = sum_{j in A(i)} softmax_{j in A(i)}(scale * q_i . k_j) v_j

A(i) follows from the runs of i's tile, six numbers each: start, count, first, first_step, last,
last_step. The t-th key of a run, start + t, is seen by the queries first + t * first_step to
last + t * last_step of the tile, counted from its own first one; what lies beyond the tile is cut
off. Runs of one tile may overlap: a key is seen by the queries of all of them, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo_core.errors import UnsupportedCall
from zoo_core.nn import native

#: Queries in a tile.
TILE = 64


def suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` can be called: the kernel is there, and takes such tensors."""
    return native.suits(q, k, v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor, borders: Tensor, *, scale: float
) -> Tensor:
    """The outputs (B, H, L, E), zeros for a query that sees no key. Only where `suits` says so.

    q (B, H, L, D), k (B, H, S, D), v (B, H, S, E), finite wherever a run shows them.
    runs: int32 (B or 1, H or 1, R, P, 6), whose keys lie within 0 .. S - 1. borders: (R + 1,), where
    each tile begins, and L.
    """
    layout = runs.contiguous(), borders.to(torch.int32)
    out: Tensor = _Tiles.apply(*(_rows(x) for x in (q, k, v)), *layout, scale)[0]
    return out


def borders(length: int, leading: int, device: torch.device) -> Tensor:
    """Where tiles of `length` queries begin, and the end, (R + 1,).

    At each multiple of TILE, and behind the first `leading` queries, which see other keys.
    """
    cuts = {*range(0, length, TILE), min(leading, length), length}
    return torch.tensor(sorted(cuts), device=device)


def run(
    start: Tensor,
    count: Tensor,
    *,
    first: Tensor | int = 0,
    first_step: int = 0,
    last: Tensor | int = TILE - 1,
    last_step: int = 0,
) -> Tensor:
    """One run for each tile, int32 (..., R, 1, 6); what is given may be of one shape or broadcast.

    A negative count is none. Stack several along the last axis but one.
    """
    numbers = (start, count.clamp(min=0), first, first_step, last, last_step)
    tensors = (torch.as_tensor(x, device=start.device) for x in numbers)
    return torch.stack(torch.broadcast_tensors(*tensors), -1).to(torch.int32)[..., None, :]


class _Tiles(torch.autograd.Function):
    """The kernel and its derivative."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, runs: Tensor, borders: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, mass = torch.ops.zoo_core.tiles(q, k, v, runs, borders, scale)
        return out, mass

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # only where the graph of the gradient is to be made
            raise UnsupportedCall(
                "the kernel that computed this attention has no second derivative; compute it, "
                "and its gradients, within zoo_core.nn.choice.plain_only() and "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )
        q, k, v, *layout, out, mass = ctx.saved_tensors
        grads = torch.ops.zoo_core.tiles_backward(
            _rows(grad), q, k, v, out, mass, *layout, ctx.scale
        )
        return *grads, None, None, None


def _rows(x: Tensor) -> Tensor:
    """x (..., width) with the numbers of a row side by side, which kernels ask for."""
    return x if x.stride(-1) == 1 else x.contiguous()
