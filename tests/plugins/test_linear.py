"""Linear attention against its definition, its recurrent form, and the paper's normaliser."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from zoo_attention.linear import LINEAR
from zoo_core import Context, Site
from zoo_core.nn import kernels


@pytest.fixture
def attention() -> torch.nn.Module:
    return LINEAR.factory(Site(heads=2, head_dim=8, dim=16), LINEAR.options())


def inputs(length: int) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(length)
    return tuple(
        torch.randn(2, 2, length, 8, dtype=torch.float64, generator=source) for _ in range(3)
    )


def phi(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def recurrent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Section 3.4 of the paper: a state of fixed size, updated and read once per token."""
    state = q.new_zeros(2, 2, 8, 8)
    normaliser = q.new_zeros(2, 2, 8)
    outputs = []
    for i in range(q.shape[2]):
        state = state + phi(k[:, :, i])[..., None] * v[:, :, i, None, :]
        normaliser = normaliser + phi(k[:, :, i])
        query = phi(q[:, :, i])
        total = (query * normaliser).sum(-1, keepdim=True)
        outputs.append((query[..., None, :] @ state)[..., 0, :] / total)
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("length", [1, 4, 5, 23, 24])
def test_the_causal_form_equals_the_recurrent_one(attention, monkeypatch, length: int) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    q, k, v = inputs(length)
    got = attention(q, k, v, Context(causal=True))
    assert_close(got, recurrent(q, k, v), rtol=0, atol=1e-13)


@pytest.mark.parametrize("cached", [1, 4, 9, 22])
def test_tokens_after_a_cache_continue_the_recurrence(attention, monkeypatch, cached: int) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    q, k, v = inputs(23)
    got = attention(q[:, :, cached:], k, v, Context(causal=True, query_offset=cached))
    assert_close(got, recurrent(q, k, v)[:, :, cached:], rtol=0, atol=1e-13)


def test_the_full_form_equals_the_normalised_sum_over_keys(attention) -> None:
    q, k, v = inputs(9)
    wanted = torch.empty_like(q)
    for i in range(9):
        shares = torch.stack([(phi(q[:, :, i]) * phi(k[:, :, j])).sum(-1) for j in range(9)], -1)
        shares = shares / shares.sum(-1, keepdim=True)
        wanted[:, :, i] = (shares[..., None] * v).sum(2)
    assert_close(attention(q, k, v, Context()), wanted, rtol=0, atol=1e-14)


def test_padding_leaves_numerator_and_normaliser(attention) -> None:
    # With padding left in the normaliser, 5 tokens in 64 would come out about 13 times too small.
    q, k, v = inputs(64)
    real = torch.arange(64) < 5
    padded = attention(q, k, v, Context(key_padding=real.expand(2, -1)))
    alone = attention(q, k[:, :, :5], v[:, :, :5], Context())
    assert_close(padded, alone, rtol=0, atol=1e-14)


def test_the_papers_epsilon_is_negligible(attention) -> None:
    q, k, v = inputs(50)
    features, keys = phi(q), phi(k)
    with_epsilon = features @ (keys.mT @ v) / (features @ keys.sum(-2)[..., None] + 1e-6)
    assert_close(attention(q, k, v, Context()), with_epsilon, rtol=1e-6, atol=1e-8)


def test_hedgehog_features_are_two_softmaxes_of_a_learned_mix() -> None:
    site = Site(heads=2, head_dim=8, dim=16, scale=0.25)
    attention = LINEAR.factory(site, LINEAR.options(feature_map="hedgehog")).double()
    torch.nn.init.normal_(attention.mix)
    q, k, v = inputs(9)
    wanted = torch.empty_like(q)
    for b, h, i in product(range(2), range(2), range(9)):
        query = learned(q[b, h, i], attention.mix[h])
        shares = [query @ learned(k[b, h, j], attention.mix[h]) for j in range(9)]
        total = sum(shares)
        wanted[b, h, i] = sum(share / total * v[b, h, j] for j, share in enumerate(shares))
    assert_close(attention(q, k, v, Context()), wanted, rtol=0, atol=1e-14)


def learned(x: Tensor, mix: Tensor) -> Tensor:
    """A feature vector of one head at scale 0.25: x / sqrt(0.25) = 2 x."""
    y = torch.einsum("d,de->e", 2 * x, mix)
    up, down = y.exp(), (-y).exp()
    return torch.cat([up / up.sum(), down / down.sum()])


def test_untrained_hedgehog_is_nearer_to_softmax_than_elu() -> None:
    q, k, v = inputs(64)
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    errors = {}
    for feature_map in ("elu", "hedgehog"):
        site = Site(heads=2, head_dim=8, dim=16, scale=8**-0.5)
        attention = LINEAR.factory(site, LINEAR.options(feature_map=feature_map)).double()
        errors[feature_map] = (attention(q, k, v, Context()) - softmax).square().mean()
    assert errors["hedgehog"] < 0.8 * errors["elu"]
