"""From maps to meaning: attention rollout over the layers, and CLS maps over the image.

Rollout: R = A_L ... A_1 with A_l = (1 - skip) mean_h(P_l) + skip I, rows made to sum to one.

Abnar, Zuidema, "Quantifying Attention Flow in Transformers", 2020, arXiv:2005.00928.
Deviations: effective maps may hold negative numbers, of which the sizes are taken.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from zoo_core.diagnose.maps import AttentionMaps, Labels
from zoo_core.errors import OptionError

Fusion = Literal["mean", "max", "min"]


def fused(weights: Tensor, fusion: Fusion = "mean") -> Tensor:
    """One map (B, L, S) for all heads of (B, H, L, S)."""
    if fusion not in ("mean", "max", "min"):
        raise OptionError(f"fusion={fusion!r} must be 'mean', 'max' or 'min'")
    if fusion == "mean":
        return weights.mean(1)
    return weights.amax(1) if fusion == "max" else weights.amin(1)


def rollout(maps: AttentionMaps, *, fusion: Fusion = "mean", skip: float = 0.5) -> Tensor:
    """How much of each input token (column) reaches each output token (row), (B, N, N).

    maps: of all self-attention layers, in order. fusion: how heads are joined. skip: the part of
    the skip connection. Rows sum to 1; a padded token keeps itself.
    Raises OptionError without maps, or where one is not square.
    """
    if not 0 <= skip < 1:
        raise OptionError(f"skip={skip} must be at least 0 and below 1")
    total: Tensor | None = None
    for path, weights in maps.items():
        if weights.shape[-1] != weights.shape[-2]:
            raise OptionError(
                f"{path}: a map of {weights.shape[-2]} queries and {weights.shape[-1]} keys cannot "
                'be rolled out; take maps with layers="self", without a cache'
            )
        total = rolled(total, weights, fusion=fusion, skip=skip)
    if total is None:
        raise OptionError("rollout needs the maps of the layers; there are none")
    return total


def rolled(
    total: Tensor | None, weights: Tensor, *, fusion: Fusion = "mean", skip: float = 0.5
) -> Tensor:
    """A rollout (B, N, N), or None before the first layer, with one more map (B, H, N, N)."""
    step = _stochastic(fused(weights.abs(), fusion))
    one = torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
    step = (1 - skip) * step + skip * one
    return step if total is None else step @ total


def cls_map(
    weights: Tensor, labels: Labels, *, token: int = 0, grid: tuple[int, ...] | None = None
) -> Tensor:
    """What one prefix token sees of the image, (B, *grid): a row of (B, N, N) or (B, H, N, N).

    weights: one map, or a rollout. Heads are averaged. token: 0 = CLS, 1 = DeiT's distillation
    token. grid: where the labels do not know it (images of another size than the model's own).
    Raises OptionError where the tokens after the prefix do not fill the grid.
    """
    grid = grid or labels.grid
    prefix = int(labels.prefix[0].sum())
    if grid is None or math.prod(grid) != weights.shape[-1] - prefix:
        raise OptionError(
            f"{weights.shape[-1] - prefix} tokens after {prefix} of prefix do not fill the grid "
            f"{grid}; pass grid=(rows, cols)"
        )
    if not 0 <= token < prefix:
        raise OptionError(f"token={token} is no prefix token; the model has {prefix}")
    rows = (weights.mean(1) if weights.dim() == 4 else weights)[:, token, prefix:]
    return rows.reshape(len(rows), *grid)


def _stochastic(weights: Tensor) -> Tensor:
    """Make the rows sum to 1; a row of zeros, a padded query, sees itself."""
    total = weights.sum(-1, keepdim=True)
    one = torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
    return torch.where(total > 0, weights / total.clamp(min=1e-30), one)
