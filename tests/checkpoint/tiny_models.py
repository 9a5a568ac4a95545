"""The smallest models that these tests save, and how two of them are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zoo_core as zoo
from zoo_core import registry

BERT = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 60,
    "max_position_embeddings": 32,
}
RANK = {"rank": 4}


def build(family: str, attention: str = "softmax", **kwargs: Any) -> nn.Module:
    tiny = registry.architecture(family).adapter().tiny()
    return zoo.build(family, attention, **{**tiny, **kwargs}).eval()


def bert(attention: str = "linformer", *, options: Any = None, **kwargs: Any) -> nn.Module:
    if attention == "linformer":
        options = {**RANK, **(options or {})}
    return zoo.build("bert", attention, options=options, **{**BERT, **kwargs}).eval()


def output(model: nn.Module) -> Tensor:
    """What a model makes of a fixed input."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        if hasattr(model, "patch_embed"):
            images = torch.randn(2, 3, *model.patch_embed.img_size, generator=generator)
            return model(images.to(dtype))
        if hasattr(model.config, "image_size"):
            side = model.config.image_size
            return model(torch.randn(2, 3, side, side, generator=generator).to(dtype))[0]
        return model(torch.randint(1, 60, (2, 17), generator=generator))[0]


def assert_same(left: nn.Module, right: nn.Module) -> None:
    """Equal to the last bit: the outputs, and every tensor with its dtype."""
    torch.testing.assert_close(output(right), output(left), rtol=0, atol=0)
    expected, actual = left.state_dict(), right.state_dict()
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0, msg=name)
