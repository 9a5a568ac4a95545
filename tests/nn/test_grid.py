from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import grid as grids

SHAPES = pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 1), (2, 3, 4)], ids=str)


def cells(shape: tuple[int, ...], width: int = 5, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, *shape, width, generator=source, dtype=torch.float64)


@SHAPES
@pytest.mark.parametrize("prefix", [0, 2])
def test_join_undoes_split(shape: tuple[int, ...], prefix: int) -> None:
    grid = grids.Grid(prefix, shape)
    x = torch.randn(2, 3, prefix + grid.cells, 5)
    first, rest = grid.split(x)
    assert torch.equal(first, x[:, :, :prefix])
    assert rest.shape == (2, 3, *shape, 5)
    assert torch.equal(grid.join(first, rest), x)


def test_cells_are_numbered_row_by_row() -> None:
    x = torch.arange(8).view(1, 1, 8, 1)
    _, rest = grids.Grid(2, (2, 3)).split(x)
    assert rest[0, 0, ..., 0].tolist() == [[2, 3, 4], [5, 6, 7]]


@SHAPES
def test_lines_hold_what_differs_in_one_axis_only(shape: tuple[int, ...]) -> None:
    x = cells(shape)
    for axis, length in enumerate(shape):
        cut = grids.lines(x, axis)
        others = x.movedim(2 + axis, -2).flatten(2, -3)  # (B, H, lines, length, D)
        assert cut.shape == (2 * others.shape[2], 3, length, 5)
        for b in range(2):
            for i in range(others.shape[2]):
                assert torch.equal(cut[b * others.shape[2] + i], others[b, :, i])
        assert torch.equal(grids.cells_of(cut, axis, shape), x)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_each_cell_attends_along_its_line_and_to_the_prefix(axis: int, prefix: int) -> None:
    q, k, v = (cells((3, 4), seed=seed) for seed in range(3))
    first = tuple(torch.randn(2, 3, prefix, 5, dtype=torch.float64) for _ in range(2))
    got = grids.attend_along(axis, q, k, v, first if prefix else None, scale=0.4)
    for row in range(3):
        for col in range(4):
            line = (slice(None), col) if axis == 0 else (row, slice(None))
            keys = torch.cat([first[0], k[:, :, *line]], 2)
            values = torch.cat([first[1], v[:, :, *line]], 2)
            scores = 0.4 * torch.einsum("bhd,bhsd->bhs", q[:, :, row, col], keys)
            wanted = torch.einsum("bhs,bhse->bhe", scores.softmax(-1), values)
            torch.testing.assert_close(got[:, :, row, col], wanted, rtol=0, atol=1e-12)


def test_a_call_without_a_grid_is_refused() -> None:
    with pytest.raises(UnsupportedCall, match=r"axial needs the .* grid of the 7 tokens"):
        grids.layout(Context(), 7, owner="axial")


def test_a_grid_of_other_tokens_is_refused_with_all_numbers() -> None:
    with pytest.raises(UnsupportedCall, match=r"got 9 tokens.* 1 prefix .* 6 cells .*\(2, 3\)"):
        grids.layout(Context(grid=(2, 3), prefix=1), 9, owner="axial")


def test_frames_are_refused_where_only_a_plane_has_a_meaning() -> None:
    ctx = Context(grid=(2, 2, 2))
    assert grids.layout(ctx, 8, owner="axial").shape == (2, 2, 2)
    with pytest.raises(UnsupportedCall, match=r"gpsa works on a grid of \(rows, cols\)"):
        grids.layout(ctx, 8, owner="gpsa", planar=True)
