"""Feature maps beside their formulas, written as loops over numbers, and their slopes."""

from __future__ import annotations

import math

import pytest
import torch

from zoo_core.nn import feature_maps

X = [-200.0, -30.0, -1.5, -1e-6, 0.0, 1e-6, 0.7, 40.0, 1e4]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=str
)
def test_elu_plus_one_and_its_slope(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.tensor(X, dtype=dtype, requires_grad=True)
    wanted = torch.tensor([1 + value if value > 0 else math.exp(value) for value in X], dtype=dtype)
    slopes = torch.tensor([1 if value > 0 else math.exp(value) for value in X], dtype=dtype)
    features = feature_maps.elu_plus_one(x)
    torch.testing.assert_close(features, wanted, rtol=tolerance, atol=0)
    features.backward(torch.full_like(x, 3.0))
    torch.testing.assert_close(x.grad, 3 * slopes, rtol=tolerance, atol=0)
    again, pull = feature_maps.elu_and_slope(x.detach())
    assert torch.equal(again, features.detach())
    torch.testing.assert_close(pull(torch.full_like(x, 3.0).detach()), x.grad, rtol=0, atol=0)


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_dpfp_multiplies_rectified_entries_that_lie_apart(nu: int) -> None:
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    features = feature_maps.dpfp(x, nu)
    assert features.shape == (4, 2 * 5 * nu)
    for row, found in zip(x.tolist(), features.tolist(), strict=True):
        r = [max(0.0, value) for value in [*row, *(-value for value in row)]]
        wanted = [r[i] * r[(i - places) % 10] for places in range(1, nu + 1) for i in range(10)]
        assert found == pytest.approx(wanted, abs=1e-15)
