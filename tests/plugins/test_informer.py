from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.informer import INFORMER, InformerOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)


def build(factor: int = 2) -> nn.Module:
    return INFORMER.factory(SITE, InformerOptions(factor=factor)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def number(n: int, factor: int, prefix: int) -> int:
    return min(max(factor * math.ceil(math.log(n)), prefix, 1), n)


def by_formula(q: Tensor, k: Tensor, v: Tensor, factor: int = 2, prefix: int = 0) -> Tensor:
    """Query by query, for one unpadded sample."""
    n = q.shape[-2]
    u = number(n, factor, prefix)
    golden = (5**0.5 - 1) / 2
    sample = [int((t + t * golden % 1) * n / u) for t in range(u)]
    out = v.mean(-2, keepdim=True).repeat(1, 1, n, 1)
    for h in range(HEADS):
        scores = q[0, h] @ k[0, h, sample].T
        measure = [(row.max() - row.sum() / u).item() for row in scores]
        order = sorted(range(n), key=lambda i: (i >= prefix, -measure[i]))
        for i in order[:u]:
            out[0, h, i] = (k[0, h] @ q[0, h, i] * SITE.scale).softmax(-1) @ v[0, h]
    return out


def attending(module: nn.Module, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
    """Which queries have other weights than a mean, bool (B, H, N)."""
    weights = module.attention_map(q, k, ctx)
    return weights.amax(-1) > weights.where(weights > 0, 1).amin(-1) + 1e-9


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 8, 20, 21, 50, 64], ids=lambda n: f"{n}-tokens")
def test_it_computes_its_formula(length: int, prefix: int) -> None:
    q, k, v = inputs(length)
    got = build()(q, k, v, Context(prefix=prefix))
    wanted = by_formula(q, k, v, prefix=prefix)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_formula() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(30))
    got = build()(q, k, v, Context(prefix=1)).square().sum()
    wanted = by_formula(q, k, v, prefix=1).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("length", "wanted"), [(128, 25), (197, 30), (512, 35), (148, 25)])
def test_the_published_number_of_queries_attends(length: int, wanted: int) -> None:
    """c * ceil(ln n) with c = 5; 148 = floor(e^5) is the last length below a step."""
    q, k, _ = inputs(length)
    found = attending(build(factor=5), q, k, Context()).sum(-1)
    assert (found == wanted).all()


class TestPadding:
    def test_a_sample_is_measured_by_its_real_tokens(self) -> None:
        """Pads on the left, on the right and inside, holding NaN, and a sample of nothing else."""
        q, k, v = inputs(50, batch=5)
        real = torch.ones(5, 50, dtype=torch.bool)
        real[0, :5] = False
        real[1, 13:] = False
        real[2, 2::4] = False
        real[3, 1:] = False
        real[4] = False
        q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
        got = build()(q, k, v, Context(key_padding=real, prefix=3))
        for b, mask in enumerate(real[:4]):
            wanted = by_formula(*(x[b : b + 1, :, mask] for x in (q, k, v)), prefix=3)
            torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)
        assert (got[4] == 0).all()

    @pytest.mark.parametrize("left", [0, 3, 30], ids=lambda n: f"{n}-pads-left")
    @pytest.mark.parametrize("right", [0, 1, 28], ids=lambda n: f"{n}-pads-right")
    def test_of_equal_queries_the_first_attend(self, left: int, right: int) -> None:
        """By a single sampled key all measure 0; of tokens that repeat some measure the same."""
        for factor, alone in ((1, inputs(2)), (2, [x.repeat(1, 1, 3, 1) for x in inputs(4)])):
            n = alone[0].shape[-2]
            q, k, v = (nn.functional.pad(x, (0, 0, left, right)) for x in alone)
            real = torch.zeros(1, left + n + right, dtype=torch.bool)
            real[:, left : left + n] = True
            got = build(factor)(q, k, v, Context(key_padding=real))[:, :, real[0]]
            torch.testing.assert_close(got, by_formula(*alone, factor), rtol=0, atol=1e-12)

    def test_the_number_follows_the_samples_own_tokens(self) -> None:
        q, k, _ = inputs(64, batch=3)
        counts = (64, 12, 3)
        real = torch.arange(64) < torch.tensor(counts)[:, None]
        found = attending(build(), q, k, Context(key_padding=real)) & real[:, None]
        wanted = torch.tensor([[number(n, 2, 0)] for n in counts])
        assert (found.sum(-1) == wanted).all()


@pytest.mark.parametrize("pads", [0, 9], ids=["no-pads", "9-pads-left"])
def test_the_prefix_attends_however_lazy_it_is(pads: int) -> None:
    """CLS gets the least measure there is, that of a query of zeros."""
    q, k, _ = inputs(60)
    q[:, :, : pads + 2] *= 1e-3
    real = (torch.arange(60) >= pads)[None]
    found = [
        attending(build(), q, k, Context(prefix=prefix, key_padding=real if pads else None))
        for prefix in (0, 2)
    ]
    assert not found[0][..., pads : pads + 2].any()
    assert found[1][..., pads : pads + 2].all()
    assert (found[0].sum(-1) == found[1].sum(-1)).all()


@pytest.mark.parametrize("length", [1, 2, 17, 64], ids=lambda n: f"{n}-tokens")
def test_a_factor_that_covers_all_queries_is_softmax_attention(length: int) -> None:
    q, k, v = inputs(length)
    got = build(INFORMER.exact_at(SITE).factor)(q, k, v, Context())
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
