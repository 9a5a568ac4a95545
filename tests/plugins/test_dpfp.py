"""DPFP against its features written out, its recurrent form, and its rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo_attention.dpfp import DPFP
from zoo_core import Context, Site
from zoo_core.nn import feature_maps, kernels

WIDTH = 5
EVERY_NU = pytest.mark.parametrize("nu", [1, 2, 3], ids=lambda nu: f"nu-{nu}")


def build(nu: int) -> nn.Module:
    site = Site(heads=2, head_dim=WIDTH, dim=2 * WIDTH, scale=WIDTH**-0.5)
    return DPFP.factory(site, DPFP.options(nu=nu))


def inputs(length: int) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(length)
    shape = (2, 2, length, WIDTH)
    return tuple(torch.randn(shape, dtype=torch.float64, generator=source) for _ in range(3))


def phi(x: Tensor, nu: int) -> Tensor:
    """The features of one vector (D,), one product at a time."""
    r = [max(y, 0.0) for y in x.tolist()] + [max(-y, 0.0) for y in x.tolist()]
    products = [r[j] * r[j - i] for i in range(1, nu + 1) for j in range(len(r))]
    return torch.tensor(products, dtype=x.dtype)


def features(x: Tensor, nu: int) -> Tensor:
    """The features of each vector of x (B, H, N, D)."""
    rows = [phi(row, nu) for row in x.reshape(-1, WIDTH)]
    return torch.stack(rows).view(*x.shape[:-1], -1)


def recurrent(q: Tensor, k: Tensor, v: Tensor, nu: int) -> Tensor:
    """The paper's sum rule: a state of fixed size, updated and read once per token."""
    q, k = features(q, nu), features(k, nu)
    state, total = 0.0, 0.0
    outputs = []
    for i in range(q.shape[2]):
        state = state + k[:, :, i, :, None] * v[:, :, i, None, :]
        total = total + k[:, :, i]
        read = torch.einsum("bhm,bhme->bhe", q[:, :, i], state)
        share = (q[:, :, i] * total).sum(-1, keepdim=True)
        outputs.append(torch.where(share > 0, read / share, torch.zeros_like(read)))
    return torch.stack(outputs, 2)


@EVERY_NU
def test_the_features_are_those_written_out(nu: int) -> None:
    x = inputs(4)[0]
    assert_close(feature_maps.dpfp(x, nu), features(x, nu), rtol=0, atol=0)


@EVERY_NU
@pytest.mark.parametrize("length", [1, 9, 23])
def test_the_causal_form_equals_the_recurrent_one(monkeypatch, nu: int, length: int) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    q, k, v = inputs(length)
    got = build(nu)(q, k, v, Context(causal=True))
    assert_close(got, recurrent(q, k, v, nu), rtol=0, atol=1e-12)


@EVERY_NU
def test_the_full_form_is_the_normalised_sum_over_keys(nu: int) -> None:
    q, k, v = inputs(9)
    shares = features(q, nu) @ features(k, nu).mT
    total = shares.sum(-1, keepdim=True)
    wanted = torch.where(total > 0, shares / total, 0.0) @ v
    assert_close(build(nu)(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


@EVERY_NU
def test_the_scale_of_queries_and_keys_cancels(nu: int) -> None:
    q, k, v = inputs(9)
    got = build(nu)(0.01 * q, 100 * k, v, Context())
    assert_close(got, build(nu)(q, k, v, Context()), rtol=0, atol=1e-12)


def test_a_query_without_features_gets_zeros() -> None:
    # A single positive entry has no neighbour to be multiplied with.
    q, k, v = inputs(9)
    q = torch.zeros_like(q)
    q[..., 0] = 3.0
    assert (build(1)(q, k, v, Context()) == 0).all()


def test_the_features_number_how_many_keys_can_be_told_apart() -> None:
    ranks = []
    for nu in (1, 2, 3):
        q, k, _ = inputs(40)
        ranks.append(torch.linalg.matrix_rank(build(nu).attention_map(q, k, Context())))
    wanted = torch.tensor([10, 20, 30])[:, None, None].expand(-1, 2, 2)
    assert torch.equal(torch.stack(ranks), wanted)
