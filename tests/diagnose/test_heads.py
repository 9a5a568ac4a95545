"""The scores of heads against formulas written out here, and on heads with known faults."""

from __future__ import annotations

import math

import pytest
import torch

from zoo_core.attention import Context, Site
from zoo_core.diagnose.heads import scores
from zoo_core.diagnose.watching import Call
from zoo_core.mechanism import Supports
from zoo_core.nn.softmax import Softmax

N, D = 9, 4
SITE = Site(path="layers.0", heads=2, head_dim=D, dim=8, scale=0.5, prefix=1)
REAL = torch.arange(N) < torch.tensor([[N], [6]])


class Given(torch.nn.Module):
    """A mechanism whose map is given."""

    zoo_supports = Supports(key_padding=True, weights=True)

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def attention_map(self, q, k, ctx):
        return self.weights

    def forward(self, q, k, v, ctx):
        return self.weights.to(v) @ v


def softmax_module():
    module = Softmax(scale=SITE.scale)
    module.zoo_supports = Softmax.supports
    return module


def call(module, *, site=SITE, scale=1.0, length=N, **context):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, length, D, generator=draw).double() * scale for _ in range(3))
    ctx = Context(**{"prefix": site.prefix, **context})
    return Call(site, "given", module, q, k, v, ctx, module(q, k, v, ctx))


def weights_of(one):
    """The softmax map of one sample and head, real tokens only."""
    return (one.q @ one.k.mT * SITE.scale), one.real_keys


def test_scores_of_softmax_are_those_of_loops():
    one = call(softmax_module(), key_padding=REAL)
    separators = torch.zeros(2, N, dtype=torch.bool)
    separators[:, 4] = True
    found = scores(one, separators)
    for b in range(2):
        n = int(REAL[b].sum())
        maps = []
        for h in range(2):
            p = (one.q[b, h, :n] @ one.k[b, h, :n].T * SITE.scale).softmax(-1)
            maps.append(p)
            entropy = float(-(p * p.log()).sum(-1).mean())
            distance = sum(
                sum(float(p[i, j]) * abs(i - j) for j in range(1, n)) / float(p[i, 1:].sum())
                for i in range(1, n)
            ) / (n - 1)
            singular = torch.linalg.svdvals(p)
            shares = singular / singular.sum()
            expected = {
                "entropy": entropy,
                "uniformity": entropy / math.log(n),
                "distance": distance,
                "prefix": float(p[:, 0].mean()),
                "separators": float(p[:, 4].mean()),
                "effective_rank": float((-(shares * shares.log()).sum()).exp()),
                "error": 0.0,
                "saturated": float((p.max(-1).values > 0.99).double().mean()),
                "broken": 0.0,
            }
            for name, value in expected.items():
                assert float(found[name][b, h]) == pytest.approx(value, abs=1e-9), name
        overlap = float(torch.minimum(*maps).sum(-1).mean())
        assert float(found["agreement"][b, 0]) == pytest.approx(overlap, abs=1e-9)


def test_a_sample_does_not_depend_on_what_its_padding_holds():
    one = call(softmax_module(), key_padding=REAL)
    clean = scores(one, None)
    junk = ~REAL[:, None, :, None]
    q, k, v = (x.masked_fill(junk, torch.nan) for x in (one.q, one.k, one.v))
    out = one.out.masked_fill(junk, torch.nan)
    dirty = scores(Call(SITE, "given", one.module, q, k, v, one.ctx, out), None)
    for name in clean:
        torch.testing.assert_close(dirty[name], clean[name], equal_nan=True, msg=name)


def test_distance_on_a_grid_is_in_patches():
    site = Site(path="x", heads=2, head_dim=D, dim=8, scale=0.5, prefix=1, grid=(2, 4))
    weights = torch.zeros(2, 2, N, N).double()
    weights[..., 1:, 8] = 1  # every patch looks at the last one, at row 1, column 3
    weights[..., 0, 0] = 1
    found = scores(call(Given(weights), site=site), None)["distance"]
    expected = sum(math.hypot(1 - r, 3 - c) for r in range(2) for c in range(4)) / 8
    torch.testing.assert_close(found, torch.full((2, 2), expected).double())


def test_faults_are_seen():
    weights = torch.full((2, 2, N, N), 1 / N).double()
    weights[:, 0] = 0
    weights[:, 0, :, 2] = 1
    one = call(Given(weights))
    one.out[0, 1, 3, 2] = torch.nan
    found = scores(one, None)
    assert found["saturated"].tolist() == [[1, 0], [1, 0]]
    assert float(found["broken"][0, 1]) == pytest.approx(1 / (N * D))
    assert float(found["broken"][0, 0]) == 0
    torch.testing.assert_close(found["effective_rank"], torch.ones(2, 2).double())
    torch.testing.assert_close(found["uniformity"][:, 1], torch.ones(2).double())
    exact = (one.q @ one.k.mT * SITE.scale).softmax(-1) @ one.v
    wrong = (one.out[1, 0] - exact[1, 0]).norm() / exact[1, 0].norm()
    assert float(found["error"][1, 0]) == pytest.approx(float(wrong))


def test_a_dead_head_has_no_share():
    weights = torch.full((2, 2, N, N), 1 / N).double()
    weights[:, 1] *= 1e-4
    share = scores(call(Given(weights)), None)["share"]
    assert (share[:, 1] < 0.001).all()
    assert (share[:, 0] > 1.9).all()


class Exploding(Given):
    """A mechanism that squares its large products."""

    def forward(self, q, k, v, ctx):
        return (q @ k.mT).square().sum(-1, keepdim=True) * 1e-3 * v


def test_overflow_in_fp16_is_found_before_it_happens():
    weights = torch.full((2, 2, N, N), 1 / N).double()
    found = scores(call(Given(weights), scale=200), None, half=True)
    assert (found["largest"] > 65504).all()  # q . k alone
    assert (found["fp16_broken"] == 0).all()  # which this mechanism does not compute
    found = scores(call(Exploding(weights), scale=20), None, half=True)
    assert (found["fp16_broken"] > 0).all()
    assert (found["broken"] == 0).all()
