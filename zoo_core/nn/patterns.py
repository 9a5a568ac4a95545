"""Sparse index patterns: some of the keys that each query sees, laid out so that few are computed.

Positions count a sample's real tokens from its first one; where there is padding, bring the real
tokens to the front (`masks.align`). One softmax may run over several of these patterns together
(`zoo_core.nn.sparse`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.nn.blocks import surroundings
from zoo_core.nn.clustering import pick
from zoo_core.nn.precision import sum_dtype


class Pattern(Protocol):
    """W keys for each of N tokens, in an order of its own; k and v are (B, H, N, width).

    Queries may be a run of n of the tokens, from position `start` on, which a pattern of blocks
    takes as whole blocks: (B, H, n, width).
    """

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Position of each key, (N or 1, W) or (B, N or 1, W); beyond 0 .. N - 1 there is none."""
        ...

    def scores(self, q: Tensor, k: Tensor, start: int = 0) -> Tensor:
        """q_i . k_j for each query and its keys, (B, H, n, W)."""
        ...

    def mix(self, weights: Tensor, v: Tensor, start: int = 0) -> Tensor:
        """Sum of weights (B, H, n, W) times values, (B, H, n, E)."""
        ...


@dataclass(frozen=True)
class Neighbours:
    """The query's own block of `size` tokens and the blocks near it. N is a multiple of `size`."""

    size: int
    before: int
    after: int

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Position of each key, (N, W)."""
        block = torch.arange(length, device=device)[:, None] // self.size
        width = (self.before + 1 + self.after) * self.size
        return (block - self.before) * self.size + torch.arange(width, device=device)

    def reach(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the key at position j is among those of the query at position i."""
        distance = j // self.size - i // self.size
        return (distance >= -self.before) & (distance <= self.after)

    def scores(self, q: Tensor, k: Tensor, start: int = 0) -> Tensor:
        """q_i . k_j for each query and its keys, (B, H, n, W)."""
        windows = self._windows(k, start, q.shape[-2])
        return torch.bmm(self._blocks(q), windows.mT).view(*q.shape[:-1], -1)

    def mix(self, weights: Tensor, v: Tensor, start: int = 0) -> Tensor:
        """Sum of weights (B, H, n, W) times values, (B, H, n, E)."""
        windows = self._windows(v, start, weights.shape[-2])
        mixed = torch.bmm(self._blocks(weights.to(v.dtype)), windows)
        return mixed.view(*weights.shape[:-1], -1)

    def _windows(self, x: Tensor, start: int, length: int) -> Tensor:
        seen = surroundings(
            x, self.size, before=self.before, after=self.after, start=start, stop=start + length
        )
        return seen.flatten(0, 2)

    def _blocks(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, 2, (-1, self.size)).flatten(0, 2)


@dataclass(frozen=True)
class Columns:
    """The keys that lie a multiple of `stride` away. N is a multiple of `stride`."""

    stride: int

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Position of each key, (N, N / stride)."""
        place = torch.arange(length, device=device)[:, None] % self.stride
        return place + torch.arange(0, length, self.stride, device=device)

    def scores(self, q: Tensor, k: Tensor, start: int = 0) -> Tensor:
        """q_i . k_j for each query and its keys, (B, H, n, N / stride)."""
        return self._rows(self._columns(q) @ self._columns(k).mT)

    def mix(self, weights: Tensor, v: Tensor, start: int = 0) -> Tensor:
        """Sum of weights (B, H, n, N / stride) times values, (B, H, n, E)."""
        return self._rows(self._columns(weights.to(v.dtype)) @ self._columns(v))

    def _columns(self, x: Tensor) -> Tensor:
        """(B, H, N, D) to (B, H, stride, N / stride, D)."""
        return torch.unflatten(x, 2, (-1, self.stride)).transpose(2, 3)

    def _rows(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3).flatten(2, 3)


@dataclass(frozen=True, eq=False)
class Common:
    """The same few keys for all queries of a sample, at `index` (B or 1, W) within 0 .. N - 1."""

    index: Tensor

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Position of each key, (B or 1, 1, W)."""
        return self.index[:, None].to(device)

    def scores(self, q: Tensor, k: Tensor, start: int = 0) -> Tensor:
        """q_i . k_j for each query and its keys, (B, H, n, W)."""
        return q @ self._rows(k).mT

    def mix(self, weights: Tensor, v: Tensor, start: int = 0) -> Tensor:
        """Sum of weights (B, H, n, W) times values, (B, H, n, E)."""
        return weights.to(v.dtype) @ self._rows(v)

    def _rows(self, x: Tensor) -> Tensor:
        if len(self.index) == 1:
            return x.index_select(2, self.index[0])
        return pick(x, self.index[:, None].expand(*x.shape[:2], -1))


