from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.tied_axial import TIED_AXIAL, TiedAxialOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 4
SCALE = WIDTH**-0.5
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=8, scale=SCALE, grid=(3, 4))
GRIDS = pytest.mark.parametrize("grid", [(1, 1), (1, 5), (3, 4), (5, 1), (2, 3, 2)], ids=str)
PREFIXES = pytest.mark.parametrize("prefix", [0, 2], ids=["no-prefix", "prefix-2"])


def build(**options: object) -> nn.Module:
    return TIED_AXIAL.factory(SITE, TiedAxialOptions(**options)).double().eval()


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def by_formula(q: Tensor, k: Tensor, v: Tensor, rows: int, prefix: int, *, columns: bool) -> Tensor:
    """Token by token, cell (r, c) being token prefix + r * cols + c."""
    cols = (q.shape[2] - prefix) // rows
    first = list(range(prefix))

    def row(r: int) -> list[int]:
        """What stands in row r: the prefix and its cells."""
        return first + [prefix + r * cols + c for c in range(cols)]

    out = (q @ k.mT * SCALE).softmax(-1) @ v
    tied = out.clone()
    for c in range(cols):
        scores = sum(
            torch.einsum("bhd,bhsd->bhs", q[:, :, prefix + r * cols + c], k[:, :, row(r)])
            for r in range(rows)
        )
        shares = (scores * SCALE / rows**0.5).softmax(-1)
        for r in range(rows):
            at = prefix + r * cols + c
            tied[:, :, at] = torch.einsum("bhs,bhse->bhe", shares, v[:, :, row(r)])
    if not columns:
        return tied
    for c in range(cols):
        column = [prefix + r * cols + c for r in range(rows)]
        shares = (q[:, :, column] @ k[:, :, column].mT * SCALE).softmax(-1)
        out[:, :, column] = shares @ tied[:, :, column]
    return out


@GRIDS
@PREFIXES
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "rows-alone"])
def test_it_computes_its_formula(grid, prefix: int, columns: bool) -> None:
    q, k, v = inputs(prefix + torch.Size(grid).numel())
    wanted = by_formula(q, k, v, grid[0], prefix, columns=columns)
    got = build(columns=columns)(q, k, v, Context(grid=grid, prefix=prefix))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@PREFIXES
@pytest.mark.parametrize("columns", [True, False], ids=["columns", "rows-alone"])
def test_a_single_row_is_softmax_attention(prefix: int, columns: bool) -> None:
    q, k, v = inputs(prefix + 7)
    wanted = (q @ k.mT * SCALE).softmax(-1) @ v
    got = build(columns=columns)(q, k, v, Context(grid=(1, 7), prefix=prefix))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_identical_rows_multiply_the_scores_by_the_root_of_their_number() -> None:
    rows, cols = 4, 5
    q, k, v = inputs(cols)
    stacked = (x.repeat(1, 1, rows, 1) for x in (q, k, v))
    wanted = (q @ k.mT * SCALE * rows**0.5).softmax(-1) @ v
    got = build()(*stacked, Context(grid=(rows, cols)))
    torch.testing.assert_close(got, wanted.repeat(1, 1, rows, 1), rtol=0, atol=1e-12)


def test_all_rows_attend_by_one_map() -> None:
    """The column that a row looks at may be told by the queries and keys of another row alone."""
    q, k, v = inputs(12)
    rows = torch.arange(12) // 4
    for x in (q, k):
        x[:, :, rows != 1] = 0
    q, k = q.repeat(1, 1, 1, 5), k.repeat(1, 1, 1, 5)  # sharp
    got = build(columns=False)(q, k, v, Context(grid=(3, 4))).unflatten(2, (3, 4))
    shares = (q[:, :, rows == 1] @ k[:, :, rows == 1].mT * SCALE / 3**0.5).softmax(-1)
    wanted = shares[:, :, None] @ v.unflatten(2, (3, 4))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
