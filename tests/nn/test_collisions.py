from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zoo_core.nn import collisions

HEADS, HASHES = 2, 3


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
