"""isab-pytorch: equal where its second step projects as ours has no need to.

It projects twice, ours once. Keys and values of its first step alike, its second step's keys not
projected, and its values by a matrix for each head: then what it gathers is what ours does.
"""

from __future__ import annotations

import pytest
import torch
from same_weights import HEADS, assert_same, first, join, normal, ours, split
from torch import Tensor, nn

from zoo_attention.induced import INDUCED
from zoo_core import Context

peer = pytest.importorskip("isab_pytorch")

WIDTH, POINTS = 64, 5  # it has no other width of heads
DIM = HEADS * WIDTH


def pair() -> tuple[nn.Module, nn.Module, Tensor]:
    """Ours and theirs, with one set of points, and the matrix (H, D, D) from keys to values."""
    theirs = peer.ISAB(dim=DIM, heads=HEADS, num_latents=POINTS).double().eval()
    keys, values = theirs.attn1.to_kv.weight.chunk(2)
    values.copy_(keys)
    to_values = normal(HEADS, WIDTH, WIDTH) / WIDTH**0.5
    theirs.attn2.to_kv.weight.copy_(
        torch.cat([torch.eye(DIM, dtype=torch.float64), torch.block_diag(*to_values.mT)])
    )
    theirs.attn1.to_out = theirs.attn2.to_out = nn.Identity()
    module = ours(INDUCED, width=WIDTH, points=POINTS)
    module.points.copy_(split(theirs.attn1.to_q(theirs.latents)[None])[0])
    return module, theirs, to_values


@pytest.mark.parametrize("real", [20, 13], ids=lambda n: f"{n}-real")
def test_attention_is_equal(real: int) -> None:
    module, theirs, to_values = pair()
    x, mask = normal(1, 20, DIM), first(real, 20)
    k = split(theirs.attn1.to_kv(x).chunk(2, -1)[0])
    q = split(theirs.attn2.to_q(x))
    got = module(q, k, k @ to_values, Context(key_padding=mask))
    wanted, _ = theirs(x, mask=mask)
    assert_same(join(got), wanted)
