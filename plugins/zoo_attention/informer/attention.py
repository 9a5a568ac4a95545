"""Informer's ProbSparse attention: queries that stand out attend, the others get the mean value.

    o_i = softmax(scale * q_i k^T) v   if M_i is among the u largest,   else mean(v)
    M_i = max_{s in S} q_i . k_s - mean_{s in S} q_i . k_s,   |S| = u = factor * ceil(ln n)

A query near orthogonal to all keys would give every one of them nearly the same weight; M_i, a
bound on how far its weights are from that, finds the others.

Zhou et al., "Informer: Beyond Efficient Transformer for Long Sequence Time-Series Forecasting",
2020, arXiv:2012.07436.
Deviations: S is the same for every query and every call, one key out of each of |S| even ranges of
ranks, where the paper draws anew; comparing queries on the same keys needs one product instead of
a copy of |S| keys for each query. The mean is over S, as in the paper's algorithm 1 (the authors'
code divides the sum over S by n). Prefix tokens always attend; at least one query does. No causal
form: whether a query attends would depend on the queries after it.
Exact when: factor * ceil(ln n) >= n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import masks, softmax
from zoo_core.nn.clustering import pick
from zoo_core.nn.precision import sum_dtype

if TYPE_CHECKING:
    from zoo_attention.informer import InformerOptions

#: ceil(ln n) is the number of these that n exceeds: exact for integers, as ln is not.
POWERS = tuple(math.floor(math.exp(power)) for power in range(44))

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, eq=False)
class Active:
    """The queries that attend.

    index: (B, H, U), distinct queries. real: bool (B, 1, U), which of them do attend: a sample
    with fewer tokens than N has fewer; None = all.
    """

    index: Tensor
    real: Tensor | None


class InformerAttention(nn.Module):
    """Softmax attention for the queries that stand out; it has no parameters."""

    def __init__(self, site: Site, options: InformerOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.factor = options.factor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        q, k, v = (masks.hide(x, ctx.key_padding) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        with torch.autocast(q.device.type, enabled=False):
            active = self._active(q, k, ctx)
            rows = F.scaled_dot_product_attention(
                pick(q, active.index),
                k.to(q.dtype),
                v.to(q.dtype),
                attn_mask=masks.scores_mask(ctx, active.index.shape[-1], k.shape[-2], q.device),
                dropout_p=dropout,
                scale=self.scale,
            )
            wide = sum_dtype(v)
            real = masks.count(ctx.key_padding, k).clamp(min=1)[:, None, None, None]
            mean = v.sum(-2, keepdim=True, dtype=wide) / real
            return _fill(mean.to(v.dtype), rows.to(v.dtype), active, q.shape[-2])

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, N, N)."""
        q, k = masks.hide(q, ctx.key_padding), masks.hide(k, ctx.key_padding)
        active = self._active(q, k, ctx)
        rows = softmax.weights(pick(q, active.index), k, ctx, scale=self.scale)
        # Equal scores, under the same mask, give the weights of a mean.
        mean = softmax.weights(torch.zeros_like(q[:, :, :1]), k, ctx, scale=self.scale)
        return _fill(mean, rows, active, q.shape[-2])

    @torch.no_grad()
    def _active(self, q: Tensor, k: Tensor, ctx: Context) -> Active:
        """Choose the queries that attend, by their scores of the sampled keys."""
        count = masks.count(ctx.key_padding, k)
        step = torch.arange(self._most(q.shape[-2], ctx.prefix), device=q.device)
        number = self._number(count, ctx.prefix)[:, None]
        keys = pick(k, _positions(step, number, count, ctx.key_padding, k.shape[1]))
        measure = _measure(q, keys, None if ctx.key_padding is None else step < number)
        if ctx.key_padding is None:
            measure[..., : ctx.prefix] = torch.inf
        else:
            first = masks.rank(ctx.key_padding) < ctx.prefix
            measure = measure.masked_fill(first[:, None], torch.inf)
            measure = measure.masked_fill(~ctx.key_padding[:, None], -torch.inf)
        index = _ordered(measure).topk(len(step)).indices
        return Active(index, None if ctx.key_padding is None else (step < number)[:, None])

    def _number(self, count: Tensor, prefix: int) -> Tensor:
        """How many queries of each sample attend, (B,), and how many keys they are chosen by."""
        powers = torch.tensor(POWERS, device=count.device)
        logarithm = (count[:, None] > powers).sum(-1)
        return (self.factor * logarithm).clamp(min=max(prefix, 1)).minimum(count)

    def _most(self, length: int, prefix: int) -> int:
        """The same for a sample of `length` tokens: no sample of this call has more."""
        logarithm = len([power for power in POWERS if length > power])
        return min(max(self.factor * logarithm, prefix, 1), length)


def _positions(
    step: Tensor, number: Tensor, count: Tensor, key_padding: Tensor | None, heads: int
) -> Tensor:
    """Positions (B, H, U) of the sampled keys: of `number` even ranges of ranks, one of each.

    A sample with a smaller number than U has meaningless, but valid, positions at the end.
    """
    # Where in its range a key lies differs from range to range, lest it meet a period of the data.
    within = step * GOLDEN % 1
    ranks = ((step + within) * count[:, None] / number.clamp(min=1)).long()
    ranks = ranks.minimum(count[:, None] - 1).clamp(min=0)
    order = masks.align(key_padding).order
    positions = ranks if order is None else order.gather(-1, ranks)
    return positions[:, None].expand(-1, heads, -1)


def _measure(q: Tensor, keys: Tensor, sampled: Tensor | None) -> Tensor:
    """M of each query (B, H, N), from keys (B, H, U, D) of which those `sampled` (B, U) count."""
    wide = sum_dtype(q)
    scores = q.to(wide) @ keys.to(wide).mT
    if sampled is None:
        return scores.amax(-1) - scores.mean(-1)
    sampled = sampled[:, None, None]
    mean = scores.masked_fill(~sampled, 0).sum(-1) / sampled.sum(-1).clamp(min=1)
    return scores.masked_fill(~sampled, -torch.inf).amax(-1) - mean


def _ordered(measure: Tensor) -> Tensor:
    """Integers (B, H, N) in the order of a measure in fp32; of equals the first is the larger.

    M is 0 for every query where a single key is sampled; which of equals `topk` takes depends on N,
    and so on the amount of padding.
    """
    bits = measure.to(torch.float32).view(torch.int32)
    bits = bits ^ (bits >> 31 & 0x7FFFFFFF)  # negative floats count backwards
    behind = torch.arange(measure.shape[-1], 0, -1, device=measure.device)
    return torch.add(behind, bits.long(), alpha=1 << 31)


def _fill(mean: Tensor, rows: Tensor, active: Active, length: int) -> Tensor:
    """Rows (B, H, U, E) at the active queries, the mean (B, H, 1, E) at all others."""
    if active.real is not None:
        rows = rows.where(active.real[..., None], mean)
    index = active.index[..., None].expand_as(rows)
    return mean.expand(-1, -1, length, -1).scatter(-2, index, rows)
