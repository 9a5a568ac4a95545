"""Improved clustered attention: a cluster of queries attends as one, but to its top keys apart.

    A_c = softmax(scale * mean(q in c) k^T),  T = the topk keys of A_c,  s_c = sum_{j in T} A_cj
    o_i = s_c sum_{j in T} softmax_{j in T}(scale * q_i . k_j) v_j + sum_{j not in T} A_cj v_j

Vyas, Katharopoulos, Fleuret, "Fast Transformers with Clustered Attention", 2020, arXiv:2007.04825.
Deviations: k-means works on the queries, not on 63 sign bits of them; it starts at evenly spaced
tokens and makes 3 steps, not 10, on at most 16 tokens per cluster, since more change little;
dropout acts on the softmax over T.
Exact when: topk >= N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import clustered, masks, native, softmax
from zoo_core.nn.clustering import cluster, group, pick
from zoo_core.nn.scores import dot_product

if TYPE_CHECKING:
    from zoo_attention.improved_clustered import ImprovedClusteredOptions


@dataclass(frozen=True, eq=False)
class TopKeys:
    """What the clusters of queries attend to.

    cluster: (B, H, N), the cluster of each query.
    top: (B, H, C, T), the top keys of each cluster. real: which of them are no padding, bool
    (B, H, C, T), or None; padding comes in only where a sample has fewer than T keys.
    share: (B, H, C, 1), what the cluster gives to its top keys. rest: (B, H, C, N), its weights of
    the other keys, 0 at the top ones. Both in at least fp32.
    """

    cluster: Tensor
    top: Tensor
    real: Tensor | None
    share: Tensor
    rest: Tensor


class ImprovedClusteredAttention(nn.Module):
    """Clustered attention with each query's own weights for the top keys; no parameters."""

    def __init__(self, site: Site, options: ImprovedClusteredOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.clusters = options.clusters
        self.topk = options.topk
        self.iterations = options.iterations

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        dropout = self.dropout if self.training else 0.0
        if native.suits(q, k, v) and not dropout:
            how = clustered.How(
                clusters=self.clusters,
                iterations=self.iterations,
                topk=self.topk,
                scale=self.scale,
                plain=lambda q, k, v: self._plain(q, k, v, ctx.key_padding, 0.0),
            )
            return clustered.attend(q, k, v, ctx.key_padding, how)
        return self._plain(q, k, v, ctx.key_padding, dropout)

    def _plain(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, dropout: float
    ) -> Tensor:
        q, k, v = (masks.hide(x, real) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            keys = self._top_keys(q, k, real)
            # So few keys cost less in whole rows than copied for each block of queries.
            few = q.shape[-2] <= self.clusters * self.topk // 4
            attend = self._in_rows if few else self._in_blocks
            return attend(q, k, v, keys, dropout).to(v.dtype)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, N, N)."""
        q, k = masks.hide(q, ctx.key_padding), masks.hide(k, ctx.key_padding)
        return self._weights(q, k, self._top_keys(q, k, ctx.key_padding))

    def _top_keys(self, q: Tensor, k: Tensor, real: Tensor | None) -> TopKeys:
        """Cluster the queries and attend with the mean of each cluster."""
        index, queries = cluster(q, real, self.clusters, self.iterations)
        scores = dot_product(queries, k, None, scale=self.scale)
        mask = None if real is None else real[:, None, None].expand_as(scores)
        weights = softmax.masked_softmax(scores, mask)
        ranked = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        top = ranked.topk(min(self.topk, k.shape[-2]), sorted=False).indices
        return TopKeys(
            cluster=index,
            top=top,
            real=None if mask is None else mask.gather(-1, top),
            share=weights.gather(-1, top).sum(-1, keepdim=True),
            rest=weights.scatter(-1, top, 0),
        )

    def _weights(self, q: Tensor, k: Tensor, keys: TopKeys) -> Tensor:
        """The weights of every query (B, H, N, N), in at least fp32."""
        top, share, rest = (pick(x, keys.cluster) for x in (keys.top, keys.share, keys.rest))
        real = None if keys.real is None else pick(keys.real, keys.cluster)
        scores = dot_product(q, k, None, scale=self.scale)
        own = softmax.masked_softmax(scores.gather(-1, top), real)
        return rest.scatter_(-1, top, share * own)

    def _in_rows(self, q: Tensor, k: Tensor, v: Tensor, keys: TopKeys, dropout: float) -> Tensor:
        """Attend to all keys, of which a mask leaves those at the top."""
        low, shape = torch.finfo(q.dtype).min, keys.rest.shape
        seen = 0.0 if keys.real is None else q.new_zeros(()).where(keys.real, low)
        mask = q.new_full(shape, low).scatter_(-1, keys.top, seen)
        own = F.scaled_dot_product_attention(
            q,
            k.to(q.dtype),
            v.to(q.dtype),
            attn_mask=pick(mask, keys.cluster),
            dropout_p=dropout,
            scale=self.scale,
        )
        rest = keys.rest @ v.to(keys.rest.dtype)
        share, rest = pick(torch.cat([keys.share, rest], -1), keys.cluster).tensor_split([1], -1)
        return torch.addcmul(rest, share, own.to(rest.dtype))

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, keys: TopKeys, dropout: float) -> Tensor:
        """Attend block by block, each of queries of one cluster, to a copy of its top keys."""
        clusters, topk = keys.top.shape[2:]
        rest = keys.rest @ v.to(keys.rest.dtype)
        top = keys.top.flatten(2)
        top_values = pick(v, top).unflatten(2, (clusters, topk))
        top_values = keys.share[..., None] * top_values
        if not dropout:
            # The softmax over T sums to one: what is added to each of its values comes out once.
            top_values = top_values + rest[..., None, :]
        top_values = top_values.to(q.dtype)
        top_keys = pick(k, top).unflatten(2, (clusters, topk)).to(q.dtype)
        groups = group(keys.cluster, clusters, size=16 if q.shape[-2] <= 64 * clusters else 32)

        def per_block(x: Tensor) -> Tensor:
            """Copy x (B, H, C, T, D) for the blocks of each cluster: (B * H * M, 1, T, D)."""
            return pick(x.flatten(3), groups.group).view(-1, 1, topk, x.shape[-1])

        queries = groups.split(q)
        out = F.scaled_dot_product_attention(
            queries.flatten(0, 2)[:, None],
            per_block(top_keys),
            per_block(top_values),
            attn_mask=None if keys.real is None else per_block(keys.real[..., None]).mT,
            dropout_p=dropout,
            scale=self.scale,
        )
        out = groups.join(out.view(*queries.shape[:-1], -1))
        return out + pick(rest, keys.cluster) if dropout else out
