"""nystrom-attention: equal for one sample and one head.

Its inverse starts from the largest norms of the whole batch, ours from each matrix's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from same_weights import WIDTH, assert_same, distance, join, normal, ours, split
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_attention.nystromformer import NYSTROMFORMER
from zoo_core import Context

peer = pytest.importorskip("nystrom_attention")

LANDMARKS = 4


def pair(heads: int = 1, *, conv: int = 0) -> tuple[nn.Module, nn.Module]:
    """Ours and theirs, with one convolution."""
    theirs = peer.NystromAttention(
        heads * WIDTH,
        dim_head=WIDTH,
        heads=heads,
        num_landmarks=LANDMARKS,
        residual=conv > 0,
        residual_conv_kernel=conv or 1,
    )
    theirs = theirs.double().eval()
    theirs.to_out = nn.Identity()
    module = ours(NYSTROMFORMER, heads=heads, landmarks=LANDMARKS, conv=conv)
    if conv:
        module.conv.copy_(theirs.res_conv.weight[:, 0, :, 0])
    return module, theirs


def projected(theirs: nn.Module, x: Tensor) -> Iterator[Tensor]:
    return (split(y, theirs.heads) for y in theirs.to_qkv(x).chunk(3, -1))


@pytest.mark.parametrize("conv", [0, 5], ids=lambda width: f"conv-{width}")
def test_attention_is_equal(conv: int) -> None:
    module, theirs = pair(conv=conv)
    x = normal(1, 24, WIDTH)
    assert_same(join(module(*projected(theirs, x), Context())), theirs(x))


def test_masked_tokens_are_left_out_alike() -> None:
    """One of each segment, so that segments by place are segments by rank."""
    module, theirs = pair()
    x = normal(1, 24, WIDTH)
    real = torch.ones(1, 24, dtype=torch.bool)
    real[0, [0, 8, 17, 23]] = False
    got = join(module(*projected(theirs, x), Context(key_padding=real)))
    # It adds 1e-8 to the number of tokens of a segment.
    assert_same(got[real], theirs(x, mask=real)[real], atol=1e-7)


def test_a_batch_mate_changes_its_result() -> None:
    module, theirs = pair(heads=2)
    x, mate = normal(1, 24, 2 * WIDTH), 5 * normal(1, 24, 2 * WIDTH)
    both = torch.cat([x, mate])
    assert distance(theirs(both)[:1], theirs(x)) > 0.01
    together = module(*projected(theirs, both), Context())[:1]
    assert_same(together, module(*projected(theirs, x), Context()))


def test_it_attends_to_the_zeros_that_it_pads_with() -> None:
    """Without a mask, where the length is no multiple of the landmarks."""
    module, theirs = pair()
    x = normal(1, 22, WIDTH)
    zeros_too = module(*projected(theirs, F.pad(x, (0, 0, 2, 0))), Context())
    assert_same(theirs(x), join(zeros_too)[:, 2:])
    assert distance(theirs(x), join(module(*projected(theirs, x), Context()))) > 0.01


def test_the_amount_of_padding_changes_its_result() -> None:
    """A landmark of padding alone still has a row in the matrix that it inverts."""
    module, theirs = pair()
    x = normal(1, 24, WIDTH)
    real = (torch.arange(32) >= 8)[None]
    padded = F.pad(x, (0, 0, 8, 0))
    alone = join(module(*projected(theirs, x), Context()))
    got = join(module(*projected(theirs, padded), Context(key_padding=real)))
    assert_same(got[:, 8:], alone)
    assert distance(theirs(padded, mask=real)[:, 8:], theirs(x)) > 0.01
