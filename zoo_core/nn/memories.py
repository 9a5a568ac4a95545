"""The memory of kernel attention, what its keys leave behind: sum_j phi(k_j) [v_j, 1]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.nn import masks
from zoo_core.nn.feature_maps import FeatureMap
from zoo_core.nn.precision import divide


def memory(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> Tensor:
    """sum_j phi(k_j) [v_j, 1] over the real keys, (B, H, M, E + 1)."""
    keys, values, total = gathered(phi, k, v, key_padding, wide)
    return torch.cat([keys.mT @ values, total.mT], -1)


def gathered(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(k) (B, H, S, M), v zeroed for padding, and the sum of phi(k) over the real keys."""
    keys = phi(masks.hide(k, key_padding).to(wide))
    values = masks.hide(v, key_padding).to(wide)
    if key_padding is None:
        return keys, values, keys.sum(-2, keepdim=True)
    return keys, values, key_padding[:, None, None].to(wide) @ keys


def written(
    phi: FeatureMap, k: Tensor, v: Tensor, key_padding: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """phi(k) (B, H, S, M) and [v, 1] (B, H, S, E + 1), the latter zeroed for padding.

    With the ones one product yields numerator and denominator.
    """
    values = masks.hide(F.pad(v.to(wide), (0, 1), value=1), key_padding)
    return phi(masks.hide(k, key_padding).to(wide)), values


def quotient(sums: Tensor) -> Tensor:
    """What queries read as sums of [v, 1] (..., E + 1), as means of v (..., E)."""
    return divide(*torch.split(sums, [sums.shape[-1] - 1, 1], -1))
