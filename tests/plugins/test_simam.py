from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.simam import SIMAM, SimamOptions
from zoo_attention.simam.attention import inverse_energy
from zoo_core import Context, Site

HEADS, WIDTH = 2, 4
SCALE = WIDTH**-0.5
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=8, scale=SCALE)


def build(**options: object) -> nn.Module:
    return SIMAM.factory(SITE, SimamOptions(**options)).double().eval()


def inputs(length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).softmax(-1) @ v


def gated(x: Tensor, prefix: int, regularisation: float, strength: float = 1.0) -> Tensor:
    """The gate, one channel of one head of one sample at a time."""
    out = x.clone()
    for b, h, e in product(*(range(n) for n in (*x.shape[:2], x.shape[-1]))):
        channel = out[b, h, :, e]
        numbers = channel[prefix:].tolist()
        mean = sum(numbers) / len(numbers)
        variance = sum((t - mean) ** 2 for t in numbers) / max(len(numbers) - 1, 1)
        for i, t in enumerate(numbers):
            energy = (
                4
                * (variance + regularisation)
                / ((t - mean) ** 2 + 2 * variance + 2 * regularisation)
            )
            share = 1 / (1 + torch.tensor(-1 / energy, dtype=torch.float64).exp())
            channel[prefix + i] = t * (1 - strength + strength * share)
    return out


@pytest.mark.parametrize("regularisation", [1e-4, 0.3])
@pytest.mark.parametrize("target", [-2.0, 0.1, 3.0])
def test_the_closed_form_is_the_least_energy(target: float, regularisation: float) -> None:
    """Of mean (-1 - w x - b)^2 + (1 - w t - b)^2 + lambda w^2 over w and b, by least squares."""
    torch.manual_seed(0)
    others = torch.randn(20, dtype=torch.float64)
    rows = [[x / 20**0.5, 20**-0.5] for x in others.tolist()]
    rows += [[target, 1.0], [regularisation**0.5, 0.0]]
    sides = [-(20**-0.5)] * 20 + [1.0, 0.0]
    a, b = torch.tensor(rows, dtype=torch.float64), torch.tensor(sides, dtype=torch.float64)
    least = (a @ torch.linalg.lstsq(a, b[:, None]).solution - b[:, None]).square().sum()
    squares = (target - others.mean()).square()
    got = inverse_energy(squares, others.var(correction=0), regularisation)
    torch.testing.assert_close(1 / got, least, rtol=0, atol=1e-10)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("cells", [1, 2, 9])
@pytest.mark.parametrize("options", [{}, {"strength": 0.3}, {"regularisation": 0.5}], ids=str)
def test_it_computes_its_formula(prefix: int, cells: int, options: dict[str, float]) -> None:
    q, k, v = inputs(prefix + cells)
    wanted = gated(attend(q, k, v), prefix, **{"regularisation": 1e-4, **options})
    got = build(**options)(q, k, v, Context(prefix=prefix))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_prefix_tokens_pass_and_do_not_count() -> None:
    q, k, v = inputs(9)
    loud = q.clone()
    loud[:, :, :2] *= 100
    ctx = Context(prefix=2)
    one, two = (build()(x, k, v, ctx) for x in (q, loud))
    torch.testing.assert_close(two[:, :, :2], attend(loud, k, v)[:, :, :2], rtol=0, atol=1e-12)
    torch.testing.assert_close(two[:, :, 2:], one[:, :, 2:], rtol=0, atol=1e-12)


def test_a_feature_map_is_the_real_tokens() -> None:
    """Pads of NaN on the left and inside; the prefix is the first real token."""
    q, k, v = inputs(9, batch=1)
    real = torch.tensor([[False, True, True, True, False, True, True, False, True]])
    padded = [x.masked_fill(~real[..., None], torch.nan).requires_grad_() for x in (q, k, v)]
    got = build()(*padded, Context(key_padding=real, prefix=1))[:, :, real[0]]
    wanted = gated(attend(*(x[:, :, real[0]] for x in (q, k, v))), 1, 1e-4)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_the_gate_lets_through_more_than_a_sigmoid_of_one_half() -> None:
    q, k, v = inputs(30)
    share = build()(q, k, v, Context()) / attend(q, k, v)
    assert share.min() > 0.6224
    assert share.max() < 1
    flat = build(regularisation=1e4)(q, k, v, Context()) / attend(q, k, v)
    torch.testing.assert_close(flat, torch.full_like(flat, 0.6225), rtol=0, atol=1e-3)


def test_without_a_gate_it_is_softmax_attention() -> None:
    q, k, v = inputs(9)
    module = SIMAM.factory(SITE, SIMAM.exact_at(SITE))
    got = module(q, k, v, Context(prefix=1))
    torch.testing.assert_close(got, attend(q, k, v), rtol=0, atol=1e-12)
