"""Agreement of two sets of embeddings of the same texts: (n, dim) each, row i = text i."""

from __future__ import annotations

from collections.abc import Callable

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
    pairs = torch.stack([similarities(x)[first, second] for x in (ours, theirs)])
    return torch.corrcoef(pairs)[0, 1].item()


def neighbours_kept(ours: Tensor, theirs: Tensor, *, k: int = 5) -> float:
    """Share of each text's k nearest neighbours that stay among its k nearest."""
    return neighbours_kept_of_each(ours, theirs, k=k).mean().item()


def neighbours_kept_of_each(ours: Tensor, theirs: Tensor, *, k: int = 5) -> Tensor:
    """The same for each text, (n,)."""
    if not 1 <= k < len(ours):
        raise ZooError(f"k={k} neighbours need more than {k} texts, got {len(ours)}")
    near = [similarities(x).fill_diagonal_(-2).topk(k).indices for x in (ours, theirs)]
    return (near[0][:, :, None] == near[1][:, None, :]).any(-1).float().mean(-1)


def similarities(x: Tensor) -> Tensor:
    """The cosine of every pair, (n, n)."""
    unit = torch.nn.functional.normalize(x.float(), dim=-1)
    return unit @ unit.mT


def resampled_mean(values: Tensor, *, resamples: int, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of values (n,), one for each text."""
    return _interval(lambda drawn: values[drawn].mean(-1), len(values), resamples, seed)


def resampled_correlation(
    ours: Tensor, theirs: Tensor, *, resamples: int, seed: int
) -> tuple[float, float]:
    """95 % bootstrap interval of the similarity correlation, over the texts.

    A text that is drawn twice makes a pair with itself, which says nothing and is left out.
    """
    both = [similarities(ours), similarities(theirs)]

    def correlation(drawn: Tensor) -> Tensor:
        rows, columns = drawn[:, :, None], drawn[:, None, :]
        weight = (rows != columns).float()
        x, y = (matrix[rows, columns] for matrix in both)
        total = weight.sum((-2, -1)).clamp_min(1)
        x, y = (z - ((z * weight).sum((-2, -1)) / total)[:, None, None] for z in (x, y))
        spread = ((x * x * weight).sum((-2, -1)) * (y * y * weight).sum((-2, -1))).sqrt()
        return (x * y * weight).sum((-2, -1)) / spread.clamp_min(1e-12)

    return _interval(correlation, len(ours), resamples, seed)


_AT_ONCE = 50


def _interval(
    statistic: Callable[[Tensor], Tensor], count: int, resamples: int, seed: int
) -> tuple[float, float]:
    """The middle 95 % of a statistic over resamples: drawn (R, n) -> (R,)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    found = torch.cat([statistic(part) for part in torch.split(drawn, _AT_ONCE)]).float()
    low, high = torch.quantile(found, torch.tensor([0.025, 0.975])).tolist()
    return low, high
