from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core import Context
from zoo_core.nn import distances, parts

HEADS, KEYS, SCALE = 2, 9, 0.4
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])


def inputs(queries: int = KEYS, batch: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and terms, of which some hide their distance."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, n, 4).double() for n in (queries, KEYS, KEYS))
    terms = torch.randn(HEADS, 2 * KEYS - 1).double()
    return q, k, v, terms.masked_fill(torch.rand_like(terms) < 0.2, -torch.inf)


def by_formula(q: Tensor, k: Tensor, v: Tensor, terms: Tensor, causal: bool) -> Tensor:
    """One sample; the queries are those of the last L tokens."""
    scores, first = q @ k.mT * SCALE, k.shape[-2] - q.shape[-2]
    for i in range(q.shape[-2]):
        for j in range(k.shape[-2]):
            scores[:, i, j] += terms[:, j - (i + first) + KEYS - 1]
            if causal and j > i + first:
                scores[:, i, j] = -torch.inf
    return scores.softmax(-1).nan_to_num() @ v


@CAUSAL
@pytest.mark.parametrize("queries", [1, 4, KEYS])
def test_each_distance_has_its_term(queries: int, causal: bool) -> None:
    q, k, v, terms = inputs(queries)
    ctx = Context(causal=causal, query_offset=KEYS - queries)
    assert distances.fits(ctx, queries, KEYS)
    got = distances.attend(q, k, v, terms, ctx, scale=SCALE)
    wanted = by_formula(q[0], k[0], v[0], terms, causal)
    torch.testing.assert_close(got[0], wanted, rtol=0, atol=1e-12)


@CAUSAL
@pytest.mark.parametrize("scores_at_once", [1, 40, 10_000])
def test_distance_counts_real_tokens(monkeypatch, scores_at_once: int, causal: bool) -> None:
    """Pads on the left and inside, holding NaN, in parts and at once."""
    monkeypatch.setattr(parts, "SCORES", scores_at_once)
    q, k, v, terms = inputs(batch=3)
    real = torch.ones(3, KEYS, dtype=torch.bool)
    real[0, :4] = real[1, 2::3] = real[2] = False
    k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (k, v))
    with torch.no_grad():
        got = distances.attend(
            q, k, v, terms, Context(key_padding=real, causal=causal), scale=SCALE
        )
    for sample, mask in enumerate(real[:2]):
        wanted = by_formula(*(x[sample][:, mask] for x in (q, k, v)), terms, causal)
        torch.testing.assert_close(got[sample][:, mask], wanted, rtol=0, atol=1e-12)
    assert not got[2].any()


def test_gradients_reach_tokens_and_terms() -> None:
    q, k, v, terms = (x.nan_to_num(neginf=-1.0).requires_grad_() for x in inputs(4))
    ctx = Context(causal=True, query_offset=KEYS - 4)
    got = distances.attend(q, k, v, terms, ctx, scale=SCALE)
    wanted = by_formula(q[0], k[0], v[0], terms, causal=True)
    pairs = zip(
        *(torch.autograd.grad(x.square().sum(), (q, k, v, terms)) for x in (got, wanted)),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gradients_of_tokens_alone_take_the_fused_kernel_to_the_same() -> None:
    q, k, v, terms = inputs()
    tokens = [x.requires_grad_() for x in (q, k, v)]
    got = distances.attend(*tokens, terms, Context(), scale=SCALE)
    wanted = by_formula(*(x[0] for x in tokens), terms, causal=False)
    for ours, theirs in zip(
        *(torch.autograd.grad(x.square().sum(), tokens) for x in (got, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("ctx", "queries"),
    [
        (Context(bias=torch.zeros(1, 1, KEYS, KEYS)), KEYS),
        (Context(key_padding=torch.ones(1, KEYS, dtype=torch.bool)), 3),
        (Context(causal=True, query_offset=1), 3),
    ],
    ids=["bias", "padding-and-a-cache", "another-offset"],
)
def test_what_a_view_cannot_show_is_left_to_others(ctx: Context, queries: int) -> None:
    assert not distances.fits(ctx, queries, KEYS)
