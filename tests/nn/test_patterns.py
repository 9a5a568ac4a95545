from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core.nn.patterns import Columns, Common, Distances, Neighbours, Pattern

CPU = torch.device("cpu")
PATTERNS = pytest.mark.parametrize(
    "pattern",
    [
        Neighbours(4, before=1, after=1),
        Neighbours(4, before=0, after=0),
        Neighbours(4, before=2, after=0),
        Columns(4),
        Columns(2),
        Common(torch.tensor([[0, 3, 11], [1, 1, 5]])),
        Common(torch.tensor([[7]])),
        Distances((-8, -1, 0, 3)),
        Distances((11,)),
    ],
    ids=lambda pattern: type(pattern).__name__.lower(),
)


def tokens(batch: int = 2, length: int = 12, width: int = 3) -> Tensor:
    return torch.randn(batch, 2, length, width, dtype=torch.float64)


def dense(pattern: Pattern, values: Tensor) -> Tensor:
    """Values (B, H, N, W) of a pattern, each at its key: (B, H, N, N)."""
    batch, heads, length, width = values.shape
    positions = pattern.positions(length, CPU).expand(batch, length, width)
    out = torch.zeros(batch, heads, length, length, dtype=values.dtype)
    for b in range(batch):
        for i in range(length):
            for w, j in enumerate(positions[b, i].tolist()):
                if 0 <= j < length:
                    out[b, :, i, j] += values[b, :, i, w]
    return out


@PATTERNS
def test_scores_are_products_with_the_keys_at_its_positions(pattern: Pattern) -> None:
    torch.manual_seed(0)
    q, k = tokens(), tokens()
    scores = pattern.scores(q, k)
    times_seen = dense(pattern, torch.ones_like(scores))
    torch.testing.assert_close(dense(pattern, scores), q @ k.mT * times_seen, rtol=0, atol=1e-12)


@PATTERNS
def test_mixing_sums_the_values_at_its_positions(pattern: Pattern) -> None:
    torch.manual_seed(0)
    v = tokens()
    weights = torch.randn_like(pattern.scores(v, v))
    wanted = dense(pattern, weights) @ v
    torch.testing.assert_close(pattern.mix(weights, v), wanted, rtol=0, atol=1e-12)


@PATTERNS
@pytest.mark.parametrize("start", [0, 4, 8])
def test_a_run_of_queries_gives_its_rows_of_the_whole(pattern: Pattern, start: int) -> None:
    torch.manual_seed(0)
    q, k, run = tokens(), tokens(), slice(start, start + 4)
    scores = pattern.scores(q, k)
    torch.testing.assert_close(
        pattern.scores(q[:, :, run], k, start), scores[:, :, run], rtol=0, atol=1e-12
    )
    mixed = pattern.mix(scores[:, :, run], k, start)
    torch.testing.assert_close(mixed, pattern.mix(scores, k)[:, :, run], rtol=0, atol=1e-12)


@pytest.mark.parametrize("offsets", [(-2, 0, 1), (4,), (-4, -1, 3)], ids=str)
def test_derivatives_along_distances(offsets: tuple[int, ...]) -> None:
    """First and second ones, which are written by hand."""
    torch.manual_seed(0)
    pattern = Distances(offsets)
    q, k = (tokens(1, 5, 2).requires_grad_() for _ in range(2))
    weights = tokens(1, 5, len(offsets)).requires_grad_()
    assert torch.autograd.gradcheck(pattern.scores, (q, k))
    assert torch.autograd.gradcheck(pattern.mix, (weights, k))
    assert torch.autograd.gradgradcheck(pattern.scores, (q, k), fast_mode=True)
    assert torch.autograd.gradgradcheck(pattern.mix, (weights, k), fast_mode=True)


def test_neighbours_say_whom_they_reach() -> None:
    pattern, i = Neighbours(4, before=1, after=0), torch.arange(12)[:, None]
    reached = pattern.reach(i, torch.arange(12))
    assert [j for j in range(12) if reached[5, j]] == list(range(8))
    assert [j for j in range(12) if reached[0, j]] == list(range(4))


def test_halves_are_summed_in_fp32() -> None:
    """300 ones: bf16 cannot count beyond 256."""
    v = torch.ones(1, 1, 512, 1, dtype=torch.bfloat16)
    weights = torch.ones(1, 1, 512, 300, dtype=torch.bfloat16)
    mixed = Distances(tuple(range(300))).mix(weights, v)
    assert mixed.dtype == torch.float32
    assert mixed[0, 0, 0].item() == 300
