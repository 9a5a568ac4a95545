"""Attention maps of whole models: map @ v is the output, for own and for effective maps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zoo_core as zoo
from zoo_core import registry
from zoo_core.attention import Context
from zoo_core.diagnose.maps import effective_map

IDS = torch.randint(5, 99, (2, 37), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 37, [1] * 9 + [0] * 28])


def model(attention) -> nn.Module:
    tiny = registry.architecture("bert").adapter().tiny()
    return zoo.build("bert", attention, seed=0, **tiny).double().eval()


@pytest.mark.parametrize("attention", ["softmax", "linear", "linformer", "nystromformer", "local"])
def test_map_times_values_is_the_output(attention: str) -> None:
    patched = model(attention)
    seen = {}
    module = patched.encoder.layer[1].attention.self.zoo
    hook = module.register_forward_hook(lambda m, args, out: seen.update(v=args[2], out=out))
    patched(IDS, MASK)
    hook.remove()
    maps = zoo.attention_map(patched, {"input_ids": IDS, "attention_mask": MASK})
    assert list(maps) == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    real = MASK.bool()[:, None, :, None]
    ours = maps["encoder.layer.1.attention.self"] @ seen["v"]
    torch.testing.assert_close(ours * real, seen["out"] * real, atol=1e-10, rtol=0)


def test_a_stock_model_gives_its_softmax_map_and_is_left_as_it_was() -> None:
    patched = model("softmax")
    expected = patched(IDS, MASK, output_attentions=True).attentions
    patched.zoo_patches.patches[0].restore()
    patched.train()
    maps = zoo.attention_map(patched, {"input_ids": IDS, "attention_mask": MASK})
    assert all(torch.equal(a, b) for a, b in zip(maps.values(), expected, strict=True))
    assert patched.training
    assert zoo.inspect(patched).patches == 0


def test_layers_and_heads_are_chosen() -> None:
    maps = zoo.attention_map(model("softmax"), {"input_ids": IDS}, layers=1, heads=[0])
    assert {path: tuple(m.shape) for path, m in maps.items()} == {
        "encoder.layer.1.attention.self": (2, 1, 37, 37)
    }


@pytest.mark.parametrize("keys", [1, 7, 8, 9, 20])
def test_effective_map_of_a_known_matrix(keys: int) -> None:
    class Fixed(nn.Module):
        def forward(self, q, k, v, ctx):
            return matrix @ v

    matrix = torch.randn(1, 1, 5, keys)
    q, k, v = torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, keys, 8), torch.randn(1, 1, keys, 8)
    torch.testing.assert_close(effective_map(Fixed(), q, k, v, Context()), matrix)
