"""YOSO of transformers: equal by expectation, given the mask that its attention understands.

It adds no convolution here, and scales outputs to length one, as normalise="l2" of ours. Its
sampled form needs a CUDA kernel: its hash codes are compared, and ours with its expectation, whose
gradient is the paper's lower bound. That of our expectation is the true derivative.
"""

from __future__ import annotations

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
from torch.nn import functional as F
from transformers import YosoConfig, YosoModel
from transformers.models.yoso.modeling_yoso import YosoCumulation, YosoSelfAttention, hashing

from zoo_attention.yoso import YOSO
from zoo_core import Context
from zoo_core.nn.collisions import sampled, sign_codes

BITS, LENGTH = 9, 20


def config(**changes: object) -> YosoConfig:
    return YosoConfig(
        vocab_size=40,
        hidden_size=DIM,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=DIM,
        max_position_embeddings=LENGTH,
        hash_code_len=BITS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **changes,
    )


def projected(theirs: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return project(x, theirs.query, theirs.key, theirs.value)


@pytest.mark.parametrize("real", [LENGTH, 13], ids=lambda n: f"{n}-real")
def test_the_expectation_is_equal(real: int) -> None:
    theirs, x = YosoSelfAttention(config()).double().eval(), normal(1, LENGTH, DIM)
    mask = first(real, LENGTH)
    module = ours(YOSO, bits=BITS, normalise="l2")
    got = join(module(*projected(theirs, x), Context(key_padding=mask)))
    (wanted,) = theirs(x, -10000.0 * ~mask)
    assert_same(got[:, :real], wanted[:, :real])


def test_the_sampled_form_and_its_derivative_approach_its_own() -> None:
    """Which is the paper's, a lower bound; the error falls as 1/sqrt(hashes)."""
    given = [normal(1, 12, WIDTH) for _ in range(3)]
    grad, mask = normal(1, 12, WIDTH), torch.ones(1, 12, dtype=torch.float64)
    bits, planes = 4, normal(1, 2048, WIDTH, 4)
    sides = []
    for approximates in (False, True):
        with torch.enable_grad():
            q, k, v = leaves = [x.clone().requires_grad_() for x in given]
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            if approximates:
                codes = [sign_codes(x.detach()[None], planes) for x in (q, k)]
                out = sampled(q[None], k[None], v[None], *codes, bits=bits)[0]
            else:
                out = YosoCumulation.apply(mask, mask, q, k, v, {"hash_code_len": bits})
        sides.append((out, *torch.autograd.grad(out, leaves, grad)))
    for got, wanted in zip(*reversed(sides), strict=True):
        assert (got - wanted).norm() < 0.15 * wanted.norm()


def test_hash_codes_are_equal() -> None:
    """Of keys, since it returns these twice and the queries' codes never."""
    q, k = normal(2, 1, LENGTH, WIDTH).float().unbind()
    torch.manual_seed(1)
    query_codes, key_codes = hashing(q, k, 6, BITS)
    torch.manual_seed(1)
    planes = torch.randn(WIDTH, 6 * BITS).view(1, WIDTH, 6, BITS).transpose(1, 2)
    wanted_query, wanted_key = (sign_codes(x[None], planes)[0].mT for x in (q, k))
    assert torch.equal(key_codes, wanted_key.int())
    assert torch.equal(query_codes, key_codes)
    assert not torch.equal(wanted_query, wanted_key)


def test_its_model_ignores_padding() -> None:
    """It passes on a mask of ones and zeros, both of which its attention reads as 1."""
    model = YosoModel(config()).double().eval()
    tokens = torch.arange(1, LENGTH + 1)[None]
    mask = first(13, LENGTH)
    other = tokens.where(mask, 39)
    got = model(tokens, attention_mask=mask.long()).last_hidden_state
    assert torch.equal(got, model(tokens).last_hidden_state)
    changed = model(other, attention_mask=mask.long()).last_hidden_state
    assert distance(got[:, :13], changed[:, :13]) > 1e-4

    theirs, x = model.encoder.layer[0].attention.self, model.embeddings(tokens)
    y = model.embeddings(other)
    module, ctx = ours(YOSO, bits=BITS), Context(key_padding=mask)
    one, two = (join(module(*projected(theirs, z), ctx))[:, :13] for z in (x, y))
    assert_same(one, two, atol=0)


def test_its_convolution_takes_the_mask_the_other_way_round() -> None:
    theirs, x = YosoSelfAttention(config(conv_window=3)).double().eval(), normal(1, LENGTH, DIM)
    real = torch.zeros(1, LENGTH, dtype=torch.float64)  # nothing is masked
    (got,) = theirs(x, real)
    theirs.use_conv = False
    assert torch.equal(got, theirs(x, real)[0])


def test_a_cosine_rounded_beyond_one_gives_nan() -> None:
    """Of a query that equals a key, in float32."""
    unit = F.normalize(normal(1, 1000, 32).float(), dim=-1)
    mask = torch.ones(1, 1000)
    settings = {"hash_code_len": BITS}
    wanted = YosoCumulation.apply(mask, mask, unit, unit, unit, settings)
    assert wanted.isnan().any()
    module = ours(YOSO, heads=1, width=32, bits=BITS).float()
    assert module(unit[None], unit[None], unit[None], Context()).isfinite().all()
