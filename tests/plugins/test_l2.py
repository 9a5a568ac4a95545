from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.l2 import L2, L2Options
from zoo_attention.l2.attention import inverse_phi
from zoo_attention.softmax import SOFTMAX
from zoo_core import Context, Site
from zoo_core.errors import OptionError, UnsupportedCall
from zoo_core.testing.cases import Setting
from zoo_core.testing.layouts import padded_and_not
from zoo_core.testing.tracing import record

HEADS, WIDTH, DIM = 2, 4, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=DIM, scale=WIDTH**-0.5)


def build(**options: object) -> nn.Module:
    return L2.factory(SITE, L2Options(**options)).eval()


def projections(*, size: float = 1.0, bias: bool = True, seed: int = 0) -> dict:
    torch.manual_seed(seed)
    names = ("query", "key", "value", "out")
    weights = [size * torch.randn(DIM, DIM, dtype=torch.float64) * DIM**-0.5 for _ in names]
    biases = [torch.randn(DIM, dtype=torch.float64) if bias else None for _ in names]
    return dict(zip(names, zip(weights, biases, strict=True), strict=True))


def host(module: nn.Module, given: dict, **ctx: object) -> Callable:
    """x (N, DIM) -> (N, DIM): a layer that projects, splits, attends and projects back."""

    def layer(x: Tensor) -> Tensor:
        q, k, v = (
            nn.functional.linear(x, *given[name]).view(-1, HEADS, WIDTH).transpose(0, 1)[None]
            for name in ("query", "key", "value")
        )
        out = module(q, k, v, Context(projections=given, **ctx))
        return nn.functional.linear(out[0].transpose(0, 1).flatten(1), *given["out"])

    return layer


def jacobian(layer: Callable, x: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(layer, x).reshape(x.numel(), x.numel())


def tokens(count: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)).double()


def test_untied_weighs_by_squared_distance() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, n, WIDTH, dtype=torch.float64) for n in (5, 9, 9))
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, 3:] = False
    distances = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    scores = (-SITE.scale * distances).masked_fill(~real[:, None, None], -torch.inf)
    got = build()(q, k, v, Context(key_padding=real))
    torch.testing.assert_close(got, scores.softmax(-1) @ v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("left", [0, 2, 4], ids=lambda n: f"{n}-pads-left")
def test_a_padded_decoder_sees_real_tokens_up_to_its_own(left: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, 9, WIDTH, dtype=torch.float64) for _ in range(3))
    real = torch.arange(left, left + 5)
    mask = torch.zeros(1, 9, dtype=torch.bool).index_fill(1, real, True)
    distances = (q[:, :, real, None] - k[:, :, None, real]).square().sum(-1)
    scores = (-SITE.scale * distances).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    got = build()(q, k, v, Context(key_padding=mask, causal=True))
    wanted = scores.softmax(-1) @ v[:, :, real]
    torch.testing.assert_close(got[:, :, real], wanted, rtol=0, atol=1e-12)
    assert (got[:, :, ~mask[0]] == 0).all()


def test_a_padded_decoder_makes_no_table_of_all_pairs() -> None:
    setting = Setting(L2, L2Options(), "causal", causal=True, heads=1)
    sizes = [
        record(setting.build(), padded_and_not(setting, length)[1], backward=True).largest
        for length in (256, 512)
    ]
    assert sizes[1] < 2.5 * sizes[0]


def test_a_tied_layer_is_the_papers() -> None:
    """F(x) = concat_h(P x A W_v) W_o with A = scale W W^T, by matrices, plus the host's biases."""
    given = projections(bias=True)
    W, W_v = (given[name][0].mT.reshape(DIM, HEADS, WIDTH) for name in ("key", "value"))
    x = tokens(6)
    parts = []
    for h in range(HEADS):
        y = x @ W[:, h]
        P = (-SITE.scale * torch.cdist(y, y).square()).softmax(-1)
        A = SITE.scale * W[:, h] @ W[:, h].mT
        parts.append(P @ x @ A @ W_v[:, h])
    wanted = (torch.cat(parts, -1) + given["value"][1]) @ given["out"][0].mT + given["out"][1]
    got = host(build(form="tied"), given)(x)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_a_token_weighs_itself_most_when_tied() -> None:
    k = 3 * torch.randn(1, HEADS, 12, WIDTH, generator=torch.Generator().manual_seed(0))
    weights = build()(k, k, torch.eye(12).expand(1, HEADS, -1, -1), Context())
    assert (weights.argmax(-1) == torch.arange(12)).all()


