from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.lipschitz_norm import LIPSCHITZ_NORM, LipschitzNormOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5)
NORMS = pytest.mark.parametrize("query_norm", ["token", "all"])


def build(**options: object) -> nn.Module:
    return LIPSCHITZ_NORM.factory(SITE, LipschitzNormOptions(**options)).eval()


def inputs(length: int, batch: int = 1, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shape = (batch, HEADS, length, WIDTH)
    q, k, v = (size * torch.randn(shape, dtype=torch.float64) for _ in range(3))
    return q, k, v


def by_formula(q: Tensor, k: Tensor, v: Tensor, query_norm: str) -> Tensor:
    """One unpadded sample and head at a time."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=v.dtype)
    for b, h in torch.cartesian_prod(*map(torch.arange, q.shape[:2])).tolist():
        keys, values = (max(row.norm().item() for row in x[b, h]) for x in (k, v))
        for i, query in enumerate(q[b, h]):
            own = (query if query_norm == "token" else q[b, h]).norm().item()
            divisor = max(own * keys, own * values, keys * values)
            weights = (SITE.scale * (k[b, h] @ query) / divisor).softmax(0)
            out[b, h, i] = weights @ v[b, h]
    return out


@NORMS
@pytest.mark.parametrize("largest", ["q", "k", "v"])
def test_it_computes_its_formula_whichever_norms_are_largest(query_norm: str, largest: str) -> None:
    tensors = dict(zip("qkv", inputs(7, batch=2), strict=True))
    tensors[largest] = 20 * tensors[largest]
    got = build(query_norm=query_norm)(**tensors, ctx=Context())
    wanted = by_formula(**tensors, query_norm=query_norm)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@NORMS
def test_norms_are_those_of_the_samples_real_tokens(query_norm: str) -> None:
    """Padding of any size, or none, on either side, beside a louder sample."""
    q, k, v = inputs(9, batch=3)
    real = torch.ones(3, 9, dtype=torch.bool)
    real[0, :4] = False
    real[1, -4:] = False
    q, k, v = (x * torch.tensor([1, 1, 50])[:, None, None, None] for x in (q, k, v))
    q, k, v = (x.masked_fill(~real[:, None, :, None], 1e6) for x in (q, k, v))
    got = build(query_norm=query_norm)(q, k, v, Context(key_padding=real))
    for b, mask in enumerate(real):
        wanted = by_formula(*(x[b : b + 1, :, mask] for x in (q, k, v)), query_norm)
        torch.testing.assert_close(got[b : b + 1, :, mask], wanted, rtol=1e-12, atol=1e-12)


@NORMS
@pytest.mark.parametrize("size", [1e-3, 1, 1e3])
def test_scores_stay_within_the_scale(query_norm: str, size: float) -> None:
    """With unit vectors as values the output is the weights."""
    q, k, _ = inputs(12, size=size)
    weights = build(query_norm=query_norm)(
        q, k, torch.eye(12).double().expand(1, HEADS, -1, -1), Context()
    )
    spread = (weights.amax(-1) / weights.amin(-1)).max().item()
    assert 1 < spread <= math.exp(2 * SITE.scale)


def test_the_inputs_size_does_not_matter() -> None:
    """Scores are of degree 0 in (q, k, v), so that the output grows as the inputs do."""
    x = inputs(9)
    for size in (1e-3, 1e3):
        got = build()(*(size * tensor for tensor in x), Context())
        torch.testing.assert_close(got, size * build()(*x, Context()), rtol=1e-10, atol=0)


def test_its_derivative_stays_bounded_where_that_of_dot_products_grows() -> None:
    """Self-attention on x itself, one token at 0 and the others ever larger."""

    def norm(size: float, module: nn.Module) -> float:
        x = size * inputs(4)[0][:, :1].clone()
        x[:, :, 0] = 0

        def layer(y: Tensor) -> Tensor:
            return module(y, y, y, Context())

        found = torch.autograd.functional.jacobian(layer, x).reshape(x.numel(), -1)
        return torch.linalg.matrix_norm(found, 2).item()

    def dot_products(q: Tensor, k: Tensor, v: Tensor, _: Context) -> Tensor:
        return (q @ k.mT * SITE.scale).softmax(-1) @ v

    module = build()
    first, *later = (norm(size, module) for size in (1, 10, 1000))
    assert all(found == pytest.approx(first, rel=1e-6) for found in later)
    assert norm(1000, dot_products) > 1e3 * norm(1, dot_products)
