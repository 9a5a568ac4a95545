"""Rank collapse: the published fall of pure attention, and what skips and padding change."""

from __future__ import annotations

import pytest
import torch

import zoo_core as zoo
from zoo_core import registry
from zoo_core.diagnose.rank import ratios, residual_ratio
from zoo_core.testing.models import inputs

N, DIM, HEADS = 32, 64, 4


def layer(seed):
    """Attention with random weights of variance 1 / dim, written out."""
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(DIM, DIM, generator=draw).double() / DIM**0.5 for _ in range(4)]

    def attention(x):
        q, k, v = ((x @ w).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for w in weights[:3])
        p = (q @ k.mT / (DIM // HEADS) ** 0.5).softmax(-1)
        return (p @ v).transpose(-2, -3).flatten(-2) @ weights[3]

    return attention


def test_the_ratio_is_that_of_the_norms():
    x = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0)).double()
    for sample, found in zip(x, residual_ratio(x), strict=True):
        rest = sample - sample.mean(0)
        sizes = [m.abs().sum(0).max() * m.abs().sum(1).max() for m in (rest, sample)]
        assert float(found) == pytest.approx(float((sizes[0] / sizes[1]) ** 0.5))
    assert float(residual_ratio(torch.ones(1, 4, 3))) == 0
    assert float(residual_ratio(torch.zeros(1, 4, 3))) == 0


def test_padding_does_not_count():
    x = torch.randn(1, 7, 5, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.tensor([[False, True, True, True, False, True, True]])
    junk = x.masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(residual_ratio(junk, mask), residual_ratio(x[:, mask[0]]))


def test_pure_attention_collapses_doubly_exponentially_and_skips_prevent_it():
    draws = [torch.randn(1, N, DIM, generator=torch.Generator().manual_seed(s)) for s in range(8)]
    x = torch.cat(draws).double()
    layers = [layer(seed) for seed in range(8)]
    pure, skips = ratios(x, layers[:4]), ratios(x, layers, skip=True)
    # A measurement elsewhere gave 0.69, 1.8e-2, 2.1e-7, 3.6e-16; the weights are random.
    assert 0.4 < pure[1] < 0.95
    assert 5e-3 < pure[2] < 1e-1
    assert 1e-9 < pure[3] < 1e-4
    assert pure[4] < 1e-14
    # Beside skips: 0.97 at first, 0.28 after eight.
    assert skips[1] > 0.9
    assert 0.15 < skips[8] < 0.6


@pytest.mark.parametrize("family", ["bert", "vit", "hf_vit", "albert"])
def test_collapse_of_a_model(family):
    tiny = registry.architecture(family).adapter().tiny()
    if "intermediate_size" in tiny:
        tiny["intermediate_size"] = 2 * tiny["hidden_size"]  # as MLPs are
    model = zoo.build(family, "linear", seed=0, **tiny).eval()
    found = zoo.diagnose.rank_collapse(model, inputs_of(model))
    assert len(found.model) == len(found.with_skip) == len(found.attention_only) == 3
    assert found.model[0] == found.with_skip[0] == found.attention_only[0]
    if family == "albert":  # its activation is called between two layers, in no module of theirs
        assert found.with_mlp == ()
    else:
        assert len(found.with_mlp) == 3
        assert found.with_mlp[0] == found.model[0]
        assert found.with_mlp != found.attention_only
    assert found.attention_only[2] < 0.1 * found.with_skip[2]


def inputs_of(model):
    given = inputs(model)
    return given.get("x", given)


def test_what_is_left_are_the_layers_own_attention_and_mlp():
    tiny = registry.architecture("vit").adapter().tiny()
    model = zoo.build("vit", "softmax", seed=0, **tiny).eval().double()
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(image))
        states, middles = [], []
        for block in model.blocks:
            states.append(block.norm1(tokens))
            middles.append(block.norm2(tokens + block.attn(states[-1])))
            tokens = block(tokens)
        x = y = states[0]
        expected = [float(residual_ratio(x))]
        mixed = list(expected)
        for state, middle, block in zip(states, middles, model.blocks, strict=True):
            x = block.attn(x * (state.norm() / x.norm()))
            expected.append(float(residual_ratio(x)))
            y = block.attn(y * (state.norm() / y.norm()))
            y = block.mlp(y * (middle.norm() / y.norm()))
            mixed.append(float(residual_ratio(y)))
    found = zoo.diagnose.rank_collapse(model, image)
    assert found.with_mlp == pytest.approx(mixed, rel=1e-6)
    assert found.attention_only == pytest.approx(expected, rel=1e-6)
    assert found.model[1] == pytest.approx(float(residual_ratio(states[1])), rel=1e-9)
