"""Tokens grouped by content: k-means, and tokens laid out group by group.

All of it is batched over samples and heads, masked, and without chance: the first centroids are
evenly spaced real tokens, so that neither padding nor a batch mate moves a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.nn import native
from zoo_core.nn.precision import sum_dtype

#: Tokens per cluster that k-means looks at; more of them hardly move the centroids.
SAMPLE = 16


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, H, N, D) by index (B, H, M): (B, H, M, D).

    It copies whole rows, which `gather` does not: that takes several times longer. So does the
    derivative of `index_select`, compared with that of `embedding`.
    """
    batch, heads, length, _ = x.shape
    sample = torch.arange(batch, device=x.device)[:, None, None]
    head = torch.arange(heads, device=x.device)[:, None]
    if x.is_contiguous():
        row = (sample * heads + head) * length + index
    else:  # hosts keep tokens before heads; flattened in that order nothing is copied
        x = x.transpose(1, 2)
        row = (sample * length + index) * heads + head
    return F.embedding(row, x.flatten(0, 2))


def spread(x: Tensor, key_padding: Tensor | None, number: int) -> tuple[Tensor, Tensor | None]:
    """Find M = min(number, N) real tokens of x (B, H, N, D), evenly spaced in rank.

    Returns their positions (B, M) and which of them exist, bool (B, M), those at the front: a
    sample with fewer than M real tokens gives each of these once. None = all exist.
    """
    batch, _, length, _ = x.shape
    number = min(number, length)
    step = torch.arange(number, device=x.device)
    if key_padding is None:
        return (step * length // number).expand(batch, -1), None
    real = key_padding.sum(-1, keepdim=True)
    found = real.clamp(max=number)
    rank = step * real // found.clamp(min=1)
    position = torch.searchsorted(key_padding.cumsum(-1), rank + 1)
    return position.clamp(max=length - 1), step < found


def cluster(
    x: Tensor, key_padding: Tensor | None, number: int, iterations: int
) -> tuple[Tensor, Tensor]:
    """Cluster the tokens of x (B, H, N, D): cluster of each (B, H, N), and means (B, H, C, D).

    C = min(number, N); otherwise as `kmeans`. Means are in at least fp32, 0 for an empty cluster,
    and let gradients through to x.
    """
    x = x.to(sum_dtype(x))
    # One copy where the products below would each make one, none where they would not.
    x = x.flatten(0, 1).view(x.shape)
    number = min(number, x.shape[-2])
    with torch.autocast(x.device.type, enabled=False):
        index = kmeans(x, key_padding, number, iterations)
        return index, _means(x, _members(x, index, key_padding, number), empty=x.new_zeros(()))


@torch.no_grad()
def kmeans(x: Tensor, key_padding: Tensor | None, number: int, iterations: int) -> Tensor:
    """Find a cluster, by Euclidean distance, for each token of x (B, H, N, D): (B, H, N).

    number: clusters, at most N; a sample with fewer real tokens uses only the first ones.
    iterations: Lloyd steps on at most SAMPLE * number tokens; 0 keeps the first centroids.
    x: at least fp32, and 0 at padding, which joins some cluster but moves none.
    """
    if native.suits(x):
        return find_clusters(x, key_padding, number, iterations)[0]
    position, real = spread(x, key_padding, SAMPLE * number)
    points = pick(x, position[:, None].expand(-1, x.shape[1], -1))
    position, used = spread(points, real, number)
    centroids = pick(points, position[:, None].expand(-1, x.shape[1], -1))
    for _ in range(iterations):
        members = _members(points, _nearest(points, centroids, used), real, number)
        centroids = _means(points, members, empty=centroids)
    return _nearest(x, centroids, used)


def find_clusters(
    x: Tensor, key_padding: Tensor | None, number: int, iterations: int
) -> tuple[Tensor, Tensor]:
    """What `cluster` gives, by a native kernel, without gradients: for x that `native.suits`.

    Padding may hold anything.
    """
    number = min(number, x.shape[-2])
    sample = SAMPLE * number
    index, means = native.call("clusters", x, key_padding, number, iterations, sample)
    return index, means


def _nearest(x: Tensor, centroids: Tensor, used: Tensor | None) -> Tensor:
    """Nearest of the centroids (B, H, C, D) that are `used` (B, C), for each row of x."""
    # |x - c|^2 = |x|^2 - 2 (x.c - |c|^2 / 2), and |x|^2 is the same for every c.
    offset = centroids.square().sum(-1) / 2
    if used is not None:
        offset = offset.masked_fill(~used[:, None], torch.inf)
    return (x @ centroids.mT).sub_(offset[..., None, :]).argmax(-1)


def _members(x: Tensor, index: Tensor, key_padding: Tensor | None, number: int) -> Tensor:
    """Which of `number` clusters each real token is in: 1 there, otherwise 0, (B, H, N, C).

    x: the tokens, for their dtype.
    """
    one = x.new_ones(()) if key_padding is None else key_padding.to(x.dtype)[:, None, :, None]
    members = x.new_zeros(*index.shape, number)
    return members.scatter_(-1, index[..., None], one.expand(*index.shape, 1))


def _means(x: Tensor, members: Tensor, empty: Tensor) -> Tensor:
    """Means (B, H, C, D) of the members (B, H, N, C) among the rows of x; `empty` without any."""
    size = members.sum(-2)[..., None]
    return torch.where(size > 0, (members.mT @ x) / size.clamp(min=1), empty)


@dataclass(frozen=True, eq=False)
class Groups:
    """Tokens laid out group by group in M blocks of `size`, each with tokens of one group only.

    token: (B, H, M * size), the token at each place; token 0 at places left empty.
    place: (B, H, N), the place of each token. group: (B, H, M), the group of each block.
    """

    token: Tensor
    place: Tensor
    group: Tensor
    size: int

    def split(self, x: Tensor) -> Tensor:
        """Lay out x (B, H, N, D): (B, H, M, size, D)."""
        return pick(x, self.token).view(*self.group.shape, self.size, -1)

    def join(self, x: Tensor) -> Tensor:
        """Undo `split`: (B, H, M, size, E) to (B, H, N, E), tokens before heads in memory."""
        batch, heads, blocks, size, width = x.shape
        first = torch.arange(batch * heads, device=x.device).view(batch, 1, heads) * blocks * size
        row = first + self.place.transpose(1, 2)
        return F.embedding(row, x.reshape(-1, width)).transpose(1, 2)


def group(index: Tensor, number: int, size: int) -> Groups:
    """Lay out N tokens by group, index (B, H, N) < number, in blocks of `size`.

    There are M = (N + number * (size - 1)) // size blocks, enough for groups of any sizes.
    """
    length = index.shape[-1]
    blocks = (length + number * (size - 1)) // size
    count = index.new_zeros(*index.shape[:-1], number)
    count.scatter_add_(-1, index, torch.ones_like(index))
    needed = (count + size - 1) // size
    end = needed.cumsum(-1)
    # Sorted by group, tokens stand in a row; to reach its blocks, a group moves as a whole.
    shift = (end - needed) * size - (count.cumsum(-1) - count)
    order = index.argsort(dim=-1, stable=True)
    place = shift.gather(-1, index.gather(-1, order)) + torch.arange(length, device=index.device)
    token = index.new_zeros(*index.shape[:-1], blocks * size)
    block = torch.arange(blocks, device=index.device)[:, None]
    return Groups(
        token=token.scatter_(-1, place, order),
        place=torch.empty_like(place).scatter_(-1, order, place),
        group=(block >= end[..., None, :]).sum(-1).clamp(max=number - 1),
        size=size,
    )
