"""Jacobian norms against whole Jacobians, certified bounds, and sensitivity to parameters."""

from __future__ import annotations

import pytest
import torch

import zoo_core as zoo
from zoo_core import registry
from zoo_core.diagnose.replay import replayed
from zoo_core.diagnose.smoothness import jacobian_norm


def build(attention, family="bert", **how):
    tiny = registry.architecture(family).adapter().tiny()
    return zoo.build(family, attention, seed=0, **how, **tiny).eval()


IDS = torch.randint(5, 99, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 5 + [0] * 2, [1] * 7])


def test_power_iteration_finds_the_norm_of_a_matrix():
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
    found = jacobian_norm(lambda x: matrix @ x, torch.ones(4).double(), tolerance=1e-9)
    assert found == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-6)
    assert jacobian_norm(lambda x: 0 * x, torch.ones(4).double()) == 0


@pytest.mark.parametrize("attention", ["softmax", "linear", "local"])
def test_the_norm_is_that_of_the_whole_jacobian(attention):
    model = build(attention)
    batch = {"input_ids": IDS, "attention_mask": MASK}
    found = zoo.diagnose.lipschitz(model, batch)
    with replayed(model, {"input_ids": IDS[:1, :5]}) as replay:
        for layer, score in zip(replay.layers, found, strict=True):
            whole = torch.autograd.functional.jacobian(layer, layer.state)
            size = layer.state.numel()
            norm = float(torch.linalg.matrix_norm(whole.reshape(size, size), 2))
            assert score.norm == pytest.approx(norm, rel=1e-2)
            assert score.norm <= norm * (1 + 1e-6)
            assert (score.mechanism, score.bound) == (attention, None)


@pytest.mark.parametrize("form", ["tied", "contractive", "untied"])
def test_the_certified_bound_holds(form):
    model = build("l2", options={"form": form})
    for score in zoo.diagnose.lipschitz(model, {"input_ids": IDS}):
        if form == "untied":
            assert score.bound is None
        else:
            assert 0 < score.norm <= score.bound
        assert form != "contractive" or score.bound == 0.9


def test_sensitivity_is_linear_in_small_noise_and_repeats():
    model, batch = build("linear"), {"input_ids": IDS, "attention_mask": MASK}
    first = zoo.diagnose.sensitivity(model, batch, size=1e-4, trials=2)
    again = zoo.diagnose.sensitivity(model, batch, size=1e-4, trials=2)
    smaller = zoo.diagnose.sensitivity(model, batch, size=1e-5, trials=2)
    assert first == again
    assert len(first.by_depth) == 2
    assert 0.5 < first.output < 20
    assert first.output == pytest.approx(smaller.output, rel=0.02)
    assert first.by_depth[1] > 0


def test_a_mechanism_with_a_carry_is_replayed():
    model = build("luna", "vit")
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for score in zoo.diagnose.lipschitz(model, images):
        assert score.norm > 0
