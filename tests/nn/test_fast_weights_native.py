"""The native kernel of the delta rule, beside a loop and beside plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zoo_attention.delta import DELTA
from zoo_core import Context, Site
from zoo_core.nn import choice, fast_weights_native, native

pytestmark = pytest.mark.usefixtures("native_kernels")

HEADS = 3
#: One token, around a block of 32, and several blocks.
LENGTHS = (1, 2, 31, 32, 33, 150)


def make(length: int, *, width: int = 16, values: int = 16) -> list[Tensor]:
    """q, k (2, 3, N, width) and v, which want gradients, and strengths (2, 3, N, 1)."""
    torch.manual_seed(length)
    sizes = (width, width, values)
    q, k, v = (torch.randn(2, length, HEADS, size).transpose(1, 2) for size in sizes)
    return [x.requires_grad_() for x in (q, k, v, torch.rand(2, HEADS, length, 1))]


def features(x: Tensor, nu: int) -> Tensor:
    """DPFP (B, H, N, M) that sums to 1, one feature after the other."""
    r = torch.cat([x.clamp(min=0), (-x).clamp(min=0)], -1)
    count = r.shape[-1]
    places = [(j, (j - s) % count) for s in range(1, nu + 1) for j in range(count)]
    found = torch.stack([r[..., j] * r[..., i] for j, i in places], -1)
    return found / found.sum(-1, keepdim=True).clamp(min=1e-30)


def loop(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, real: Tensor | None, nu: int, offset: int
) -> Tensor:
    """Token by token in float64."""
    q, k, v, b = (x.double() for x in (q, k, v, b))
    q, k = features(q, nu), features(k, nu)
    state, out = v.new_zeros(*v.shape[:2], v.shape[-1], k.shape[-1]), []
    for t in range(offset + q.shape[2]):
        error = v[:, :, t] - (state @ k[:, :, t, :, None]).squeeze(-1)
        added = (b[:, :, t] * error)[..., None] * k[:, :, t, None]
        seen = True if real is None else real[:, t, None, None, None]
        state = state + torch.where(torch.as_tensor(seen), added, 0)
        if t >= offset:
            out.append((state @ q[:, :, t - offset, :, None]).squeeze(-1))
    return torch.stack(out, 2)


def by_loop(
    *tokens: Tensor, real: Tensor | None = None, nu: int = 1, offset: int | None = None
) -> Tensor:
    """Both ways if offset is None."""
    there = loop(*tokens, real, nu, offset or 0)
    if offset is not None:
        return there
    mirrored = None if real is None else real.flip(1)
    return (there + loop(*(x.flip(2) for x in tokens), mirrored, nu, 0).flip(2)) / 2


def by_kernel(
    *tokens: Tensor,
    real: Tensor | None = None,
    nu: int = 1,
    offset: int | None = None,
    plain: Callable[..., Tensor] = by_loop,
) -> Tensor:
    out = fast_weights_native.delta_rule_of_dpfp(plain, *tokens, real, nu=nu, offset=offset)
    assert out is not None
    return out


def check(tokens: list[Tensor], **how: object) -> None:
    """Outputs, with gradients and without, and gradients are the loop's."""
    out, expected = by_kernel(*tokens, **how), by_loop(*tokens, **how)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(by_kernel(*tokens, **how), out, rtol=0, atol=0)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, tokens, grad)
    wanted = torch.autograd.grad(expected, tokens, grad.double())
    for one, other in zip(found, wanted, strict=True):
        most = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * most)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("both", [False, True], ids=["one_way", "both_ways"])
def test_the_kernel_is_the_loop(length: int, both: bool) -> None:
    check(make(length), offset=None if both else 0)


@pytest.mark.parametrize("nu", [2, 3])
@pytest.mark.parametrize("width", [16, 48])
@pytest.mark.parametrize("values", [16, 80, 128])
def test_any_width_and_all_rolls(nu: int, width: int, values: int) -> None:
    check(make(40, width=width, values=values), nu=nu)


def test_queries_after_keys_of_a_cache() -> None:
    q, *others = make(70)
    check([q[:, :, 40:], *others], offset=40)
    q, *others = make(70)
    check([q[:, :, 40:65], *others], offset=40)  # the last keys are seen by none


