"""What a race does with competitors that fail on the way, or do not do the work."""

from __future__ import annotations

import re

import pytest
from torch import Tensor, nn

import zoo_core as zoo
from zoo_core.bench.cases import Case
from zoo_core.bench.layers import measure

CASE = Case(length=16, heads=2, width=8)


def mechanism(name: str, module: type[nn.Module]) -> zoo.Mechanism:
    return zoo.Mechanism(
        name=name,
        summary="A test.",
        family="test",
        paper=None,
        time="n",
        memory="n",
        supports=zoo.Supports(),
        options=zoo.Options,
        swap="approximate",
        factory=lambda site, options: module(),
    )


class Tired(nn.Module):
    """Fails at a call that only the timed rounds reach."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: zoo.Context) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            raise ValueError("too tired")
        return v


class Lazy(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: zoo.Context) -> Tensor:
        return v[:, :1]


class Widening(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: zoo.Context) -> Tensor:
        return v.double()


def test_one_that_fails_while_it_is_timed_leaves_the_others_in_the_race(quick) -> None:
    rows = {
        row.name: row
        for row in measure([mechanism("tired", Tired), "linear"], [CASE], effort=quick)
    }
    assert rows["tired"].refused.startswith("tired: failed: ValueError: too tired")
    assert rows["tired"].seconds is None
    for name in ("sdpa", "linear"):
        assert rows[name].rounds == 2
        assert rows[name].seconds > 0


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Lazy, r"lazy: its output is \(1, 1, 16, 8\) of torch.float32; it must be \(1, 2, 16, 8\)"),
        (Widening, r"lazy: its output is \(1, 2, 16, 8\) of torch.float64; it must be"),
    ],
)
def test_less_than_the_work_is_no_win(quick, module, words) -> None:
    rows = list(measure([mechanism("lazy", module)], [CASE], effort=quick))
    (row,) = [row for row in rows if row.name == "lazy"]
    assert row.seconds is None
    assert re.match(words, row.refused)
