from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.bipartite import BIPARTITE, BipartiteOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)
FORMS = pytest.mark.parametrize("form", ["simplex", "duplex"])


def build(latents: int = 4, **options: object) -> nn.Module:
    """A module in float64 whose gain is no longer zero."""
    torch.manual_seed(1)
    module = BIPARTITE.factory(SITE, BipartiteOptions(latents=latents, **options)).double().eval()
    if module.gain is not None:
        nn.init.normal_(module.gain)
    return module


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def simplex(y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the tokens of one head (N, D) read from latents y (M, D)."""
    content = torch.stack([(k @ latent * SITE.scale).softmax(0) @ v for latent in y])
    return (q @ y.mT * SITE.scale).softmax(-1) @ content


def duplex(y: Tensor, q: Tensor, k: Tensor, v: Tensor, iterations: int) -> Tensor:
    """The same, by k-means that assigns each token softly to its nearest centroids."""
    centroids = torch.stack([(k @ latent * SITE.scale).softmax(0) @ k for latent in y])
    for _ in range(iterations):
        nearness = -SITE.scale / 2 * torch.cdist(k, centroids).square()
        shares = nearness.softmax(-1)
        last, centroids = centroids, (shares.mT @ k) / shares.sum(0)[:, None]
    assert iterations == 0 or not torch.equal(last, centroids)
    values = (shares.mT @ v) / shares.sum(0)[:, None]
    kernel = shares.sum(0) * (q @ centroids.mT * SITE.scale).exp()
    return kernel @ values / kernel.sum(-1, keepdim=True)


def by_formula(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    for b in range(len(q)):
        for h in range(HEADS):
            call = (module.latents[h], q[b, h], k[b, h], v[b, h])
            read = duplex(*call, module.iterations) if module.duplex else simplex(*call)
            out[b, h] = read
            if module.gain is not None:
                own = v[b, h] - v[b, h].mean(-1, keepdim=True)
                own = own / (v[b, h].var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
                out[b, h] += module.gain[h] * read * own
    return out


@FORMS
@pytest.mark.parametrize("integration", ["add", "both"])
@pytest.mark.parametrize("length", [2, 3, 17])
def test_it_computes_its_formula(form: str, integration: str, length: int) -> None:
    module = build(form=form, integration=integration)
    q, k, v = inputs(length, batch=2)
    wanted = by_formula(module, q, k, v)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


def test_k_means_repeats() -> None:
    module = build(iterations=3)
    q, k, v = inputs(17)
    wanted = by_formula(module, q, k, v)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


@FORMS
def test_padding_joins_no_cluster(form: str) -> None:
    """Pads on the left, on the right and inside, holding NaN, in one batch."""
    module = build(form=form, iterations=2)
    q, k, v = inputs(11, batch=3)
    real = torch.ones(3, 11, dtype=torch.bool)
    real[0, :4] = False
    real[1, -8:] = False
    real[2, 1::3] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = module(q, k, v, Context(key_padding=real))
    for b, mask in enumerate(real):
        wanted = by_formula(module, *(x[b : b + 1, :, mask] for x in (q, k, v)))
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)


def test_clusters_of_equal_keys_give_softmax_attention() -> None:
    """Three tokens share one key, one has another: as many exponentials as tokens are summed."""
    q, _, v = inputs(4)
    points = 100 * torch.eye(2, WIDTH, dtype=torch.float64)
    k = points[[0, 1, 0, 0]].expand(1, HEADS, -1, -1)
    module = BIPARTITE.factory(SITE, BipartiteOptions(latents=2, integration="add")).double()
    with torch.no_grad():
        module.latents.copy_(points)
    q = q / 50
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


@FORMS
def test_permuted_tokens_give_permuted_outputs(form: str) -> None:
    module = build(form=form)
    q, k, v = inputs(20)
    order = torch.randperm(20)
    got = module(*(x[:, :, order] for x in (q, k, v)), Context())
    torch.testing.assert_close(got, module(q, k, v, Context())[:, :, order], rtol=0, atol=1e-12)


@FORMS
def test_modulation_is_off_at_the_start(form: str) -> None:
    torch.manual_seed(0)
    both, add = (
        BIPARTITE.factory(SITE, BipartiteOptions(form=form, integration=how))
        for how in ("both", "add")
    )
    add.load_state_dict(both.state_dict(), strict=False)
    q, k, v = (x.float() for x in inputs(9))
    assert torch.equal(both(q, k, v, Context()), add(q, k, v, Context()))
