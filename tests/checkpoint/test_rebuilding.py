"""How the model that takes a checkpoint's tensors is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import BERT, assert_same, bert, build
from torch import nn
from transformers import BertConfig, BertModel

import zoo_core as zoo
from zoo_core.checkpoint import host_config, read_manifest
from zoo_core.checkpoint.rebuilding import WithoutInitialisation, rebuild


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 4),
        lambda: nn.Embedding(5, 3, padding_idx=0),
        lambda: nn.Conv2d(3, 4, 2),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.init.trunc_normal_(nn.Parameter(torch.full((3, 4), 9.0))),
        lambda: nn.init.kaiming_normal_(nn.Parameter(torch.empty(3, 4))),
    ],
    ids=["linear", "embedding", "conv", "attention", "trunc_normal", "kaiming_normal"],
)
def test_parameters_are_not_initialised(make: object) -> None:
    before = torch.get_rng_state()
    with WithoutInitialisation():
        make()
    assert torch.equal(torch.get_rng_state(), before)


def test_buffers_are_computed_as_always() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        module = nn.BatchNorm1d(3)
        module.register_buffer("features", torch.empty(4).normal_())
        module.register_buffer("table", torch.arange(3).float().mul_(2))
        return module

    with WithoutInitialisation():
        quick = make()
    expected = dict(make().named_buffers())
    assert dict(quick.named_buffers()).keys() == expected.keys()
    for name, buffer in quick.named_buffers():
        assert torch.equal(buffer, expected[name]), name


HARMFUL = (
    "_attn_implementation _attn_implementation_internal _attn_implementation_autoset "
    "attn_implementation auto_map _experts_implementation _experts_implementation_internal "
    "_experts_implementation_of_others experts_implementation trust_remote_code "
    "quantization_config custom_pipelines use_kernels kernel_config _name_or_path name_or_path"
).split()


def test_entries_that_choose_code_are_dropped() -> None:
    harmless = {"hidden_size": 3, "attention_dropout": 0.1, "use_cache": True}
    harmful = dict.fromkeys([*HARMFUL, "zoo"], "evil")
    assert host_config.safe({**harmless, **harmful}) == harmless


@pytest.mark.parametrize("way", ["load", "pretrained"])
def test_checkpoints_and_stock_weights_choose_no_code(way: str, tmp_path: Path) -> None:
    stock = BertModel(BertConfig(**BERT))
    if way == "load":
        zoo.save(stock, tmp_path)
        path = tmp_path / "zoo.json"
        data = json.loads(path.read_text())
        data["config"] |= dict.fromkeys(HARMFUL, "evil")
    else:
        stock.save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        data = json.loads(path.read_text()) | dict.fromkeys(HARMFUL, "evil")
    path.write_text(json.dumps(data))
    load = zoo.load if way == "load" else lambda where: zoo.build("bert", pretrained=str(where))
    assert "evil" not in str(vars(load(tmp_path).config))


@pytest.mark.parametrize("family", ["modernbert", "vit"])
def test_defaults_of_the_process_do_not_matter(family: str, tmp_path: Path) -> None:
    model = build(family)
    zoo.save(model, tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            fresh = rebuild(read_manifest(tmp_path), tmp_path)
            loaded = zoo.load(tmp_path)
            zoo.save(loaded, tmp_path / "again")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in fresh.parameters()} == {torch.float32}
    assert {parameter.device.type for parameter in fresh.parameters()} == {"cpu"}
    assert_same(model, loaded)
    assert_same(model, zoo.load(tmp_path / "again"))


def test_parameters_stay_the_objects_that_others_refer_to(tmp_path: Path) -> None:
    """Linformer's layers may share one Parameter; an optimiser or a hook holds on to objects."""
    zoo.save(bert(options={"share": "layers"}), tmp_path)
    loaded = zoo.load(tmp_path)
    first, second = (layer.attention.self.zoo for layer in loaded.encoder.layer)
    assert first.project_keys is second.project_keys
    assert first.project_keys.requires_grad
