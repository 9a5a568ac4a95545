"""reformer-pytorch: equal for all queries beyond the first chunk, from the same rotations.

Its first chunk sees the last one, ours the second. It divides scores by sqrt(D) though its keys
have length one; queries as many times longer make up for that, and hash alike. Ours counts a key
once, as it does with allow_duplicate_attention=False, which is not its default.
"""

from __future__ import annotations

import pytest
import torch
from chunks import beyond_first, by_formula, meetings
from same_weights import HEADS, WIDTH, assert_same, distance, first, normal, ours
from torch import Tensor, nn

from zoo_attention.reformer import REFORMER
from zoo_core import Context

peer = pytest.importorskip("reformer_pytorch.reformer_pytorch")

LENGTH, CHUNK = 64, 8
BUCKETS = LENGTH // CHUNK


def build(rounds: int) -> nn.Module:
    """Ours, with the rotations that theirs draws from seed 0."""
    module = ours(REFORMER, rounds=rounds, buckets=BUCKETS, chunk=CHUNK)
    torch.manual_seed(0)
    drawn = torch.randn(HEADS, WIDTH, rounds, BUCKETS // 2, dtype=torch.float64)
    module.rotations.copy_(drawn.transpose(1, 2))
    return module


def attend(
    q: Tensor, v: Tensor, rounds: int, *, duplicates: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Theirs for one sample (1, H, N, D), heads in place of samples; and the buckets (H, R, N)."""
    theirs = peer.LSHAttention(
        bucket_size=CHUNK,
        n_hashes=rounds,
        allow_duplicate_attention=duplicates,
        random_rotations_per_head=True,
    )
    if mask is not None:
        mask = mask.expand(HEADS, -1)
    torch.manual_seed(0)
    out, _, buckets = theirs.eval()(q[0] * WIDTH**0.5, v[0], input_mask=mask)
    return out[None], buckets.view(HEADS, rounds, LENGTH)


@pytest.mark.parametrize("rounds", [1, 2, 3], ids=lambda n: f"{n}-rounds")
def test_attention_is_equal(rounds: int) -> None:
    q, v = normal(2, 1, HEADS, LENGTH, WIDTH).unbind()
    wanted, buckets = attend(q, v, rounds)
    got = build(rounds)(q, q, v, Context())
    compared = beyond_first(buckets, CHUNK)[None]
    assert compared.float().mean() > 0.5
    # It adds 1e-9 to the number of rounds in which two tokens meet.
    assert_same(got[compared], wanted[compared], atol=1e-7)


def test_by_default_a_key_counts_once_for_every_round() -> None:
    q, v = normal(2, 1, HEADS, LENGTH, WIDTH).unbind()
    wanted, buckets = attend(q, v, 2, duplicates=True)
    compared, times = beyond_first(buckets, CHUNK)[None], meetings(buckets, CHUNK)
    assert times.max() == 2
    assert_same(by_formula(q, v, times)[compared], wanted[compared])
    got = build(2)(q, q, v, Context())
    assert_same(by_formula(q, v, times.clamp(max=1))[compared], got[compared])


@pytest.mark.parametrize("real", [16, 11], ids=lambda n: f"{n}-real")
def test_full_attention_is_equal(real: int) -> None:
    """Up to two chunks; each token sees all but itself."""
    q, v = normal(2, 1, HEADS, 16, WIDTH).unbind()
    mask = first(real, 16)
    theirs = peer.FullQKAttention().eval()
    wanted, *_ = theirs(q[0] * WIDTH**0.5, v[0], input_mask=mask.expand(HEADS, -1))
    got = build(1)(q, q, v, Context(key_padding=mask))
    assert_same(got[0, :, :real], wanted[:, :real])


def test_padding_takes_up_room_in_its_chunks() -> None:
    """It masks the keys, but what they hold moves the borders of chunks."""
    q, v = normal(2, 1, HEADS, LENGTH, WIDTH).unbind()
    mask = first(40, LENGTH)
    other = torch.where(mask[:, None, :, None], q, normal(*q.shape))
    one, _ = attend(q, v, 1, mask=mask)
    two, _ = attend(other, v, 1, mask=mask)
    assert distance(one[:, :, :40], two[:, :, :40]) > 0.01
    module, ctx = build(1), Context(key_padding=mask)
    assert_same(module(q, q, v, ctx)[:, :, :40], module(other, other, v, ctx)[:, :, :40], atol=0)
