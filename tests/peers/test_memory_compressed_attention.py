"""memory-compressed-attention: equal without padding, at its scale and with its null key.

It scales by the width of the model, not of a head; its convolution has a bias, here zero; it needs
a length that is a multiple of the factor, else it adds zeros at the front. Causal, it never shows
a token its own block, ours does so uncompressed: only at a factor of 1 that is the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from same_weights import DIM, HEADS, WIDTH, assert_same, distance, join, normal, ours, split
from torch import Tensor, nn

from zoo_attention.memory_compressed import MEMORY_COMPRESSED
from zoo_core import Context

peer = pytest.importorskip("memory_compressed_attention")


def build(factor: int, *, causal: bool = False) -> nn.Module:
    theirs = peer.MemoryCompressedAttention(
        DIM, heads=HEADS, compression_factor=factor, causal=causal
    )
    theirs = theirs.double().eval()
    theirs.to_out = nn.Identity()
    theirs.compress_fn.conv.bias.zero_()
    return theirs


def counterpart(theirs: nn.Module) -> nn.Module:
    """Ours, whose convolution is told apart from the mean."""
    factor = theirs.compression_factor
    module = ours(MEMORY_COMPRESSED, scale=DIM**-0.5, factor=factor, null_key=True)
    weight = theirs.compress_fn.conv.weight.view(HEADS, WIDTH, WIDTH, factor)
    mix = factor * weight.permute(0, 3, 2, 1) - torch.eye(WIDTH, dtype=weight.dtype)
    module.mix_keys.copy_(mix)
    module.mix_values.copy_(mix)
    return module


def projected(theirs: nn.Module, x: Tensor) -> Iterator[Tensor]:
    return (split(y) for y in theirs.to_qkv(x).chunk(3, -1))


@pytest.mark.parametrize("factor", [1, 3], ids=lambda n: f"factor-{n}")
def test_attention_is_equal(factor: int) -> None:
    theirs, x = build(factor), normal(2, 24, DIM)
    got = counterpart(theirs)(*projected(theirs, x), Context())
    assert_same(join(got), theirs(x))


def test_causal_attention_is_equal_at_a_factor_of_one() -> None:
    theirs, x = build(1, causal=True), normal(2, 24, DIM)
    identity = torch.eye(WIDTH, dtype=torch.float64).repeat(HEADS, 1)
    theirs.compress_fn.conv.weight.copy_(identity[..., None])
    got = counterpart(theirs)(*projected(theirs, x), Context(causal=True))
    assert_same(join(got), theirs(x))


def test_its_mask_leaves_the_null_key_only() -> None:
    """A mask of ones changes everything: queries are compared with keys by <, not by and."""
    theirs, x = build(3), normal(1, 24, DIM)
    theirs.null_v.normal_()
    real = torch.ones(1, 24, dtype=torch.bool)
    masked = theirs(x, input_mask=real)
    assert_same(masked, theirs.null_v.expand_as(masked))
    assert distance(masked, theirs(x)) > 0.1
    module = counterpart(theirs)
    plain = module(*projected(theirs, x), Context())
    assert_same(module(*projected(theirs, x), Context(key_padding=real)), plain)
