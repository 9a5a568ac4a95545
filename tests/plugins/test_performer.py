"""Performer: the published errors of its kernel estimates, their decay, and the redraw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import zoo_core as zoo
from zoo_attention.performer import PERFORMER
from zoo_core import Context, Site
from zoo_core.nn import softmax

WIDTH = 8
FULL = Context()


def performer(**options: object) -> nn.Module:
    site = Site(heads=2, head_dim=WIDTH, dim=2 * WIDTH, scale=WIDTH**-0.5)
    return PERFORMER.factory(site, PERFORMER.options(**options))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# The kernel: closed forms of the paper, for one direction ----------------------------------------

PAIRS = {
    "unrelated": (normal(WIDTH, seed=1) * 0.2, normal(WIDTH, seed=2) * 0.2),
    "similar": (normal(WIDTH, seed=3) * 0.15, normal(WIDTH, seed=3) * 0.12),
    "opposite": (normal(WIDTH, seed=4) * 0.3, normal(WIDTH, seed=4) * -0.2),
}


def positive_error(x: Tensor, y: Tensor) -> Tensor:
    """MSE of exp(w.x - |x|^2/2) exp(w.y - |y|^2/2) as an estimate of exp(x.y)."""
    z = (x + y).square().sum()
    return z.exp() * (2 * x @ y).exp() * (1 - (-z).exp())


def hyperbolic_error(x: Tensor, y: Tensor) -> Tensor:
    """MSE of the mean of that estimate and the one with -w."""
    return (1 - (-(x + y).square().sum()).exp()) / 2 * positive_error(x, y)


def trigonometric_error(x: Tensor, y: Tensor) -> Tensor:
    """MSE of exp(|x|^2/2 + |y|^2/2) cos(w.(x - y))."""
    z, difference = (x + y).square().sum(), (x - y).square().sum()
    return z.exp() * (-2 * x @ y).exp() * (1 - (-difference).exp()).square() / 2


def estimates_of(attention: nn.Module, x: Tensor, y: Tensor, *, at_once: int) -> Tensor:
    """Estimates of exp(x.y), each of `at_once` features: from the shares of the keys y and -x.

    That of -x is exp(-|x|^2) whatever the direction, since w.x - w.x = 0. Keys have no other scale
    than one another's. Each sample gets features of its own.
    """
    w = attention.directions.double().unflatten(0, (at_once, -1))
    attention.directions = w.transpose(0, 1)[:, None]
    x_and_keys = x[None] * WIDTH**0.25, torch.stack([y, -x]) * WIDTH**0.25
    each = torch.eye(2, dtype=torch.float64)
    q, k, v = (tensor.expand(w.shape[1], 1, -1, -1) for tensor in (*x_and_keys, each))
    shares = attention(q, k, v, FULL)
    return (-x.square().sum()).exp() * shares[..., 0] / shares[..., 1]


@pytest.mark.parametrize(("x", "y"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize(
    ("kind", "at_once", "published"),
    [("positive", 1, positive_error), ("hyperbolic", 2, hyperbolic_error)],
    ids=["positive", "hyperbolic"],
)
def test_the_published_mean_squared_errors_hold(
    kind: str, at_once: int, published: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> None:
    torch.manual_seed(0)
    attention = performer(features=65536, kind=kind, norms="chi")
    error = (estimates_of(attention, x, y, at_once=at_once) - (x @ y).exp()).square().mean()
    assert_close(error, published(x, y), rtol=0.1, atol=0)


@pytest.mark.parametrize(("x", "y"), PAIRS.values(), ids=PAIRS)
def test_the_published_error_of_trigonometric_features_holds_for_the_directions(x, y) -> None:
    torch.manual_seed(0)
    w = performer(features=65536, norms="chi").directions.double()
    estimates = ((x.square().sum() + y.square().sum()) / 2).exp() * (w @ (x - y)).cos()
    error = (estimates - (x @ y).exp()).square().mean()
    assert_close(error, trigonometric_error(x, y), rtol=0.1, atol=0)


def test_orthogonal_directions_beat_independent_ones() -> None:
    # Averaged over a block of d features the error is below that of d independent ones.
    torch.manual_seed(0)
    x, y = PAIRS["similar"]
    w = performer(features=65536, norms="chi").directions.double()
    lengths = (x.square().sum() + y.square().sum()) / 2
    blocks = (w @ (x + y) - lengths).exp().unflatten(0, (-1, WIDTH)).mean(-1)
    error = (blocks - (x @ y).exp()).square().mean()
    assert error < 0.95 * positive_error(x, y) / WIDTH


# Attention ---------------------------------------------------------------------------------------


def attention_error(features: int, **options: object) -> float:
    """Root mean squared error against softmax, over 40 draws of the directions.

    Queries and keys are small: for larger ones the errors have tails too heavy to average.
    """
    q, k, v = (size * normal(1, 2, 30, WIDTH, seed=i) for i, size in enumerate((0.3, 0.3, 1)))
    exact = softmax.attend(q, k, v, FULL, scale=WIDTH**-0.5)
    torch.manual_seed(0)
    attention = performer(features=features, **options)
    errors = []
    for _ in range(40):
        attention.redraw()
        errors.append((attention(q, k, v, FULL) - exact).square().mean())
    return torch.stack(errors).mean().sqrt().item()


@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_the_error_falls_as_one_over_the_root_of_the_features(kind: str) -> None:
    few, many = (attention_error(m, kind=kind, norms="chi") for m in (128, 2048))
    assert few / many == pytest.approx(4, rel=0.2)


def test_directions_of_equal_length_are_better_at_few_features() -> None:
    few = {norms: attention_error(32, norms=norms) for norms in ("chi", "sqrt_d")}
    assert few["sqrt_d"] < few["chi"]


def test_relu_features_follow_their_formula() -> None:
    attention = performer(features=16, kind="relu").double()
    q, k, v = (normal(1, 2, 7, WIDTH, seed=seed) for seed in range(3))
    w = attention.directions * WIDTH**-0.25
    shares = ((q @ w.T).clamp(min=0) + 1e-3) @ ((k @ w.T).clamp(min=0) + 1e-3).mT
    wanted = shares / shares.sum(-1, keepdim=True) @ v
    assert_close(attention(q, k, v, FULL), wanted, rtol=0, atol=1e-14)


def test_loud_padding_does_not_reach_the_stabiliser() -> None:
    attention = performer(features=32)
    q, k, v = (normal(1, 2, 40, WIDTH, seed=seed).float() for seed in range(3))
    real = torch.arange(40) < 12
    loud = torch.where(real[:, None], k, 50 * k)
    got = attention(q, loud, v, Context(key_padding=real[None]))
    wanted = attention(q, k[:, :, :12], v[:, :, :12], FULL)
    assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("features", [1, 5, 6])
def test_hyperbolic_features_come_in_opposite_pairs(features: int) -> None:
    w = performer(features=features, kind="hyperbolic").directions
    assert w.shape == (features, WIDTH)
    pairs = features // 2
    assert torch.equal(w[features - pairs :], -w[:pairs])


# The redraw --------------------------------------------------------------------------------------


def test_training_never_redraws_by_itself() -> None:
    attention = performer(features=8).train()
    before = attention.directions.clone()
    x = normal(1, 2, 5, WIDTH)
    for _ in range(10):
        attention(x, x, x, FULL)
    assert torch.equal(attention.directions, before)


def test_redraw_follows_the_seed_and_keeps_the_buffer() -> None:
    attention = performer(features=8).to(torch.float16)
    buffer, before = attention.directions, attention.directions.clone()
    torch.manual_seed(7)
    attention.redraw()
    assert attention.directions is buffer
    assert buffer.dtype == torch.float16
    assert not torch.equal(buffer, before)
    torch.manual_seed(7)
    assert torch.equal(buffer, performer(features=8).directions.to(torch.float16))


@pytest.mark.parametrize("attention", ["performer", ("spe", {"base": "performer"})], ids=str)
def test_all_sites_of_a_model_are_drawn_anew_by_one_call(attention) -> None:
    tiny = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 9}
    model = zoo.build("bert", {"0-1": attention}, seed=0, **tiny).eval()
    ids = torch.arange(7)[None]
    before, buffers = model(ids)[0], [b.clone() for n, b in model.named_buffers() if ".zoo." in n]
    assert zoo.redraw(model) == 2
    after = [buffer for name, buffer in model.named_buffers() if ".zoo." in name]
    assert buffers
    assert not any(torch.equal(old, new) for old, new in zip(buffers, after, strict=True))
    assert not torch.equal(model(ids)[0], before)
    assert zoo.redraw(zoo.build("bert", **tiny)) == 0


def test_directions_are_saved_with_the_model() -> None:
    assert list(performer().state_dict()) == ["directions"]
