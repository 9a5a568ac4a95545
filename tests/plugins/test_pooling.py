from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.pooling import POOLING, PoolingOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 4
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=8, scale=WIDTH**-0.5, max_len=512)
POOLS = pytest.mark.parametrize("pool", ["dynamic", "mean", "max"])

# The first level works in blocks from 65 tokens on, the second from 65 pooled ones on.
LENGTHS = pytest.mark.parametrize("length", [1, 2, 6, 90, 150])
SMALL = {"window": 3, "outer": 9, "kernel": 3, "stride": 2}


def build(**options: object) -> nn.Module:
    """A module in float64 whose gates and taps are no longer what they start from."""
    torch.manual_seed(1)
    module = POOLING.factory(SITE, PoolingOptions(**options)).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, sees: list[list[bool]]) -> Tensor:
    scores = (q @ k.mT * SITE.scale).masked_fill(~torch.tensor(sees), -torch.inf)
    return scores.softmax(-1) @ v


def pooled(module: nn.Module, k: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cell by cell, keys and values (H, C, D)."""
    keys, values = [], []
    for start in range(0, k.shape[-2], module.stride):
        cell = slice(start, start + module.kernel)
        of_k, of_y = k[:, cell], y[:, cell]
        if module.takes_maximum:
            keys.append(of_k.amax(1))
            values.append(of_y.amax(1))
            continue
        size = of_k.shape[1]
        weights = torch.full((HEADS, size), 1 / size, dtype=k.dtype)
        if module.taps is not None:
            middle = of_k[:, min(module.kernel // 2, size - 1)]
            weights = torch.einsum("hd,hdt->ht", middle, module.taps)[:, :size].softmax(-1)
        keys.append(torch.einsum("ht,htd->hd", weights, of_k))
        values.append(torch.einsum("ht,htd->hd", weights, of_y))
    return torch.stack(keys, 1), torch.stack(values, 1)


def by_loop(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, prefix: int = 0) -> Tensor:
    """Both levels dense, sample by sample, for tokens none of which is padding."""
    length, stride, out = q.shape[-2], module.stride, []
    near = [
        [abs(i - j) <= module.window or i < prefix or j < prefix for j in range(length)]
        for i in range(length)
    ]
    for b in range(len(q)):
        y = attend(q[b], k[b], v[b], near)
        if length > prefix:
            short_k, short_y = pooled(module, k[b, :, prefix:], y[:, prefix:])
            reach, cells = module.outer // stride, range(short_k.shape[1])
            sees = [[abs(i // stride - c) <= reach for c in cells] for i in range(length - prefix)]
            z = attend(q[b, :, prefix:], short_k, short_y, sees)
            share = 1 / (1 + (-module.gate).exp())
            y = torch.cat([y[:, :prefix], (1 - share) * y[:, prefix:] + share * z], 1)
        out.append(y)
    return torch.stack(out)


@POOLS
@LENGTHS
def test_it_computes_its_formula(length: int, pool: str) -> None:
    module = build(pool=pool, **SMALL)
    q, k, v = inputs(length, batch=2)
    for prefix in (0, 2):
        got = module(q, k, v, Context(prefix=prefix))
        torch.testing.assert_close(got, by_loop(module, q, k, v, prefix), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (5, 4), (2, 3)])
def test_any_kernel_and_stride(kernel: int, stride: int) -> None:
    module = build(window=2, outer=8, kernel=kernel, stride=stride)
    q, k, v = inputs(23)
    wanted = by_loop(module, q, k, v)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


@POOLS
@pytest.mark.parametrize("length", [13, 150])
def test_padding_is_neither_pooled_nor_counted(length: int, pool: str) -> None:
    """Pads on the left, on the right and inside, holding NaN, in one batch."""
    module = build(pool=pool, **SMALL)
    q, k, v = inputs(length, batch=3)
    real = torch.ones(3, length, dtype=torch.bool)
    real[0, :6] = False
    real[1, -6:] = False
    real[2, 4::5] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = module(q, k, v, Context(key_padding=real, prefix=1))
    for b, mask in enumerate(real):
        wanted = by_loop(module, *(x[b : b + 1, :, mask] for x in (q, k, v)), prefix=1)
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)


def test_a_value_reaches_as_far_as_both_levels() -> None:
    """Through the first level to its neighbours, whose outputs the second level pools."""
    module = build(pool="mean", window=2, outer=8, kernel=4, stride=4)
    q, k, v = inputs(100)
    moved = v.clone()
    moved[:, :, 50] += 1
    change = module(q, k, moved, Context()) - module(q, k, v, Context())
    rows = change.abs().amax((0, 1, 3)).nonzero().flatten().tolist()
    # Outputs 48 to 52 lie in the cells 12 and 13; the cells 10 to 15 see one of them.
    assert rows == list(range(40, 64))


@POOLS
def test_gradients_are_those_of_the_loop(pool: str) -> None:
    module = build(pool=pool, **SMALL)
    leaves = [*(x.requires_grad_() for x in inputs(90)), *module.parameters()]
    got = module(*leaves[:3], Context(prefix=1)).square().sum()
    wanted = by_loop(module, *leaves[:3], prefix=1).square().sum()
    pairs = zip(*(torch.autograd.grad(x, leaves) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_dynamic_pooling_starts_as_the_mean() -> None:
    dynamic, mean = (
        POOLING.factory(SITE, PoolingOptions(pool=pool, window=3)).double()
        for pool in ("dynamic", "mean")
    )
    q, k, v = inputs(50)
    wanted = mean(q, k, v, Context())
    torch.testing.assert_close(dynamic(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 17, 128], ids=lambda n: f"{n}-tokens")
def test_a_window_that_spans_all_is_softmax_attention(length: int) -> None:
    q, k, v = inputs(length)
    module = POOLING.factory(SITE, POOLING.exact_at(SITE)).double()
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)
