from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import zoo_core as zoo
from zoo_attention.self_modulating import SELF_MODULATING, SelfModulatingOptions
from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import parts

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5)


def build(*, started: bool = True, **options: object) -> nn.Module:
    """A module in float64, whose parameters have moved if it has `started` to train."""
    torch.manual_seed(1)
    module = SELF_MODULATING.factory(SITE, SelfModulatingOptions(**options)).double().eval()
    for parameter in module.parameters() if started else ():
        nn.init.normal_(parameter, std=0.5)
    return module


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and times."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v, torch.rand(batch, length, dtype=torch.float64).cumsum(-1)


def intensity(module: nn.Module, k: Tensor, a: Tensor, gap: float, h: int) -> list[Tensor]:
    """lambda_i. of one sample and head, from keys k (N, D) and weights a (N,) of one query."""
    state = torch.cat([a @ k, torch.tensor([gap], dtype=torch.float64)]) @ module.state
    state = torch.sigmoid(state + module.state_bias)
    s = torch.exp(module.log_scale[h]) / math.log(2)
    return [s * torch.log(1 + torch.exp((key @ module.marks) @ state / s)) for key in k]


def by_formula(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, times: Tensor
) -> tuple[Tensor, list[float]]:
    """The output and the terms of the likelihood, token by token, of an unpadded input."""
    out, terms = torch.zeros_like(v), []
    for b, h in torch.cartesian_prod(*map(torch.arange, q.shape[:2])).tolist():
        a = (q[b, h] @ k[b, h].mT * SITE.scale).softmax(-1)
        gaps = [0.0, *times[b].diff().tolist()]
        modulation = [intensity(module, k[b, h], a[i], gaps[i], h) for i in range(len(gaps))]
        for i, row in enumerate(modulation):
            out[b, h, i] = sum(a[i, j] * row[j] * v[b, h, j] for j in range(len(row)))
        for i in range(1, len(gaps)):
            before = torch.stack(modulation[i - 1])
            terms.append((before[i].log() - gaps[i] / 2 * before.mean()).item())
    return out, terms


@torch.no_grad()
def test_it_computes_its_formula_and_its_likelihood() -> None:
    module = build(likelihood_weight=0.3).train()
    q, k, v, times = inputs(5, batch=2)
    wanted, terms = by_formula(module, q, k, v, times)
    got = module(q, k, v, Context(times=times))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    loss = -0.3 * sum(terms) / len(terms)
    assert module.auxiliary_loss().item() == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("scores", [1, 40], ids=lambda n: f"{n}-scores-at-once")
def test_parts_without_gradients_change_nothing(monkeypatch, scores: int) -> None:
    module, (q, k, v, times) = build(), inputs(9, batch=2)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :4] = real[1, 3::2] = False
    monkeypatch.setattr(parts, "SCORES", scores)
    ctx = Context(key_padding=real, times=times)
    wanted = module(q, k, v, ctx)
    with torch.no_grad():
        torch.testing.assert_close(module(q, k, v, ctx), wanted, rtol=0, atol=1e-12)


@torch.no_grad()
def test_intervals_run_from_one_real_token_to_the_next() -> None:
    """Pads on the left, on the right and inside, with NaN in all they hold."""
    module = build().train()
    q, k, v, times = inputs(8, batch=3)
    real = torch.ones(3, 8, dtype=torch.bool)
    real[0, :4] = False
    real[1, -4:] = False
    real[2, 1::3] = False
    padded = [x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v)]
    ctx = Context(key_padding=real, times=times.masked_fill(~real, torch.nan))
    got = module(*padded, ctx)
    terms = []
    for b, mask in enumerate(real):
        alone = [x[b : b + 1, :, mask] for x in (q, k, v)]
        wanted, found = by_formula(module, *alone, times[b : b + 1, mask])
        torch.testing.assert_close(got[b : b + 1, :, mask], wanted, rtol=0, atol=1e-12)
        terms += found
    loss = -0.1 * sum(terms) / len(terms)
    assert module.auxiliary_loss().item() == pytest.approx(loss, rel=1e-12)


def test_without_times_tokens_are_one_unit_apart() -> None:
    module = build()
    q, k, v, _ = inputs(6)
    counted = module(q, k, v, Context(times=torch.arange(6)[None]))
    assert torch.equal(module(q, k, v, Context()), counted)


def test_only_intervals_count_even_of_large_integers() -> None:
    module = build().float()
    q, k, v, _ = (x.float() for x in inputs(6))
    times = torch.tensor([[0, 3, 4, 9, 9, 20]])
    wanted = module(q, k, v, Context(times=times))
    got = module(q, k, v, Context(times=times + 1_700_000_000))
    assert torch.equal(got, wanted)
    assert not torch.equal(module(q, k, v, Context(times=2 * times)), wanted)


def test_it_starts_as_softmax_attention() -> None:
    q, k, v, times = inputs(9)
    got = build(started=False)(q, k, v, Context(times=times))
    torch.testing.assert_close(got, (q @ k.mT * SITE.scale).softmax(-1) @ v, rtol=0, atol=1e-12)


def test_times_of_another_shape_are_refused() -> None:
    q, k, v, times = inputs(9)
    with pytest.raises(UnsupportedCall, match=r"times of shape \(1, 8\).*\(1, 9\)"):
        build()(q, k, v, Context(times=times[:, :8]))


@pytest.mark.parametrize("architecture", ["vit", "hf_vit"])
def test_images_have_no_times(architecture: str) -> None:
    assert "images have none" in " ".join(zoo.why(architecture, "self_modulating"))


def test_a_model_hands_times_on() -> None:
    model = zoo.build(
        "bert",
        "self_modulating",
        task="sequence-classification",
        num_hidden_layers=2,  # the first token of a layer waits for nothing
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=64,
    ).eval()
    for layer in model.bert.encoder.layer:
        nn.init.normal_(layer.attention.self.zoo.marks)
    ids = torch.arange(6)[None]
    plain = model(ids).logits
    assert torch.equal(model(ids, times=torch.arange(6.0)[None]).logits, plain)
    assert not torch.equal(model(ids, times=torch.arange(6.0)[None] ** 2).logits, plain)
    model.train()(ids)
    assert zoo.auxiliary_loss(model).requires_grad
    model.eval()(ids)
    assert zoo.auxiliary_loss(model) == 0
