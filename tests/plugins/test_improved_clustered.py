from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.improved_clustered import IMPROVED_CLUSTERED, ImprovedClusteredOptions
from zoo_core import Context, Site
from zoo_core.nn.clustering import cluster

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)

# With 8 clusters and 8 top keys up to 16 tokens are computed in whole rows, more in blocks.
SIZES = {"clusters": 8, "topk": 8}
PATHS = pytest.mark.parametrize("length", [16, 50], ids=["in-rows", "in-blocks"])


def build(**options: object) -> nn.Module:
    options = {**SIZES, **options}
    return IMPROVED_CLUSTERED.factory(SITE, ImprovedClusteredOptions(**options)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def softmax_map(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * SITE.scale).softmax(-1)


def clustered_map(q: Tensor, k: Tensor) -> Tensor:
    """The weights (B, H, N, N) of the cluster that each query belongs to."""
    index, means = cluster(q, None, SIZES["clusters"], 3)
    rows = softmax_map(means, k)
    return rows.gather(-2, index[..., None].expand(*index.shape, k.shape[-2]))


def by_formula(q: Tensor, k: Tensor, v: Tensor, topk: int) -> Tensor:
    """Query by query, for one unpadded sample."""
    out, clusters = torch.zeros_like(v), clustered_map(q, k)
    for h in range(HEADS):
        for i in range(q.shape[-2]):
            row = clusters[0, h, i]
            top = set(row.argsort(descending=True)[:topk].tolist())
            inside = [j for j in range(len(row)) if j in top]
            rest = [j for j in range(len(row)) if j not in top]
            own = (k[0, h, inside] @ q[0, h, i] * SITE.scale).softmax(-1)
            out[0, h, i] = row[inside].sum() * (own @ v[0, h, inside]) + row[rest] @ v[0, h, rest]
    return out


@pytest.mark.parametrize("length", [1, 2, 7, 16, 17, 50, 64], ids=lambda n: f"{n}-tokens")
def test_it_computes_its_formula(length: int) -> None:
    q, k, v = inputs(length)
    got = build()(q, k, v, Context())
    torch.testing.assert_close(got, by_formula(q, k, v, 8), rtol=0, atol=1e-12)


@PATHS
def test_gradients_are_those_of_the_formula(length: int) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(length))
    got = build()(q, k, v, Context()).square().sum()
    wanted = by_formula(q, k, v, 8).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@PATHS
def test_dropout_leaves_what_the_cluster_gives_to_the_other_keys(length: int) -> None:
    """Whether none or all of the exact weights are dropped."""
    q, k, v = inputs(length)
    module = build().train()
    rest = clustered_map(q, k)
    rest = rest.scatter(-1, rest.topk(8).indices, 0) @ v
    for dropout, wanted in ((1e-12, by_formula(q, k, v, 8)), (1 - 1e-12, rest)):
        module.dropout = dropout
        torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-10)


class TestPadding:
    @PATHS
    def test_a_sample_is_clustered_by_its_real_tokens(self, length: int) -> None:
        """Pads on the left, on the right and inside, holding NaN, in one batch."""
        q, k, v = inputs(length, batch=3)
        real = torch.ones(3, length, dtype=torch.bool)
        real[0, :5] = False
        real[1, -5:] = False
        real[2, 2::4] = False
        q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
        got = build()(q, k, v, Context(key_padding=real))
        for b, mask in enumerate(real):
            alone = [x[b : b + 1, :, mask] for x in (q, k, v)]
            wanted = by_formula(*alone, 8)
            torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("length", [5, 64], ids=lambda n: f"{n}-tokens")
    def test_fewer_real_tokens_than_clusters_and_top_keys(self, length: int) -> None:
        """Three real tokens: all are top keys, and no padding is among those that count."""
        q, k, v = inputs(length, batch=2)
        real = torch.arange(length) < torch.tensor([[length], [3]])
        q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
        got = build(clusters=64, topk=32)(q, k, v, Context(key_padding=real))
        few = [x[1, :, :3] for x in (q, k, v)]
        wanted = softmax_map(few[0], few[1]) @ few[2]
        torch.testing.assert_close(got[1, :, :3], wanted, rtol=0, atol=1e-12)

    @PATHS
    def test_a_sample_of_padding_is_zero(self, length: int) -> None:
        q, k, v = inputs(length, batch=2)
        real = torch.ones(2, length, dtype=torch.bool)
        real[1] = False
        assert (build()(q, k, v, Context(key_padding=real))[1] == 0).all()


class TestBounds:
    """The paper's two propositions, on rows of the weights."""

    def test_a_cluster_errs_by_no_more_than_the_distance_to_its_mean(self) -> None:
        q, k, _ = inputs(64)
        index, means = cluster(q, None, 8, 3)
        mean = means.gather(-2, index[..., None].expand_as(q))
        error = (clustered_map(q, k) - softmax_map(q, k)).norm(dim=-1)
        largest = torch.linalg.matrix_norm(k, ord=2)[..., None]
        assert (error <= SITE.scale * (q - mean).norm(dim=-1) * largest).all()

    @PATHS
    @pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
    def test_it_is_never_worse_than_clustered_attention(self, length: int, spread: float) -> None:
        q, k, _ = (spread * x for x in inputs(length, batch=8))
        exact = softmax_map(q, k)
        ours = (build().attention_map(q, k, Context()) - exact).abs().sum(-1)
        clustered = (clustered_map(q, k) - exact).abs().sum(-1)
        assert (ours <= clustered + 1e-12).all()
        assert ours.mean() < 0.95 * clustered.mean()


@pytest.mark.parametrize("clusters", [1, 2, 32])
@pytest.mark.parametrize("length", [1, 17, 64], ids=lambda n: f"{n}-tokens")
def test_all_keys_at_the_top_is_softmax_attention(length: int, clusters: int) -> None:
    q, k, v = inputs(length)
    topk = IMPROVED_CLUSTERED.exact_at(SITE).topk
    got = build(clusters=clusters, topk=topk)(q, k, v, Context())
    torch.testing.assert_close(got, softmax_map(q, k) @ v, rtol=0, atol=1e-12)
