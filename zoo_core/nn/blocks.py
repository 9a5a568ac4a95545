"""Sequences cut into blocks that see their neighbours: windows without an N x N matrix.

The blocks of all samples lie behind one another on one axis, M, so that a single call of 4-D
fused attention serves them all. A window, the block and its neighbours, is an overlapping view:
copying each block once per neighbour would cost more than the products themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """A cut of (B, H, N, D) into blocks of `size` tokens, the last one filled up with zeros.

    batch, length: B and N. before, after: neighbours that a block sees to its left and right.
    prefix: every block also sees the first `prefix` tokens of its sample, at most N.

    Positions count from the sample's first token; where there is padding, bring the real tokens
    to the front first (`masks.align`). Between two samples lie `gap` blocks that nobody reads, so
    that a window never holds another sample's numbers, not even to multiply them by 0.
    """

    batch: int
    length: int
    size: int
    before: int = 1
    after: int = 1
    prefix: int = 0

    @property
    def count(self) -> int:
        """Blocks of one sample."""
        return -(-self.length // self.size)

    @property
    def gap(self) -> int:
        """Unread blocks between two samples."""
        return max(self.before, self.after)

    @property
    def total(self) -> int:
        """M: the blocks of all samples and the gaps between them."""
        return self.batch * (self.count + self.gap) - self.gap

    def split(self, x: Tensor) -> Tensor:
        """Cut x (B, H, N, D) into blocks (M, H, size, D); a view where one sample fills them."""
        blocks = self._cut(x)
        if self.batch > 1:
            blocks = F.pad(blocks, (*(0, 0) * 3, 0, self.gap))
        return blocks.flatten(0, 1)[: self.total].transpose(1, 2)

    def windows(self, x: Tensor) -> Tensor:
        """Give each block what it sees of x (B, H, N, D): (M, H, W, D), an overlapping view.

        W runs over the blocks of the window from left to right, each led by a copy of the prefix.
        """
        view: Tensor = _Windows.apply(x, self)
        return view

    def join(self, x: Tensor) -> Tensor:
        """Undo `split`: blocks (M, H, size, E) to tokens (B, H, N, E), a view."""
        tokens = self._samples(x.transpose(1, 2)).flatten(1, 2)
        return tokens[:, : self.length].transpose(1, 2)

    def queries(self, device: torch.device) -> Tensor:
        """Position of each token of each block, (M, size)."""
        block = torch.arange(self.total, device=device)[:, None] % (self.count + self.gap)
        return block * self.size + torch.arange(self.size, device=device)

    def keys(self, device: torch.device, real: Tensor | None = None) -> Tensor:
        """Position of each token of each window, (M, W), or -1 where there is none to see.

        A window shows a token once: the prefix only through the copy that leads the block itself.
        real: (B,) number of real tokens, which lie at the front; None = all are real.
        """
        row = torch.arange(self.total, device=device)[:, None, None]
        sample, block = row // (self.count + self.gap), row % (self.count + self.gap)
        neighbour = torch.arange(-self.before, self.after + 1, device=device)[:, None]
        own = (block + neighbour) * self.size + torch.arange(self.size, device=device)
        own = own.masked_fill(own < self.prefix, -1)
        copy = torch.arange(self.prefix, device=device).where(neighbour == 0, -1)
        position = torch.cat([copy.expand(self.total, -1, -1), own], -1)
        end = self.length if real is None else real[sample]
        return position.masked_fill(position >= end, -1).flatten(1)

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """How far each token of a window lies from the first one of its block, (W,).

        And which of them are copies of the prefix, bool (W,), whose distance has no meaning.
        """
        start = torch.arange(-self.before, self.after + 1, device=device)[:, None] * self.size
        slot = torch.arange(-self.prefix, self.size, device=device)
        return (start + slot).flatten(), (slot < 0).expand(start.shape[0], -1).flatten()

    def _cut(self, x: Tensor) -> Tensor:
        """Cut x (B, H, N, D) into (B, count, size, H, D), tokens before heads as hosts store it."""
        tokens = x.transpose(1, 2)
        if missing := self.count * self.size - self.length:
            tokens = F.pad(tokens, (0, 0, 0, 0, 0, missing))
        return tokens.view(x.shape[0], self.count, self.size, *tokens.shape[2:])

    def _samples(self, x: Tensor) -> Tensor:
        """Leave out the gaps: (M, ...) to (B, count, ...), a view."""
        return x.unfold(0, self.count, self.count + self.gap).movedim(-1, 1)


class _Windows(torch.autograd.Function):
    """`Blocks.windows`, with a derivative that adds up whole blocks instead of single elements."""

    @staticmethod
    def forward(x: Tensor, blocks: Blocks) -> Tensor:
        gap, prefix, tokens = blocks.gap, blocks.prefix, x.transpose(1, 2)
        row = x.new_empty(blocks.total + 2 * gap, prefix + blocks.size, *tokens.shape[2:])
        row[:gap].zero_()
        samples = row[gap:].view(blocks.batch, -1, *row.shape[1:])
        samples[:, blocks.count :].zero_()
        samples[:, : blocks.count, :prefix] = tokens[:, None, :prefix]
        own, whole = samples[:, :, prefix:], blocks.length // blocks.size
        end = whole * blocks.size
        own[:, :whole] = torch.unflatten(tokens[:, :end], 1, (whole, blocks.size))
        if rest := blocks.length - end:
            own[:, whole, :rest] = tokens[:, end:]
            own[:, whole, rest:].zero_()
        # Not unfolded: a compiler would copy each block once per neighbour.
        step, *strides = row.stride()
        width = (blocks.before + 1 + blocks.after) * row.shape[1]
        start = (gap - blocks.before) * step
        view = row.as_strided((blocks.total, width, *row.shape[2:]), (step, *strides), start)
        return view.transpose(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Blocks], output: Tensor) -> None:
        ctx.blocks = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        blocks: Blocks = ctx.blocks
        prefix, total, width = blocks.prefix, blocks.total, blocks.before + 1 + blocks.after
        windows = grad.transpose(1, 2)
        windows = windows.view(total, width, prefix + blocks.size, *windows.shape[2:])
        row = windows[:, blocks.before].clone(memory_format=torch.contiguous_format)
        for j in range(width):
            # The j-th block of a window lies so far behind the window's own.
            shift = j - blocks.before
            start, stop = max(0, shift), min(total, total + shift)
            if shift and start < stop:
                row[start:stop] += windows[start - shift : stop - shift, j]
        own = blocks._samples(row)
        tokens = own[:, :, prefix:].flatten(1, 2)[:, : blocks.length]
        if prefix:
            tokens[:, :prefix] += own[:, :, :prefix].sum(1)
        return tokens.transpose(1, 2), None


def surroundings(
    x: Tensor, size: int, *, before: int, after: int, start: int = 0, stop: int | None = None
) -> Tensor:
    """Give each block of `size` tokens its neighbours: (B, H, R * size, D) to (B, H, R, W, D).

    Zeros beyond the first and last block; an overlapping view, from left to right. For products
    that want samples and heads outermost; `Blocks` keeps tokens before heads, as hosts do.
    start, stop: where the first block begins that is asked for, and where the last one ends.
    """
    length = x.shape[-2]
    first = start - before * size
    last = (length if stop is None else stop) + after * size
    missing = max(0, -first), max(0, last - length)
    seen = F.pad(x[:, :, max(0, first) : last], (0, 0, *missing))
    return seen.unfold(2, (before + 1 + after) * size, size).mT
