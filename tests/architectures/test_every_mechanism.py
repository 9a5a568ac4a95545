"""Every mechanism in vision models with several prefix tokens, and with grids that change.

BERT, plain ViT and the other families are in tests/contract.
"""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import zoo_core as zoo
from zoo_core import registry
from zoo_core.errors import DoesNotFit
from zoo_core.hosts import adapter_of
from zoo_core.plan import obstacles
from zoo_core.testing.combinations import combination

#: name of the timm model, arguments, sizes of the images in pixels
HOSTS = {
    "distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 48}, [(48, 48)]),
    "registers": ("vit_tiny_patch16_224", {"img_size": 48, "reg_tokens": 4}, [(48, 48)]),
    "dynamic": (
        "vit_tiny_patch16_224",
        {"img_size": (32, 80), "dynamic_img_size": True},
        [(32, 80), (48, 32)],
    ),
}
MECHANISMS = {record.name: record for record in zoo.mechanisms(distribution="zoo-core")}
every = pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
limits = {name: record for name, record in MECHANISMS.items() if record.exact_at}
limited = pytest.mark.parametrize("mechanism", limits.values(), ids=limits)
hosts = pytest.mark.parametrize("host", HOSTS)


def stock(host: str) -> nn.Module:
    """A small model in float64 whose attention is sharp enough to matter."""
    name, arguments, _ = HOSTS[host]
    torch.manual_seed(0)
    small = {"depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
    model = timm.create_model(name, **small, **arguments).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


@every
@hosts
def test_it_passes_the_kits_check_of_a_whole_model(host: str, mechanism: zoo.Mechanism) -> None:
    name, arguments, _ = HOSTS[host]
    family = registry.architecture("deit" if host == "distilled" else "vit")
    combination(family, mechanism, variant=name, **{**arguments, "patch_size": 16})


def fits(mechanism: zoo.Mechanism, model: nn.Module) -> bool:
    sites = adapter_of(model)[1].sites(model)
    return not any(obstacles(mechanism, site) for site in sites)


def images(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


#: Reads a grid, the time of each token, or state of a layer before it.
GRID, TIMES = {"axial", "factorised", "gpsa", "tied_axial"}, {"self_modulating"}
STATE = {"bayesian", "evolving", "luna"}


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("bert", GRID),
        ("distilbert", GRID),
        ("electra", GRID),
        ("roberta", GRID),
        ("albert", GRID | STATE),  # whose layers are one module
        ("vit", TIMES),
        ("deit", TIMES),
        ("hf_vit", TIMES),
    ],
)
def test_nothing_else_is_refused_than_what_cannot_be(family: str, refused: set[str]) -> None:
    assert {name for name in MECHANISMS if zoo.why(family, name)} == refused


@hosts
def test_no_mechanism_of_images_is_refused_for_more_prefix_tokens_or_grids(host: str) -> None:
    model = stock(host)
    assert {name for name, one in MECHANISMS.items() if not fits(one, model)} == TIMES


@every
@hosts
def test_it_runs_and_trains_or_is_refused(host: str, mechanism: zoo.Mechanism) -> None:
    model = stock(host)
    untouched = model(images(HOSTS[host][2][0]))
    if not fits(mechanism, model):
        with pytest.raises(DoesNotFit, match=mechanism.name):
            zoo.patch(model, mechanism.qualified)
        assert torch.equal(model(images(HOSTS[host][2][0])), untouched)
        return
    zoo.patch(model, mechanism.qualified, seed=0)
    for size in HOSTS[host][2]:
        both = model.eval()(images(size))
        torch.testing.assert_close(model(images(size)[:1]), both[:1], rtol=0, atol=1e-9)
        loss = model.train()(images(size)).square().sum() + zoo.auxiliary_loss(model)
        loss.backward()
    for name, parameter in model.named_parameters():
        if ".zoo." in name and parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


@limited
@hosts
def test_at_its_exact_limit_it_is_the_stock_model(host: str, mechanism: zoo.Mechanism) -> None:
    model = stock(host)
    options = mechanism.exact_at(adapter_of(model)[1].sites(model)[0])
    if options is None or not fits(mechanism, model):
        pytest.skip("has no exact limit here")
    wanted = [model(images(size)) for size in HOSTS[host][2]]
    zoo.patch(model, mechanism.qualified, options=options, seed=0)
    for size, expected in zip(HOSTS[host][2], wanted, strict=True):
        torch.testing.assert_close(model(images(size)), expected, rtol=0, atol=1e-5)
