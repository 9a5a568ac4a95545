"""Softmax attention of tiles of queries to runs of keys, by a native kernel.

TILE consecutive queries, or fewer, share the keys that any of them sees; each sees some of those:

    o_i = sum_{j in A(i)} softmax_{j in A(i)}(scale * q_i . k_j) v_j

A(i) follows from the runs of i's tile, six numbers each: start, count, first, first_step, last,
last_step. The t-th key of a run, start + t, is seen by the queries first + t * first_step to
last + t * last_step of the tile, counted from its own first one; what lies beyond the tile is cut
off. Runs of one tile may overlap: a key is seen by the queries of all of them, once.

What has no such form in one order of tokens may have one in two: `attend_union` puts several parts,
each with runs of its own, under one softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from zoo_core.errors import UnsupportedCall
from zoo_core.nn import native

#: Queries in a tile.
TILE = 64


@dataclass(frozen=True, eq=False)
class Part:
    """Runs that show some of the pairs.

    runs: int32 (B or 1, H or 1, R, P, 6), whose keys lie within 0 .. S - 1.
    borders: (R + 1,), where each tile begins, and L.
    period: where it is not 1, a token sees tokens a multiple of it away, and L = S. Both of the
    above then count every period-th token, of which there are L / period, rounded up, and runs have
    an axis of the one that is counted first in the place of heads: (B or 1, period or 1, R, P, 6).
    """

    runs: Tensor
    borders: Tensor
    period: int = 1


def suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` can be called: the kernel is there, and takes such tensors."""
    return native.suits(q, k, v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor, borders: Tensor, *, scale: float
) -> Tensor:
    """The outputs (B, H, L, E), zeros for a query that sees no key. Only where `suits` says so.

    q (B, H, L, D), k (B, H, S, D), v (B, H, S, E), finite wherever a run shows them.
    runs, borders: as in `Part`.
    """
    return attend_union(q, k, v, [Part(runs, borders)], scale=scale)


def attend_all(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """As `attend`, where every query sees every key."""
    edges = borders(q.shape[-2], 0, q.device)
    first = torch.zeros_like(edges[:-1])
    runs = run(first, first + k.shape[-2])[None, None]
    return attend(q, k, v, runs, edges, scale=scale)


def attend_union(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], *, scale: float) -> Tensor:
    """As `attend`, to what any of the parts shows, which must show no pair twice."""
    layouts = [_layout(x, q.shape[1]) for x in parts]
    q, k, v = (native.rows(x) for x in (q, k, v))
    out: Tensor = _Tiles.apply(q, k, v, scale, layouts)[0]
    return out


def borders(length: int, leading: int, device: torch.device) -> Tensor:
    """Where tiles of `length` queries begin, and the end, (R + 1,).

    At each multiple of TILE, and behind the first `leading` queries, which see other keys: there a
    tile may be empty.
    """
    cuts = torch.arange(-(-length // TILE) + 1, device=device).mul(TILE).clamp(max=length)
    if not 0 < leading < length:
        return cuts
    return torch.cat([cuts, cuts.new_full((1,), leading)]).sort().values


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
    shown = torch.broadcast_tensors(*tensors)  # type: ignore[no-untyped-call]
    return torch.stack(shown, -1).to(torch.int32)[..., None, :]


def leading(begin: Tensor, number: int, end: Tensor, *, causal: bool) -> Tensor:
    """The run of the first `number` tokens, which all see and which, if not causal, see all.

    begin: (R,), where each tile begins; tiles begin behind those tokens (`borders`) where they see
    all. end: how many tokens there are, broadcastable to (..., R). int32 (..., R, 1, 6).
    """
    zero, seen = torch.zeros_like(begin), end.clamp(max=number)
    if causal:
        return run(zero, seen, first=-begin, first_step=1)
    return run(zero, torch.where(begin < number, end, seen))


_Layout = tuple[int, Tensor, Tensor]


class _Tiles(torch.autograd.Function):
    """The kernel and its derivative: layouts are the runs and the borders of each part."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, scale: float, layouts: list[_Layout]
    ) -> tuple[Tensor, Tensor]:
        found = []
        for period, *layout in layouts:
            out, mass = torch.ops.zoo_core.tiles(
                *(_fold(x, period) for x in (q, k, v)), *layout, scale
            )
            mass = _unfold(mass[..., None], period, q).contiguous()
            found.append((_unfold(out, period, q), mass))
        return reduce(_merge, found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.scale, ctx.layouts = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # only where the graph of the gradient is to be made
            raise UnsupportedCall(
                "the kernel that computed this attention has no second derivative; compute it, "
                "and its gradients, within zoo_core.nn.choice.plain_only() and "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )
        q, k, v, out, mass = ctx.saved_tensors
        tensors = native.rows(grad), q, k, v, out
        found = []
        for period, *layout in ctx.layouts:
            masses = _fold(mass, period)[..., 0].contiguous()
            grads = torch.ops.zoo_core.tiles_backward(
                *(_fold(x, period) for x in tensors), masses, *layout, ctx.scale
            )
            found.append([_unfold(x, period, y) for x, y in zip(grads, (q, k, v), strict=True)])
        total = [reduce(Tensor.add_, x) for x in zip(*found, strict=True)]
        return *total, None, None


def _layout(part: Part, heads: int) -> _Layout:
    """The period, the runs and the borders of a part as the kernel takes them."""
    runs = part.runs
    if part.period > 1 and runs.shape[1] > 1:
        runs = runs.repeat_interleave(heads, 1)
    return part.period, runs.contiguous(), part.borders.to(torch.int32)


def _fold(x: Tensor, period: int) -> Tensor:
    """x (B, H, N, width) with residues among the heads: (B, period * H, N / period, width).

    N / period is rounded up: zeros stand for what is missing. Else this is a view, if x lies as
    hosts store it, tokens before heads.
    """
    if period == 1:
        return x
    x = x.transpose(1, 2)
    batch, length, heads, width = x.shape
    if missing := -length % period:  # F.pad would fill all of it first
        x = torch.cat([x, x.new_zeros(batch, missing, heads, width)], 1)
    return x.reshape(batch, -1, period * heads, width).transpose(1, 2)


def _unfold(x: Tensor, period: int, like: Tensor) -> Tensor:
    """Undo `_fold`, of a tensor with the tokens and the heads of `like`."""
    if period == 1:
        return x
    batch, heads, length, _ = like.shape
    rows = x.transpose(1, 2).reshape(batch, -1, heads, x.shape[-1])
    return rows[:, :length].transpose(1, 2)


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, N, E) and logs of denominators (B, H, N, 1) of two parts to those of both."""
    (out, mass), (out_of_other, mass_of_other) = one, other
    total = torch.logaddexp(mass, mass_of_other)
    # All are -inf where no key is seen, and both outputs 0.
    share = (mass_of_other - total.clamp(min=torch.finfo(total.dtype).min)).exp_()
    return out.lerp_(out_of_other, share), total
