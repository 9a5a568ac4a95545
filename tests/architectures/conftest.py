from __future__ import annotations

import pytest
import torch

from zoo_core import registry


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def tiny(name: str) -> dict:
    """Arguments that build the smallest model of a family."""
    return registry.architecture(name).adapter().tiny()
