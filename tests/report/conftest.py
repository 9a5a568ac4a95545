"""Makes `page_reader` importable, and tiny models to report on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import zoo_core as zoo
from zoo_core import registry

sys.path.insert(0, str(Path(__file__).parent))


def tiny(family: str, attention: str | None = "local", **how) -> nn.Module:
    """A model of a few thousand weights; None leaves its stock attention."""
    sizes = registry.architecture(family).adapter().tiny()
    model = zoo.build(family, attention or "softmax", seed=0, **{**sizes, **how}).eval()
    if attention is None:
        model.zoo_patches.clear()
    return model


@pytest.fixture(scope="session")
def make():
    return tiny


@pytest.fixture(scope="session")
def tokens():
    """Samples of a text model, of many lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(6, 20, (12,), generator=generator).tolist()
    return [{"input_ids": torch.randint(5, 99, (n,), generator=generator)} for n in lengths]


@pytest.fixture(scope="session")
def images():
    return list(torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(2)))


@pytest.fixture(scope="session")
def text_report(tokens):
    return zoo.report.examine(tiny("bert"), tokens, name="tiny <b>bert</b>", batch_size=6)


@pytest.fixture(scope="session")
def image_report(images):
    return zoo.report.examine(tiny("deit"), images, batch_size=6, parts=["maps", "retention"])
