"""The presets that are shipped: each fits its architecture, is built at full size, and runs."""

from __future__ import annotations

import pytest
import torch

import zoo_core as zoo
from zoo_core import registry
from zoo_core.plan import why

PRESETS = [preset.name for preset in registry.presets()]


def test_the_promised_ones_are_there() -> None:
    assert {"exact_limit", "fast_vit", "long_document_bert", "mixed_layers"} <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_it_is_planned(name: str) -> None:
    assert why(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_it_is_built_and_runs(name: str) -> None:
    model = zoo.build(name, seed=0).eval()
    config = getattr(model, "config", None)
    with torch.no_grad():
        if config is None:
            size = model.patch_embed.img_size
            assert model(torch.randn(1, 3, *size)).isfinite().all()
            return
        ids = torch.randint(999, 20000, (1, 40))
        found = model(ids).last_hidden_state
        assert found.isfinite().all()
        if name == "exact_limit":
            stack = model.zoo_patches
            stack.patches[0].restore()
            torch.testing.assert_close(found, model(ids).last_hidden_state, rtol=1e-4, atol=1e-4)
        if name == "long_document_bert":
            assert config.max_position_embeddings == 4096
            assert model(torch.randint(999, 20000, (1, 600))).last_hidden_state.isfinite().all()
