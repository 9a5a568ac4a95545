"""What every padding rule rests on: ranks, alignment, hiding, the dense mask of a call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core import Context
from zoo_core.nn import masks

#: Padding to the left, to the right, in the middle, everywhere, nowhere.
PADDING = torch.tensor(
    [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
).bool()


def tokens(*, padded: float = torch.nan) -> Tensor:
    """(5, 2, 5, 3), with what no output may depend on where there is padding."""
    x = torch.arange(150.0).view(5, 2, 5, 3)
    return x.masked_fill(~PADDING[:, None, :, None], padded)


@pytest.mark.parametrize("padded", [torch.nan, torch.inf, -torch.inf])
def test_hidden_tokens_are_zero_whatever_they_held_and_get_no_gradient(padded: float) -> None:
    x = tokens(padded=padded).requires_grad_()
    hidden = masks.hide(x, PADDING)
    for sample, real in enumerate(PADDING):
        for token, is_real in enumerate(real):
            wanted = x[sample, :, token] if is_real else torch.zeros(2, 3)
            assert torch.equal(hidden[sample, :, token], wanted)
    hidden.sum().backward()
    assert torch.equal(x.grad[:, 0, :, 0].bool(), PADDING)
    assert masks.hide(x, None) is x


def test_rank_counts_real_tokens_only() -> None:
    for sample, real in enumerate(PADDING.tolist()):
        found = masks.rank(PADDING)[sample].tolist()
        ranks = [rank for rank, is_real in zip(found, real, strict=True) if is_real]
        assert ranks == list(range(sum(real)))
    assert masks.positions(PADDING, tokens())[2].tolist() == [0, -1, 1, -1, 2]
    assert masks.positions(None, tokens()).tolist() == [[0, 1, 2, 3, 4]]
    assert masks.count(PADDING, tokens()).tolist() == [3, 3, 3, 0, 5]
    assert masks.count(None, tokens()).tolist() == [5] * 5


def test_alignment_brings_real_tokens_to_the_front_in_order_and_back() -> None:
    x, order = tokens(), masks.align(PADDING)
    front = order.front(x)
    for sample, real in enumerate(PADDING):
        own = x[sample][:, real]
        assert torch.equal(front[sample, :, : own.shape[1]], own)
        assert not front[sample, :, own.shape[1] :].any()
        assert order.key_padding[sample].tolist() == [i < own.shape[1] for i in range(5)]
    assert torch.equal(order.back(front), masks.hide(x, PADDING))


def test_alignment_without_padding_is_free() -> None:
    x, order = tokens(padded=0), masks.align(None)
    assert order.front(x) is x
    assert order.back(x) is x


@pytest.mark.parametrize("offset", [0, 3])
def test_the_mask_of_a_call_is_padding_and_causality_together(offset: int) -> None:
    ctx = Context(key_padding=PADDING, causal=True, query_offset=offset)
    mask = masks.scores_mask(ctx, 5 - offset, 5, PADDING.device)
    for sample in range(5):
        for i in range(5 - offset):
            seen = [j <= i + offset and bool(PADDING[sample, j]) for j in range(5)]
            assert mask[sample, 0, i].tolist() == seen
    plain = masks.scores_mask(Context(key_padding=PADDING), 4, 5, PADDING.device)
    assert plain.shape == (5, 1, 1, 5)
    assert masks.scores_mask(Context(), 5, 5, PADDING.device) is None
