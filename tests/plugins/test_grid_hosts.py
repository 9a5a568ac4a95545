"""Grid mechanisms in real vision models: prefix tokens of every number, grids that change."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import zoo_core as zoo
from zoo_core.errors import DoesNotFit

HOSTS = {
    "class-token": ("vit_tiny_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 4}),
    "no-prefix": ("vit_base_patch16_siglip_224", {}),
}
MECHANISMS = {
    "gpsa": {"gate": -40.0},
    "axial": {},
    "tied_axial": {},
    "factorised": {"temporal": 0.0},
    "lie": {"group": "p4"},
    "simam": {"strength": 0.0},
}
ON_ANY_GRID = ("gpsa", "lie", "simam")
every = pytest.mark.parametrize("mechanism", MECHANISMS)


def stock(host: str) -> nn.Module:
    """A small model in float64 for images of any size, whose attention is sharp."""
    name, changes = HOSTS[host]
    small = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 32, "num_classes": 3}
    torch.manual_seed(0)
    model = timm.create_model(name, dynamic_img_size=True, **small, **changes).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def images(rows: int, cols: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, 16 * rows, 16 * cols, dtype=torch.float64)


@every
@pytest.mark.parametrize("host", HOSTS)
def test_its_limit_gives_the_stock_model(host: str, mechanism: str) -> None:
    """Where the limit is a grid of one row, other grids give another output."""
    model, grids = stock(host), [(1, 4), (2, 3), (3, 2)]
    wanted = [model(images(*grid)) for grid in grids]
    zoo.patch(model, mechanism, options=MECHANISMS[mechanism])
    for grid, before in zip(grids, wanted, strict=True):
        got = model(images(*grid))
        if grid[0] == 1 or mechanism in ON_ANY_GRID:
            torch.testing.assert_close(got, before, rtol=0, atol=1e-9)
        else:
            assert (got - before).abs().max() > 1e-3


@every
def test_bert_has_no_grid(mechanism: str) -> None:
    tiny = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 99}
    if mechanism in ("lie", "simam"):
        assert zoo.build("bert", mechanism, **tiny)(torch.ones(1, 5).long())[0].isfinite().all()
        return
    with pytest.raises(DoesNotFit, match="grid"):
        zoo.build("bert", mechanism, **tiny)
