from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo_core as zoo
from zoo_attention.evolving import EVOLVING, EvolvingOptions
from zoo_core import Context, Site
from zoo_core.errors import DoesNotFit, UnsupportedCall

HEADS, WIDTH = 2, 4
FIRST = Site(path="first", heads=HEADS, head_dim=WIDTH, dim=8, scale=WIDTH**-0.5)
SECOND = Site(path="second", previous="first", heads=HEADS, head_dim=WIDTH, scale=WIDTH**-0.5)
TINY = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def build(site: Site = SECOND, **options: float) -> nn.Module:
    """A module in float64 with a random convolution."""
    module = EVOLVING.factory(site, EvolvingOptions(**options)).double().eval()
    if module.conv is not None:
        torch.manual_seed(1)
        nn.init.normal_(module.conv, std=0.5)
    return module


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def evolve(plain: Tensor, before: Tensor, module: nn.Module) -> Tensor:
    """A of one sample (H, N, N), entry by entry."""
    alpha, beta, conv = module.alpha, module.beta, module.conv
    mixed = (1 - beta) * plain + beta * before
    H, N, _ = plain.shape
    convolved = torch.zeros_like(plain)
    for h, i, j in torch.cartesian_prod(*map(torch.arange, (H, N, N))).tolist():
        for a, b in torch.cartesian_prod(torch.arange(3), torch.arange(3)).tolist():
            row, column = i + a - 1, j + b - 1
            if 0 <= row < N and 0 <= column < N:
                convolved[h, i, j] += conv[h, :, a, b] @ mixed[:, row, column]
    return (1 - alpha) * mixed + alpha * convolved.clamp(min=0)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * FIRST.scale


