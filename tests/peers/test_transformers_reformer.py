"""Reformer of transformers: equal in one round for all queries beyond the first chunk.

Its first chunk sees the last one, ours the second. In several rounds it counts a key once for each
round in which it is seen, ours once. It adds 1e-6 to the squared length of keys, here zero.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from chunks import beyond_first, by_formula, meetings
from same_weights import DIM, HEADS, WIDTH, assert_same, first, join, normal, ours, project, split
from torch import Tensor, nn
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from zoo_attention.reformer import REFORMER
from zoo_core import Context

LENGTH, CHUNK, BUCKETS, SEED = 64, 8, 6, 3


def pair(rounds: int) -> tuple[nn.Module, nn.Module]:
    """Ours and theirs, with the rotations that theirs draws from its seed in every call."""
    config = ReformerConfig(
        attention_head_size=WIDTH,
        num_attention_heads=HEADS,
        hidden_size=DIM,
        num_hashes=rounds,
        num_buckets=BUCKETS,
        lsh_attn_chunk_length=CHUNK,
        lsh_attention_probs_dropout_prob=0.0,
        hash_seed=SEED,
    )
    theirs = LSHSelfAttention(config, layer_idx=0).double().eval()
    theirs._len_norm = partial(theirs._len_norm, epsilon=0)
    module = ours(REFORMER, rounds=rounds, buckets=BUCKETS, chunk=CHUNK)
    torch.manual_seed(SEED)
    drawn = torch.randn(HEADS, WIDTH, rounds, BUCKETS // 2, dtype=torch.float64)
    module.rotations.copy_(drawn.transpose(1, 2))
    torch.manual_seed(0)
    return module, theirs


def projected(theirs: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return project(x, theirs.query_key, theirs.value)


@pytest.mark.parametrize("real", [LENGTH, 48], ids=lambda n: f"{n}-real")
def test_attention_is_equal(real: int) -> None:
    """Padding has buckets of its own in both, behind those of the tokens."""
    module, theirs = pair(rounds=1)
    x, mask = normal(2, LENGTH, DIM), first(real, LENGTH).expand(2, -1)
    q, v = projected(theirs, x)
    out = theirs(x, attention_mask=mask)
    compared = beyond_first(out.buckets, CHUNK) & mask[:, None]
    assert compared.sum() == 2 * HEADS * (real - CHUNK)
    got = module(q, q, v, Context(key_padding=mask))
    assert_same(got[compared], split(out.hidden_states)[compared])


@pytest.mark.parametrize("real", [CHUNK, 5], ids=lambda n: f"{n}-real")
def test_full_attention_is_equal(real: int) -> None:
    """Up to one chunk; each token sees all but itself."""
    module, theirs = pair(rounds=1)
    x, mask = normal(1, CHUNK, DIM), first(real, CHUNK)
    q, v = projected(theirs, x)
    got = join(module(q, q, v, Context(key_padding=mask)))
    wanted = theirs(x, attention_mask=mask).hidden_states
    assert_same(got[:, :real], wanted[:, :real])


def test_a_key_counts_once_for_every_round() -> None:
    module, theirs = pair(rounds=3)
    x = normal(1, LENGTH, DIM)
    q, v = projected(theirs, x)
    out = theirs(x)
    compared, times = beyond_first(out.buckets, CHUNK), meetings(out.buckets, CHUNK)
    assert times.max() == 3
    assert_same(by_formula(q, v, times)[compared], split(out.hidden_states)[compared])
    got = module(q, q, v, Context())
    assert_same(by_formula(q, v, times.clamp(max=1))[compared], got[compared])
