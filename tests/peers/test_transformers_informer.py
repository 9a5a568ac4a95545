"""Informer of transformers: equal where there is no doubt which queries stand out.

Both compare queries on a sample of the keys, of which it draws as many as there are keys, anew in
every call, ours fewer and always the same. All queries but as many as attend are next to zero
here, so that every sample finds the same ones.
"""

from __future__ import annotations

import pytest
import torch
from same_weights import DIM, HEADS, assert_same, distance, first, join, normal, ours, project
from torch import Tensor, nn
from transformers.models.informer.modeling_informer import InformerProbSparseAttention

from zoo_attention.informer import INFORMER
from zoo_core import Context

FACTOR, LENGTH = 2, 24
ACTIVE = 8  # FACTOR * ceil(ln LENGTH), which ceil(ln(1 + LENGTH)) equals


def build() -> nn.Module:
    theirs = InformerProbSparseAttention(DIM, HEADS, sampling_factor=FACTOR, bias=False)
    theirs.out_proj = nn.Identity()
    return theirs.double().eval()


def few_that_stand_out(batch: int) -> Tensor:
    """Tokens (batch, LENGTH, DIM) of which ACTIVE, others in each sample, are not next to zero."""
    standing_out = torch.rand(batch, LENGTH).argsort(-1) < ACTIVE
    x = normal(batch, LENGTH, DIM)
    return torch.where(standing_out[..., None], 3 * x, 1e-3 * x)


def projected(theirs: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return project(x, theirs.q_proj, theirs.k_proj, theirs.v_proj)


def test_attention_is_equal() -> None:
    theirs, x = build(), few_that_stand_out(3)
    got = join(ours(INFORMER, factor=FACTOR)(*projected(theirs, x), Context()))
    assert_same(got, theirs(x)[0])
    mean = theirs.v_proj(x).mean(1, keepdim=True)
    assert ((got - mean).abs() > 1e-9).any(-1).sum() == 3 * ACTIVE


def test_a_factor_that_covers_all_queries_is_equal() -> None:
    theirs, x = build(), normal(2, LENGTH, DIM)
    theirs.factor = LENGTH
    got = join(ours(INFORMER, factor=LENGTH)(*projected(theirs, x), Context()))
    assert_same(got, theirs(x)[0])


def test_padding_is_in_its_mean_and_among_its_active_queries() -> None:
    """Its mask hides padding from the queries that attend only."""
    theirs, x = build(), few_that_stand_out(1)
    real = first(16, LENGTH)
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=x.dtype)
    mask = mask.masked_fill(~real[:, None, None], torch.finfo(x.dtype).min)
    other = torch.where(real[..., None], x, 5 * normal(1, LENGTH, DIM))
    one, two = (theirs(y, attention_mask=mask)[0][real] for y in (x, other))
    assert distance(one, two) > 0.1
    module, ctx = ours(INFORMER, factor=FACTOR), Context(key_padding=real)
    one, two = (join(module(*projected(theirs, y), ctx))[real] for y in (x, other))
    assert_same(one, two, atol=0)


@pytest.mark.parametrize("length", [24, 100, 512])
def test_it_samples_every_key(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper, like ours, samples as many as queries attend: about ln(length)."""
    shapes = []
    draw = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *a, **kw: shapes.append(a[2]) or draw(*a, **kw))
    build()(normal(1, length, DIM))
    assert shapes == [(length,)]
