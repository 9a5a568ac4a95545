"""The native kernel of sums of sinusoids, beside plain torch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo_attention.spe import SPE, sines
from zoo_attention.spe.waves import Noise
from zoo_core import Context, Site
from zoo_core.nn import choice, native

pytestmark = pytest.mark.usefixtures("native_kernels")

HEADS, WIDTH = 3, 16
ALONE = Context()


def build(*, grid: tuple[int, ...] | None = None, prefix: int = 0, **options: Any) -> nn.Module:
    """A module whose parameters are no longer what they start from."""
    torch.manual_seed(0)
    site = Site(
        heads=HEADS,
        head_dim=WIDTH,
        dim=HEADS * WIDTH,
        scale=WIDTH**-0.5,
        max_len=100,
        grid=grid,
        prefix=prefix,
    )
    module = SPE.factory(site, SPE.options(sines=3, realizations=32, **options)).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def tokens(length: int, batch: int = 1, width: int = WIDTH) -> list[Tensor]:
    torch.manual_seed(length)
    return [torch.randn(batch, HEADS, length, width) for _ in range(2)]


def encoded(module: nn.Module, q: Tensor, k: Tensor, ctx: Context) -> list[Tensor]:
    """Encoded queries and keys, and the gradients of everything that has one."""
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    out = module.encode(*leaves, ctx)
    torch.manual_seed(1)
    # The same for fp32 and for float64.
    grads = [torch.randn(x.shape).to(x.dtype) for x in out]
    return [*out, *torch.autograd.grad(out, [*leaves, *module.parameters()], grads)]


def check(module: nn.Module, q: Tensor, k: Tensor, ctx: Context = ALONE) -> None:
    found = encoded(module, q, k, ctx)
    with choice.plain_only():
        wanted = encoded(module.double(), q.double(), k.double(), ctx)
    for one, other in zip(found, wanted, strict=True):
        scale = max(1.0, other.abs().max().item())
        assert_close(one.double() / scale, other / scale, rtol=0, atol=3e-6)


@pytest.fixture
def only_kernels(monkeypatch) -> None:
    """What the plain path cannot do without is missing, as long as kernels are allowed."""
    plain = sines.make_factors

    def factors(*args: Any) -> Any:
        assert not choice.kernels_allowed()
        return plain(*args)

    monkeypatch.setattr(sines, "make_factors", factors)


@pytest.mark.usefixtures("only_kernels")
class TestKernel:
    @pytest.mark.parametrize("length", [1, 2, 5, 31, 32, 33, 95, 96, 97, 98, 230])
    def test_text(self, length: int) -> None:
        check(build(), *tokens(length))

    @pytest.mark.parametrize("batch", [2, 3])
    @pytest.mark.parametrize("gated", [False, True], ids=["bare", "gated"])
    def test_batches(self, batch: int, gated: bool) -> None:
        check(build(gated=gated), *tokens(101, batch))

    @pytest.mark.parametrize("grid", [(1, 1), (5, 7), (7, 98), (1, 40), (40, 1), (3, 1, 34)])
    def test_grids(self, grid: tuple[int, ...]) -> None:
        prefix = 2
        ctx = Context(grid=grid, prefix=prefix)
        length = prefix + torch.Size(grid).numel()
        check(build(grid=grid, prefix=prefix), *tokens(length, 2), ctx)

    @pytest.mark.parametrize("threads", [2, 5])
    def test_threads(self, threads: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            check(build(), *tokens(300))
            check(build(grid=(9, 4)), *tokens(36, 2), Context(grid=(9, 4)))
        finally:
            torch.set_num_threads(before)

    def test_other_layouts(self) -> None:
        q, k = tokens(50, 2, 2 * WIDTH)
        q, k = q[..., ::2], k.transpose(2, 3).contiguous().transpose(2, 3)[..., :WIDTH]
        check(build(), q, k)
        hosts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tokens(50, 2)]
        check(build(), *hosts)

    def test_wide_rows_and_odd_widths(self) -> None:
        """Every count of vectors that kernels hold at once."""
        for realizations in (16, 48, 112):
            torch.manual_seed(0)
            site = Site(heads=2, head_dim=48, dim=96, scale=1.0, max_len=40)
            module = SPE.factory(site, SPE.options(sines=2, realizations=realizations))
            nn.init.normal_(module.codes.offsets)
            torch.manual_seed(1)
            check(module, *(torch.randn(1, 2, 37, 48) for _ in range(2)))

    def test_far_away_too(self) -> None:
        """Angles of thousands of turns are not rounded."""
        module = build()
        nn.init.normal_(module.codes.frequencies, std=30)
        q, k = tokens(5000)
        found = module.encode(q, k, Context())
        turns = (2 / torch.tensor(100.0) * module.codes.frequencies.detach()).tanh() * math.pi
        angles = 4999 * turns[..., 0].mT.double()
        phases = angles + module.codes.offsets.mT
        waves = torch.cat([phases.cos(), phases.sin()], 1)
        assert angles.abs().max() > 1e4
        sizes = torch.nn.functional.softplus(module.codes.gains.double()).mT / 3**0.5
        gate = module.gate.double().sigmoid()
        sizes = (sizes * (1 - gate).sqrt()[:, None]).repeat(1, 2, 1)
        code = torch.einsum("hjd,djr->hdr", waves * sizes, module.codes.noise.double())
        code = (code + gate.sqrt()[..., None] * module.free.double()) / 32**0.5
        wanted = torch.einsum("hd,hdr->hr", q[0, :, -1].double(), code)
        assert_close(found[0][0, :, -1].double(), wanted, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
    def test_padding_holds_anything(self, left: bool) -> None:
        module, (q, k) = build(), tokens(70, 3)
        real = torch.zeros(3, 70, dtype=torch.bool)
        for i, count in enumerate((70, 41, 0)):
            real[i, 70 - count if left else 0 : 70 if left else count] = True
        v = torch.randn_like(q)
        filled = [x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v)]
        leaves = [x.requires_grad_() for x in filled]
        out = module(*leaves, Context(key_padding=real))
        grads = torch.autograd.grad(out.masked_fill(~real[:, None, :, None], 0).sum(), leaves)
        assert not out[2].any()
        for i in range(2):
            own = [x[i : i + 1, :, real[i]].requires_grad_() for x in (q, k, v)]
            alone = module(*own, Context())
            assert_close(out[i : i + 1, :, real[i]], alone, rtol=1e-4, atol=1e-5)
            for one, other in zip(grads, torch.autograd.grad(alone.sum(), own), strict=True):
                assert_close(one[i : i + 1, :, real[i]], other, rtol=1e-3, atol=1e-4)

    def test_nan_in_a_token_stays_there(self) -> None:
        module, (q, k) = build(), tokens(97)
        q[0, 1, 40, 3] = torch.nan
        found = module.encode(q, k, Context())[0].isnan()
        assert found[0, 1, 40].all()
        assert found.sum() == 32


def test_queries_of_the_last_tokens() -> None:
    module, (q, k) = build(), tokens(80)
    whole = module.encode(q, k, Context())
    some = module.encode(q[:, :, 50:], k, Context())
    assert_close(some[0], whole[0][:, :, 50:], rtol=0, atol=1e-5)


def test_a_second_derivative_takes_the_plain_path() -> None:
    module = build()
    q, k = (x.requires_grad_() for x in tokens(9))
    for x in (q, k):
        found = []
        for plain in (False, True):
            with choice.plain_only() if plain else torch.enable_grad():
                out = sum(x.square().sum() for x in module.encode(q, k, Context()))
                (first,) = torch.autograd.grad(out, x, create_graph=True)
                found.append(torch.autograd.grad(first.square().sum(), module.codes.offsets)[0])
        assert_close(*found, rtol=1e-4, atol=1e-4)


def test_it_is_taken() -> None:
    assert native.loaded()
    noise = Noise(torch.randn(16, 6, 32), None, (9,))
    assert sines._has_kernel(*tokens(9), noise)
    assert not sines._has_kernel(*tokens(8), noise)
    assert not sines._has_kernel(*tokens(9, width=8), noise)
