from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core.nn.windows import LARGEST, Window

HEADS, WIDTH, SCALE = 2, 4, 0.5


def inputs(queries: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = [(batch, HEADS, n, WIDTH) for n in (queries, keys, keys)]
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


def by_formula(q: Tensor, k: Tensor, v: Tensor, window: Window, real: list[int]) -> Tensor:
    """Dense, sample by sample; a query without a key gets zeros."""
    out = torch.zeros_like(q)
    for b, end in enumerate(real):
        for i in range(q.shape[-2]):
            seen = [
                j
                for j in range(end)
                if (j <= i or not window.causal)
                and (
                    abs(i // window.stride - j) <= window.reach
                    or i < window.prefix
                    or j < window.prefix
                )
            ]
            if seen:
                weights = torch.einsum("hd,hjd->hj", q[b, :, i], k[b, :, seen]) * SCALE
                out[b, :, i] = torch.einsum("hj,hje->he", weights.softmax(-1), v[b, :, seen])
    return out


# Blocks begin to pay from 65 keys on.
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("queries", [1, 2, 190, 220])
@pytest.mark.parametrize("reach", [0, 5, 17])
def test_a_query_sees_the_keys_within_reach(queries: int, stride: int, reach: int) -> None:
    window = Window(reach, stride=stride)
    keys = -(-queries // stride)
    q, k, v = inputs(queries, keys)
    got = window.attend_front(q, k, v, None, scale=SCALE)
    wanted = by_formula(q, k, v, window, [keys, keys])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("length", "prefix"), [(40, 0), (40, 2), (90, 0), (90, 2)])
def test_keys_beyond_the_real_ones_are_not_seen(length: int, prefix: int) -> None:
    window, real = Window(3, prefix=prefix), [length - 7, 0]
    q, k, v = inputs(length, length)
    got = window.attend_front(q, k, v, torch.tensor(real), scale=SCALE)
    wanted = by_formula(q, k, v, window, real)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_a_reach_beyond_the_largest_block() -> None:
    window = Window(LARGEST + 5)
    q, k, v = inputs(500, 500, batch=1)
    got = window.attend_front(q, k, v, None, scale=SCALE)
    torch.testing.assert_close(got, by_formula(q, k, v, window, [500]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("length", [40, 90])
def test_tokens_in_any_order_are_seen_by_rank(length: int, causal: bool) -> None:
    window = Window(3, prefix=2, causal=causal)
    q, k, v = inputs(length, length)
    real = torch.rand(2, length) < 0.8
    k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (k, v))
    got = window.attend(q, k, v, real, scale=SCALE)
    for b, mask in enumerate(real):
        alone = (x[b : b + 1, :, mask] for x in (q, k, v))
        wanted = by_formula(*alone, window, [int(mask.sum())])
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("queries", [3, 30])
def test_the_map_is_that_of_the_output(queries: int) -> None:
    window = Window(3, prefix=1)
    q, k, v = inputs(queries, 90)
    weights = window.weights(q, k, None, scale=SCALE)
    wanted = window.attend(q, k, v, None, scale=SCALE)
    torch.testing.assert_close(weights @ v, wanted, rtol=0, atol=1e-12)
