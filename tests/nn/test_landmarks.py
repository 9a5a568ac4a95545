from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from zoo_core.nn import landmarks

BATCH, HEADS, LENGTH, WIDTH = 4, 2, 13, 3
MASKS = torch.tensor(
    [
        [1] * 13,
        [0] * 4 + [1] * 9,
        [1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0] * 13,
    ],
    dtype=torch.bool,
)


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, HEADS, LENGTH, WIDTH, dtype=torch.float64).to(dtype)


def mean_by_loop(x: Tensor, key_padding: Tensor, number: int) -> Tensor:
    """Every real token goes to segment rank * number // count of its sample."""
    means = torch.zeros(BATCH, HEADS, number, WIDTH, dtype=x.dtype)
    for b in range(BATCH):
        real = [i for i in range(LENGTH) if key_padding[b, i]]
        for m in range(number):
            mine = [i for r, i in enumerate(real) if r * number // len(real) == m]
            if mine:
                means[b, :, m] = sum(x[b, :, i] for i in mine) / len(mine)
    return means


@pytest.mark.parametrize("number", [1, 4, 13, 20])
def test_means_equal_a_loop_over_the_real_tokens(number: int) -> None:
    x = tokens()
    got = landmarks.split(MASKS, number, x).mean(x)
    torch.testing.assert_close(got, mean_by_loop(x, MASKS, number), rtol=0, atol=1e-12)


@pytest.mark.parametrize("number", [1, 4, 13, 20])
def test_no_mask_means_that_all_are_real(number: int) -> None:
    x = tokens()
    everything = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    got = landmarks.split(None, number, x).mean(x)
    torch.testing.assert_close(got, mean_by_loop(x, everything, number), rtol=0, atol=1e-12)


def test_tokens_may_lie_in_memory_in_any_order() -> None:
    x = tokens()
    outermost = x.transpose(1, 2).contiguous().transpose(1, 2)
    segments = landmarks.split(MASKS, 4, x)
    assert torch.equal(segments.mean(outermost), segments.mean(x))


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_what_padding_holds_reaches_neither_mean_nor_gradient(junk: float) -> None:
    clean = tokens()
    x = clean.masked_fill(~MASKS[:, None, :, None], junk).requires_grad_()
    means = landmarks.split(MASKS, 4, x).mean(x)
    torch.testing.assert_close(means, mean_by_loop(clean, MASKS, 4), rtol=0, atol=1e-12)
    means.sum().backward()
    assert x.grad is not None
    assert (x.grad[~MASKS[:, None, :, None].expand_as(x)] == 0).all()
    assert torch.autograd.gradcheck(
        lambda y: landmarks.split(MASKS, 4, y).mean(y), clean.requires_grad_()
    )


def test_seen_tells_segments_with_a_token() -> None:
    seen = landmarks.split(MASKS, 6, tokens()).seen
    assert seen is not None
    assert seen.tolist() == [[True] * 6, [True] * 6, [True, False] * 3, [False] * 6]


def test_seen_is_none_where_every_segment_must_hold_a_token() -> None:
    x = tokens()
    assert landmarks.split(None, LENGTH, x).seen is None
    longer = landmarks.split(None, LENGTH + 1, x).seen
    assert longer is not None
    assert longer.sum(-1).tolist() == [LENGTH] * BATCH


def test_half_precision_is_averaged_in_single() -> None:
    x = torch.full((1, 1, 64, 2), 60000.0, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        means = landmarks.split(None, 1, x).mean(x)
    assert means.dtype == torch.float32
    torch.testing.assert_close(means, torch.full((1, 1, 1, 2), 60000.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [1, 2, 7, 12, 64, 197])
@pytest.mark.parametrize("number", [1, 3, 12, 64])
def test_borders_and_segment_of_describe_the_same_split(count: int, number: int) -> None:
    (edges,) = landmarks.borders(torch.tensor([count]), number).tolist()
    assert (edges[0], edges[-1]) == (0, count)
    sizes = [end - start for start, end in pairwise(edges)]
    assert max(sizes) - min(sizes) <= 1
    members = [m for m, size in enumerate(sizes) for _ in range(size)]
    assert [landmarks.segment_of(rank, number, count) for rank in range(count)] == members
    ranks = landmarks.segment_of(torch.arange(count), number, count)
    assert ranks.tolist() == members
