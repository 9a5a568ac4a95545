"""The construction of sparse patterns, its logarithmic width, and who finds the keys."""

from __future__ import annotations

import math

import pytest
import torch

import zoo_core as zoo
from zoo_core import registry
from zoo_core.diagnose import fixture_mechanisms

FIXTURE = zoo.diagnose.sparse_pattern(zoo.diagnose.random_pattern(64, 2), width=256)


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (7, 7), (64, 1), (64, 5)])
def test_a_pattern_has_k_keys_in_each_row_and_column(length, keys):
    pattern = zoo.diagnose.random_pattern(length, keys)
    assert (pattern.sum(0) == keys).all()
    assert (pattern.sum(1) == keys).all()


def test_fixed_projections_give_the_products():
    width = 256
    one, zero = torch.eye(width).double(), torch.zeros(width, width).double()
    assert torch.equal(FIXTURE.query, torch.cat([one, zero], 1))
    assert torch.equal(FIXTURE.key, torch.cat([zero, one], 1))
    other = zoo.diagnose.sparse_pattern(zoo.diagnose.random_pattern(64, 1, seed=9), width=width)
    assert torch.equal(other.query, FIXTURE.query)
    error = (FIXTURE.x @ FIXTURE.query.T @ FIXTURE.key @ FIXTURE.x.T - FIXTURE.scores).abs().max()
    assert FIXTURE.error == pytest.approx(float(error))


def test_softmax_of_the_wanted_scores_is_the_pattern_but_for_the_leak():
    weights = torch.tensor([[0.7, 0.3, 0, 0], [0, 1, 0, 0], [0, 0, 0.5, 0.5], [1, 0, 0, 0]])
    fixture = zoo.diagnose.sparse_pattern(weights, width=8, leak=0.02)
    found = fixture.scores.softmax(-1)
    wanted = weights > 0
    assert found[~wanted].reshape(-1).max() <= 0.02
    torch.testing.assert_close((found * ~wanted).sum(-1), torch.full((4,), 0.02).double())
    torch.testing.assert_close(found[0, 0] / found[0, 1], torch.tensor(7 / 3).double())


def test_the_width_grows_with_the_logarithm_of_the_length():
    curves = [zoo.diagnose.capacity_curve((32, 64, 128, 256), keys) for keys in (1, 2)]
    for curve, published in zip(curves, ((19, 35, 65, 65), (35, 65, 101, 117)), strict=True):
        for width, known in zip(curve.widths, published, strict=True):
            # Another search elsewhere, with steps of 15 % and a precision it does not tell.
            assert 0.5 < width / known < 2.2
        # Eight times the length takes less than four times the width.
        assert curve.widths[3] < 4 * curve.widths[0]
        line = [curve.intercept + curve.slope * math.log(n) for n in curve.lengths]
        assert max(abs(a / b - 1) for a, b in zip(line, curve.widths, strict=True)) < 0.35
    assert all(b > a for a, b in zip(curves[0].widths, curves[1].widths, strict=True))


def test_softmax_finds_every_key_and_uniform_none():
    assert zoo.diagnose.key_recall(FIXTURE, "softmax").recall == 1
    wide = zoo.diagnose.sparse_pattern(zoo.diagnose.random_pattern(256, 2), width=64)
    assert zoo.diagnose.key_recall(wide, "softmax").recall >= 0.98
    assert zoo.diagnose.key_recall(FIXTURE, "uniform").recall < 0.15


@pytest.mark.parametrize("name", ["pooling", "yoso"])
def test_without_a_map_keys_count_by_what_moves_with_them(name):
    """As moving one value after the other says, which takes a forward for each key."""
    record = registry.mechanism(name)
    if record.supports.linear_in_v:
        pytest.skip("it has a map")
    length, width = 40, 24
    fixture = zoo.diagnose.sparse_pattern(zoo.diagnose.random_pattern(length, 2), width=width)
    site = zoo.Site(path="x", dim=width, heads=1, head_dim=width, scale=width**-0.5, max_len=40)
    torch.manual_seed(0)
    module = record.factory(site, record.options()).double().eval()
    draw = torch.Generator().manual_seed(3)
    v = torch.randn(1, 1, length, width, generator=draw).double()
    q, k = fixture.q[None, None] * width**0.5, fixture.k[None, None]
    with torch.no_grad():
        before = module(q, k, v, zoo.Context())
        columns = []
        for key in range(length):
            moved = v.clone()
            moved[..., key, :] += 1e-3
            columns.append((module(q, k, moved, zoo.Context()) - before).norm(dim=-1)[0, 0])
    wanted = fixture.recall(torch.stack(columns, -1))
    assert zoo.diagnose.key_recall(fixture, name).recall == pytest.approx(wanted, abs=0.06)


@pytest.mark.parametrize("name", fixture_mechanisms())
def test_sparse_hashing_and_clustering_mechanisms_are_scored(name):
    found = zoo.diagnose.key_recall(FIXTURE, name)
    assert (found.mechanism, found.refused) == (name, None)
    assert 0 <= found.recall <= 1


def test_a_window_over_everything_finds_every_key():
    assert zoo.diagnose.key_recall(FIXTURE, "local", options={"window": 128}).recall == 1
    narrow = zoo.diagnose.key_recall(FIXTURE, "local", options={"window": 4}).recall
    assert narrow < 0.5


def test_who_cannot_be_scored_says_why():
    assert "projections" in zoo.diagnose.key_recall(FIXTURE, "l2").refused
    required = [one.name for one in registry.mechanisms() if one.supports.grid == "required"]
    assert "grid" in zoo.diagnose.key_recall(FIXTURE, required[0]).refused


@pytest.mark.parametrize(
    ("pattern", "how", "message"),
    [
        (torch.ones(2, 3), {}, r"\(2, 3\)"),
        (torch.zeros(2, 2), {}, "positive one in each row"),
        (-torch.eye(2), {}, "no negative"),
        (torch.eye(2), {"leak": 1.0}, "leak"),
        (torch.eye(2), {"width": 0}, "width"),
    ],
    ids=["shape", "empty", "negative", "leak", "width"],
)
def test_misuse(pattern, how, message):
    with pytest.raises(zoo.ZooError, match=message):
        zoo.diagnose.sparse_pattern(pattern, **{"width": 8, **how})
