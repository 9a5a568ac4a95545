"""linear-attention-transformer: another feature map, which its inputs can make equal to ours.

Its features are exponentials. Of log(elu(x) + 1) those are elu(x) + 1, and what it computes is
linear attention. That is exactly so for its causal form. Its other form normalises each feature
over the tokens instead of each query over the keys: queries multiplied by the features' sums undo
that, up to a factor of sqrt(D) which it divides by.
"""

from __future__ import annotations

import pytest
import torch
from same_weights import HEADS, WIDTH, assert_same, first, normal, ours
from torch import Tensor
from torch.nn import functional as F

from zoo_attention.linear import LINEAR
from zoo_core import Context

peer = pytest.importorskip("linear_attention_transformer.linear_attention_transformer")


def log_features(x: Tensor) -> Tensor:
    return (F.elu(x) + 1).log()


def inputs(length: int = 24) -> tuple[Tensor, ...]:
    return normal(3, 2, HEADS, length, WIDTH).unbind()


def both_ways(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Its form for encoders, on queries that turn its normalisation into that of a query."""
    q, k, v = log_features(q), log_features(k), v.clone()
    counted = k if mask is None else k.masked_fill(~mask[:, None, :, None], -torch.inf)
    sums = counted.logsumexp(-2, keepdim=True)
    return peer.linear_attn(q + sums, k, v, mask) * WIDTH**0.5


def test_attention_is_equal() -> None:
    q, k, v = inputs()
    assert_same(both_ways(q, k, v), ours(LINEAR)(q, k, v, Context()))


def test_padding_is_left_out_alike() -> None:
    q, k, v = inputs()
    real = first(15, 24).expand(2, -1)
    got = ours(LINEAR)(q, k, v, Context(key_padding=real))
    assert_same(got, both_ways(q, k, v, real))


@pytest.mark.parametrize("real", [24, 15], ids=lambda n: f"{n}-real")
def test_causal_attention_is_equal(real: int) -> None:
    q, k, v = inputs()
    mask = first(real, 24).expand(2, -1)
    got = ours(LINEAR)(q, k, v, Context(key_padding=mask, causal=True))
    theirs = peer.causal_linear_attn(
        log_features(q), log_features(k), v.clone(), mask, bucket_size=1, eps=0
    )
    assert_same(got[:, :, :real], theirs[:, :, :real])


def test_its_weights_do_not_sum_to_one() -> None:
    """Values of one come back as 1 / sqrt(D)."""
    q, k, v = inputs()
    assert_same(peer.linear_attn(q, k, torch.ones_like(v)), torch.full_like(v, WIDTH**-0.5))
    assert_same(ours(LINEAR)(q, k, torch.ones_like(v), Context()), torch.ones_like(v))


def test_its_causal_buckets_hide_the_query_itself() -> None:
    """By default 64 tokens: a query sees the buckets before its own, and in the first nothing."""
    q, k, v = inputs()
    out = peer.causal_linear_attn(q, k, v, bucket_size=8, eps=1e-9)
    assert torch.equal(out[:, :, :8], torch.zeros_like(out[:, :, :8]))
    k[:, :, 8:16], v[:, :, 8:16] = 0, 0
    again = peer.causal_linear_attn(q, k, v, bucket_size=8, eps=1e-9)
    assert_same(again[:, :, 8:16], out[:, :, 8:16])
