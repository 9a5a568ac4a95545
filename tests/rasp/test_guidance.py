"""Selectors as masks and as targets of attention maps."""

from __future__ import annotations

import pytest
import torch

import zoo_core as zoo
from zoo_core import rasp
from zoo_core.errors import OptionError, PatchError, UnsupportedCall
from zoo_core.rasp.guidance import mismatch

SAMPLE = rasp.TASKS["reverse"].sample(3, 7, torch.Generator().manual_seed(0))
WORDS = SAMPLE.words
INPUTS = {"input_ids": WORDS.tokens, "attention_mask": WORDS.real.long()}


def model(attention: str, **settings) -> torch.nn.Module:
    settings = {"length": 7, "width": 8, **settings}
    return rasp.learner("reverse", attention, **settings).double()


def loss_of(patched: torch.nn.Module) -> torch.Tensor:
    with rasp.Guide(patched) as guide:
        patched(**INPUTS)
        return guide.loss(SAMPLE.trace.layers)


def test_softmax_held_to_a_selector_averages_what_it_takes() -> None:
    layer = zoo.mechanisms("softmax")[0]
    module = layer.factory(zoo.Site(heads=1, head_dim=4), layer.options())
    same = WORDS.select(WORDS.tokens, WORDS.tokens, torch.eq)
    flat = torch.zeros(*WORDS.tokens.shape, 4)[:, None]
    values = torch.randn(*WORDS.tokens.shape)
    ctx = zoo.Context(key_padding=WORDS.real, bias=same.bias())
    out = module(flat, flat, values[:, None, :, None], ctx)[:, 0, :, 0]
    expected = rasp.aggregate(same, values)
    torch.testing.assert_close(out * WORDS.real, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("attention", ["softmax", "lie", "dam"])
def test_a_mechanism_that_takes_a_mask_does_not_look_past_the_selector(attention: str) -> None:
    """In a whole model, through transformers' own 4-D masks."""
    patched = model(attention).eval()
    near = WORDS.select(WORDS.indices, WORDS.indices, torch.eq).mask[:, None]
    before = patched(WORDS.tokens, near).logits
    other = WORDS.tokens.clone()
    other[:, 1] = 2 + (other[:, 1] - 1) % 8  # the first symbol of each word
    after = patched(other, near).logits
    assert torch.equal(before[:, 2:], after[:, 2:])
    assert not torch.equal(before[:, 1], after[:, 1])


@pytest.mark.parametrize("attention", ["softmax", "linear", "linformer", "local"])
def test_maps_are_those_of_attention_map_and_carry_gradients(attention: str) -> None:
    patched = model(attention).eval()
    with rasp.Guide(patched) as guide:
        patched(**INPUTS)
        found = guide.maps()
    expected = zoo.attention_map(patched, INPUTS).values()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
        assert ours.requires_grad


def test_the_mismatch_is_a_sum_over_pairs() -> None:
    flip = SAMPLE.trace.layers[1][0]
    found = torch.rand(*flip.mask.shape)
    distances = []
    for b in range(3):
        last = int(WORDS.real[b].sum())
        for i in range(1, last):  # START takes nothing and is free
            wanted = [float(j == last - i) for j in range(8)]
            distances.append(sum((found[b, i, j] - wanted[j]) ** 2 for j in range(8)))
    expected = sum(distances) / len(distances)
    torch.testing.assert_close(mismatch(found, flip), expected, atol=1e-5, rtol=0)
    assert mismatch(flip.weights(), flip) == 0


@pytest.mark.parametrize("attention", ["softmax", "linear", "nystromformer", "performer"])
def test_guidance_alone_moves_heads_to_their_patterns(attention: str) -> None:
    patched = model(attention)
    optimiser = torch.optim.Adam(patched.parameters(), lr=1e-2)
    before = float(loss_of(patched).detach())
    for _ in range(15):
        optimiser.zero_grad()
        loss_of(patched).backward()
        optimiser.step()
    assert float(loss_of(patched).detach()) < 0.8 * before


def test_heads_and_layers_beyond_the_program_are_free() -> None:
    patched = model("softmax", heads=2, layers=3)
    loss_of(patched).backward()
    layers = patched.bert.encoder.layer
    assert layers[2].attention.self.query.weight.grad is None
    halves = layers[1].attention.self.query.weight.grad.view(2, 8, 16)
    assert halves[0].abs().sum() > 0
    assert halves[1].abs().sum() == 0


def test_every_head_has_its_own_pattern() -> None:
    sample = rasp.TASKS["most_frequent"].sample(3, 7, torch.Generator().manual_seed(0))
    patched = rasp.learner("most_frequent", length=7, width=8)
    inputs = {"input_ids": sample.words.tokens, "attention_mask": sample.words.real.long()}
    with rasp.Guide(patched) as guide:
        patched(**inputs)
        found = guide.loss(sample.trace.layers)
    one, two, three = zoo.attention_map(patched, inputs).values()
    (same, copies), (earlier,), (fetched,) = sample.trace.layers
    pairs = [(one[:, 0], same), (one[:, 1], copies), (two[:, 0], earlier), (three[:, 0], fetched)]
    expected = torch.stack([mismatch(seen, wanted) for seen, wanted in pairs]).mean()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_last_forward_counts_and_a_guide_leaves_no_trace() -> None:
    patched = model("linformer").eval()
    expected = loss_of(patched)
    with rasp.Guide(patched) as guide:
        patched(WORDS.tokens.flip(1))
        patched(**INPUTS)
        assert torch.equal(guide.loss(SAMPLE.trace.layers), expected)
        with pytest.raises(OptionError, match="0 layers ran since the last look, 2 are asked"):
            guide.loss(SAMPLE.trace.layers)
    assert not any(module._forward_pre_hooks for module in patched.modules())


def test_what_cannot_be_guided_is_refused() -> None:
    with pytest.raises(UnsupportedCall, match="has no attention map"):
        rasp.Guide(model("pooling"))
    half = model("softmax")
    half.zoo_patches.patches[0].restore()
    with pytest.raises(PatchError, match=r"zoo\.patch\(model, \"softmax\"\)"):
        rasp.Guide(half)
    patched = model("softmax")
    twice = [[*heads, *heads] for heads in SAMPLE.trace.layers]
    with rasp.Guide(patched) as guide:
        patched(**INPUTS)
        with pytest.raises(OptionError, match="layer 0 has 1 heads, the program takes 2"):
            guide.loss(twice)
