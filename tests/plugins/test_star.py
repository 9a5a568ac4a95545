from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.star import STAR, StarOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=128)

# Up to 64 tokens are computed under a dense mask.
PATHS = pytest.mark.parametrize("length", [20, 70], ids=["as-a-whole", "by-distance"])


def build(**options: object) -> nn.Module:
    return STAR.factory(SITE, StarOptions(**options)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def star(length: int, prefix: int, ring: bool = True) -> Tensor:
    """Who sees whom, edge by edge."""
    hubs = max(prefix, 1)
    edges = torch.eye(length, dtype=torch.bool)
    for i in range(length - 1):
        edges[i, i + 1] = edges[i + 1, i] = True
    edges[:hubs] = edges[:, :hubs] = True
    if ring and length > hubs:
        edges[hubs, -1] = edges[-1, hubs] = True
    return edges


def by_formula(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    return (q @ k.mT * SITE.scale).masked_fill(~edges, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "chain"])
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 70])
def test_it_computes_its_formula(length: int, prefix: int, ring: bool) -> None:
    q, k, v = inputs(length, batch=2)
    module = build(ring=ring)
    module.short = module.few = 0
    wanted = by_formula(q, k, v, star(length, prefix, ring))
    torch.testing.assert_close(module(q, k, v, Context(prefix=prefix)), wanted, rtol=0, atol=1e-12)


@PATHS
def test_the_map_shows_the_edges(length: int) -> None:
    q, k, _ = inputs(length)
    weights = build().attention_map(q, k, Context(prefix=2))
    assert torch.equal(weights > 0, star(length, 2).expand_as(weights))


@pytest.mark.parametrize("ring", [True, False], ids=["ring", "chain"])
def test_its_published_sparsity(ring: bool) -> None:
    """96.1 % of 128 x 128 weights are zero, as SparseBERT reports."""
    q, k, _ = inputs(128)
    weights = build(ring=ring).attention_map(q, k, Context(prefix=1))
    assert (weights == 0).double().mean().item() == pytest.approx(0.961, abs=5e-4)


@PATHS
@pytest.mark.parametrize("ring", [True, False], ids=["ring", "chain"])
def test_the_chain_counts_real_tokens_only(length: int, ring: bool) -> None:
    """Pads on the left, on the right and inside, holding NaN, in one batch."""
    q, k, v = inputs(length, batch=4)
    real = torch.ones(4, length, dtype=torch.bool)
    real[0, :9] = False
    real[1, 3:] = False
    real[2, 4::5] = False
    real[3] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = build(ring=ring)(q, k, v, Context(key_padding=real, prefix=1))
    for b, mask in enumerate(real[:3]):
        alone = [x[b : b + 1, :, mask] for x in (q, k, v)]
        wanted = by_formula(*alone, star(int(mask.sum()), 1, ring))
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)


@PATHS
def test_causal_calls_leave_the_ring_open(length: int) -> None:
    q, k, v = inputs(length)
    wanted = by_formula(q, k, v, star(length, 0, ring=False).tril())
    got = build()(q, k, v, Context(causal=True))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_formula() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(70, batch=2))
    got = build()(q, k, v, Context(prefix=2)).square().sum()
    wanted = by_formula(q, k, v, star(70, 2)).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
