"""Kernel attention's shared parts: feature maps, causal products in chunks, safe division."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from zoo_core import Context
from zoo_core.nn import feature_maps, kernels, parts, precision


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_elu_plus_one_is_linear_above_zero_and_exponential_below() -> None:
    x = torch.tensor([-3.0, -0.5, 0.0, 2.0], dtype=torch.float64)
    wanted = torch.tensor([-3.0, -0.5, 0.0, 0.0], dtype=torch.float64).exp()
    wanted[3] = 3.0
    assert_close(feature_maps.elu_plus_one(x), wanted, rtol=0, atol=1e-15)


def test_elu_plus_one_leaves_its_input_and_its_gradient_intact() -> None:
    x = normal(3, 4)
    before = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(feature_maps.elu_plus_one, before)
    assert torch.autograd.gradgradcheck(feature_maps.elu_plus_one, before)
    feature_maps.elu_plus_one(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("queries", "keys", "offset"),
    [
        (1, 1, 0),
        (3, 3, 0),
        (4, 4, 0),
        (5, 5, 0),
        (13, 13, 0),
        (2, 9, 7),
        (9, 13, 4),
        (8, 3, 0),
        (5, 12, 2),
    ],
    ids=lambda number: str(number),
)
def test_causal_product_equals_the_loop(monkeypatch, queries: int, keys: int, offset: int) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    q, k, v = normal(2, 3, queries, 5), normal(2, 3, keys, 5, seed=1), normal(2, 3, keys, 6, seed=2)
    wanted = torch.zeros(2, 3, queries, 6, dtype=torch.float64)
    for i in range(queries):
        for j in range(min(i + offset + 1, keys)):
            wanted[:, :, i] += (q[:, :, i] * k[:, :, j]).sum(-1, keepdim=True) * v[:, :, j]
    got = kernels.causal_product(q, k, v, offset=offset)
    assert_close(got, wanted, rtol=0, atol=1e-12)


def test_causal_product_takes_nothing_back_from_huge_later_keys(monkeypatch) -> None:
    # A running sum minus the chunk's own part would lose the earlier part to rounding.
    monkeypatch.setattr(kernels, "CHUNK", 4)
    x = normal(1, 1, 12, 5, dtype=torch.float32)
    later = torch.cat([x[..., :6, :], 1e12 * x[..., 6:, :]], -2)
    before, after = (
        kernels.causal_product(x, keys, x, offset=0)[..., :6, :] for keys in (x, later)
    )
    assert_close(after, before, rtol=0, atol=0)


def test_causal_product_gradients_are_those_of_the_masked_product(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    x = [normal(1, 2, 7, 3, seed=seed).requires_grad_() for seed in range(3)]
    got = torch.autograd.grad(kernels.causal_product(*x, offset=0).square().sum(), x)
    q, k, v = x
    wanted = torch.autograd.grad(((q @ k.mT).tril() @ v).square().sum(), x)
    for mine, dense in zip(got, wanted, strict=True):
        assert_close(mine, dense, rtol=0, atol=1e-10)


PADDING = torch.ones(2, 13, dtype=torch.bool)
PADDING[0, :6] = PADDING[1, 3:8] = False


@pytest.mark.parametrize("padding", [None, PADDING], ids=["all-real", "padded"])
@pytest.mark.parametrize(
    ("queries", "causal", "offset"),
    [(13, False, 0), (1, False, 0), (13, True, 0), (6, True, 7), (2, True, 5), (20, True, 0)],
)
def test_attend_in_parts_equals_the_map_times_values(
    monkeypatch, padding: torch.Tensor | None, queries: int, causal: bool, offset: int
) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    monkeypatch.setattr(parts, "FEWEST", 4)
    monkeypatch.setattr(parts, "ROWS", 1)
    ctx = Context(key_padding=padding, causal=causal, query_offset=offset)
    q, k, v = normal(2, 1, queries, 5), normal(2, 1, 13, 5, seed=1), normal(2, 1, 13, 6, seed=2)
    wanted = kernels.weights(feature_maps.elu_plus_one, q, k, ctx) @ v
    if padding is not None:
        k, v = (x.masked_fill(~padding[:, None, :, None], torch.nan) for x in (k, v))
    calls = []

    def phi(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[-2])
        return feature_maps.elu_plus_one(x)

    with torch.no_grad():
        got = kernels.attend(phi, q, k, v, ctx)
    assert_close(got, wanted, rtol=0, atol=1e-13)
    assert max(calls) <= 4
    assert_close(kernels.attend(phi, q, k, v, ctx), wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "phi",
    [feature_maps.elu_plus_one, lambda x: feature_maps.dpfp(x, 1) + 0.1],
    ids=["elu", "any-other"],
)
def test_gradients_in_parts_are_right_and_so_are_theirs(monkeypatch, phi) -> None:
    monkeypatch.setattr(parts, "FEWEST", 3)
    monkeypatch.setattr(parts, "ROWS", 1)
    padding = torch.tensor([[False, True, True, True, False], [False] * 5])
    x = [normal(2, 2, n, w, seed=n + w).requires_grad_() for n, w in ((4, 2), (5, 2), (5, 3))]

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return kernels.attend(phi, *x, Context(key_padding=padding))

    assert "InParts" in type(attend(*x).grad_fn).__name__
    assert torch.autograd.gradcheck(attend, x)
    assert torch.autograd.gradgradcheck(attend, x)


def test_keys_made_from_queries_hand_on_their_gradient_once() -> None:
    q, v = normal(1, 1, 4, 2).requires_grad_(), normal(1, 1, 4, 3, seed=1)
    out = kernels.attend(feature_maps.elu_plus_one, q, q.sin(), v, Context())
    once, again = (
        torch.autograd.grad(out.square().sum(), q, create_graph=graph, retain_graph=True)[0]
        for graph in (False, True)
    )
    assert_close(again, once, rtol=0, atol=1e-12)


def test_half_precision_sums_are_taken_in_fp32() -> None:
    # 5000 features of about 20 sum to 100,000: beyond fp16, and far beyond its 11 bits.
    q, v = normal(1, 1, 3, 4), normal(1, 1, 5000, 4, seed=1)
    k = 20 + normal(1, 1, 5000, 4, seed=2)
    half = [x.to(torch.float16) for x in (q, k, v)]
    got = kernels.attend(feature_maps.elu_plus_one, *half, Context())
    with torch.no_grad():
        in_parts = kernels.attend(feature_maps.elu_plus_one, *half, Context())
    wanted = kernels.attend(feature_maps.elu_plus_one, *(x.double() for x in half), Context())
    for half_sums in (got, in_parts):
        assert half_sums.dtype == torch.float16
        assert_close(half_sums.double(), wanted, rtol=2e-3, atol=1e-4)


def test_a_total_of_zero_gives_zeros_and_finite_gradients() -> None:
    sums = torch.zeros(2, 3, requires_grad=True)
    total = torch.tensor([[0.0], [2.0]], requires_grad=True)
    quotient = precision.divide(sums, total)
    quotient.sum().backward()
    assert_close(quotient, torch.zeros(2, 3), rtol=0, atol=0)
    assert sums.grad.isfinite().all()
    assert total.grad.isfinite().all()


@pytest.mark.parametrize(
    ("causal", "offset", "keys", "answer"),
    [
        (False, 0, 9, True),
        (True, 0, 9, False),
        (True, 8, 9, True),
        (True, 7, 9, False),
        (True, 0, 1, True),
    ],
)
def test_sees_all(causal: bool, offset: int, keys: int, answer: bool) -> None:
    ctx = Context(causal=causal, query_offset=offset)
    assert kernels.sees_all(ctx, torch.zeros(1, 1, keys, 2)) is answer


@pytest.mark.parametrize("length", [1, 4, 6, 8])
def test_chunks_and_joined_are_inverse(monkeypatch, length: int) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    x = normal(2, 3, length, 5)
    cut = kernels.chunks(x, length)
    assert cut.shape[3] <= 4
    assert torch.equal(kernels.joined(cut, length), x)
