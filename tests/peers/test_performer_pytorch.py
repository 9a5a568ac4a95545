"""performer-pytorch: the same function of the same directions, once its epsilon is set to zero.

It adds 1e-4 to every feature after the exponential; ours adds nothing. The ReLU features of both
have an offset of 1e-3.
"""

from __future__ import annotations

from functools import partial

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

from zoo_attention.performer import PERFORMER
from zoo_core import Context

peer = pytest.importorskip("performer_pytorch.performer_pytorch")

FEATURES = 32
KINDS = pytest.mark.parametrize("kind", ["positive", "relu"])


@pytest.fixture
def no_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "softmax_kernel", partial(peer.softmax_kernel, eps=0))


def pair(kind: str = "positive", *, causal: bool = False) -> tuple[nn.Module, nn.Module]:
    """Ours and theirs, with one set of directions."""
    module = ours(PERFORMER, features=FEATURES, kind=kind)
    options = {"causal": causal, "generalized_attention": kind == "relu"}
    theirs = peer.FastAttention(WIDTH, FEATURES, **options).double()
    theirs.projection_matrix.copy_(module.directions)
    return module, theirs


def inputs(length: int = 20) -> tuple[Tensor, ...]:
    return normal(3, 2, HEADS, length, WIDTH).unbind()


@KINDS
@pytest.mark.usefixtures("no_epsilon")
def test_attention_is_equal(kind: str) -> None:
    module, theirs = pair(kind)
    q, k, v = inputs()
    assert_same(theirs(q, k, v), module(q, k, v, Context()))


@KINDS
@pytest.mark.usefixtures("no_epsilon")
def test_causal_attention_is_equal(kind: str) -> None:
    """Its causal normaliser has another epsilon, 1e-6, which is set to zero as well."""
    module, theirs = pair(kind, causal=True)
    theirs.causal_linear_fn = partial(peer.causal_linear_attention_noncuda, eps=0)
    q, k, v = inputs(200)
    assert_same(theirs(q, k, v), module(q, k, v, Context(causal=True)), atol=1e-9)


def test_its_epsilon_pulls_large_keys_towards_the_mean_value() -> None:
    module, theirs = pair()
    q, k, v = inputs()
    k = 4 * k
    mean = v.mean(-2, keepdim=True).expand_as(v)
    assert (theirs(q, k, v) - mean).norm() < (module(q, k, v, Context()) - mean).norm() / 2


def test_its_causal_form_leaks_the_future() -> None:
    """Through the maximum over all keys and the epsilon after it."""
    module, theirs = pair(causal=True)
    q, k, v = inputs()
    later = k.clone()
    later[:, :, -1] *= 5
    causal = Context(causal=True)
    before, after = theirs(q, k, v), theirs(q, later, v)
    assert distance(before[:, :, :-1], after[:, :, :-1]) > 0.01
    assert_same(module(q, k, v, causal)[:, :, :-1], module(q, later, v, causal)[:, :, :-1])


def test_padding_stays_in_its_normaliser() -> None:
    """It zeroes the values of padding and keeps the weights, so that outputs shrink."""
    module, fast = pair("relu")
    attention = peer.SelfAttention(
        DIM, heads=HEADS, dim_head=WIDTH, nb_features=FEATURES, generalized_attention=True
    )
    attention = attention.double().eval()
    attention.fast_attention, attention.to_out = fast, nn.Identity()
    x, real = normal(1, 20, DIM), first(8, 20)
    q, k, v = project(x, attention.to_q, attention.to_k, attention.to_v)

    alone = attention(x[:, :8])
    assert_same(join(module(q, k, v, Context(key_padding=real)))[:, :8], alone)
    padded = attention(x, mask=real)[:, :8]
    zeroed = v * real[:, None, :, None]
    assert_same(padded, join(module(q, k, zeroed, Context()))[:, :8])
    assert torch.linalg.norm(padded) < torch.linalg.norm(alone) * 0.7