@dataclass(frozen=True)
class Distances:
    """The key at each of some offsets from the query, none of them as large as N.

    Nothing is gathered: a copy of the keys for each offset would take W times their memory.
    """

    offsets: tuple[int, ...]

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Position of each key, (N, W)."""
        offsets = torch.tensor(self.offsets, device=device)
        return torch.arange(length, device=device)[:, None] + offsets

    def scores(self, q: Tensor, k: Tensor, start: int = 0) -> Tensor:
        """q_i . k_j for each query and its keys, (B, H, n, W), in at least fp32."""
        scores: Tensor = _Products.apply(*_widened(q, k), self._from(start))
        return scores

    def mix(self, weights: Tensor, v: Tensor, start: int = 0) -> Tensor:
        """Sum of weights (B, H, n, W) times values, (B, H, n, E), in at least fp32."""
        mixed: Tensor = _Mixture.apply(*_widened(weights, v), self._from(start))
        return mixed

    def _from(self, start: int) -> tuple[int, ...]:
        """The offsets from the place of a query within its run to that of its key."""
        return tuple(offset + start for offset in self.offsets)


class _Products(torch.autograd.Function):
    """x_i . y_(i + offset), 0 where there is no such y, for x (B, H, n, D), y (B, H, N, D).

    With W offsets (B, H, n, W).
    """

    @staticmethod
    def forward(x: Tensor, y: Tensor, offsets: tuple[int, ...]) -> Tensor:
        out = x.new_zeros(len(offsets), *x.shape[:-1])
        for w, at, there, number in _spans(offsets, x.shape[-2], y.shape[-2]):
            both = x.narrow(-2, at, number) * y.narrow(-2, there, number)
            out[w].narrow(-1, at, number).copy_(both.sum(-1))
        return out.movedim(0, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, tuple[int, ...]], _: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.offsets = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        for_x = _Mixture.apply(grad, y, ctx.offsets)
        for_y = _Mixture.apply(*_turned(grad, ctx.offsets, x, y.shape[-2]))
        return for_x, for_y, None


class _Mixture(torch.autograd.Function):
    """sum_w weights_iw y_(i + offset_w) for weights (B, H, n, W), y (B, H, N, E): (B, H, n, E)."""

    @staticmethod
    def forward(weights: Tensor, y: Tensor, offsets: tuple[int, ...]) -> Tensor:
        out = y.new_zeros(*weights.shape[:-1], y.shape[-1])
        of_offset = weights[..., None].unbind(-2)
        for w, at, there, number in _spans(offsets, weights.shape[-2], y.shape[-2]):
            some = of_offset[w].narrow(-2, at, number), y.narrow(-2, there, number)
            out.narrow(-2, at, number).addcmul_(*some)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, tuple[int, ...]], _: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.offsets = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, y = ctx.saved_tensors
        for_weights = _Products.apply(grad, y, ctx.offsets)
        for_y = _Mixture.apply(*_turned(weights, ctx.offsets, grad, y.shape[-2]))
        return for_weights, for_y, None


def _spans(offsets: tuple[int, ...], length: int, keys: int) -> Iterator[tuple[int, int, int, int]]:
    """For each offset, which of `length` places have a key, one of `keys`, so far further on.

    Number of the offset, the first place, its key, and how many there are, if there are any.
    """
    for w, offset in enumerate(offsets):
        start = max(0, -offset)
        number = min(length, keys - offset) - start
        if number > 0:
            yield w, start, start + offset, number


def _turned(
    weights: Tensor, offsets: tuple[int, ...], x: Tensor, keys: int
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The arguments of the mixture that sends x_i, rather than fetches it, along the offsets."""
    # What i sends to i + offset, i + offset fetches from -offset.
    moved = [
        F.pad(weight, (offset, keys - weight.shape[-1] - offset))
        for weight, offset in zip(weights.unbind(-1), offsets, strict=True)
    ]
    return torch.stack(moved, -1), x, tuple(-offset for offset in offsets)


def _widened(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide = sum_dtype(x, y)
    return x.to(wide), y.to(wide)
