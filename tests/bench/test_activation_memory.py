"""A layer of 16,384 tokens trains in less than an eighth of the memory of eager softmax."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import zoo_core as zoo
from zoo_core.bench import counting

ATTENTIONS = ("linear", "linformer", "nystromformer", "local", "performer")
TOKENS = 16_384
SETTINGS = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 99,
    "max_position_embeddings": TOKENS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def peak_of_a_step(model: nn.Module, tokens: int) -> int:
    """Bytes that live at once in a forward and backward, without the weights."""

    def step(tokens: int = tokens) -> None:
        ids = torch.arange(tokens)[None] % 99
        model(ids).last_hidden_state.square().sum().backward()
        model.zero_grad()

    step(64)
    peak = counting.peak_bytes(step, torch.device("cpu"))
    assert peak is not None
    return peak


@pytest.fixture(scope="module")
def eager() -> float:
    """What stock eager attention needs for its N x N tensors alone, of all heads.

    Too much to run: of a N^2 + b N at two short lengths, a is what doubling adds.
    """
    model = BertModel(BertConfig(**SETTINGS, attn_implementation="eager")).train()
    short, long = (peak_of_a_step(model, tokens) for tokens in (512, 1024))
    of_one_pair = (long - 2 * short) / (2 * 512**2)
    one_tensor = SETTINGS["num_attention_heads"] * torch.float32.itemsize
    assert 2 * one_tensor <= of_one_pair <= 6 * one_tensor
    return of_one_pair * TOKENS**2


@pytest.mark.parametrize(
    "attention", ["linear", "linformer", "nystromformer", "local", "performer"]
)
def test_a_layer_trains_in_an_eighth_of_the_memory(attention: str, eager: float) -> None:
    model = zoo.build("bert", attention, **SETTINGS).train()
    assert peak_of_a_step(model, TOKENS) < eager / 8
