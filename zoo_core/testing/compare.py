"""Comparisons whose failures say what differs, where, and by how much."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_core.testing.conformance import ConformanceFailure


def expect(condition: bool, where: object, expected: str, got: str) -> None:
    """Raise ConformanceFailure unless `condition` holds."""
    if not condition:
        raise ConformanceFailure(str(where), expected, got)


def expect_close(
    got: Tensor, wanted: Tensor, where: object, expected: str, *, tolerance: float = 1e-9
) -> None:
    """Values may differ by `tolerance` times the largest magnitude in `wanted` (at least 1)."""
    got, wanted = got.detach(), wanted.detach()
    if got.shape != wanted.shape:
        raise ConformanceFailure(str(where), expected, f"shape {_shape(got)}")
    if got.numel() == 0:
        return
    scale = max(1.0, wanted.abs().max().item())
    difference = (got.double() - wanted.double()).abs().nan_to_num(nan=torch.inf)
    largest = difference.max().item()
    if largest > tolerance * scale:
        raise ConformanceFailure(
            str(where), f"{expected} (within {tolerance * scale:.1g})", _worst(got, wanted)
        )


def expect_bits(got: Tensor, wanted: Tensor, where: object, expected: str) -> None:
    """The same shape, dtype and bits; NaN equals NaN."""
    same = got.shape == wanted.shape and got.dtype == wanted.dtype
    if not (same and torch.equal(_bits(got), _bits(wanted))):
        shown = _worst(got.detach(), wanted.detach()) if same else f"{got.dtype} {_shape(got)}"
        raise ConformanceFailure(str(where), f"{expected}, bit for bit", shown)


def expect_finite(got: Tensor | None, where: object, what: str) -> None:
    """Neither NaN nor infinity; None (no gradient) passes."""
    if got is not None and not got.isfinite().all():
        bad = int((~got.isfinite()).sum())
        raise ConformanceFailure(
            str(where), f"{what} finite", f"{bad} of {got.numel()} values are NaN or infinite"
        )


def changed(got: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    if got.shape != wanted.shape:
        return True
    return not torch.allclose(got, wanted, rtol=1e-7, atol=1e-9)


def _bits(x: Tensor) -> Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(width)


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _worst(got: Tensor, wanted: Tensor) -> str:
    """The largest difference, with its place and both values."""
    if got.numel() == 0 or got.dim() == 0:
        return f"{got.tolist()} instead of {wanted.tolist()}"
    difference = (got.double() - wanted.double()).abs().nan_to_num(nan=torch.inf)
    place = torch.unravel_index(difference.argmax(), got.shape)
    index = tuple(int(i) for i in place)
    names = ("sample", "head", "token", "channel") if got.dim() == 4 else ("index",) * got.dim()
    spot = ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True))
    count = int((difference > 0).sum())
    return (
        f"{got[index].item():.6g} instead of {wanted[index].item():.6g} at ({spot}), the largest "
        f"of {count} differences among {got.numel()} values"
    )
