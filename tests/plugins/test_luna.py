from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo_attention.luna import LUNA, LunaOptions
from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall

HEADS, WIDTH, LAYERS = 2, 8, 3
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)


class Carry(dict[Any, Any]):
    """What one forward hands on."""


def site(layer: int) -> Site:
    previous = f"layers.{layer - 1}" if layer else None
    return replace(SITE, path=f"layers.{layer}", layer=layer, layers=LAYERS, previous=previous)


def build(layer: int, packed: int = 4) -> nn.Module:
    """A layer in float64 whose parameters are no longer what they start from."""
    torch.manual_seed(layer)
    module = LUNA.factory(site(layer), LunaOptions(packed=packed)).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def inputs(length: int, layer: int = 0, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(layer)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def run(layers: list[nn.Module], length: int, *, recompute: bool = False) -> list[Tensor]:
    """The outputs of all layers, each of which gets other tokens."""
    ctx, outputs = Context(carry=Carry()), []
    for i, layer in enumerate(layers):
        call = (*inputs(length, i), ctx)
        out = checkpoint(layer, *call, use_reentrant=False) if recompute else layer(*call)
        outputs.append(out)
    return outputs


def by_loop(layers: list[nn.Module], length: int) -> list[Tensor]:
    """Sample by sample and head by head, with P as a plain matrix."""
    outputs = [torch.zeros(2, HEADS, length, WIDTH, dtype=torch.float64) for _ in layers]
    for b in range(2):
        packed = layers[0].start
        for i, layer in enumerate(layers):
            q, k, v = (x[b] for x in inputs(length, i))
            if i:
                centred = packed - packed.mean(-1, keepdim=True)
                spread = (packed.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
                packed = centred / spread * layer.norm.weight + layer.norm.bias
            queries, taken_up = packed @ layer.pack.weight.mT, []
            for h in range(HEADS):
                mine = queries[:, h * WIDTH : (h + 1) * WIDTH]
                weights = (mine @ k[h].mT * SITE.scale).softmax(-1)
                keys = weights @ k[h]
                outputs[i][b, h] = (q[h] @ keys.mT * SITE.scale).softmax(-1) @ (weights @ v[h])
                taken_up.append(keys)
            packed = packed + torch.cat(taken_up, -1)
    return outputs


@pytest.mark.parametrize("length", [1, 3, 17])
def test_the_packed_sequence_travels_through_the_layers(length: int) -> None:
    layers = [build(i) for i in range(LAYERS)]
    for got, wanted in zip(run(layers, length), by_loop(layers, length), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_each_forward_starts_afresh() -> None:
    layers = [build(i) for i in range(LAYERS)]
    first, _, second = run(layers, 5), run(layers, 9), run(layers, 5)
    for got, wanted in zip(second, first, strict=True):
        assert torch.equal(got, wanted)


def test_gradients_reach_the_start_also_when_layers_are_recomputed() -> None:
    layers = [build(i) for i in range(LAYERS)]
    parameters = [p for layer in layers for p in layer.parameters()]
    plain, again = (
        torch.autograd.grad(run(layers, 5, recompute=how)[-1].square().sum(), parameters)
        for how in (False, True)
    )
    assert plain[0].abs().max() > 0
    for got, wanted in zip(again, plain, strict=True):
        assert torch.equal(got, wanted)


def test_two_forwards_may_come_before_their_backwards() -> None:
    layers = [build(i) for i in range(LAYERS)]
    start = layers[0].start
    one, two = (run(layers, n)[-1].sum() for n in (5, 9))
    got = torch.autograd.grad(one + two, start)[0]
    wanted = sum(torch.autograd.grad(run(layers, n)[-1].sum(), start)[0] for n in (5, 9))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_padding_is_hidden_from_the_packed_sequence_that_travels() -> None:
    layers = [build(i) for i in range(2)]
    real = torch.tensor([[False, True, True, False, True]] * 2)
    padded, alone = (Context(key_padding=mask, carry=Carry()) for mask in (real, None))
    for i, layer in enumerate(layers):
        q, k, v = inputs(5, i)
        hidden = [x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v)]
        got = layer(*hidden, padded)[:, :, real[0]]
        wanted = layer(*(x[:, :, real[0]] for x in (q, k, v)), alone)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


class TestRefusals:
    def test_a_layer_by_itself(self) -> None:
        with pytest.raises(UnsupportedCall, match=r"packed sequence of layers\.0"):
            build(1)(*inputs(5), Context(carry=Carry()))

    def test_layers_that_pack_to_other_lengths(self) -> None:
        ctx = Context(carry=Carry())
        build(0, packed=4)(*inputs(5), ctx)
        with pytest.raises(UnsupportedCall, match=r"\(8, 16\), but layers\.0 handed on \(4, 16\)"):
            build(1, packed=8)(*inputs(5), ctx)


def test_it_starts_from_what_its_projections_say() -> None:
    first, second = (LUNA.factory(site(i), LunaOptions(packed=16)) for i in range(2))
    assert torch.equal(second.pack.weight, torch.eye(HEADS * WIDTH))
    assert first.start.shape == (16, HEADS * WIDTH)
    assert second.start is None
    assert first.norm is None
