"""Uniform attention is softmax attention that cannot tell one key from another."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from zoo_attention.uniform import UNIFORM
from zoo_core import Context, Site
from zoo_core.nn import softmax

PADDING = torch.ones(2, 9, dtype=torch.bool)
PADDING[0, :3] = PADDING[1, 4:6] = False


@pytest.fixture
def attention() -> torch.nn.Module:
    return UNIFORM.factory(Site(heads=2, head_dim=4, dim=8), UNIFORM.options())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("queries", "ctx"),
    [
        (9, Context()),
        (3, Context(key_padding=PADDING)),
        (9, Context(causal=True)),
        (9, Context(causal=True, key_padding=PADDING)),
        (2, Context(causal=True, query_offset=7, key_padding=PADDING)),
        (2, Context(causal=True, query_offset=3)),
        (12, Context(causal=True)),
    ],
    ids=["full", "cross, padded", "causal", "causal, padded", "cache", "early queries", "few keys"],
)
def test_equals_softmax_of_queries_that_are_zero(attention, queries: int, ctx: Context) -> None:
    q, k, v = normal(2, 2, queries, 4), normal(2, 2, 9, 4, seed=1), normal(2, 2, 9, 5, seed=2)
    wanted = softmax.attend(torch.zeros_like(q), k, v, ctx, scale=1.0)
    assert_close(attention(q, k, v, ctx), wanted, rtol=0, atol=1e-14)


def test_is_the_running_mean_when_causal(attention) -> None:
    x = normal(1, 2, 6, 4)
    out = attention(x, x, x, Context(causal=True))
    for i in range(6):
        assert_close(out[:, :, i], x[:, :, : i + 1].mean(-2), rtol=0, atol=1e-15)


def test_half_precision_values_are_summed_in_fp32(attention) -> None:
    # 40,000 twos sum to more than fp16 can hold.
    v = torch.full((1, 2, 40_000, 4), 2.0, dtype=torch.float16)
    out = attention(v[..., :1, :], v, v, Context())
    assert_close(out, torch.full_like(out, 2.0), rtol=0, atol=0)


def test_reads_neither_queries_nor_keys(attention) -> None:
    q, k = (torch.full((1, 2, 9, 4), torch.nan) for _ in range(2))
    assert attention(q, k, normal(1, 2, 9, 4), Context()).isfinite().all()
    assert attention.unused == {"query", "key"}
