"""Softmax attention to the keys that a sparse pattern allows, without an N x N matrix.

    o_i = sum_{j in A(i)} softmax_{j in A(i)}(scale * q_i . k_j) v_j

A(i) follows from the ranks of i and j among the sample's real tokens. The first tokens of a sample,
its hubs, see every token and are seen by every one: else CLS would see only what lies near it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core.attention import Context, Site
from zoo_core.nn import masks, softmax, tiles
from zoo_core.nn.parts import attend_in_parts, streams
from zoo_core.nn.patterns import Common, Pattern
from zoo_core.nn.precision import sum_dtype
from zoo_core.nn.scores import dot_product

#: Queries, of all heads together, that are worked on at once without gradients: fewer cost more in
#: calls of small operations than they save in memory traffic.
ROWS = 6144


@dataclass(frozen=True, eq=False)
class Extent:
    """What a pattern knows of a call.

    count: real tokens of each sample, (B or 1, 1, 1) or with one more axis, to meet ranks.
    hubs: tokens at the front that see, and are seen by, all others. causal: as in Context.
    """

    count: Tensor
    hubs: int
    causal: bool


class SparseAttention(nn.Module, ABC):
    """Base of mechanisms with a sparse pattern: say which (`sees`), and compute long inputs by it.

    hubs: least number of hubs. global_prefix: whether the prefix of a call is among them.
    few, short: up to so many queries, or keys, the pattern is used as a dense mask.
    multiple: `attend` wants a multiple of so many tokens.
    """

    hubs: int = 0

    def __init__(
        self, site: Site, *, few: int, short: int, multiple: int = 1, global_prefix: bool = True
    ) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.global_prefix = global_prefix
        self.few, self.short, self.multiple = few, short, multiple

    @abstractmethod
    def sees(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        """Whether the query of rank i sees the key of rank j, hubs and causality left aside.

        i, j broadcast: (B or 1, 1, L, 1) and (B or 1, 1, 1, S), or without the axis of heads.
        For ranks beyond 0 .. count - 1 any answer will do.
        """

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, extent: Extent) -> Tensor:
        """Attend without a dense mask: q, k, v (B, H, N, width) -> (B, H, N, E).

        Real tokens come first, zeros behind them. Unless the call is causal, the rows of the hubs
        are left to the caller.
        """

    def runs(self, length: int, begin: Tensor, stop: Tensor, extent: Extent) -> Tensor | None:
        """The runs of `nn.tiles` that show queries what they see, (B or 1, H or 1, R, P, 6).

        By the pattern, by causality and of the sample's own keys only; hubs are left to the caller.
        length: N. begin, stop: where each tile begins and ends, (R,).
        None where the pattern has no such form: `attend` then goes without the native kernel.
        """
        return None

    def apart(self, length: int, extent: Extent) -> Sequence[tiles.Part]:
        """What the pattern shows beside `runs`, for which that order of tokens has no form.

        By causality and of the sample's own keys only; no pair with a hub, none that `runs` shows.
        length: N.
        """
        return ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        The queries are those of the last L of the S tokens.
        """
        queries, keys = q.shape[-2], k.shape[-2]
        if queries <= self.few or keys <= self.short:
            k, v = masks.hide(k, ctx.key_padding), masks.hide(v, ctx.key_padding)
            return self._fused(q, k, v, self._mask(q, k, ctx)).to(v.dtype)
        tokens = masks.align(ctx.key_padding)
        if queries < keys:
            q = F.pad(q, (0, 0, keys - queries, 0))
        q, k, v = (tokens.front(x) for x in (q, k, v))
        out = tokens.back(self._long(q, k, v, ctx, tokens.key_padding))
        return out[:, :, keys - queries :]

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        dots = dot_product(q, k, ctx.key_padding, scale=self.scale)
        return softmax.masked_softmax(dots, self._mask(q, k, ctx))

    def visible(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        """Whether the query of rank i sees the key of rank j, by all rules; rank -1 is no key."""
        seen = self.sees(i, j, extent) | (j < extent.hubs)
        seen = seen & (j <= i) if extent.causal else seen | (i < extent.hubs)
        return seen & (j >= 0) & (j < extent.count)

    def _extent(self, count: Tensor, ctx: Context) -> Extent:
        hubs = max(self.hubs, ctx.prefix if self.global_prefix else 0)
        return Extent(count, hubs, ctx.causal)

    def _mask(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The dense mask of a call, (B or 1, H or 1, L, S)."""
        queries, keys = q.shape[-2], k.shape[-2]
        ranks = masks.positions(ctx.key_padding, k)
        count = _count(ctx.key_padding, keys, k.device)[..., None]
        i, j = ranks[:, None, -queries:, None], ranks[:, None, None]
        return self.visible(i, j, self._extent(count, ctx))

    def _long(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, real: Tensor | None) -> Tensor:
        """Attend by `attend`; hubs, which see everything, are attended apart.

        real: key padding of the tokens, which have been brought to the front.
        """
        length = q.shape[-2]
        extent = self._extent(_count(real, length, q.device), ctx)
        if (out := self._attend_in_tiles(q, k, v, extent)) is not None:
            return out
        missing = -length % self.multiple
        padded = [F.pad(x, (0, 0, 0, missing)) if missing else x for x in (q, k, v)]
        out = self.attend(padded[0], padded[1], padded[2], extent)[:, :, :length]
        hubs = min(extent.hubs, length)
        if ctx.causal or not hubs:
            return out
        seen = None if real is None else real[:, None, None]
        first = self._fused(q[:, :, :hubs], k, v, seen).to(out.dtype)
        if streams(q):
            out[:, :, :hubs] = first
            return out
        # Put together as hosts store it, tokens before heads.
        return torch.cat([first.transpose(1, 2), out.transpose(1, 2)[:, hubs:]], 1).transpose(1, 2)

    def _attend_in_tiles(self, q: Tensor, k: Tensor, v: Tensor, extent: Extent) -> Tensor | None:
        """Attend by the native kernel, hubs as well; None where it cannot be."""
        if (self.training and self.dropout) or not tiles.suits(q, k, v):
            return None
        length = q.shape[-2]
        hubs = min(extent.hubs, length)
        borders = tiles.borders(length, 0 if extent.causal else hubs, q.device)
        begin = borders[:-1]
        runs = self.runs(length, begin, borders[1:], extent)
        if runs is None:
            return None
        first = tiles.leading(begin, hubs, extent.count, causal=extent.causal)
        first = first.expand(*runs.shape[:3], 1, 6)
        near = tiles.Part(torch.cat([runs, first], -2), borders)
        parts = [near, *self.apart(length, extent)]
        return tiles.attend_union(q, k, v, parts, scale=self.scale)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scale
        )


def _count(real: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Real tokens of each sample, (B, 1, 1), or (1, 1, 1) where all are."""
    if real is None:
        return torch.full((1, 1, 1), length, device=device)
    return real.sum(-1)[:, None, None]


class PatternAttention(SparseAttention):
    """Sparse attention in which each query has keys of its own: one softmax over few patterns."""

    @abstractmethod
    def layout(
        self, length: int, extent: Extent, device: torch.device
    ) -> Sequence[tuple[Pattern, Tensor]]:
        """Patterns that hold every pair that `sees` allows, with the ranks to take from each.

        A rank that is negative, or that `sees` does not allow, is left out. Together they must give
        a query no key twice; hubs need no pattern. length: N.
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, extent: Extent) -> Tensor:
        """Attend along the layout: q, k, v (B, H, N, width) -> (B, H, N, E)."""
        length, device = q.shape[-2], q.device
        i = torch.arange(length, device=device)[None, :, None]
        patterns, seen = [], []
        for pattern, j in self.layout(length, extent, device):
            patterns.append(pattern)
            seen.append(self.visible(i, j.masked_fill(j < extent.hubs, -1), extent))
        if extent.hubs:
            first = torch.arange(min(extent.hubs, length), device=device)[None]
            patterns.append(Common(first))
            seen.append(self.visible(i, first[:, None], extent))
        dropout = self.dropout if self.training else 0.0
        with torch.autocast(device.type, enabled=False):
            return mix(
                patterns,
                q,
                k,
                v,
                torch.cat(seen, -1)[:, None],
                scale=self.scale,
                dropout=dropout,
                multiple=self.multiple,
            )


def mix(
    patterns: Sequence[Pattern],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    multiple: int = 1,
) -> Tensor:
    """Attend to all keys of some patterns under one softmax: (B, H, N, E) in v's dtype.

    mask: bool (B or 1, 1, N, W), which keys take part, the patterns' W side by side; a query with
    none gets zeros. multiple: the patterns take runs of a multiple of so many queries.
    """
    wide = sum_dtype(q)
    seen = torch.zeros_like(mask, dtype=wide).masked_fill_(~mask, torch.finfo(wide).min)
    alive = mask.any(-1, keepdim=True).to(wide)

    def attend(heads: slice, span: slice) -> Tensor:
        queries, keys, values = q[:, heads, span] * scale, k[:, heads], v[:, heads]
        scores = [pattern.scores(queries, keys, span.start).to(wide) for pattern in patterns]
        hidden = torch.split(seen[:, :, span], [x.shape[-1] for x in scores], -1)
        weights = _softmax([x + h for x, h in zip(scores, hidden, strict=True)])
        if dropout:
            weights = [F.dropout(x, dropout) for x in weights]
        mixed = (p.mix(w, values, span.start) for p, w in zip(patterns, weights, strict=True))
        # A masked weight is 0 by itself, but in a query without a key.
        return (reduce(torch.add, (x.to(wide) for x in mixed)) * alive[:, :, span]).to(v.dtype)

    return attend_in_parts(attend, q, v, multiple=multiple, rows=ROWS, dropout=dropout)


def _softmax(scores: list[Tensor]) -> Sequence[Tensor]:
    """One softmax over the last axes of several scores (B, H, n, W), in at least fp32."""
    if not streams(scores[0]):
        widths = [x.shape[-1] for x in scores]
        return torch.split(torch.cat(scores, -1).softmax(-1), widths, -1)
    # By single operations, in place and each in its own layout; the kernel, which is made for long
    # rows, takes several times longer on short ones. exp takes ten times as long as exp2 where it
    # underflows, as it does at every hidden key.
    peak = reduce(torch.maximum, [x.amax(-1, keepdim=True) for x in scores])
    powers = [x.sub_(peak).mul_(math.log2(math.e)).exp2_() for x in scores]
    total = reduce(torch.add, [x.sum(-1, keepdim=True) for x in powers])
    return [x.div_(total) for x in powers]