@torch.no_grad()
@pytest.mark.parametrize(("alpha", "beta"), [(0, 0), (1, 0.5), (0.3, 0.7), (0.4, 0)])
def test_two_layers_compute_the_formula(alpha: float, beta: float) -> None:
    first, second = build(FIRST), build(alpha=alpha, beta=beta)
    ctx = Context(carry={})
    q, k, v = inputs(5)
    torch.testing.assert_close(first(q, k, v, ctx), scores(q, k).softmax(-1) @ v)
    q2, k2 = 2 * k.flip(2), q.roll(1, 2)
    wanted = evolve(scores(q2, k2)[0], scores(q, k)[0], second)
    got = second(q2, k2, v, ctx)
    torch.testing.assert_close(got[0], wanted.softmax(-1) @ v[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(ctx.carry["second"][0], wanted, rtol=0, atol=1e-12)


@torch.no_grad()
def test_neighbours_are_real_tokens() -> None:
    """Pads on the left, on the right and inside, with NaN in all they hold."""
    first, second = build(FIRST), build(alpha=0.5, beta=0.5)
    q, k, v = inputs(7, batch=3)
    real = torch.ones(3, 7, dtype=torch.bool)
    real[0, :3] = False
    real[1, -3:] = False
    real[2, 1::3] = False
    padded = [x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v)]
    ctx = Context(key_padding=real, carry={})
    first(*padded, ctx)
    got = second(*padded, ctx)
    for b, mask in enumerate(real):
        plain = scores(q[b, :, mask], k[b, :, mask])
        wanted = evolve(plain, plain, second).softmax(-1) @ v[b, :, mask]
        torch.testing.assert_close(got[b, :, mask], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "before",
    [None, torch.ones(1, HEADS, 6, 6), torch.ones(2, HEADS, 5, 5)],
    ids=["skipped", "length", "batch"],
)
def test_a_layer_without_a_like_predecessor_is_plain(before: Tensor | None) -> None:
    q, k, v = inputs(5)
    got = build(alpha=1.0, beta=0.5)(q, k, v, Context(carry={"first": before}))
    torch.testing.assert_close(got, scores(q, k).softmax(-1) @ v)


def test_the_first_layer_has_no_parameters_and_the_next_starts_as_softmax() -> None:
    assert not list(build(FIRST).parameters())
    module = EVOLVING.factory(SECOND, EvolvingOptions()).double()
    q, k, v = inputs(5)
    before = torch.randn(1, HEADS, 5, 5, dtype=torch.float64)
    got = module(q, k, v, Context(carry={"first": before}))
    torch.testing.assert_close(got, scores(q, k).softmax(-1) @ v, rtol=0, atol=1e-14)
    got.square().sum().backward()
    assert module.alpha.grad.abs() > 0
    assert module.beta.grad.abs() > 0


def bert(**how: Any) -> nn.Module:
    """A tiny BERT in train mode whose evolving layers have moved from their start."""
    model = zoo.build(
        "bert", "evolving", options={"alpha": 0.4, "beta": 0.3}, seed=0, **TINY, **how
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("zoo.conv"):
            nn.init.normal_(parameter, std=0.3)
    return model.train()


def gradients(model: nn.Module, *, forwards: int) -> dict[str, Tensor]:
    """Gradients of the sum of the losses of several forwards, all before one backward."""
    torch.manual_seed(2)
    losses = []
    for _ in range(forwards):
        ids = torch.randint(1, 64, (2, 7))
        mask = torch.arange(7) < torch.tensor([[7], [4]])
        losses.append(model(ids, attention_mask=mask.long()).last_hidden_state.square().mean())
    torch.stack(losses).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class TestInAModel:
    @pytest.mark.parametrize("forwards", [1, 2], ids=["one-forward", "two-forwards"])
    @pytest.mark.parametrize("layers", [None, "0,2"], ids=["all-layers", "layers-0-and-2"])
    def test_checkpointing_keeps_every_gradient(self, forwards: int, layers: str | None) -> None:
        model, again = bert(layers=layers), bert(layers=layers)
        again.gradient_checkpointing_enable({"use_reentrant": False})
        runs: list[nn.Module] = []
        last = again.encoder.layer[2].attention.self.zoo
        last.register_forward_pre_hook(lambda module, _: runs.append(module))
        wanted = gradients(model, forwards=forwards)
        got = gradients(again, forwards=forwards)
        assert len(runs) == 2 * forwards  # each once more, for the backward
        assert any(name.endswith("zoo.conv") and grad.any() for name, grad in wanted.items())
        assert got.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7, msg=name)

    def test_the_gradient_passes_through_the_carry(self) -> None:
        """The first layer's queries move the second layer's scores."""
        model = bert()
        wanted = gradients(model, forwards=1)["encoder.layer.0.attention.self.query.weight"]
        cut = bert()
        for layer in cut.encoder.layer[1:]:
            with torch.no_grad():
                layer.attention.self.zoo.alpha.zero_()
                layer.attention.self.zoo.beta.zero_()
        found = gradients(cut, forwards=1)["encoder.layer.0.attention.self.query.weight"]
        assert (found - wanted).norm() > 0.01 * wanted.norm()

    def test_maps_are_those_of_the_forward(self) -> None:
        model, calls = bert().eval(), {}
        for path, layer in model.named_modules():
            if path.endswith("self.zoo"):
                layer.register_forward_hook(
                    lambda _, args, out, path=path: calls.update({path: (args[2], out)})
                )
        maps = zoo.attention_map(model, {"input_ids": torch.arange(7)[None]})
        assert len(maps) == 3
        for path, weights in maps.items():
            v, out = calls[f"{path}.zoo"]
            torch.testing.assert_close(weights @ v, out, rtol=0, atol=1e-5)

    def test_reentrant_checkpointing_is_refused(self) -> None:
        model = bert()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        with pytest.raises(UnsupportedCall, match="use_reentrant=False"):
            gradients(model, forwards=1)

    def test_checkpointing_in_timm_is_refused(self) -> None:
        model = zoo.build("vit", "evolving", depth=2, embed_dim=16, num_heads=2, img_size=32)
        model.set_grad_checkpointing()
        with pytest.raises(UnsupportedCall, match=r"set_grad_checkpointing\(False\)"):
            model.train()(torch.randn(1, 3, 32, 32))

    def test_a_decoder_is_refused(self) -> None:
        with pytest.raises(DoesNotFit, match="evolving has no causal form"):
            zoo.build("bert", "evolving", is_decoder=True, **TINY)

    def test_a_model_that_repeats_one_layer_is_refused(self) -> None:
        assert "repeats one layer" in " ".join(zoo.why("albert", "evolving"))
