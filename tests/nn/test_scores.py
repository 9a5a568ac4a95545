from __future__ import annotations

import torch

from zoo_core.nn import scores


def test_dot_products_under_autocast_stay_in_fp32() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 5, 8).unbind(0)
    wanted = scores.dot_product(q, k, None, scale=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = scores.dot_product(q, k, None, scale=0.5)
    assert torch.equal(got, wanted)
    torch.testing.assert_close(wanted, 0.5 * q @ k.mT)


def test_padding_leaves_dot_products_and_mixtures_finite() -> None:
    torch.manual_seed(0)
    real = torch.tensor([[True, True, False]])
    k = torch.randn(1, 2, 3, 4).masked_fill(~real[:, None, :, None], torch.nan)
    dots = scores.dot_product(torch.randn(1, 2, 3, 4), k, real, scale=1.0)
    assert (dots[..., 2] == 0).all()
    weights = torch.tensor([0.25, 0.75, 0.0]).expand(1, 2, 3, 3)
    got = scores.mix(weights, k, real)
    torch.testing.assert_close(got[0, 0, 0], 0.25 * k[0, 0, 0] + 0.75 * k[0, 0, 1])


def test_a_mixture_has_the_dtype_of_the_values_and_sums_in_that_of_the_weights() -> None:
    v = torch.full((1, 1, 4096, 1), 0.1, dtype=torch.bfloat16)
    got = scores.mix(torch.ones(1, 1, 1, 4096) / 4096, v, None)
    assert got.dtype == torch.bfloat16
    assert got.item() == v[0, 0, 0, 0].item()


def test_samples_that_share_weights_drop_their_own() -> None:
    torch.manual_seed(0)
    out = scores.mix(torch.ones(1, 1, 8, 8), torch.eye(8).expand(2, 1, 8, 8), None, dropout=0.5)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(out[0], out[1])


def test_the_queries_of_a_cached_call_are_the_last_tokens() -> None:
    real = torch.tensor([[False, True, True, False]])
    assert scores.real_queries(real, 2).tolist() == [[True, False]]
    assert scores.real_queries(None, 2) is None
