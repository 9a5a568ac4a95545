"""local-attention with exact_windowsize=True, its window being the reach to each side.

Without that it sees whole neighbouring blocks, so that how far a token sees depends on its place.
"""

from __future__ import annotations

import pytest
from same_weights import HEADS, WIDTH, assert_same, distance, first, normal, ours
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_attention.local import LOCAL
from zoo_core import Context

peer = pytest.importorskip("local_attention")

WINDOW = 4
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["both-sides", "causal"])


def pair(*, causal: bool = False) -> tuple[nn.Module, nn.Module]:
    theirs = peer.LocalAttention(
        WINDOW, causal=causal, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False
    )
    return ours(LOCAL, window=WINDOW), theirs.eval()


def inputs(length: int) -> tuple[Tensor, ...]:
    return normal(3, 2, HEADS, length, WIDTH).unbind()


@CAUSAL
@pytest.mark.parametrize("length", [12, 96], ids=lambda n: f"{n}-tokens")
def test_attention_is_equal(length: int, causal: bool) -> None:
    module, theirs = pair(causal=causal)
    q, k, v = inputs(length)
    assert_same(module(q, k, v, Context(causal=causal)), theirs(q, k, v))


@CAUSAL
@pytest.mark.parametrize("left", [0, 7], ids=["right-padding", "both-sides-padded"])
def test_padding_is_left_out_alike(left: int, causal: bool) -> None:
    module, theirs = pair(causal=causal)
    q, k, v = inputs(94)
    real = (first(81, 94) & ~first(left, 94)).expand(2, -1)
    got = module(q, k, v, Context(key_padding=real, causal=causal))
    wanted = theirs(q, k, v, mask=real)
    assert_same(got[:, :, real[0]], wanted[:, :, real[0]])


def test_it_attends_to_the_zeros_that_it_pads_with() -> None:
    """With autopad and without a mask, where the length is no multiple of the window."""
    module, theirs = pair()
    q, k, v = inputs(21)
    padded = (F.pad(x, (0, 0, 0, 3)) for x in (q, k, v))
    assert_same(module(*padded, Context())[:, :, :21], theirs(q, k, v))
    assert distance(module(q, k, v, Context()), theirs(q, k, v)) > 0.01
