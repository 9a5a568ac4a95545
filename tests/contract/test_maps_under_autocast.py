"""Attention maps are looked at, and compared: no half precision, whatever the host computes in."""

from __future__ import annotations

import pytest
import torch

from zoo_core import registry
from zoo_core.testing.cases import settings

WITH_MAP = [one for one in registry.mechanisms() if one.supports.weights]


@pytest.mark.parametrize("mechanism", WITH_MAP, ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_map_under_autocast_is_in_single_precision(mechanism, dtype: torch.dtype) -> None:
    for setting in settings(mechanism):
        probe, call = setting.build(dtype=torch.float32), setting.call(9).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            weights = probe.attention_map(call.q, call.k, call.ctx)
        assert weights.dtype == torch.float32, setting
