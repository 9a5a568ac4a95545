"""The native kernel of the delta rule, beside a loop and beside plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core.nn import choice, fast_weights, native
from zoo_core.nn.feature_maps import dpfp

pytestmark = pytest.mark.usefixtures("native_kernels")


def make(batch: int, length: int, width: int = 16) -> list[Tensor]:
    """Queries and keys (2, 3, N, 32), many of whose features are zero, values and strengths."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(batch, 3, length, width) for _ in range(3))
    q, k = (torch.nn.functional.normalize(dpfp(x, 1), dim=-1) for x in (q, k))
    return [q, k, v, torch.rand(batch, 3, length, 1)]


def loop(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Token by token in float64."""
    q, k, v, b = (x.double() for x in (q, k, v, b))
    state, out = q.new_zeros(*v.shape[:2], v.shape[-1], q.shape[-1]), []
    for t in range(q.shape[2]):
        error = v[:, :, t] - (state @ k[:, :, t, :, None]).squeeze(-1)
        state = state + (b[:, :, t] * error)[..., None] * k[:, :, t, None]
        out.append((state @ q[:, :, t, :, None]).squeeze(-1))
    return torch.stack(out, 2)


@pytest.mark.parametrize("length", [1, 2, 17, 64, 150])
@pytest.mark.parametrize("both", [False, True], ids=["one_way", "both_ways"])
def test_the_kernel_is_the_loop(length: int, both: bool, monkeypatch) -> None:
    tokens = [x.requires_grad_() for x in make(2, length)]
    monkeypatch.setattr(fast_weights, "_chunks", None)  # which the plain path cannot do without
    rule = fast_weights.delta_rule_both_ways if both else fast_weights.delta_rule
    out, expected = rule(*tokens), loop(*tokens)
    if both:
        expected = (expected + loop(*(x.flip(2) for x in tokens)).flip(2)) / 2
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, tokens, grad)
    wanted = torch.autograd.grad(expected, tokens, grad.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_zero_features_have_gradients_too() -> None:
    q, k, v, b = make(1, 20)
    leaves = [x.requires_grad_() for x in (q, k)]
    out = fast_weights.delta_rule(*leaves, v, b)
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert (grad[x == 0] != 0).any()


def test_strength_zero_leaves_everything_as_it_was() -> None:
    q, k, v, b = make(1, 40)
    b[:, :, 20:] = 0
    v[:, :, 20:] = 1e6
    out = fast_weights.delta_rule(q, k, v, b)
    known = fast_weights.delta_rule(q[:, :, :20], k[:, :, :20], v[:, :, :20], b[:, :, :20])
    torch.testing.assert_close(out[:, :, :20], known, rtol=0, atol=0)
    assert out.abs().max() < 1e3


def test_in_parts_as_without_kernels() -> None:
    _, _, v, b = make(2, 70)
    q, k = torch.randn(2, 3, 30, 16), torch.randn(2, 3, 70, 16)
    found = []
    for plain in (False, True):
        with choice.plain_only() if plain else torch.no_grad():
            found.append(
                fast_weights.delta_rule_in_parts(lambda x: dpfp(x, 1) / 8, q, k, v, b, offset=40)
            )
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_takes_the_plain_path() -> None:
    tokens = [x.requires_grad_() for x in make(1, 5)]

    def second(out: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(out.square().sum(), tokens[1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), tokens[1])[0]

    for backwards in (False, True):
        out = fast_weights._by_kernel(*tokens, backwards=backwards)
        order = [x.flip(2) for x in tokens] if backwards else tokens
        expected = loop(*order)
        torch.testing.assert_close(second(out), second(expected), rtol=1e-4, atol=1e-5)


def test_it_is_taken() -> None:
    assert native.loaded()
    assert fast_weights._has_kernel(*make(1, 3))
