"""Longformer of transformers: equal where its global projections are copies of the local ones.

The paper starts them so; ours has the host's projections only. Its window counts both sides, and
its softmax is in float32, hence the tolerance.
"""

from __future__ import annotations

import pytest
import torch
from same_weights import DIM, HEADS, assert_same, first, join, normal, ours, project
from torch import Tensor, nn
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from zoo_attention.local import LOCAL
from zoo_core import Context

REACH, LENGTH = 4, 96


def build() -> nn.Module:
    config = LongformerConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        attention_window=[2 * REACH],
        attention_probs_dropout_prob=0.0,
    )
    theirs = LongformerSelfAttention(config, layer_id=0).double().eval()
    for name in ("query", "key", "value"):
        theirs.get_submodule(f"{name}_global").load_state_dict(
            theirs.get_submodule(name).state_dict()
        )
    return theirs


def attend(theirs: nn.Module, x: Tensor, real: Tensor, globally: Tensor) -> Tensor:
    """Its mask is 0 for tokens, -10000 for padding and 10000 for global tokens."""
    mask = torch.zeros(x.shape[:2], dtype=x.dtype)
    mask = mask.masked_fill(~real, -10000.0).masked_fill(globally, 10000.0)
    out, *_ = theirs(
        x,
        attention_mask=mask,
        is_index_masked=mask < 0,
        is_index_global_attn=mask > 0,
        is_global_attn=bool(globally.any()),
    )
    return out


@pytest.mark.parametrize("left", [0, 9], ids=lambda n: f"{n}-left")
@pytest.mark.parametrize("right", [0, 7], ids=lambda n: f"{n}-right")
@pytest.mark.parametrize("prefix", [0, 1, 2], ids=lambda n: f"{n}-global")
def test_attention_is_equal(prefix: int, right: int, left: int) -> None:
    theirs, x = build(), normal(1, LENGTH, DIM)
    real = first(LENGTH - right, LENGTH) & ~first(left, LENGTH)
    globally = first(left + prefix, LENGTH) & real
    q, k, v = project(x, theirs.query, theirs.key, theirs.value)
    got = join(ours(LOCAL, window=REACH)(q, k, v, Context(key_padding=real, prefix=prefix)))
    assert_same(got[real], attend(theirs, x, real, globally)[real], atol=1e-6)
