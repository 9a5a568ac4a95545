"""Landmarks: each sample's real tokens in consecutive segments, and the mean of every segment.

A segment is a range of ranks among the sample's real tokens, so that neither padding nor a batch
mate moves its borders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from zoo_core.nn import masks
from zoo_core.nn.precision import sum_dtype


@overload
def segment_of(rank: int, number: int, count: int) -> int: ...
@overload
def segment_of(rank: Tensor, number: int, count: int) -> Tensor: ...
def segment_of(rank: int | Tensor, number: int, count: int) -> int | Tensor:
    """Segment of the token at `rank`, when `count` tokens are split into `number` segments.

    Sizes differ by at most one. With fewer tokens than segments each token has one to itself, and
    the others are empty. Rank -1 gives a negative segment.
    """
    return rank * number // count


def borders(counts: Tensor, number: int) -> Tensor:
    """Rank of the first token of each segment, (B, number + 1), for counts (B,); last: the count.

    Segment m holds the ranks from borders[:, m] up to, not including, borders[:, m + 1], the same
    ones that `segment_of` sends to m.
    """
    products = torch.arange(number + 1, device=counts.device) * counts[:, None]
    return -(-products // number)


@dataclass(frozen=True, eq=False)
class Segments:
    """A split of each sample's real tokens.

    order: (B, S) long, the token at each rank; padded tokens come last. None where tokens are all
        real and segments all of one size.
    borders: (B, M + 1) long, the rank at which each segment starts and the last one ends.
    seen: bool (B, M), which segments hold a token; None where all do whatever the tokens are.
    """

    order: Tensor | None
    borders: Tensor
    seen: Tensor | None

    def mean(self, x: Tensor) -> Tensor:
        """Mean of x (B, H, S, D) over each segment, (B, H, M, D), in at least fp32.

        Zero for an empty segment. Padded tokens may hold anything. Deterministic on every device.
        """
        batch, heads, length, width = x.shape
        wide = sum_dtype(x)
        if self.order is None:
            return torch.unflatten(x, 2, (self.borders.shape[-1] - 1, -1)).mean(3, dtype=wide)
        # Hosts keep tokens outermost, so that this is a view of what they pass.
        rows = x.transpose(1, 2).reshape(batch * length, heads * width).to(wide)
        first = torch.arange(batch, device=x.device)[:, None] * length
        order, starts = (self.order + first).flatten(), (self.borders + first).flatten()
        # One bag per segment, and a last one in each sample that keeps its padding out.
        bags = nn.functional.embedding_bag(order, rows, starts, mode="mean")
        return bags.view(batch, -1, heads, width)[:, :-1].transpose(1, 2)


def split(key_padding: Tensor | None, number: int, like: Tensor) -> Segments:
    """Split each sample's real tokens into `number` segments, for tokens `like` (B, H, S, D)."""
    ends = borders(masks.count(key_padding, like), number)
    length = like.shape[-2]
    order = masks.align(key_padding).order
    if order is None and length % number:
        order = torch.arange(length, device=like.device).expand(like.shape[0], -1)
    filled = key_padding is None and number <= length
    return Segments(order, ends, None if filled else ends.diff(dim=-1) > 0)
