"""The kernel for tiles against a dense softmax that is written from the runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from zoo_core.errors import UnsupportedCall
from zoo_core.nn import tiles

pytestmark = pytest.mark.usefixtures("native_kernels")

SCALE = 0.3
#: What a run shows to whom: start, count, first, first_step, last, last_step.
Run = tuple[int, int, int, int, int, int]
NONE: Run = (0, 0, 0, 0, 0, 0)


def layout(*of_tiles: Sequence[Run]) -> Tensor:
    """Runs (1, 1, R, P, 6) of one tile after the other."""
    most = max(map(len, of_tiles))
    rows = [[*runs, *[NONE] * (most - len(runs))] for runs in of_tiles]
    return torch.tensor(rows, dtype=torch.int32)[None, None]


def shown(runs: Tensor, borders: Tensor, keys: int) -> Tensor:
    """Who sees whom, (B or 1, H or 1, L, S), by the words of `nn.tiles`."""
    edges = borders.tolist()
    mask = torch.zeros(*runs.shape[:2], edges[-1], keys, dtype=torch.bool)
    for b, of_sample in enumerate(runs.tolist()):
        for h, of_head in enumerate(of_sample):
            for begin, stop, of_tile in zip(edges, edges[1:], of_head, strict=False):
                for start, count, first, first_step, last, last_step in of_tile:
                    for t in range(count):
                        low = begin + max(first + t * first_step, 0)
                        high = min(begin + last + t * last_step, stop - 1)
                        mask[b, h, low : high + 1, start + t] = True
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT * SCALE).masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~mask, 0)
    return weights @ v


def check(
    runs: Tensor,
    borders: Tensor,
    *,
    keys: int,
    width: int = 16,
    values: int = 16,
    batch: int = 2,
    heads: int = 2,
) -> None:
    """Outputs and gradients are those of the dense softmax, which is computed in float64."""
    torch.manual_seed(0)
    mask, length = shown(runs, borders, keys), int(borders[-1])
    shapes = [(length, width), (keys, width), (keys, values), (length, values)]
    # As a host has them, tokens before heads.
    *leaves, grad = (torch.randn(batch, n, heads, w).transpose(1, 2) for n, w in shapes)
    single = [x.detach().requires_grad_() for x in leaves]
    double = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = single
    got = tiles.attend(q, k, v, runs, borders, scale=SCALE)
    wanted = dense(*double, mask)
    found = [got, *torch.autograd.grad(got, single, grad)]
    right = [wanted, *torch.autograd.grad(wanted, double, grad.double())]
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


ALL: Run = (0, 100, 0, 0, 63, 0)
LAYOUTS = {
    "all": layout([ALL], [ALL]),
    "some keys": layout([(3, 40, 0, 0, 63, 0)], [(60, 40, 0, 0, 63, 0)]),
    "overlapping": layout(
        [(0, 50, 0, 0, 40, 0), (30, 60, 20, 0, 63, 0)], [ALL, (0, 9, 0, 0, 5, 0)]
    ),
    "a tile without keys": layout([NONE], [(5, 20, 0, 0, 63, 0)]),
    "queries without keys": layout([(0, 30, 10, 0, 20, 0)], [(0, 30, 3, 0, 3, 0)]),
    "causal": layout([(0, 64, 0, 1, 63, 0)], [(0, 64, 0, 0, 63, 0), (64, 36, 0, 1, 63, 0)]),
    "a band": layout([(0, 74, -10, 1, 10, 1)], [(54, 46, -20, 1, 0, 1)]),
    "beyond the tile": layout([(0, 5, -99, 0, 999, 0)], [(0, 5, 70, 0, 90, 0)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_queries_see_what_runs_show(name: str) -> None:
    check(LAYOUTS[name], torch.tensor([0, 64, 100]), keys=100)


@pytest.mark.parametrize(("width", "values"), [(16, 48), (48, 16), (64, 64), (80, 80), (128, 16)])
def test_widths(width: int, values: int) -> None:
    check(LAYOUTS["overlapping"], torch.tensor([0, 64, 100]), keys=100, width=width, values=values)


@pytest.mark.parametrize("last", [1, 15, 16, 17, 36, 63, 64])
def test_the_last_tile_may_be_short(last: int) -> None:
    check(LAYOUTS["causal"], torch.tensor([0, 64, 64 + last]), keys=100)


@pytest.mark.parametrize(("batch", "heads"), [(3, 1), (1, 2), (3, 2)])
def test_samples_and_heads_may_have_runs_of_their_own(batch: int, heads: int) -> None:
    of_one = torch.cat([LAYOUTS["overlapping"], LAYOUTS["overlapping"].flip(2)])
    chosen = torch.arange(batch * heads).view(batch, heads) % 2
    runs = of_one[chosen, 0]
    check(runs, torch.tensor([0, 64, 100]), keys=100, batch=3, heads=2)


def test_borders_cut_tiles_where_other_keys_are_seen() -> None:
    borders = tiles.borders(130, 3, torch.device("cpu"))
    assert borders.tolist() == [0, 3, 64, 128, 130]
    everything, window = (0, 130, 0, 0, 63, 0), (20, 50, 0, 0, 63, 0)
    check(layout([everything], [window], [window], [window]), borders, keys=130)
    assert tiles.borders(5, 0, torch.device("cpu")).tolist() == [0, 5]
    assert tiles.borders(5, 9, torch.device("cpu")).tolist() == [0, 5]


def test_run_broadcasts_and_drops_what_is_negative() -> None:
    runs = tiles.run(torch.tensor([0, 4]), torch.tensor([3, -2]), first=torch.tensor([[7], [8]]))
    assert runs.shape == (2, 2, 1, 6)
    assert runs.dtype is torch.int32
    assert runs[1, :, 0].tolist() == [[0, 3, 8, 0, 63, 0], [4, 0, 8, 0, 63, 0]]


@pytest.mark.parametrize("run", [(90, 11, 0, 0, 63, 0), (-1, 3, 0, 0, 63, 0)])
def test_runs_that_leave_the_keys_are_refused(run: Run) -> None:
    x = torch.randn(1, 1, 100, 16)
    with pytest.raises(RuntimeError, match="leaves the 100 that there are"):
        tiles.attend(x, x, x, layout([ALL], [run]), torch.tensor([0, 64, 100]), scale=SCALE)


@pytest.mark.parametrize(
    "borders", [[0, 65, 100], [0, 64, 64], [0, 64, 99], [1, 64, 100], [0, 100]]
)
def test_borders_that_make_no_tiles_are_refused(borders: list[int]) -> None:
    x = torch.randn(1, 1, 100, 16)
    with pytest.raises(RuntimeError, match="tile"):
        tiles.attend(x, x, x, LAYOUTS["all"], torch.tensor(borders), scale=SCALE)


def test_a_second_derivative_is_refused_in_words() -> None:
    x = torch.randn(1, 1, 100, 16, requires_grad=True)
    out = tiles.attend(x, x, x, LAYOUTS["all"], torch.tensor([0, 64, 100]), scale=SCALE)
    with pytest.raises(UnsupportedCall, match=r"has no second derivative; .*plain_only"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("length", [1, 64, 130])
@pytest.mark.parametrize("keys", [1, 64, 300])
def test_all_may_be_seen(length: int, keys: int) -> None:
    q, k, v = (torch.randn(2, 2, n, 16) for n in (length, keys, keys))
    all_of_them = torch.ones(2, 2, length, keys, dtype=torch.bool)
    found = tiles.attend_all(q, k, v, scale=SCALE)
    torch.testing.assert_close(found, dense(q, k, v, all_of_them), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("leading", [0, 1, 64, 65, 130, 200])
def test_borders_begin_tiles(leading: int) -> None:
    """At each multiple of TILE and behind the leading queries, the last one at the end."""
    edges = tiles.borders(130, leading, torch.device("cpu")).tolist()
    wanted = {0, 64, 128, 130} | ({leading} if leading < 130 else set())
    assert set(edges) == wanted
    assert edges == sorted(edges)
