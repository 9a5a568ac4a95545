"""The native kernel of kernel attention with DPFP features, beside dense weights in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from zoo_core import Context
from zoo_core.nn import choice, kernels, kernels_in_parts
from zoo_core.nn.feature_maps import dpfp

pytestmark = pytest.mark.usefixtures("native_kernels")

#: Below these many tokens a total weight may be so small that its reciprocal blurs gradients.
ENOUGH = 31


def make(length: int, keys: int, *, width: int = 16, values: int = 16) -> list[Tensor]:
    """q (2, 3, L, width), k (2, 3, S, width), v (2, 3, S, values), in the layout of hosts."""
    torch.manual_seed(length + keys)
    shapes = ((length, width), (keys, width), (keys, values))
    tokens = [torch.randn(2, n, 3, size).transpose(1, 2) for n, size in shapes]
    return [x.requires_grad_() for x in tokens]


def dense(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, nu: int) -> Tensor:
    """Features one after the other, and all weights."""

    def phi(x: Tensor) -> Tensor:
        r = torch.cat([x.clamp(min=0), (-x).clamp(min=0)], -1)
        count = r.shape[-1]
        places = [(j, (j - s) % count) for s in range(1, nu + 1) for j in range(count)]
        return torch.stack([r[..., j] * r[..., i] for j, i in places], -1)

    weights = phi(q.double()) @ phi(k.double()).mT
    if real is not None:
        weights = weights.masked_fill(~real[:, None, None], 0)
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1) @ v.double()


def attend(*tokens: Tensor, real: Tensor | None = None, nu: int = 1) -> Tensor:
    assert kernels_in_parts.kernel_of(partial(dpfp, nu=nu), *tokens) is not None
    return kernels.attend(partial(dpfp, nu=nu), *tokens, Context(key_padding=real))


def check(tokens: list[Tensor], *, nu: int = 1) -> None:
    """Outputs, with gradients and without, and gradients are those of dense weights."""
    out, expected = attend(*tokens, nu=nu), dense(*tokens, None, nu)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(attend(*tokens, nu=nu), out, rtol=0, atol=0)
    if tokens[1].shape[-2] < ENOUGH:
        return
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, tokens, grad)
    wanted = torch.autograd.grad(expected, tokens, grad.double())
    for one, other in zip(found, wanted, strict=True):
        most = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * most)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("keys", [1, 31, 32, 33, 70])
def test_the_kernel_is_dense_attention(length: int, keys: int) -> None:
    check(make(length, keys))


@pytest.mark.parametrize("nu", [1, 2, 3])
@pytest.mark.parametrize("width", [16, 48])
@pytest.mark.parametrize("values", [32, 80, 128])
def test_any_width_and_all_rolls(nu: int, width: int, values: int) -> None:
    check(make(40, 50, width=width, values=values), nu=nu)


@pytest.mark.parametrize("side", ["left", "right", "all"])
def test_padding_may_hold_anything(side: str) -> None:
    q, k, v = make(20, 80)
    real = torch.ones(2, 80, dtype=torch.bool)
    real[0, {"left": slice(0, 40), "right": slice(40, 80), "all": slice(None)}[side]] = False
    hidden = ~real[:, None, :, None]
    broken = [x.detach().masked_fill(hidden, torch.nan) for x in (k, v)]
    tokens = [x.requires_grad_() for x in (q.detach(), *broken)]
    out, expected = attend(*tokens, real=real), dense(q, k, v, real, 1)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, tokens, grad)
    wanted = torch.autograd.grad(expected, (q, k, v), grad.double())
    for one, other in zip(found, wanted, strict=True):
        most = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * most)


def test_other_layouts_of_memory() -> None:
    tokens = make(33, 40)
    wanted = attend(*tokens)
    for arrange in (torch.Tensor.contiguous, lambda x: x.mT.contiguous().mT):
        torch.testing.assert_close(attend(*map(arrange, tokens)), wanted, rtol=0, atol=0)


def test_numbers_without_features_weigh_nothing() -> None:
    q, k, v = make(35, 40)
    with torch.no_grad():
        q[:, :, 3], k[:, :, 5, ::2], k[:, :, 5, 1::2] = 0, 1, -1
    check([q, k, v])
    assert (attend(q, k, v)[:, :, 3] == 0).all()


def test_a_second_derivative_takes_the_plain_path() -> None:
    tokens = make(40, 40)

    def second() -> Tensor:
        out = kernels.attend(partial(dpfp, nu=1), *tokens, Context())
        (first,) = torch.autograd.grad(out.square().sum(), tokens[1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), tokens[1])[0]

    found = second()
    with choice.plain_only():
        torch.testing.assert_close(found, second(), rtol=1e-4, atol=1e-4)
