from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import zoo_core as zoo
from zoo_attention.bayesian import BAYESIAN, BayesianOptions
from zoo_attention.bayesian.attention import kl
from zoo_core import Context, Site
from zoo_core.nn import softmax

HEADS, WIDTH = 2, 8
SITE = Site(path="first", heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5)
PRIORS = ("constant", "learned", "contextual", "layers")


def build(site: Site = SITE, **options: object) -> nn.Module:
    torch.manual_seed(1)
    return BAYESIAN.factory(site, BayesianOptions(**options)).double()


def build_trained(**options: object) -> nn.Module:
    return build(**options).train()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def densities(w: Tensor, p: float, alpha: float, beta: float, shape: float) -> tuple[Tensor, ...]:
    """The Weibull density of mean p and the Gamma density, as the textbook has them."""
    size = p / math.gamma(1 + 1 / shape)
    weibull = shape / size * (w / size) ** (shape - 1) * (-((w / size) ** shape)).exp()
    gamma = beta**alpha * w ** (alpha - 1) * (-beta * w).exp() / math.gamma(alpha)
    return weibull, gamma


@pytest.mark.parametrize("prior", PRIORS)
def test_eval_mode_is_softmax_attention_to_the_bit(prior: str) -> None:
    q, k, v = (x.float() for x in inputs(9, batch=2))
    module = build(prior=prior).float().eval()
    assert torch.equal(
        module(q, k, v, Context()), softmax.attend(q, k, v, Context(), scale=SITE.scale)
    )
    assert module.auxiliary_loss() == 0


@pytest.mark.parametrize("shape", [0.5, 1, 10])
def test_training_draws_normalised_weibull_variables(shape: float) -> None:
    q, k, v = inputs(9, batch=2)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 4:] = False
    scores = (q @ k.mT * SITE.scale).masked_fill(~real[:, None, None], -torch.inf)
    module = build_trained(shape=shape)
    torch.manual_seed(3)
    got = module(q, k, v, Context(key_padding=real))
    torch.manual_seed(3)
    u = torch.rand(scores.shape, dtype=torch.float64)
    drawn = scores.softmax(-1) / math.gamma(1 + 1 / shape) * (-(1 - u).log()) ** (1 / shape)
    wanted = drawn / drawn.sum(-1, keepdim=True) @ v
    rows = real[:, None].expand(-1, HEADS, -1)
    torch.testing.assert_close(got[rows], wanted[rows], rtol=0, atol=1e-9)


def test_weights_vary_as_measured() -> None:
    """Total variation to softmax: a third at shape 1, 4 % at 10, none as the shape grows."""
    q, k, _ = inputs(64, batch=4)
    eye = torch.eye(64).double().expand(4, HEADS, -1, -1)
    wanted = (q @ k.mT * SITE.scale).softmax(-1)
    torch.manual_seed(0)
    found = [
        (build_trained(shape=shape)(q, k, eye, Context()) - wanted).abs().sum(-1).mean().item() / 2
        for shape in (1, 10, 1e6)
    ]
    assert found == pytest.approx([0.34, 0.043, 0], abs=0.04)
    assert found[1] == pytest.approx(0.043, abs=8e-3)
    assert found[2] < 1e-6


@pytest.mark.parametrize(
    ("p", "alpha", "beta", "shape"), [(0.2, 1, 1, 10), (0.7, 2.5, 3, 1.5), (0.05, 0.4, 0.5, 2)]
)
def test_the_divergence_is_the_integral(p: float, alpha: float, beta: float, shape: float) -> None:
    w = torch.linspace(-12, 3, 200_001, dtype=torch.float64).exp()
    weibull, gamma = densities(w, p, alpha, beta, shape)
    integrand = (weibull * (weibull / gamma).log()).where(weibull > 1e-300, 0)
    wanted = torch.trapezoid(integrand, w).item()
    log_p = torch.tensor(p, dtype=torch.float64).log()
    got = kl(log_p, torch.tensor(alpha, dtype=torch.float64), beta, shape=shape).item()
    assert got == pytest.approx(wanted, rel=1e-5)


def expected_loss(p: Tensor, alpha: Tensor | float, **options: float) -> float:
    beta, shape = options.get("beta", 1.0), options.get("shape", 10.0)
    alphas = torch.as_tensor(alpha, dtype=torch.float64).expand_as(p)
    return kl(p.log(), alphas, beta, shape=shape).mean().item()


