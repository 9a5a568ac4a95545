"""Layers that are compiled one by one, as accelerate's compile_regions does it."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import zoo_core as zoo
from zoo_core import registry

LAYERS = 6
IDS = torch.randint(5, 99, (2, 9), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def tiny(name: str) -> dict:
    return registry.architecture(name).adapter().tiny()


def bert() -> nn.Module:
    sizes = tiny("bert") | {"num_hidden_layers": LAYERS}
    return registry.architecture("bert").adapter().create(None, **sizes).eval()


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **tiny("vit") | {"depth": LAYERS}).eval()


HOSTS = {
    "bert": (bert, IDS, lambda model: model.encoder.layer),
    "vit": (vit, IMAGES, lambda model: model.blocks),
}


def run(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    output = model(inputs)
    return output if isinstance(output, torch.Tensor) else output[0]


def compile_each(layers: nn.ModuleList) -> list[int]:
    """Compile each layer; the list that is returned grows by one entry a graph."""
    graphs = []

    def count(graph, examples):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer, backend=count)
    return graphs


@pytest.mark.parametrize("attention", ["softmax", "linformer", "local"])
@pytest.mark.parametrize("host", HOSTS)
@torch.no_grad()
def test_one_graph_serves_all_layers(host: str, attention: str) -> None:
    make, inputs, layers_of = HOSTS[host]
    stock = make()
    allowed = compile_each(layers_of(stock))
    run(stock, inputs)
    torch._dynamo.reset()
    model = make()
    zoo.patch(model, attention)
    expected = run(model, inputs)
    graphs = compile_each(layers_of(model))
    torch.testing.assert_close(run(model, inputs), expected)
    assert len(graphs) <= len(allowed) + 1 < LAYERS


@pytest.mark.parametrize("first", ["patch", "compile"])
@pytest.mark.parametrize("host", HOSTS)
@torch.no_grad()
def test_inspect_save_and_restore(host: str, first: str, tmp_path) -> None:
    make, inputs, layers_of = HOSTS[host]
    model = make()
    stock = run(model, inputs)
    if first == "compile":
        compile_each(layers_of(model))
        run(model, inputs)
    patch = zoo.patch(model, "linformer")
    if first == "patch":
        compile_each(layers_of(model))
    output = run(model, inputs)
    report = zoo.inspect(model)
    assert [site.mechanism for site in report.sites] == ["zoo-core/linformer"] * LAYERS
    assert "_orig_mod" not in report.sites[0].path
    zoo.save(model, tmp_path)
    torch.testing.assert_close(run(zoo.load(tmp_path), inputs), output)
    patch.restore()
    torch.testing.assert_close(run(model, inputs), stock)


@pytest.mark.parametrize("attention", ["uniform", "evolving"])
@torch.no_grad()
def test_attention_that_is_compiled_itself(attention: str) -> None:
    for host, (make, inputs, layers_of) in HOSTS.items():
        model = make()
        twin = make()
        twin.load_state_dict(model.state_dict())
        zoo.patch(twin, attention, seed=0)
        for layer in layers_of(model):
            holder, name = (layer.attention, "self") if host == "bert" else (layer, "attn")
            setattr(holder, name, torch.compile(getattr(holder, name), backend="eager"))
        stock = run(model, inputs)
        patch = zoo.patch(model, attention, seed=0)
        torch.testing.assert_close(run(model, inputs), run(twin, inputs))
        patch.restore()
        torch.testing.assert_close(run(model, inputs), stock)
