"""One softmax over several parts, each with runs of its own, against a dense one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoo_core as zoo
from zoo_core.attention import Context
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import choice, tiles
from zoo_core.nn.tiles import Part

pytestmark = pytest.mark.usefixtures("native_kernels")

SCALE = 0.3


def shown(part: Part, length: int) -> Tensor:
    """Who sees whom by one part whose runs serve all samples and heads, (L, L)."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    edges = part.borders.tolist()
    residues = part.runs[0].tolist()
    for residue in range(part.period):
        tokens = range(residue, length, part.period)
        of_tiles = residues[residue % len(residues)]
        for begin, stop, runs in zip(edges, edges[1:], of_tiles, strict=False):
            for start, count, first, first_step, last, last_step in runs:
                for t in range(count):
                    low = begin + max(first + t * first_step, 0)
                    high = min(begin + last + t * last_step, stop - 1)
                    for i in range(low, high + 1):
                        if i < len(tokens):
                            mask[tokens[i], tokens[start + t]] = True
    return mask


def near(length: int, reach: int, *, ahead: bool = True) -> Part:
    """The tokens at most `reach` away: before, and after if `ahead`; not the token itself."""
    borders = tiles.borders(length, 0, torch.device("cpu"))
    begin = borders[:-1]
    everything = torch.zeros_like(begin), torch.full_like(begin, length)
    past = tiles.run(*everything, first=1 - begin, first_step=1, last=reach - begin, last_step=1)
    after = tiles.run(*everything, first=-reach - begin, first_step=1, last=-1 - begin, last_step=1)
    runs = torch.cat([past, after], -2) if ahead else past
    return Part(runs[None, None], borders)


def columns(length: int, period: int, *, behind: int = 0) -> Part:
    """The tokens a multiple of the period away, but for the first `behind` ones of each residue."""
    borders = tiles.borders(-(-length // period), 0, torch.device("cpu"))
    residue = torch.arange(period)[:, None]
    own = -((residue - length) // period)
    start = torch.full_like(borders[:-1], behind)
    return Part(tiles.run(start, own - start)[None], borders, period)


def check(parts: list[Part], length: int, *, batch: int = 2, heads: int = 2) -> Tensor:
    """Outputs and gradients are those of the dense softmax in float64; gives the outputs."""
    torch.manual_seed(length)
    masks = [shown(part, length) for part in parts]
    assert int(sum(mask.int() for mask in masks).max()) <= 1, "parts share no pair"
    mask = torch.stack(masks).any(0)
    # As a host has them, tokens before heads.
    *leaves, grad = (torch.randn(batch, length, heads, w).transpose(1, 2) for w in (16, 16, 48, 48))
    single = [x.detach().requires_grad_() for x in leaves]
    q, k, v = double = [x.detach().double().requires_grad_() for x in leaves]
    scores = (q @ k.mT * SCALE).masked_fill(~mask, torch.finfo(torch.float64).min)
    wanted = scores.softmax(-1).masked_fill(~mask, 0) @ v
    got = tiles.attend_union(*single, parts, scale=SCALE)
    found = [got, *torch.autograd.grad(got, single, grad)]
    right = [wanted, *torch.autograd.grad(wanted, double, grad.double())]
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    return got


@pytest.mark.parametrize("period", [2, 9, 16, 70])
@pytest.mark.parametrize("length", [64, 90, 150])
def test_parts_are_one_softmax(length: int, period: int) -> None:
    check([near(length, min(period - 1, 8)), columns(length, period)], length)


def test_three_parts_are_one_softmax() -> None:
    first, second = near(100, 3), columns(100, 10)
    halves = first.runs.split(1, -2)
    check([*(Part(runs, first.borders) for runs in halves), second], 100)


def test_one_part_may_be_in_another_order() -> None:
    check([columns(100, 7)], 100)


def test_queries_without_keys_in_some_parts_or_all() -> None:
    """Of what is before it the first query sees nothing; columns may begin behind a residue."""
    some, none = near(90, 0), columns(90, 9, behind=10)
    assert not shown(some, 90).any()
    assert not shown(none, 90).any()
    check([some, columns(90, 9)], 90)
    check([near(90, 4), none], 90)
    out = check([near(90, 4, ahead=False), none], 90)
    assert not out[:, :, 0].any()


def test_tensors_may_lie_in_any_way() -> None:
    """What folds without a copy only as hosts store it."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 60, 16)
    parts = [near(60, 5), columns(60, 6)]
    stored = x.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = tiles.attend_union(stored, stored, stored, parts, scale=SCALE)
    fused = torch.cat([x, x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)
    for tensors in ((x, x, x), fused.chunk(3, -1), [x.mT.contiguous().mT] * 3):
        got = tiles.attend_union(*tensors, parts, scale=SCALE)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_derivative_is_refused_in_words() -> None:
    x = torch.randn(1, 2, 60, 16, requires_grad=True)
    out = tiles.attend_union(x, x, x, [near(60, 5), columns(60, 6)], scale=SCALE)
    with pytest.raises(UnsupportedCall, match="has no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("how", [{}, {"prefix": 2}, {"prefix": 20}, {"causal": True}], ids=str)
@pytest.mark.parametrize("stride", [1, 5, 70])
@pytest.mark.parametrize(
    "options", [{}, {"pattern": "fixed", "summary": 3}], ids=["strided", "fixed"]
)
def test_sparse_transformer_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    stride: int,
    how: dict[str, Any],
    padded: bool,
) -> None:
    (record,) = zoo.mechanisms("sparse_transformer")
    site = zoo.Site(dim=32, heads=2, head_dim=16, scale=SCALE, max_len=300, **how)
    module = record.factory(site, record.options(stride=stride, **options))
    torch.manual_seed(stride)
    q, k, v, grad = (torch.randn(3, 233, 2, 16).transpose(1, 2) for _ in range(4))
    real = (torch.rand(3, 233) > 0.4) if padded else torch.ones(3, 233, dtype=torch.bool)
    real[0], real[2, 7 * (1 + padded) :] = True, not padded
    ctx = Context(key_padding=real if padded else None, **how)
    taken = []
    union = tiles.attend_union
    monkeypatch.setattr(
        tiles, "attend_union", lambda *args, **kwargs: taken.append(1) or union(*args, **kwargs)
    )

    def attend() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = module(*leaves, ctx) * real[:, None, :, None]
        return [out, *torch.autograd.grad(out, leaves, grad)]

    got = attend()
    with choice.plain_only():
        wanted = attend()
    assert len(taken) == 1
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
