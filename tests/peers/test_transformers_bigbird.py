"""BigBird of transformers: equal while it trains, from its own random blocks.

It makes the first and the last block global, ours tokens at the front: with the last block moved
there, blocks have the same neighbours but for the two, which every block sees anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
from same_weights import (
    DIM,
    HEADS,
    WIDTH,
    assert_same,
    distance,
    first,
    join,
    normal,
    ours,
    project,
)
from torch import Tensor, nn
from transformers import BigBirdConfig, BigBirdModel
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from zoo_attention.bigbird import BIGBIRD
from zoo_attention.bigbird.attention import BITS
from zoo_core import Context

BLOCK, BLOCKS = 4, 9
LENGTH = BLOCK * BLOCKS


@pytest.fixture(autouse=True)
def _state_of_numpy() -> Iterator[None]:
    """Which it seeds for everybody."""
    state = numpy.random.get_state()
    yield
    numpy.random.set_state(state)


class Theirs:
    """Its attention, with the random blocks of its last call, (H, BLOCKS - 2)."""

    def __init__(self) -> None:
        config = BigBirdConfig(
            hidden_size=DIM,
            num_attention_heads=HEADS,
            block_size=BLOCK,
            num_random_blocks=1,
            max_position_embeddings=LENGTH,
        )
        self.module = BigBirdBlockSparseAttention(config, seed=0).double().train()
        self.draw = self.module._bigbird_block_rand_mask_with_head
        self.module._bigbird_block_rand_mask_with_head = self.remember

    def remember(self, **how: object) -> list[numpy.ndarray]:
        drawn = self.draw(**how)
        self.drawn = numpy.stack(drawn)[..., 0]
        return drawn

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return project(x, self.module.query, self.module.key, self.module.value)

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        masks = BigBirdModel.create_masks_for_block_sparse_attn(real.to(x.dtype), BLOCK)
        blocked, band, rows, columns = masks
        return self.module(x, band, rows, columns, blocked, blocked)[0]


def counterpart(drawn: dict[tuple[int, int], int], held: int, hubs: int) -> nn.Module:
    """Ours, whose block b of head h sees at random drawn[h, b], among `held` blocks."""
    options = {"block": BLOCK, "window": 1, "random": 1, "global_tokens": hubs}
    module = ours(BIGBIRD, max_len=LENGTH, **options)
    module.draws.zero_()
    for (head, block), wanted in drawn.items():
        outside = [b for b in range(held) if abs(b - block) > 1]
        place = outside.index(wanted)
        module.draws[head, block, 0] = -(-(place << BITS) // len(outside))
    return module


def test_attention_is_equal() -> None:
    theirs, x = Theirs(), normal(2, LENGTH, DIM)
    wanted = theirs.attend(x, torch.ones(2, LENGTH))
    order = [0, BLOCKS - 1, *range(1, BLOCKS - 1)]
    tokens = torch.arange(LENGTH).view(BLOCKS, BLOCK)[order].flatten()
    drawn = {
        (head, order.index(block)): order.index(theirs.drawn[head, block - 1])
        for head in range(HEADS)
        for block in range(1, BLOCKS - 1)
    }
    assert len(set(drawn.values())) > 2
    module = counterpart(drawn, held=BLOCKS, hubs=2 * BLOCK)
    got = join(module(*(y[:, :, tokens] for y in theirs.projected(x)), Context()))
    assert_same(got, wanted[:, tokens])


def test_padding_is_left_out_alike() -> None:
    """With a last block of padding alone, so that only the first block is global."""
    theirs, x = Theirs(), normal(1, LENGTH, DIM)
    real = first(LENGTH - BLOCK, LENGTH)
    wanted = theirs.attend(x, real)[real]
    drawn = {
        (head, block): int(theirs.drawn[head, block - 1])
        for head in range(HEADS)
        for block in range(1, BLOCKS - 1)
    }
    module = counterpart(drawn, held=BLOCKS - 1, hubs=BLOCK)
    got = join(module(*theirs.projected(x), Context(key_padding=real)))
    assert_same(got[real], wanted)


def test_in_eval_it_has_no_random_blocks_but_counts_the_first_block_again() -> None:
    """Its random blocks are then all number 0, which is global and so seen already."""
    theirs, x = Theirs(), normal(1, LENGTH, DIM)
    real = torch.ones(1, LENGTH)
    trained = theirs.attend(x, real)
    theirs.module.eval()
    got = theirs.attend(x, real)
    assert (theirs.drawn == 0).all()
    assert distance(got, trained) > 0.01

    block = torch.arange(LENGTH) // BLOCK
    back = block[:, None] - block
    is_global = (block == 0) | (block == BLOCKS - 1)
    times = (is_global[:, None] | is_global | (back.abs() <= 1)).double()
    times[~is_global, :BLOCK] += 1
    q, k, v = theirs.projected(x)
    weights = times * (q @ k.mT * WIDTH**-0.5).exp()
    assert_same(join(weights / weights.sum(-1, keepdim=True) @ v), got)