class TestPriors:
    def loss(self, module: nn.Module, ctx: Context | None = None, length: int = 6) -> Tensor:
        module.train()(*inputs(length), ctx or Context())
        return module.auxiliary_loss()

    def weights(self, length: int = 6) -> Tensor:
        q, k, _ = inputs(length)
        return (q @ k.mT * SITE.scale).softmax(-1)

    @pytest.mark.parametrize("kl_weight", [1, 0.25])
    @pytest.mark.parametrize("prior", ["constant", "learned"])
    def test_a_constant_one_and_where_a_learned_one_starts(
        self, prior: str, kl_weight: float
    ) -> None:
        module = build(prior=prior, alpha=0.5, beta=2, kl_weight=kl_weight)
        wanted = kl_weight * expected_loss(self.weights(), 0.5, beta=2)
        assert self.loss(module).item() == pytest.approx(wanted, rel=1e-6)

    def test_a_contextual_one_starts_uniform_and_follows_its_network(self) -> None:
        module = build(prior="contextual", beta=2)
        wanted = expected_loss(self.weights(), 2 / 6, beta=2)
        assert self.loss(module).item() == pytest.approx(wanted, rel=1e-9)
        nn.init.normal_(module.prior.out)
        k = inputs(6)[1]
        network = (k @ module.prior.hidden).clamp(min=0) @ module.prior.out
        alpha = 2 * network.softmax(-1)[:, :, None]
        wanted = expected_loss(self.weights(), alpha.detach(), beta=2)
        assert self.loss(module).item() == pytest.approx(wanted, rel=1e-9)

    def test_across_layers_it_is_the_previous_layers_weights(self) -> None:
        first = build(prior="layers", alpha=0.5)
        second = build(
            Site(path="second", previous="first", heads=HEADS, head_dim=WIDTH, scale=2.0),
            prior="layers",
            alpha=0.5,
            beta=3,
        )
        carry: dict = {}
        ctx = Context(carry=carry)
        wanted = expected_loss(self.weights(), 0.5)
        assert self.loss(first, ctx).item() == pytest.approx(wanted, rel=1e-9)
        q, k, _ = inputs(6)
        wanted = expected_loss((2 * q @ k.mT).softmax(-1), 3 * self.weights(), beta=3)
        assert self.loss(second, ctx).item() == pytest.approx(wanted, rel=1e-9)

    @pytest.mark.parametrize("before", [None, torch.ones(1, HEADS, 5, 5)], ids=["skipped", "shape"])
    def test_without_a_like_predecessor_it_is_constant(self, before: Tensor | None) -> None:
        site = Site(path="b", previous="a", heads=HEADS, head_dim=WIDTH, scale=SITE.scale)
        module = build(site, prior="layers", alpha=0.5)
        got = self.loss(module, Context(carry={"a": before}))
        assert got.item() == pytest.approx(expected_loss(self.weights(), 0.5), rel=1e-9)

    @pytest.mark.parametrize("prior", PRIORS)
    def test_padding_counts_for_nothing(self, prior: str) -> None:
        """Queries, keys and values of padding hold NaN; parameters get finite gradients."""
        module = build(prior=prior).train()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        x = inputs(6)
        module(*x, Context(carry={}))
        wanted = module.auxiliary_loss()
        padded = [nn.functional.pad(t, (0, 0, 2, 1), value=torch.nan) for t in x]
        mask = nn.functional.pad(torch.ones(1, 6, dtype=torch.bool), (2, 1))
        module(*padded, Context(key_padding=mask, carry={}))
        torch.testing.assert_close(module.auxiliary_loss(), wanted, rtol=1e-10, atol=0)
        if parameters := list(module.parameters()):
            module.auxiliary_loss().backward()
            assert all(p.grad.isfinite().all() and p.grad.any() for p in parameters)


@pytest.mark.parametrize("prior", PRIORS)
def test_in_a_model_the_loss_is_that_of_the_last_training_forward(prior: str) -> None:
    model = zoo.build(
        "bert",
        "bayesian",
        options={"prior": prior},
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=64,
    )
    ids = torch.arange(8).view(1, 8)
    model.train()(ids)
    first = zoo.auxiliary_loss(model)
    model(ids.expand(2, -1).roll(3, 1))
    second = zoo.auxiliary_loss(model)
    assert first.requires_grad
    assert first != second
    second.backward()
    assert model.encoder.layer[1].attention.self.query.weight.grad.any()
    model.eval()(ids)
    assert zoo.auxiliary_loss(model) == 0


def test_in_a_model_the_prior_of_a_layer_is_what_the_layer_before_it_hands_on() -> None:
    tiny = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
    losses = {}
    for prior in ("constant", "layers"):
        model = zoo.build("bert", "bayesian", options={"prior": prior}, seed=0, **tiny).train()
        weights = zoo.build("bert", seed=0, **tiny).state_dict()
        model.load_state_dict(weights, strict=False)
        torch.manual_seed(0)
        model(torch.arange(8).view(1, 8))
        sites = [layer.attention.self.zoo for layer in model.encoder.layer]
        losses[prior] = [site.auxiliary_loss().item() for site in sites]
    assert losses["layers"][0] == losses["constant"][0]  # which has none before it
    assert losses["layers"][1] != losses["constant"][1]
