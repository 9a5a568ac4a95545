from __future__ import annotations

import pytest
import torch

from zoo_core.nn import latents

HEADS, WIDTH, SCALE = 2, 4, 0.5


@pytest.mark.parametrize("width", [WIDTH, 6], ids=lambda e: f"values-{e}-wide")
def test_latents_gather_keys_and_values_by_one_softmax(width: int) -> None:
    torch.manual_seed(0)
    y, k, v = (
        torch.randn(2, HEADS, n, d, dtype=torch.float64)
        for n, d in ((3, WIDTH), (7, WIDTH), (7, width))
    )
    real = torch.tensor([[True] * 7, [True, False, True, True, False, False, True]])
    k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (k, v))
    keys, values = latents.gather(y, k, v, real, scale=SCALE)
    weights, again = latents.gather_weights(y, k, real, scale=SCALE)
    for b in range(2):
        alone = (y[b] @ k[b, :, real[b]].mT * SCALE).softmax(-1)
        torch.testing.assert_close(weights[b][..., real[b]], alone)
        for got, x in ((keys, k), (again, k), (values, v)):
            torch.testing.assert_close(got[b], alone @ x[b, :, real[b]], rtol=0, atol=1e-12)


def test_a_sample_of_padding_gathers_zeros() -> None:
    y, k, v = (torch.randn(1, HEADS, 3, WIDTH) for _ in range(3))
    gathered = latents.gather(y, k, v, torch.zeros(1, 3, dtype=torch.bool), scale=SCALE)
    assert all((x == 0).all() for x in gathered)


def test_latents_of_a_head_start_orthogonal_and_gaussian() -> None:
    torch.manual_seed(0)
    y = latents.spread_out(3, 64, 64)
    assert y.std().item() == pytest.approx(1, rel=0.03)
    first, second = (torch.nn.functional.normalize(x, dim=-1) for x in y[:2])
    torch.testing.assert_close(first @ first.mT, torch.eye(64), rtol=0, atol=1e-5)
    assert (first @ second.mT).abs().max() < 0.9
