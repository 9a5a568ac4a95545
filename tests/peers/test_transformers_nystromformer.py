"""Nyströmformer of transformers: equal for one sample and head, of the one length it is made for.

Its inverse starts from the largest norm of the batch; tests/plugins/test_nystromformer.py shows
what that does to several samples. It runs six iterations.
"""

from __future__ import annotations

import pytest
import torch
from same_weights import WIDTH, assert_same, first, join, normal, ours, project
from torch import Tensor, nn
from transformers import NystromformerConfig, NystromformerModel
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from zoo_attention.nystromformer import NYSTROMFORMER
from zoo_core import Context

LENGTH, LANDMARKS, CONV = 16, 4, 5


def config(heads: int = 1, **changes: object) -> NystromformerConfig:
    options = {
        "vocab_size": 80,
        "hidden_size": heads * WIDTH,
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "intermediate_size": WIDTH,
        "attention_probs_dropout_prob": 0.0,
        "num_landmarks": LANDMARKS,
        "segment_means_seq_len": LENGTH,
        "conv_kernel_size": CONV,
    }
    return NystromformerConfig(**{**options, **changes})


def projected(theirs: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return project(x, theirs.query, theirs.key, theirs.value, heads=1)


def counterpart(theirs: nn.Module, **options: object) -> nn.Module:
    module = ours(NYSTROMFORMER, heads=1, conv=theirs.conv_kernel_size, **options)
    module.conv.copy_(theirs.conv.weight[:, 0, :, 0])
    return module


def test_attention_is_equal() -> None:
    theirs, x = NystromformerSelfAttention(config()).double().eval(), normal(1, LENGTH, WIDTH)
    module = counterpart(theirs, landmarks=LANDMARKS)
    assert_same(join(module(*projected(theirs, x), Context())), theirs(x)[0])


def test_its_default_is_plain_softmax() -> None:
    """With as many landmarks as tokens, 64, it takes an exact branch, at any length."""
    default = NystromformerConfig()
    assert default.num_landmarks == default.segment_means_seq_len == 64
    theirs = NystromformerSelfAttention(config(num_landmarks=64, segment_means_seq_len=64))
    theirs = theirs.double().eval()
    x = normal(1, 100, WIDTH)
    q, k, v = projected(theirs, x)
    wanted = (q @ k.mT * WIDTH**-0.5).softmax(-1) @ v + theirs.conv(v)
    assert_same(theirs(x)[0], join(wanted))


def test_padding_is_an_error() -> None:
    model = NystromformerModel(config()).eval()
    tokens = torch.arange(LENGTH)[None]
    assert model(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state.isfinite().all()
    with pytest.raises(RuntimeError, match="must match"):
        model(tokens, attention_mask=first(11, LENGTH).long())


def test_another_length_is_an_error_or_makes_samples_up() -> None:
    """Of four times the length, one sample becomes four."""
    theirs = NystromformerSelfAttention(config()).double().eval()
    with pytest.raises(RuntimeError):
        theirs(normal(1, LENGTH + 1, WIDTH))
    assert theirs(normal(1, 4 * LENGTH, WIDTH))[0].shape == (4, 4 * LENGTH, WIDTH)
    for length in (LENGTH + 1, 4 * LENGTH):
        q, k, v = normal(3, 1, 1, length, WIDTH).unbind()
        module = ours(NYSTROMFORMER, heads=1, landmarks=LANDMARKS)
        assert module(q, k, v, Context()).shape == v.shape


def test_its_option_for_the_start_cannot_be_set() -> None:
    with pytest.raises(TypeError, match="not subscriptable"):
        NystromformerSelfAttention(config(inv_coeff_init_option=True))
