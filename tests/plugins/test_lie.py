from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.lie import LIE, LieOptions
from zoo_core import Context, Site
from zoo_core.errors import OptionError, UnsupportedCall

HEADS, WIDTH = 2, 4
SCALE = WIDTH**-0.5
TURNS = [lambda y, x: (y, x), lambda y, x: (-x, y), lambda y, x: (-y, -x), lambda y, x: (x, -y)]
GROUPS = pytest.mark.parametrize("group", ["translations", "p4"])


def build(grid: tuple[int, ...] | None, **options: object) -> nn.Module:
    """A module in float64 whose location acts."""
    site = Site(heads=HEADS, head_dim=WIDTH, dim=8, scale=SCALE, grid=grid)
    torch.manual_seed(1)
    options = {"start": "random", "hidden": 6, **options}
    return LIE.factory(site, LieOptions(**options)).double().eval()


def inputs(length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def score(module: nn.Module, offset: tuple[int, ...]) -> Tensor:
    """The network by hand, (H,)."""
    state = module.state_dict()
    x = torch.tensor(offset, dtype=torch.float64)
    x = x.sign() * (1 + x.abs()).log()
    hidden = state["location.inner.weight"] @ x + state["location.inner.bias"]
    return state["location.outer.weight"] @ (hidden / (1 + (-hidden).exp()))


def by_formula(module, q, k, v, places, turn=lambda *offset: offset) -> Tensor:
    """One pair at a time; places: a tuple for each token, None where it has no location."""
    scores = q @ k.mT * SCALE
    for i, one in enumerate(places):
        for j, two in enumerate(places):
            if one is not None and two is not None:
                offset = turn(*(b - a for a, b in zip(one, two, strict=True)))
                scores[:, :, i, j] += score(module, offset)
    return scores.softmax(-1) @ v


def cells(grid: tuple[int, ...], prefix: int = 0) -> list[tuple[int, ...] | None]:
    return [None] * prefix + list(product(*map(range, grid)))


class TestFormula:
    @pytest.mark.parametrize("length", [1, 2, 9])
    def test_on_a_line(self, length: int) -> None:
        module, (q, k, v) = build(None), inputs(length)
        wanted = by_formula(module, q, k, v, cells((length,)))
        torch.testing.assert_close(module(q, k, v, Context(prefix=1)), wanted, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("grid", [(1, 1), (2, 3), (4, 1), (2, 1, 3)], ids=str)
    @pytest.mark.parametrize("prefix", [0, 2])
    def test_on_a_grid(self, grid: tuple[int, ...], prefix: int) -> None:
        module, (q, k, v) = build(grid), inputs(prefix + prod(grid))
        wanted = by_formula(module, q, k, v, cells(grid, prefix))
        got = module(q, k, v, Context(grid=grid, prefix=prefix))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("prefix", [0, 1])
    def test_p4_is_the_mean_over_four_turns(self, prefix: int) -> None:
        module, (q, k, v) = build((2, 3), group="p4"), inputs(prefix + 6)
        places = cells((2, 3), prefix)
        turns = [by_formula(module, q, k, v, places, turn) for turn in TURNS]
        got = module(q, k, v, Context(grid=(2, 3), prefix=prefix))
        torch.testing.assert_close(got, torch.stack(turns).mean(0), rtol=0, atol=1e-10)

    def test_positions_on_a_line_count_real_tokens(self) -> None:
        module, (q, k, v) = build(None), inputs(7, batch=1)
        real = torch.tensor([[False, True, True, False, True, True, False]])
        got = module(q, k, v.masked_fill(~real[..., None], torch.nan), Context(key_padding=real))
        alone = [x[:, :, real[0]] for x in (q, k, v)]
        wanted = by_formula(module, *alone, cells((4,)))
        torch.testing.assert_close(got[:, :, real[0]], wanted, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("queries", [1, 3])
    def test_a_causal_cache_gives_the_rows_of_the_whole(self, queries: int) -> None:
        module, (q, k, v) = build(None), inputs(6)
        future = torch.ones(6, 6).triu(1) * -1e9
        wanted = by_formula(module, *inputs(6), cells((6,)))
        biased = module(q, k, v, Context(bias=future))
        assert (biased - wanted).abs().max() > 1e-3
        ctx = Context(causal=True, query_offset=6 - queries)
        got = module(q[:, :, -queries:], k, v, ctx)
        torch.testing.assert_close(got, biased[:, :, -queries:], rtol=0, atol=1e-10)


def within(x: Tensor, grid: tuple[int, ...], corner: tuple[int, ...], small: tuple[int, ...]):
    """The cells of a part of a grid, as tokens."""
    part = tuple(slice(c, c + n) for c, n in zip(corner, small, strict=True))
    return x.unflatten(2, grid)[:, :, *part].flatten(2, -2)


class TestEquivariance:
    """A scene moves over a larger, otherwise hidden plane, or turns: its outputs go with it."""

    def moved(self, module, grid, small, corner) -> Tensor:
        scene = inputs(prod(small))
        plane = [torch.randn(2, HEADS, *grid, WIDTH, dtype=torch.float64) for _ in scene]
        shown = torch.zeros(grid, dtype=torch.bool)
        part = tuple(slice(c, c + n) for c, n in zip(corner, small, strict=True))
        shown[part] = True
        for whole, own in zip(plane, scene, strict=True):
            whole[:, :, *part] = own.unflatten(2, small)
        bias = torch.zeros(1, 1, 1, prod(grid), dtype=torch.float64)
        bias = bias.masked_fill(~shown.flatten(), -1e9)
        ctx = Context(bias=bias, grid=grid if len(grid) > 1 else None)
        return within(module(*(x.flatten(2, -2) for x in plane), ctx), grid, corner, small)

    @pytest.mark.parametrize("corner", [(1,), (6,)], ids=str)
    def test_t1(self, corner) -> None:
        module = build(None)
        home, away = (self.moved(module, (9,), (3,), c) for c in ((0,), corner))
        torch.testing.assert_close(away, home, rtol=0, atol=1e-6)

    @GROUPS
    @pytest.mark.parametrize("corner", [(0, 2), (3, 0), (2, 3)], ids=str)
    def test_translations_of_a_grid(self, group: str, corner) -> None:
        module = build((5, 6), group=group)
        home, away = (self.moved(module, (5, 6), (2, 3), c) for c in ((0, 0), corner))
        torch.testing.assert_close(away, home, rtol=0, atol=1e-6)

    def turned(self, module, grid, turns: int) -> tuple[Tensor, Tensor]:
        """The outputs of a turned scene, and the turned outputs."""
        scene = inputs(2 + prod(grid))

        def turn(x: Tensor) -> Tensor:
            tokens = x[:, :, 2:].unflatten(2, grid).rot90(turns, (2, 3)).flatten(2, 3)
            return torch.cat([x[:, :, :2], tokens], 2)

        other = grid[:: (-1) ** turns]
        got = module(*map(turn, scene), Context(grid=other, prefix=2))
        return got, turn(module(*scene, Context(grid=grid, prefix=2)))

    @pytest.mark.parametrize("turns", [1, 2, 3])
    @pytest.mark.parametrize("grid", [(3, 3), (4, 4), (2, 5)], ids=str)
    def test_quarter_turns_under_p4(self, grid, turns: int) -> None:
        got, wanted = self.turned(build(grid, group="p4"), grid, turns)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)

    def test_translations_alone_do_not_turn(self) -> None:
        got, wanted = self.turned(build((3, 3)), (3, 3), 1)
        assert (got - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("grid", [None, (3, 4)], ids=["line", "grid"])
@pytest.mark.parametrize("group", ["translations", "p4"])
def test_it_starts_as_softmax_attention(grid, group: str) -> None:
    if grid is None and group == "p4":
        with pytest.raises(OptionError, match="p4"):
            build(grid, group=group)
        return
    module, (q, k, v) = build(grid, group=group, start="zero"), inputs(12)
    wanted = (q @ k.mT * SCALE).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context(grid=grid)), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("site", "call"), [((3, 4), None), (None, (3, 4)), ((3, 4), (1, 3, 4))], ids=str
)
def test_another_kind_of_layout_is_refused(site, call) -> None:
    with pytest.raises(UnsupportedCall, match="lie was built for tokens on a"):
        build(site)(*inputs(12), Context(grid=call))
