"""Makes the modules that these tests share importable; none of them needs a gradient."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seeded_without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
