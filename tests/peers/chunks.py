"""Reformer's pattern from its buckets: who sees whom, but for the queries of the first chunk.

The public versions let the first chunk of a round see the last one of the round before, ours the
second of the same round.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_of(buckets: Tensor, chunk: int) -> Tensor:
    """The chunk of each token in each round, (..., R, N), tokens sorted by bucket, then place."""
    places = buckets.argsort(dim=-1, stable=True).argsort(dim=-1)
    return places // chunk


def beyond_first(buckets: Tensor, chunk: int) -> Tensor:
    """Which queries are in no round in the first chunk, bool (..., N)."""
    return (chunk_of(buckets, chunk) > 0).all(-2)


def by_formula(q: Tensor, v: Tensor, times: Tensor) -> Tensor:
    """Weights times_ij exp(q_i . q_j / |q_j|), zero for i = j, over their sum: (..., N, E)."""
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).mT
    apart = times * (1 - torch.eye(q.shape[-2], dtype=q.dtype))
    weights = apart * (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def meetings(buckets: Tensor, chunk: int) -> Tensor:
    """In how many rounds each query sees each key, (..., N, N)."""
    chunks = chunk_of(buckets, chunk)
    back = chunks[..., :, None] - chunks[..., None, :]
    return ((back == 0) | (back == 1)).sum(-3)