@pytest.mark.parametrize("both", [False, True], ids=["one_way", "both_ways"])
@pytest.mark.parametrize("side", ["left", "right", "all"])
def test_padding_may_hold_anything(side: str, both: bool) -> None:
    q, k, v, b = make(50)
    real = torch.ones(2, 50, dtype=torch.bool)
    real[0, {"left": slice(0, 35), "right": slice(15, 50), "all": slice(None)}[side]] = False
    hidden = ~real[:, None, :, None]
    k_nan, v_nan, b_nan = (x.detach().masked_fill(hidden, torch.nan) for x in (k, v, b))
    offset = None if both else 0
    tokens = [x.requires_grad_() for x in (q.detach(), k_nan, v_nan, b_nan)]
    out = by_kernel(*tokens, real=real, offset=offset)
    torch.testing.assert_close(
        out.double(), by_loop(q, k, v, b, real=real, offset=offset), rtol=1e-5, atol=1e-5
    )
    grads = torch.autograd.grad(out.sum(), tokens)
    for grad in grads:
        assert grad.isfinite().all()
    for grad in grads[1:]:
        assert (grad.masked_select(hidden) == 0).all()
    if side == "all":
        assert (out[0] == 0).all()


def test_other_layouts_of_memory() -> None:
    tokens = make(33)
    wanted = by_kernel(*tokens)
    for arrange in (torch.Tensor.contiguous, lambda x: x.mT.contiguous().mT):
        torch.testing.assert_close(by_kernel(*map(arrange, tokens)), wanted, rtol=0, atol=0)


def test_numbers_that_are_zero_or_not_finite() -> None:
    tokens = make(20)
    with torch.no_grad():
        tokens[0][:, :, 3], tokens[1][:, :, 5, ::2] = 0, 0  # without features
    check(tokens)
    for number in (torch.nan, torch.inf, -torch.inf):
        for broken in tokens[:2]:
            with torch.no_grad():
                kept = broken[0, 0, 7, 0].clone()
                broken[0, 0, 7, 0] = number
                broken[0, 0, 7, 1] = broken[0, 0, 7, -1] = -kept.abs()
                got = by_kernel(*tokens, offset=0)
                broken[0, 0, 7, 0] = kept
            assert got[0, 0, 7].isnan().all() or broken is tokens[1]
            assert got[0, 0, 7:].isnan().any()
            assert got[0, 0, :7].isfinite().all()
            assert got[0, 1:].isfinite().all()


def test_strength_zero_leaves_everything_as_it_was() -> None:
    q, k, v, b = (x.detach() for x in make(40))
    b[:, :, 20:], v[:, :, 20:] = 0, 1e6
    out = by_kernel(q, k, v, b, offset=0)
    known = by_kernel(*(x[:, :, :20] for x in (q, k, v, b)), offset=0)
    torch.testing.assert_close(out[:, :, :20], known, rtol=0, atol=0)
    assert out.abs().max() < 1e3


@pytest.mark.parametrize("causal", [False, True], ids=["both_ways", "one_way"])
def test_a_second_derivative_takes_the_plain_path(causal: bool) -> None:
    site = Site(dim=48, heads=HEADS, head_dim=16, causal=causal)
    module = DELTA.factory(site, DELTA.options(strength_from="keys"))
    tokens = make(9)[:3]

    def second() -> Tensor:
        out = module(*tokens, Context(causal=causal))
        (first,) = torch.autograd.grad(out.square().sum(), tokens[1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), tokens[1])[0]

    found = second()
    with choice.plain_only():
        torch.testing.assert_close(found, second(), rtol=1e-4, atol=1e-4)


def test_it_is_taken_for_what_it_computes() -> None:
    assert native.loaded()
    *tokens, b = make(3)
    by_kernel(*tokens, b)
    for refused in ([*tokens, b.double()], [x.double() for x in (*tokens, b)]):
        rule = fast_weights_native.delta_rule_of_dpfp
        assert rule(by_loop, *refused, None, nu=1, offset=None) is None
