from __future__ import annotations

import pytest
import torch

from zoo_core.nn.parts import parts


@pytest.mark.parametrize("multiple", [1, 3], ids=lambda m: f"multiple_{m}")
@pytest.mark.parametrize("rows", [1, 7, 20, 1000], ids=lambda rows: f"{rows}_rows")
def test_parts_cover_each_token_of_each_head_once(rows: int, multiple: int) -> None:
    seen = torch.zeros(2, 5, 12, 1)
    with torch.no_grad():
        cut = parts(seen, multiple=multiple, rows=rows)
        for heads, span in cut:
            assert span.start % multiple == 0
            assert seen[:, heads, span].numel() <= max(rows, 2 * multiple)
            seen[:, heads, span] += 1
    assert (seen == 1).all()


def test_gradients_and_dropout_keep_all_in_one() -> None:
    x = torch.zeros(2, 5, 12, 1)
    whole = [(slice(0, 5), slice(0, 12))]
    assert parts(x, rows=1) == whole
    with torch.no_grad():
        assert parts(x, rows=1, dropout=0.1) == whole
        assert parts(x, rows=1) != whole