def test_moving_all_keys_moves_no_weight_when_tied() -> None:
    given = projections()
    x, move = tokens(6), tokens(1, seed=1)
    layer = host(build(form="tied"), given)
    by_constant = layer(x + move) - layer(x)
    torch.testing.assert_close(by_constant, by_constant[:1].expand(6, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("count", "value"), [(1, 0), (4, 0.604), (16, 1.383), (4096, 5.596)])
def test_the_inverse_of_phi(count: int, value: float) -> None:
    got = inverse_phi(torch.tensor(count - 1, dtype=torch.float64)).item()
    assert got == pytest.approx(value, abs=1e-3)
    assert got * math.exp(got + 1) == pytest.approx(count - 1, rel=1e-12)


class TestCertificate:
    @pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
    @pytest.mark.parametrize("size", [0.3, 1, 3], ids=lambda size: f"weights-{size}")
    @pytest.mark.parametrize("count", [2, 6], ids=lambda count: f"{count}-tokens")
    def test_no_random_input_violates_it(self, count: int, size: float, causal: bool) -> None:
        """Inputs from zero, where all tokens mix, to far apart, where none do."""
        given, module = projections(size=size), build(form="tied")
        for seed, spread in enumerate([0, 0.1, 0.3, 1, 3, 10]):
            found = jacobian(host(module, given, causal=causal), tokens(count, seed, spread))
            for norm in (2, math.inf):
                bound = module.lipschitz_bound(count, given, norm=norm)
                assert torch.linalg.matrix_norm(found, norm) <= bound

    def test_it_takes_the_fourth_power_of_the_projection(self) -> None:
        """With its square instead, as is easily misread, large weights exceed it, even at x = 0."""
        given = projections(size=30)
        key, value = (given[name][0].view(HEADS, WIDTH, DIM) for name in ("key", "value"))
        module = build(form="tied")
        found = jacobian(host(module, given), torch.zeros(4, DIM).double())
        key, value, out = (torch.linalg.matrix_norm(x, 2) for x in (key, value, given["out"][0]))
        phi = 0.604
        misread = 2 * SITE.scale * (4 * phi + 1) * (key**2 * value**2).sum().sqrt() * out
        assert misread < torch.linalg.matrix_norm(found, 2) <= module.lipschitz_bound(4, given)

    def test_dot_product_attention_has_none(self) -> None:
        """One token at 0 and the others ever larger: its derivative grows without end."""
        given = projections(bias=False)
        softmax = SOFTMAX.factory(SITE, SOFTMAX.options()).eval()
        tied = build(form="tied")
        found = {}
        for module in (softmax, tied):
            norms = []
            for size in (1, 10, 100):
                x = tokens(4, size=size)
                x[0] = 0
                norms.append(torch.linalg.matrix_norm(jacobian(host(module, given), x), 2).item())
            found[module] = norms
        assert found[softmax][1] > 5 * found[softmax][0]
        assert found[softmax][2] > 50 * found[softmax][1]
        assert max(found[tied]) <= tied.lipschitz_bound(4, given).item()

    def test_the_untied_form_gives_none(self) -> None:
        with pytest.raises(UnsupportedCall, match=r"untied.* is not Lipschitz"):
            build().lipschitz_bound(4, projections())


class TestContractive:
    def test_it_is_the_tied_form_over_its_bound(self) -> None:
        given, x = projections(bias=False), tokens(5)
        tied, contractive = build(form="tied"), build(form="contractive", contraction=0.5)
        wanted = host(tied, given)(x) * 0.5 / tied.lipschitz_bound(5, given)
        torch.testing.assert_close(host(contractive, given)(x), wanted, rtol=0, atol=1e-12)

    def test_the_bound_counts_real_tokens_only(self) -> None:
        given, x = projections(), tokens(5)
        contractive = build(form="contractive")
        padded = torch.cat([tokens(3, seed=1), x])
        mask = (torch.arange(8) >= 3)[None]
        got = host(contractive, given, key_padding=mask)(padded)[3:]
        torch.testing.assert_close(got, host(contractive, given)(x), rtol=0, atol=1e-12)

    def test_a_residual_block_of_it_has_an_inverse(self) -> None:
        layer = host(build(form="contractive"), projections(size=3))
        x = tokens(6)
        y = x + layer(x)
        back = y
        for _ in range(40):
            back = y - layer(back)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["tied", "contractive"])
def test_tied_forms_are_refused_in_cross_attention(form: str) -> None:
    with pytest.raises(OptionError, match="cross-attention"):
        L2.factory(Site(kind="cross"), L2Options(form=form))


def test_the_contractive_form_is_refused_in_a_decoder() -> None:
    with pytest.raises(OptionError, match="no causal form"):
        L2.factory(Site(causal=True), L2Options(form="contractive"))


def test_half_precision_keeps_the_norm_of_large_keys() -> None:
    """|k|^2 / 2 is near 300 here, where bfloat16 counts in steps of 2."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 32, 64).bfloat16() for _ in range(3))
    k = 3 * k
    distances = (q.double()[..., :, None, :] - k.double()[..., None, :, :]).square().sum(-1)
    wanted = (-distances / 8).softmax(-1) @ v.double()
    module = L2.factory(Site(head_dim=64, scale=1 / 8), L2Options())
    got = module(q, k, v, Context()).double()
    torch.testing.assert_close(got, wanted, rtol=0, atol=3e-2)
