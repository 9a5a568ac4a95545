"""In what precision to sum, and which sums are too small to divide by."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to sum in: the widest of the tensors', and at least fp32."""
    wide = torch.float32
    for tensor in tensors:
        wide = torch.promote_types(wide, tensor.dtype)
    return wide


def divide(sums: Tensor, total: Tensor, *, out: Tensor | None = None) -> Tensor:
    """sums / total of weights; a negligible total leaves sums, as negligible, as they are.

    out: where to write it, without gradients.
    """
    return torch.div(sums, total.where(total > negligible(total.dtype), 1), out=out)


def negligible(dtype: torch.dtype) -> float:
    """The total weight that counts as zero: 1 / total, and its gradient, stay finite above it."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps
