from __future__ import annotations

import pytest
import torch

from zoo_core.nn import sparse
from zoo_core.nn.patterns import Common, Distances, Neighbours


@pytest.mark.parametrize("rows", [8, 24, 1000], ids=lambda rows: f"{rows}_rows")
def test_parts_without_gradients_give_what_the_whole_gives(monkeypatch, rows: int) -> None:
    torch.manual_seed(0)
    patterns = [Neighbours(4, 1, 0), Distances((-9, 5)), Common(torch.tensor([[2]]))]
    q, k, v = (torch.randn(2, 3, 16, 5, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, 1, 16, 11) > 0.5
    for start, pattern in ((0, patterns[0]), (8, patterns[1])):
        positions = pattern.positions(16, q.device)
        mask[..., start : start + positions.shape[-1]] &= (positions >= 0) & (positions < 16)
    mask[1, :, 3] = False
    wanted = sparse.mix(patterns, q.requires_grad_(), k, v, mask, scale=0.4, multiple=4)
    monkeypatch.setattr(sparse, "ROWS", rows)
    with torch.no_grad():
        got = sparse.mix(patterns, q, k, v, mask, scale=0.4, multiple=4)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    assert not got[1, :, 3].any()
