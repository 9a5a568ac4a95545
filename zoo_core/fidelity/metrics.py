"""Agreement of two sets of embeddings of the same texts: (n, dim) each, row i = text i."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_core.errors import ZooError


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean of the real tokens: hidden (B, N, dim), mask (B, N), 1 or True = real -> (B, dim)."""
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(-2) / weights.sum(-2).clamp_min(1)


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Mean cosine of each embedding to its original."""
    return torch.cosine_similarity(ours, theirs, dim=-1).mean().item()


def similarity_correlation(ours: Tensor, theirs: Tensor) -> float:
    """Pearson correlation of the n(n-1)/2 pairwise cosine similarities."""
    first, second = torch.triu_indices(len(ours), len(ours), offset=1)
    pairs = torch.stack([_similarities(x)[first, second] for x in (ours, theirs)])
    return torch.corrcoef(pairs)[0, 1].item()


def neighbours_kept(ours: Tensor, theirs: Tensor, *, k: int = 5) -> float:
    """Share of each text's k nearest neighbours that stay among its k nearest."""
    if not 1 <= k < len(ours):
        raise ZooError(f"k={k} neighbours need more than {k} texts, got {len(ours)}")
    near = [_similarities(x).fill_diagonal_(-2).topk(k).indices for x in (ours, theirs)]
    return (near[0][:, :, None] == near[1][:, None, :]).any(-1).float().mean().item()


def _similarities(x: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(x.float(), dim=-1)
    return unit @ unit.mT
