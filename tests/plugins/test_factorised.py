from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.factorised import FACTORISED, FactorisedOptions
from zoo_core import Context, Site

WIDTH = 4
SCALE = WIDTH**-0.5
GRIDS = pytest.mark.parametrize(
    "grid", [(1, 1), (3, 4), (5, 1), (3, 2, 2), (1, 2, 3), (4, 1, 1)], ids=str
)
PREFIXES = pytest.mark.parametrize("prefix", [0, 2], ids=["no-prefix", "prefix-2"])


def build(heads: int, **options: object) -> nn.Module:
    site = Site(heads=heads, head_dim=WIDTH, dim=heads * WIDTH, scale=SCALE, grid=(3, 4))
    return FACTORISED.factory(site, FactorisedOptions(**options)).double().eval()


def inputs(heads: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def by_formula(q: Tensor, k: Tensor, v: Tensor, frames: int, prefix: int, spatial: int) -> Tensor:
    """Dense attention, head by head, under a mask of who sees whom."""
    length = q.shape[2]
    places = (length - prefix) // frames
    cell = torch.arange(length) - prefix
    frame, place = cell.div(places, rounding_mode="floor"), cell % places
    outside = (cell < 0)[:, None] | (cell < 0)
    heads = []
    for h in range(q.shape[1]):
        own = frame if h < spatial else place
        mask = outside | (own[:, None] == own)
        scores = (q[:, h] @ k[:, h].mT * SCALE).masked_fill(~mask, -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, h])
    return torch.stack(heads, 1)


@GRIDS
@PREFIXES
@pytest.mark.parametrize(
    ("heads", "temporal", "spatial"),
    [(4, 0.5, 2), (3, 0.5, 2), (1, 0.5, 1), (3, 0.0, 3), (3, 1.0, 0)],
    ids=["half-of-4", "half-of-3", "half-of-1", "all-spatial", "all-temporal"],
)
def test_it_computes_its_formula(grid, prefix, heads: int, temporal: float, spatial: int) -> None:
    q, k, v = inputs(heads, prefix + torch.Size(grid).numel())
    wanted = by_formula(q, k, v, grid[0], prefix, spatial)
    got = build(heads, temporal=temporal)(q, k, v, Context(grid=grid, prefix=prefix))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_one_frame_leaves_softmax_in_space_and_the_value_itself_in_time() -> None:
    q, k, v = inputs(4, 6)
    got = build(4)(q, k, v, Context(grid=(1, 2, 3)))
    wanted = (q @ k.mT * SCALE).softmax(-1) @ v
    torch.testing.assert_close(got[:, :2], wanted[:, :2], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[:, 2:], v[:, 2:], rtol=0, atol=1e-12)


@PREFIXES
def test_one_frame_without_temporal_heads_is_softmax_attention(prefix: int) -> None:
    q, k, v = inputs(2, prefix + 6)
    got = build(2, temporal=0.0)(q, k, v, Context(grid=(1, 2, 3), prefix=prefix))
    wanted = (q @ k.mT * SCALE).softmax(-1) @ v
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
