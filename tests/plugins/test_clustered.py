from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.clustered import CLUSTERED, ClusteredOptions
from zoo_attention.improved_clustered import IMPROVED_CLUSTERED, ImprovedClusteredOptions
from zoo_core import Context, Site
from zoo_core.nn.clustering import cluster

HEADS, WIDTH, CLUSTERS = 2, 8, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)


def build(clusters: int = CLUSTERS, iterations: int = 3) -> nn.Module:
    options = ClusteredOptions(clusters=clusters, iterations=iterations)
    return CLUSTERED.factory(SITE, options).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def softmax_map(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * SITE.scale).softmax(-1)


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query by query, for one unpadded sample: the mean of those of its cluster attends."""
    index, _ = cluster(q, None, CLUSTERS, 3)
    out = torch.zeros_like(v)
    for h in range(HEADS):
        for i in range(q.shape[-2]):
            mean = q[0, h, index[0, h] == index[0, h, i]].mean(0)
            out[0, h, i] = (k[0, h] @ mean * SITE.scale).softmax(-1) @ v[0, h]
    return out


@pytest.mark.parametrize("length", [1, 7, 8, 50, 64], ids=lambda n: f"{n}-tokens")
def test_it_computes_its_formula(length: int) -> None:
    q, k, v = inputs(length)
    wanted = by_formula(q, k, v)
    torch.testing.assert_close(build()(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_formula() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(30))
    got = build()(q, k, v, Context()).square().sum()
    wanted = by_formula(q, k, v).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_a_sample_is_clustered_by_its_real_tokens() -> None:
    """Pads on the left, on the right and inside, holding NaN, and a sample of nothing else."""
    q, k, v = inputs(40, batch=4)
    real = torch.ones(4, 40, dtype=torch.bool)
    real[0, :5] = False
    real[1, 6:] = False
    real[2, 2::4] = False
    real[3] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = build()(q, k, v, Context(key_padding=real))
    for b, mask in enumerate(real[:3]):
        wanted = by_formula(*(x[b : b + 1, :, mask] for x in (q, k, v)))
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)
    assert (got[3] == 0).all()


class TestBounds:
    """The paper's two propositions, on the weights."""

    @pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
    def test_two_queries_differ_by_no_more_than_their_distance_allows(self, spread: float) -> None:
        """Proposition 1, for all pairs, and for each query and the mean that attends for it."""
        q, k, _ = (spread * x for x in inputs(64))
        largest = SITE.scale * torch.linalg.matrix_norm(k, ord=2)[..., None]
        own = build(clusters=64).attention_map(q, k, Context())
        apart, allowed = ((x[..., None, :] - x[..., None, :, :]).norm(dim=-1) for x in (own, q))
        assert (apart <= allowed * largest[..., None] + 1e-12).all()

        index, means = cluster(q, None, CLUSTERS, 3)
        mean = means.gather(-2, index[..., None].expand_as(q))
        error = (build().attention_map(q, k, Context()) - softmax_map(q, k)).norm(dim=-1)
        assert (error <= (q - mean).norm(dim=-1) * largest + 1e-12).all()
        assert error.mean() > 1e-3

    @pytest.mark.parametrize("length", [20, 64], ids=lambda n: f"{n}-tokens")
    @pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
    def test_improved_clusters_err_by_no_more(self, length: int, spread: float) -> None:
        """Proposition 2, row by row in the L1 norm, with the same clusters."""
        q, k, _ = (spread * x for x in inputs(length, batch=4))
        options = ImprovedClusteredOptions(clusters=CLUSTERS, topk=8)
        improved = IMPROVED_CLUSTERED.factory(SITE, options).double()
        ours, better = (
            (module.attention_map(q, k, Context()) - softmax_map(q, k)).abs().sum(-1)
            for module in (build(), improved)
        )
        assert (better <= ours + 1e-12).all()
        assert better.mean() < 0.95 * ours.mean()


@pytest.mark.parametrize("length", [1, 17, 64], ids=lambda n: f"{n}-tokens")
@pytest.mark.parametrize("iterations", [0, 3])
def test_as_many_clusters_as_tokens_is_softmax_attention(length: int, iterations: int) -> None:
    q, k, v = inputs(length)
    clusters = CLUSTERED.exact_at(SITE).clusters
    got = build(clusters, iterations)(q, k, v, Context())
    torch.testing.assert_close(got, softmax_map(q, k) @ v, rtol=0, atol=1e-12)
