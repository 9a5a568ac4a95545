from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.axial import AXIAL, AxialOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 4
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=8, scale=WIDTH**-0.5, grid=(3, 4))
GRIDS = pytest.mark.parametrize("grid", [(1, 1), (3, 4), (5, 2), (2, 3, 2)], ids=str)
PREFIXES = pytest.mark.parametrize("prefix", [0, 2], ids=["no-prefix", "prefix-2"])


def build(combine: str) -> nn.Module:
    return AXIAL.factory(SITE, AxialOptions(combine=combine)).double().eval()


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def along(axis: int, grid: tuple[int, ...], prefix: int, q: Tensor, k: Tensor) -> Tensor:
    """The map at which a cell sees the prefix and what differs from it in `axis` only."""
    cells = list(product(*map(range, grid)))
    length = prefix + len(cells)
    mask = torch.ones(length, length, dtype=torch.bool)
    for i, one in enumerate(cells):
        for j, two in enumerate(cells):
            others = [a == b for n, (a, b) in enumerate(zip(one, two, strict=True)) if n != axis]
            mask[prefix + i, prefix + j] = all(others)
    return (q @ k.mT * WIDTH**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)


@GRIDS
@PREFIXES
def test_in_sequence_it_attends_along_one_axis_after_the_other(grid, prefix: int) -> None:
    q, k, v = inputs(prefix + torch.Size(grid).numel())
    *others, last = range(len(grid))
    step = along(last, grid, prefix, q, k) @ v
    for axis in reversed(others):
        cells = along(axis, grid, 0, q[:, :, prefix:], k[:, :, prefix:]) @ step[:, :, prefix:]
        step = torch.cat([step[:, :, :prefix], cells], 2)
    got = build("sequence")(q, k, v, Context(grid=grid, prefix=prefix))
    torch.testing.assert_close(got, step, rtol=0, atol=1e-12)


@GRIDS
@PREFIXES
def test_the_mean_is_over_the_axes(grid, prefix: int) -> None:
    q, k, v = inputs(prefix + torch.Size(grid).numel())
    maps = torch.stack([along(axis, grid, prefix, q, k) for axis in range(len(grid))])
    got = build("mean")(q, k, v, Context(grid=grid, prefix=prefix))
    torch.testing.assert_close(got, maps.mean(0) @ v, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("combine", "reached"), [("sequence", 12), ("mean", 6)])
def test_a_cell_reaches_the_grid_or_its_cross(combine: str, reached: int) -> None:
    q, k, v = inputs(12)
    module, moved = build(combine), v.clone()
    moved[:, :, 5] += 1
    ctx = Context(grid=(3, 4))
    change = module(q, k, moved, ctx) - module(q, k, v, ctx)
    assert int((change.abs().amax((0, 1, 3)) > 1e-9).sum()) == reached


@PREFIXES
def test_a_single_row_is_softmax_attention(prefix: int) -> None:
    q, k, v = inputs(prefix + 7)
    wanted = (q @ k.mT * WIDTH**-0.5).softmax(-1) @ v
    got = build("sequence")(q, k, v, Context(grid=(1, 7), prefix=prefix))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("combine", ["sequence", "mean"])
def test_the_transposed_grid_is_another_input(combine: str) -> None:
    """Rows and columns are told apart, which a square root of the length would not do."""
    q, k, v = inputs(12)
    module = build(combine)
    wide, high = (module(q, k, v, Context(grid=grid)) for grid in ((3, 4), (4, 3)))
    assert (wide - high).abs().amax() > 1e-2
