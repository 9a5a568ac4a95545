from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from zoo_core.nn import collisions

HEADS, HASHES = 2, 3


def randn(length: int, width: int) -> Tensor:
    return torch.randn(2, 3, length, width, dtype=torch.float64)


def tokens(length: int, batch: int = 1, width: int = 4) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, HEADS, length, width, dtype=torch.float64)


def random_codes(length: int, number: int, batch: int = 1) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(number, (batch, HEADS, HASHES, length))


@pytest.mark.parametrize("bits", [1, 5])
def test_a_code_holds_the_sides_of_all_planes(bits: int) -> None:
    x, planes = tokens(9), torch.randn(HEADS, HASHES, 4, bits, dtype=torch.float64)
    codes = collisions.sign_codes(x, planes)
    for h in range(HEADS):
        for m in range(HASHES):
            for i in range(9):
                sides = [(x[0, h, i] @ plane > 0).item() for plane in planes[h, m].T]
                assert codes[0, h, m, i] == sum(side << b for b, side in enumerate(sides))


@pytest.mark.parametrize("number", [1, 4, 20], ids=lambda n: f"{n}-codes")
def test_values_are_summed_by_code(number: int) -> None:
    queries = random_codes(7, number, batch=2)
    keys, values = random_codes(11, number, batch=2), tokens(11, batch=2)
    got = collisions.collide(queries, keys, values, number=number)
    equal = (queries[..., None] == keys[..., None, :]).double().mean(2)
    torch.testing.assert_close(got, equal @ values, rtol=0, atol=1e-12)


def test_the_chance_of_equal_codes_is_that_of_the_angle() -> None:
    x = torch.tensor([[1.0, 0.0], [math.cos(0.5), math.sin(0.5)]]).expand(1, 1, 2, 2)
    torch.manual_seed(0)
    codes = collisions.sign_codes(x, torch.randn(1, 40_000, 2, 3))[0, 0]
    share = (codes[:, 0] == codes[:, 1]).float().mean().item()
    assert share == pytest.approx((1 - 0.5 / math.pi) ** 3, abs=0.01)


class TestExpected:
    @pytest.mark.parametrize("few", [False, True], ids=["at-once", "few-at-a-time"])
    @pytest.mark.parametrize("bits", [1, 2, 3, 10], ids=lambda n: f"{n}-bits")
    def test_it_and_its_gradients_are_those_of_the_formula(
        self, bits: int, few: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if few:  # 3 of the 10 queries of one head at a time
            monkeypatch.setattr(collisions, "PAIRS_ON_CPU", 2 * 3 * 13)
        q, k = (nn.functional.normalize(randn(n, 5), dim=-1).requires_grad_() for n in (10, 13))
        v = randn(13, 4).requires_grad_()
        weights = (1 - (q @ k.mT).acos() / math.pi) ** bits
        outs = collisions.expected(q, k, v, bits=bits), weights @ v
        torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
        upstream = randn(10, 4)
        pairs = (torch.autograd.grad(out, (q, k, v), upstream) for out in outs)
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)

    def test_its_second_derivative_is_that_of_the_formula(self) -> None:
        x, v, upstream = randn(10, 5).requires_grad_(), randn(10, 4), randn(10, 4)

        def formula(q: Tensor, k: Tensor, v: Tensor, *, bits: int) -> Tensor:
            return (1 - (q @ k.mT).acos() / math.pi) ** bits @ v

        found = []
        for form in (collisions.expected, formula):
            q, k = (nn.functional.normalize(y, dim=-1) for y in (x, x.exp()))
            out = form(q, k, v, bits=3)
            (slope,) = torch.autograd.grad(out, x, upstream, create_graph=True)
            found.append((slope, *torch.autograd.grad(slope.square().sum(), x)))
        torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)

    def test_equal_vectors_weigh_one_and_have_no_slope(self) -> None:
        q = nn.functional.normalize(randn(1, 5), dim=-1).requires_grad_()
        k = q.detach().clone().requires_grad_()
        out = collisions.expected(q, k, torch.ones(2, 3, 1, 1, dtype=torch.float64), bits=4)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=0.01)
        for gradient in torch.autograd.grad(out.sum(), (q, k)):
            assert (gradient == 0).all()
