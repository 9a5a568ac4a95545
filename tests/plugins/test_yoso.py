from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.yoso import YOSO, YosoOptions
from zoo_core import Context, Site
from zoo_core.nn import collisions

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)
BOTH = pytest.mark.parametrize("form", ["expectation", "sampled"])
SCALES = pytest.mark.parametrize("normalise", ["rows", "l2"])


def build(**options: object) -> nn.Module:
    torch.manual_seed(1)
    options = {"bits": 3, "hashes": 5, **options}
    return YOSO.factory(SITE, YosoOptions(**options)).double().eval()


def inputs(length: int, keys: int | None = None, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64)
    k, v = (torch.randn(batch, HEADS, keys or length, WIDTH, dtype=torch.float64) for _ in range(2))
    return q, k, v


def code(x: Tensor, planes: Tensor) -> list[bool]:
    """The sides of planes (D, bits) that x is on."""
    return [(x @ plane).item() > 0 for plane in planes.T]


def weight(module: nn.Module, x: Tensor, y: Tensor, head: int) -> float:
    """The weight of the key y for the query x."""
    if module.form == "expectation":
        cosine = (x @ y / (x.norm() * y.norm())).item()
        return (1 - math.acos(cosine) / math.pi) ** module.bits
    met = [code(x, planes) == code(y, planes) for planes in module.planes[head]]
    return sum(met) / len(met)


def weights(module: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    """The weights (1, H, L, S), pair by pair."""
    table = [
        [[weight(module, x, y, h) for y in k[0, h].detach()] for x in q[0, h].detach()]
        for h in range(HEADS)
    ]
    return torch.tensor([table], dtype=torch.float64)


def normalised(module: nn.Module, w: Tensor, v: Tensor) -> Tensor:
    out = w @ v
    if module.normalise == "l2":
        return out / out.norm(dim=-1, keepdim=True)
    return out / w.sum(-1, keepdim=True)


@BOTH
@SCALES
@pytest.mark.parametrize(("queries", "keys"), [(12, 12), (3, 17), (17, 3)])
def test_it_computes_its_formula(form: str, normalise: str, queries: int, keys: int) -> None:
    module, (q, k, v) = build(form=form, normalise=normalise, bits=1), inputs(queries, keys)
    wanted = normalised(module, weights(module, q, k), v)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-10)


class TestBernoulli:
    """Each hash of a pair of vectors is a trial that succeeds with the expectation's weight."""

    HASHES, BITS = 20_000, 3

    def meetings(self) -> tuple[Tensor, Tensor]:
        """Whether 6 x 6 pairs meet, by hash, float (HASHES, 6, 6), and the probability of it."""
        q, k, _ = inputs(6)
        k[..., 0, :] = q[..., 0, :] + 0.1 * k[..., 0, :]
        planes = torch.randn(HEADS, self.HASHES, WIDTH, self.BITS, dtype=torch.float64)
        one, two = (collisions.sign_codes(x, planes)[0, 0] for x in (q, k))
        met = (one[..., None] == two[:, None]).double()
        return met, weights(build(bits=self.BITS), q, k)[0, 0]

    def test_the_mean_is_the_expectation(self) -> None:
        met, p = self.meetings()
        error = (met.mean(0) - p).abs() / (p * (1 - p) / self.HASHES).sqrt()
        assert error.max() < 4

    @pytest.mark.parametrize("hashes", [1, 4, 25])
    def test_the_spread_falls_with_the_root_of_the_hashes(self, hashes: int) -> None:
        met, p = self.meetings()
        spread = met.unflatten(0, (-1, hashes)).mean(1).std(0)
        wanted = (p * (1 - p) / hashes).sqrt()
        # Rare meetings tell little about their spread.
        often = p > 0.02
        assert often.sum() > 20
        torch.testing.assert_close(spread[often], wanted[often], rtol=0.15, atol=0)


def test_more_hashes_come_nearer_to_the_expectation() -> None:
    q, k, v = inputs(30)
    exact = build()(q, k, v, Context())
    error = [
        (build(form="sampled", hashes=hashes)(q, k, v, Context()) - exact).norm().item()
        for hashes in (16, 1024)
    ]
    assert error[0] / error[1] == pytest.approx(8, rel=0.3)


class TestGradients:
    @SCALES
    def test_the_expectation_has_its_own(self, normalise: str) -> None:
        module, tensors = build(normalise=normalise), inputs(4)
        tensors = tuple(x.requires_grad_() for x in tensors)
        torch.autograd.gradcheck(lambda q, k, v: module(q, k, v, Context()), tensors)

    def test_sampled_it_has_the_papers(self) -> None:
        """d w_ij / d cos_ij = bits / 2 * w_ij, in a dense formula."""
        module = build(form="sampled", bits=2)
        q, k, v = (x.requires_grad_() for x in inputs(5, 9))
        w = weights(module, q, k)
        cosines = nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).mT
        dense = w + module.bits / 2 * w * (cosines - cosines.detach())
        goal = torch.randn_like(q)
        got = (module(q, k, v, Context()) * goal).sum()
        wanted = (normalised(module, dense, v) * goal).sum()
        pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)

    @BOTH
    @SCALES
    @pytest.mark.parametrize("sign", [1, -1], ids=["parallel", "opposite"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_they_are_finite_where_acos_has_none(
        self, form: str, normalise: str, sign: int, dtype: torch.dtype
    ) -> None:
        """Rounding takes cosines of parallel vectors beyond 1, and acos to NaN."""
        module = build(form=form, normalise=normalise).to(dtype)
        q, _, v = (x.to(dtype).requires_grad_() for x in inputs(50))
        k = (sign * 3 * q.detach()).requires_grad_()
        out = module(q, k, v, Context())
        out.square().sum().backward()
        assert out.isfinite().all()
        assert all(x.grad.isfinite().all() for x in (q, k, v))


@BOTH
@SCALES
def test_padding_has_no_weight(form: str, normalise: str) -> None:
    """Pads holding NaN, and a sample of nothing else."""
    module, (q, k, v) = build(form=form, normalise=normalise), inputs(20, batch=3)
    real = torch.ones(3, 20, dtype=torch.bool)
    real[0, 2::4] = False
    real[1, :15] = False
    real[2] = False
    k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (k, v))
    got = module(q, k, v, Context(key_padding=real))
    for b, mask in enumerate(real[:2]):
        alone = q[b : b + 1], k[b : b + 1, :, mask], v[b : b + 1, :, mask]
        torch.testing.assert_close(got[b : b + 1], module(*alone, Context()), rtol=0, atol=1e-12)
    assert (got[2] == 0).all()
