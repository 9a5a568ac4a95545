"""Two implementations on the same weights: a peer projects its input, and ours gets the result."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo_core import Mechanism, Site

HEADS, WIDTH = 2, 8
DIM = HEADS * WIDTH


def ours(
    record: Mechanism,
    *,
    heads: int = HEADS,
    width: int = WIDTH,
    scale: float | None = None,
    max_len: int = 128,
    **options: object,
) -> nn.Module:
    """The module of a mechanism, in float64; scale: of the scores, by default width ** -0.5."""
    site = Site(
        heads=heads,
        head_dim=width,
        dim=heads * width,
        scale=width**-0.5 if scale is None else scale,
        max_len=max_len,
    )
    return record.factory(site, record.options(**options)).double().eval()


def normal(*shape: int) -> Tensor:
    """Independent numbers in float64."""
    return torch.randn(shape, dtype=torch.float64)


def first(real: int, length: int) -> Tensor:
    """The key padding (1, length) of a sample whose first `real` tokens are real."""
    return (torch.arange(length) < real)[None]


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    """(B, N, H * D) as a projection gives it -> (B, H, N, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def project(x: Tensor, *projections: nn.Module, heads: int = HEADS) -> tuple[Tensor, ...]:
    """What each projection gives for x (B, N, dim), (B, H, N, D)."""
    return tuple(split(projection(x), heads) for projection in projections)


def join(x: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H * D)."""
    return x.transpose(1, 2).flatten(2)


def assert_same(got: Tensor, wanted: Tensor, atol: float = 1e-10) -> None:
    """Equal to `atol`, whatever their size."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference between two tensors."""
    return (one - other).abs().max().item()
