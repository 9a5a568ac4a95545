from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.log_sparse import LOG_SPARSE, LogSparseOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=128)

# Up to 256 tokens are computed under a dense mask.
WHOLE, APART = 60, 270
PATHS = pytest.mark.parametrize("length", [WHOLE, APART], ids=["as-a-whole", "by-distance"])
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])


def build(**options: object) -> nn.Module:
    return LOG_SPARSE.factory(SITE, LogSparseOptions(**options)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def edges(length: int, window: int = 1, prefix: int = 0, causal: bool = False) -> Tensor:
    """Who sees whom, distance by distance."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for distance in {*range(window + 1), *(2**m for m in range(20))}:
        if distance < length:
            seen.diagonal(distance).fill_(True)
            seen.diagonal(-distance).fill_(True)
    seen[:prefix] = seen[:, :prefix] = True
    return seen.tril() if causal else seen


def by_formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT * SITE.scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v


@DIRECTIONS
@pytest.mark.parametrize(("window", "prefix"), [(1, 0), (1, 2), (5, 1), (20, 0)])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 65, APART])
def test_it_computes_its_formula(length: int, window: int, prefix: int, causal: bool) -> None:
    q, k, v = inputs(length)
    module = build(window=window)
    module.short = module.few = 0
    wanted = by_formula(q, k, v, edges(length, window, prefix, causal))
    got = module(q, k, v, Context(prefix=prefix, causal=causal))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@PATHS
def test_a_key_moves_the_rows_a_power_of_two_away(length: int) -> None:
    q, k, v = inputs(length)
    module, moved = build(), v.clone()
    moved[:, :, 30] += 1
    change = module(q, k, moved, Context()) - module(q, k, v, Context())
    rows = change.abs().amax((0, 1, 3)).nonzero().flatten().tolist()
    distances = [-16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64, 128]
    assert rows == [30 + d for d in distances if 30 + d < length]


def test_its_published_sparsity() -> None:
    """89.8 % of 128 x 128 weights are zero, as SparseBERT reports for LogSparse."""
    q, k, _ = inputs(128)
    weights = build().attention_map(q, k, Context())
    assert (weights == 0).double().mean().item() == pytest.approx(0.898, abs=5e-4)


def test_the_prefix_can_be_left_local() -> None:
    q, k, v = inputs(WHOLE)
    got = build(global_prefix=False)(q, k, v, Context(prefix=3))
    torch.testing.assert_close(got, by_formula(q, k, v, edges(WHOLE)), rtol=0, atol=1e-12)


@PATHS
@DIRECTIONS
def test_distance_counts_real_tokens_only(length: int, causal: bool) -> None:
    """Pads on the left, on the right and inside, holding NaN, in one batch."""
    q, k, v = inputs(length, batch=3)
    real = torch.ones(3, length, dtype=torch.bool)
    real[0, :9] = False
    real[1, 5:] = False
    real[2, 4::5] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = build()(q, k, v, Context(key_padding=real, prefix=2, causal=causal))
    for b, mask in enumerate(real):
        alone = [x[b : b + 1, :, mask] for x in (q, k, v)]
        wanted = by_formula(*alone, edges(int(mask.sum()), 1, 2, causal))
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)


def test_a_sample_of_padding_gets_zeros() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(APART, batch=2))
    mask = torch.arange(APART) < torch.tensor([[APART], [0]])
    out = build()(q, k, v, Context(key_padding=mask, prefix=1))
    out.sum().backward()
    assert (out[1] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("queries", [1, 40])
def test_a_cache_gives_the_rows_of_the_whole(queries: int) -> None:
    q, k, v = inputs(APART)
    ctx = Context(causal=True, query_offset=APART - queries)
    got = build()(q[:, :, -queries:], k, v, ctx)
    wanted = by_formula(q, k, v, edges(APART, causal=True))[:, :, -queries:]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@DIRECTIONS
def test_gradients_are_those_of_the_formula(causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(APART))
    got = build(window=3)(q, k, v, Context(prefix=1, causal=causal)).square().sum()
    wanted = by_formula(q, k, v, edges(APART, 3, 1, causal)).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 17, 128], ids=lambda n: f"{n}-tokens")
def test_a_window_that_spans_all_is_softmax_attention(length: int) -> None:
    q, k, v = inputs(length)
    module = LOG_SPARSE.factory(SITE, LOG_SPARSE.exact_at(SITE)).double()
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)
