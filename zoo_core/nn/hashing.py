"""Locality-sensitive hashing: near vectors often meet in a bucket, so that few pairs are compared.

Sorted by bucket and cut into chunks, queries attend to a window of the keys sorted likewise; the
union over several rounds of hashing finds what one of them misses, see `zoo_core.nn.rounds`. Where
meeting in a bucket is itself the weight, see `zoo_core.nn.collisions`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.nn import masks, native, softmax
from zoo_core.nn.precision import sum_dtype
from zoo_core.nn.scores import dot_product

#: Score of a key that counts only where there is no other.
LAST_RESORT = -1e5


def buckets(x: Tensor, rotations: Tensor, number: int) -> Tensor:
    """Bucket of each row of x (B, H, N, D) in each round, (B, H, R, N) < number.

    That is the nearest of `number` directions: the columns of the rotations (H, R, D, K), where
    K = ceil(number / 2), and their opposites. The length of x has no say.
    """
    rounds = rotations.shape[1]
    # One product for all rounds: a broadcast one would copy x for each of them.
    with torch.autocast(x.device.type, enabled=False):  # rounding moves x to another bucket
        turned = x @ rotations.to(x.dtype).transpose(1, 2).flatten(2)
    turned = turned.view(*x.shape[:-1], rounds, -1)
    if native.suits(x):
        found: Tensor = torch.ops.zoo_core.buckets(turned.detach(), number)
        return found
    # Of either sign, there is half as much to compare.
    far = turned.abs()
    if number % 2:  # the last column has no opposite
        far[..., -1] = turned[..., -1]
    nearest = far.argmax(-1, keepdim=True)
    signed = nearest + (turned.gather(-1, nearest) < 0) * turned.shape[-1]
    # A single bucket is the nearest even where it lies on the other side.
    return signed.clamp(max=number - 1).squeeze(-1).mT.contiguous()


@dataclass(frozen=True, eq=False)
class Windows:
    """Which keys a chunk of queries sees, in each of R rounds: a window of the sorted keys.

    query: (B, H, R, C, P), the queries of each chunk; token 0 where the last one is not full.
    key: (B, H, R, C, W), the keys of its window. real: which are no padding, bool, or None.
    row: (B, H, R, N), where each query stands among the C * P.
    place: (B, H, R, N), where each key stands in the sorted order. first: (B, H, R, N), the place
    at which the window of each query begins.
    """

    query: Tensor
    key: Tensor
    real: Tensor | None
    row: Tensor
    place: Tensor
    first: Tensor

    def heads(self, some: slice) -> Windows:
        """The same of some heads only."""
        return Windows(
            query=self.query[:, some],
            key=self.key[:, some],
            real=None if self.real is None else self.real[:, some],
            row=self.row[:, some],
            place=self.place[:, some],
            first=self.first[:, some],
        )

    def dense(self) -> Tensor:
        """Which keys each query sees in any round, bool (B, H, N, N), padding among them."""
        offset = self.place[..., None, :] - self.first[..., None]
        return ((offset >= 0) & (offset < self.key.shape[-1])).any(2)


@torch.no_grad()
def windows(
    queries: Tensor,
    keys: Tensor,
    key_padding: Tensor | None,
    *,
    number: int,
    chunk: int,
    before: int,
    after: int,
) -> Windows:
    """Sort tokens by their buckets (B, H, R, N) < number, and lay out who sees whom.

    Queries form chunks of `chunk`. Each sees `before` + 1 + `after` chunks of keys, around the
    place among the keys that matches the chunk's middle: as far into the same bucket. With equal
    buckets for queries and keys that is the chunk itself with its neighbours; at the ends the
    window moves inwards rather than shrink. Padding has a bucket of its own, behind all others,
    so that places, and with them all borders, depend on the sample's real tokens only.
    """
    length = queries.shape[-1]
    size = min(chunk, length)
    width = min((before + 1 + after) * size, length)
    if native.may_be_taken(queries):
        others = None if keys is queries else keys
        return Windows(
            *torch.ops.zoo_core.windows(queries, others, key_padding, number, size, width, before)
        )
    chunks = -(-length // size)
    sorted_queries = _sort(queries, key_padding, number)
    sorted_keys = sorted_queries if keys is queries else _sort(keys, key_padding, number)

    step = torch.arange(chunks, device=queries.device) * size
    middle = (step + size // 2).clamp(max=length - 1).expand(*queries.shape[:3], -1)
    real = None if key_padding is None else key_padding.sum(-1)[:, None, None, None]
    if real is not None:
        middle = middle.minimum(real - 1).clamp(min=0)
    matching = sorted_queries.matching(middle, sorted_keys)
    last = length - width if real is None else real - width
    first = (matching - size // 2 - before * size).clamp(max=last).clamp(min=0)

    places = first[..., None] + torch.arange(width, device=queries.device)
    filled = F.pad(sorted_queries.order, (0, chunks * size - length))
    return Windows(
        query=filled.view(*queries.shape[:3], chunks, size),
        key=sorted_keys.order.gather(-1, places.flatten(3)).view_as(places),
        real=None if real is None else places < real[..., None],
        row=sorted_queries.place,
        place=sorted_keys.place,
        first=first.gather(-1, sorted_queries.place // size),
    )


def weights(
    q: Tensor,
    k: Tensor,
    seen: Windows,
    key_padding: Tensor | None,
    *,
    scale: float,
    spare_self: bool = False,
) -> Tensor:
    """The attention map (B, H, N, N) of `rounds.attend`, dense: for looking, not for running."""
    dots = dot_product(q, k, None, scale=scale)
    if spare_self:
        own = torch.eye(q.shape[-2], dtype=torch.bool, device=q.device)
        dots = dots.masked_fill(own, LAST_RESORT)
    mask = seen.dense()
    if key_padding is not None:
        mask = mask & key_padding[:, None, None]
    return softmax.masked_softmax(dots, mask)


def centred(x: Tensor, key_padding: Tensor | None) -> Tensor:
    """x (B, H, N, D), 0 at padding, less the mean of its real tokens, in at least fp32."""
    wide = sum_dtype(x)
    real = masks.count(key_padding, x).clamp(min=1)[:, None, None, None]
    return x.to(wide) - x.sum(-2, keepdim=True, dtype=wide) / real


@dataclass(frozen=True, eq=False)
class _Sorted:
    """Tokens sorted by bucket, those of one bucket as they came.

    bucket, order, place: (B, H, R, N), bucket of each token, token at each place, and the place of
    each token. start, count: (B, H, R, number + 1), of each bucket.
    """

    bucket: Tensor
    order: Tensor
    place: Tensor
    start: Tensor
    count: Tensor

    def matching(self, place: Tensor, other: _Sorted) -> Tensor:
        """The place in `other` that is as far into the same bucket, for places (B, H, R, C)."""
        bucket = self.bucket.gather(-1, self.order.gather(-1, place))
        within = 2 * (place - self.start.gather(-1, bucket)) + 1
        ours, theirs = self.count.gather(-1, bucket), other.count.gather(-1, bucket)
        return other.start.gather(-1, bucket) + within * theirs // (2 * ours)


def _sort(bucket: Tensor, key_padding: Tensor | None, number: int) -> _Sorted:
    if key_padding is not None:
        bucket = bucket.masked_fill(~key_padding[:, None, None], number)
    order = bucket.argsort(dim=-1, stable=True)
    steps = torch.arange(bucket.shape[-1], device=bucket.device).expand_as(order)
    count = bucket.new_zeros(*bucket.shape[:-1], number + 1)
    count.scatter_add_(-1, bucket, torch.ones_like(bucket))
    return _Sorted(
        bucket=bucket,
        order=order,
        place=torch.empty_like(order).scatter_(-1, order, steps),
        start=count.cumsum(-1) - count,
        count=count,
    )
