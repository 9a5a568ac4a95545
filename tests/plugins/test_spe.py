"""Stochastic positional encoding against the exact kernels of positions that it estimates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo_attention.spe import SPE, codes, sines
from zoo_core import Context, Site
from zoo_core.errors import OptionError, UnsupportedCall

HEADS, WIDTH = 2, 3
GRID, PREFIX = (3, 4), 2
TOKENS = 14  # in text, and on the grid with its prefix
KINDS = pytest.mark.parametrize("kind", ["sine", "conv"])

Kernel = Callable[[nn.Module, tuple[int, ...]], Tensor]
Places = list[tuple[int, ...] | None]


def build(seed: int = 0, *, grid: bool = False, prefix: int = PREFIX, **options: object):
    """A module in float64 whose kernels are no longer what they start from."""
    torch.manual_seed(seed)
    site = Site(
        heads=HEADS,
        head_dim=WIDTH,
        dim=HEADS * WIDTH,
        scale=WIDTH**-0.5,
        max_len=TOKENS,
        grid=GRID if grid else None,
        prefix=prefix if grid else 0,
    )
    options = {"sines": 3, "kernel": 5, "features": 8, **options}
    module = SPE.factory(site, SPE.options(**options)).double().eval()
    parameters = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=parameters)
    return module


def inputs(length: int = TOKENS, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(length)
    shape = (3, batch, HEADS, length, WIDTH)
    q, k, v = torch.randn(shape, dtype=torch.float64, generator=source)
    return q, k, v


def sine_kernel(module: nn.Module, distance: tuple[int, ...]) -> Tensor:
    """P of one distance between query and key, (H, D)."""
    raw, extents = module.codes.frequencies, module.codes.extents
    turns = sum(
        torch.tanh(2 * raw[..., axis] / extents[axis]) / 2 * step
        for axis, step in enumerate(distance)
    )
    waves = torch.cos(2 * math.pi * turns + module.codes.offsets)
    return (nn.functional.softplus(module.codes.gains) ** 2 * waves).mean(-1)


def convolutional_kernel(module: nn.Module, distance: tuple[int, ...]) -> Tensor:
    """P of one distance between query and key, (H, D), tap by tap."""
    a, b = module.codes.filters
    total = a.new_zeros(a.shape[:2])
    for tap in itertools.product(*(range(n) for n in a.shape[2:])):
        other = tuple(t - x for t, x in zip(tap, distance, strict=True))
        if all(0 <= t < n for t, n in zip(other, a.shape[2:], strict=True)):
            total = total + a[(..., *tap)] * b[(..., *other)]
    return total


KERNELS: dict[str, Kernel] = {"sine": sine_kernel, "conv": convolutional_kernel}


def position(token: int, grid: bool, prefix: int) -> tuple[int, ...] | None:
    if not grid:
        return (token,)
    return None if token < prefix else divmod(token - prefix, GRID[1])


def exact(module: nn.Module, kernel: Kernel, q: Tensor, k: Tensor, where: Places) -> Tensor:
    """sum_d q_md P_d(m - n) k_nd, (B, H, N, N), one pair of tokens at a time."""
    gated = module.gate is not None
    g = torch.sigmoid(module.gate) if gated else torch.zeros(HEADS, WIDTH, dtype=q.dtype)
    out = q.new_empty(*q.shape[:3], q.shape[2])
    for m, n in itertools.product(range(q.shape[2]), repeat=2):
        places = [where[m], where[n]]
        if None in places:
            P = torch.ones_like(g) if places == [None, None] else g.sqrt()
        else:
            distance = tuple(x - y for x, y in zip(*places, strict=True))
            P = g + (1 - g) * kernel(module, distance)
        out[:, :, m, n] = (q[:, :, m] * P * k[:, :, n]).sum(-1)
    return out


@torch.no_grad()
def error(kind: str, realizations: int, *, grid: bool, prefix: int, gated: bool) -> float:
    """Root mean squared error of q^ . k^ over all pairs of tokens and 24 draws of the noise."""
    q, k, _ = inputs(12 + prefix)
    how = {"grid": grid, "prefix": prefix}
    where = [position(token, **how) for token in range(12 + prefix)]
    squares = []
    for seed in range(24):
        module = build(seed, kind=kind, gated=gated, realizations=realizations, **how)
        ctx = Context(grid=GRID if grid else None, prefix=prefix)
        q_code, k_code = module.encode(q, k, ctx)
        if seed == 0:
            wanted = exact(module, KERNELS[kind], q, k, where)
        squares.append((q_code @ k_code.mT - wanted).square().mean())
    return torch.stack(squares).mean().sqrt().item()


@KINDS
@pytest.mark.parametrize(
    "how",
    [
        {"grid": False, "prefix": 0, "gated": False},
        {"grid": False, "prefix": 0, "gated": True},
        {"grid": True, "prefix": 0, "gated": False},
        {"grid": True, "prefix": 2, "gated": True},
    ],
    ids=["text", "text gated", "grid", "grid gated with a prefix"],
)
def test_the_error_falls_as_one_over_the_root_of_the_realizations(
    monkeypatch, kind: str, how: dict[str, bool]
) -> None:
    monkeypatch.setattr(codes, "NOISE", 7)  # a field takes its noise from several realizations
    few, many = (error(kind, R, **how) for R in (16, 256))
    assert few / many == pytest.approx(4, rel=0.15)


@KINDS
def test_kernels_start_near_one(kind: str) -> None:
    torch.manual_seed(0)
    site = Site(heads=1, head_dim=64, dim=64, max_len=512)
    module = SPE.factory(site, SPE.options(kind=kind))
    near = [KERNELS[kind](module, (x,)).mean().item() for x in (0, 1, 32)]
    assert near[0] == pytest.approx(1, abs=1e-5)
    assert near[0] > near[1] > near[2] > 0.6


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@KINDS
def test_linear_attention_over_the_codes(kind: str, causal: bool) -> None:
    module, (q, k, v) = build(kind=kind, realizations=6), inputs()
    ctx = Context(causal=causal)
    q_code, k_code = (x * (WIDTH**-0.5 * 6**0.5) ** 0.5 for x in module.encode(q, k, ctx))
    q_code, k_code = (torch.where(x > 0, x + 1, x.exp()) for x in (q_code, k_code))
    shares = q_code @ k_code.mT
    shares = shares.tril() if causal else shares
    wanted = shares / shares.sum(-1, keepdim=True) @ v
    assert_close(module(q, k, v, ctx), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_performer_over_the_codes(causal: bool) -> None:
    module, (q, k, v) = build(base="performer", realizations=6), inputs()
    ctx = Context(causal=causal)
    w = module.directions * WIDTH**-0.25
    logs = [
        x @ w.T - x.square().sum(-1, keepdim=True) * WIDTH**-0.5 / 2
        for x in module.encode(q, k, ctx)
    ]
    shares = logs[0].exp() @ logs[1].exp().mT
    shares = shares.tril() if causal else shares
    wanted = shares / shares.sum(-1, keepdim=True) @ v
    assert_close(module(q, k, v, ctx), wanted, rtol=0, atol=1e-12)


@KINDS
@pytest.mark.parametrize("grid", [False, True], ids=["text", "grid"])
def test_positions_are_ranks_among_real_tokens(kind: str, grid: bool) -> None:
    """Left, right and inside, in one batch, holding NaN."""
    module, (q, k, v) = build(kind=kind, grid=grid), inputs(TOKENS + 4, batch=3)
    real = torch.ones(3, TOKENS + 4, dtype=torch.bool)
    real[0, :4] = False
    real[1, -4:] = False
    real[2, 1:9:2] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    ctx = {"grid": GRID if grid else None, "prefix": PREFIX}
    got = module(q, k, v, Context(key_padding=real, **ctx))
    for i, mask in enumerate(real):
        wanted = module(*(x[i : i + 1, :, mask] for x in (q, k, v)), Context(**ctx))
        assert_close(got[i : i + 1, :, mask], wanted, rtol=0, atol=1e-12)


def test_noise_repeats_only_after_all_realizations(monkeypatch) -> None:
    monkeypatch.setattr(codes, "NOISE", 5)
    module = build(kind="conv", realizations=3)
    field = module.codes._field([4, 4])
    assert field.shape == (WIDTH, 3, 4, 4)
    for row in field.flatten(2).flatten(0, 1):
        assert row.unique().numel() == 15
        assert row[15] == row[0]


@pytest.mark.parametrize("noise", [3, 5, 13], ids=lambda n: f"{n}-places")
def test_convolutional_codes_repeat_with_their_noise(monkeypatch, noise: int) -> None:
    """The codes of later positions, taken from the first ones, are those of the whole field."""
    monkeypatch.setattr(codes, "NOISE", noise)
    module, (q, k, _) = build(kind="conv", realizations=4, gated=False), inputs(batch=2)
    amplitude = torch.rand(HEADS, WIDTH, dtype=q.dtype)
    got = module.codes((TOKENS,), amplitude, q, k)
    for x, x_code, code in zip((q, k), got, module.codes._codes([TOKENS], amplitude), strict=True):
        wanted = torch.einsum("bhnd,hndr->bhnr", x, code)
        assert_close(x_code, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("gated", [False, True], ids=["bare", "gated"])
@pytest.mark.parametrize("grid", [False, True], ids=["text", "grid"])
@pytest.mark.parametrize("entries", [1, 150, 1 << 18], ids=["tiny", "some", "whole"])
def test_sines_come_out_alike_in_parts(monkeypatch, entries: int, grid: bool, gated: bool) -> None:
    """Of few samples, and of so many that they share codes, and their gradients."""
    monkeypatch.setattr(sines, "ENTRIES", entries)
    module = build(grid=grid, prefix=PREFIX * gated, realizations=12, gated=gated)
    ctx = Context(grid=GRID if grid else None, prefix=PREFIX * gated)
    for batch in (1, 3):
        q, k, _ = inputs(12 + PREFIX * gated, batch=batch)
        with torch.no_grad():
            got = module.encode(q, k, ctx)
        leaves = [x.requires_grad_() for x in (q, k, *module.parameters())]
        grads = [torch.randn_like(x) for x in got]
        found = []
        for at_once in (False, True):
            with monkeypatch.context() as patch:
                if at_once:
                    patch.setattr(sines, "fits_parts", lambda _: False)
                out = module.encode(q, k, ctx)
            assert_close(out, got, rtol=0, atol=1e-12)
            found.append(torch.autograd.grad(out, leaves, grads))
        assert_close(*found, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("grid", [False, True], ids=["text", "grid"])
def test_gradients_of_gradients(grid: bool) -> None:
    module = build(grid=grid, realizations=3, sines=2)
    ctx = Context(grid=GRID if grid else None, prefix=PREFIX)
    q, k, _ = (x.requires_grad_() for x in inputs())
    assert torch.autograd.gradgradcheck(lambda q, k: module.encode(q, k, ctx), (q, k))


def test_noise_is_saved() -> None:
    saved = build(kind="sine", base="performer").state_dict().keys()
    assert {"codes.noise", "free", "directions"} <= saved
    assert "codes.noise" in build(kind="conv", gated=False).state_dict()


def test_a_prefix_without_a_gate_is_refused() -> None:
    with pytest.raises(OptionError, match="2 prefix tokens"):
        build(grid=True, gated=False)


@pytest.mark.parametrize("grid", [None, (2, 3, 2)], ids=["none", "three axes"])
def test_a_call_without_the_grid_is_refused(grid: tuple[int, ...] | None) -> None:
    with pytest.raises(UnsupportedCall, match="grid of 2 axes"):
        build(grid=True)(*inputs(), Context(grid=grid, prefix=PREFIX))
