"""The smallest models that the tests of push and pull publish, and a stock one on the Hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import nn

import zoo_core as zoo
from zoo_core import registry

TINY = registry.architecture("bert").adapter().tiny()


@cache
def bert(attention: str = "linformer", seed: int = 0) -> nn.Module:
    """Built once for all tests, which must not change it."""
    options = {"rank": 4} if attention == "linformer" else None
    return zoo.build("bert", attention, options=options, seed=seed, **TINY).eval()


@cache
def vit() -> nn.Module:
    tiny = registry.architecture("vit").adapter().tiny()
    return zoo.build("vit", "linear", seed=0, num_classes=3, **tiny).eval()


def stock(folder: Path) -> None:
    """A BERT as transformers itself saves it."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(**TINY)).save_pretrained(folder)


def tokenizer(folder: Path):
    """A word piece tokenizer over a handful of words."""
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "plain", "word"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "vocab.txt"
    path.write_text("\n".join(words))
    return BertTokenizerFast(vocab_file=str(path), model_max_length=64)


def assert_same(left: nn.Module, right: nn.Module) -> None:
    """Every tensor is there, equal to the last bit."""
    expected, actual = left.state_dict(), right.state_dict()
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0, msg=name)
