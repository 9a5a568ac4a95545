"""zoo.load gives back what zoo.save was given, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BERT, assert_same, bert, build, output
from torch import nn

import zoo_core as zoo
from zoo_core.checkpoint import load_directory, read_manifest, verify
from zoo_core.patching import stack_of

MODELS = {
    "bert": lambda: bert(),
    "stock": lambda: zoo.build("bert", **BERT).eval(),
    "partial": lambda: bert("softmax", layers=[1]),
    "layer_rules": lambda: bert({"0": "softmax", "1": ("linformer", {"rank": 3})}),
    "no_pooler": lambda: bert(add_pooling_layer=False),
    "masked_lm": lambda: bert(task="masked-lm"),
    "classifier": lambda: bert(task="sequence-classification", num_labels=5),
    "decoder": lambda: bert("softmax", task="causal-lm", is_decoder=True),
    "vit": lambda: build("vit", num_classes=5),
    "vit_other_grid": lambda: build("vit", "linformer", img_size=(32, 48)),
    "deit_distilled": lambda: build("deit", variant="deit_tiny_distilled_patch16_224"),
    "modernbert": lambda: build("modernbert"),
    "hf_vit": lambda: build("hf_vit"),
}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_last_bit(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    manifest = zoo.save(model, tmp_path)
    loaded = zoo.load(tmp_path)
    assert_same(model, loaded)
    assert not any(module.training for module in loaded.modules())
    assert zoo.inspect(loaded).sites == zoo.inspect(model).sites
    assert manifest == read_manifest(tmp_path)
    assert verify(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["bert", "modernbert", "vit"])
def test_dtype_is_kept_also_by_buffers_that_are_not_stored(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """ModernBERT computes its rotary table; `.to(dtype)` converts it, and so must a load."""
    model = bert() if family == "bert" else build(family)
    model.to(dtype)
    zoo.save(model, tmp_path)
    assert_same(model, zoo.load(tmp_path))


def test_dtypes_may_differ_within_one_model(tmp_path: Path) -> None:
    model = bert("softmax").to(torch.bfloat16)
    model.embeddings.LayerNorm.float()
    zoo.save(model, tmp_path)
    loaded = zoo.load(tmp_path)
    assert loaded.embeddings.LayerNorm.weight.dtype == torch.float32
    assert loaded.encoder.layer[0].output.dense.weight.dtype == torch.bfloat16


def test_the_random_generator_is_left_alone(tmp_path: Path) -> None:
    """This ViT draws its position embeddings before they are a parameter."""
    zoo.save(build("hf_vit", "linformer"), tmp_path)
    before = torch.get_rng_state()
    zoo.save(zoo.load(tmp_path), tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_equal_models_give_equal_bytes(tmp_path: Path) -> None:
    model = bert()
    zoo.save(model, tmp_path / "one")
    zoo.save(zoo.load(tmp_path / "one"), tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "zoo.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = bert(task="masked-lm", options={"share": "layers"})
    manifest = zoo.save(model, tmp_path)
    first, second = (f"bert.encoder.layer.{n}.attention.self.zoo.project_keys" for n in (0, 1))
    assert manifest.tied == {
        second: first,
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    loaded = zoo.load(tmp_path)
    for alias, kept in manifest.tied.items():
        assert loaded.get_parameter(alias) is loaded.get_parameter(kept), alias


def test_a_tie_that_the_user_made_comes_back(tmp_path: Path) -> None:
    model = bert("softmax")
    first, second = model.encoder.layer
    second.output.dense.weight = first.output.dense.weight
    zoo.save(model, tmp_path)
    loaded = zoo.load(tmp_path)
    assert_same(model, loaded)
    first, second = loaded.encoder.layer
    assert second.output.dense.weight is first.output.dense.weight


def test_a_tie_that_the_user_cut_stays_cut(tmp_path: Path) -> None:
    model = bert("softmax", task="masked-lm")
    decoder = model.cls.predictions.decoder
    decoder.weight = nn.Parameter(torch.randn_like(decoder.weight))
    zoo.save(model, tmp_path)
    loaded = zoo.load(tmp_path)
    assert_same(model, loaded)
    embeddings = loaded.bert.embeddings.word_embeddings
    assert loaded.cls.predictions.decoder.weight is not embeddings.weight


def test_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    model = bert("softmax")
    dense = model.encoder.layer[0].output.dense
    dense.weight = nn.Parameter(torch.randn(32, 32).T)
    whole = torch.randn(64, 32)
    model.encoder.layer[1].output.dense.weight = nn.Parameter(whole[:32])
    model.encoder.layer[1].intermediate.dense.weight = nn.Parameter(whole[32:])
    zoo.save(model, tmp_path)
    loaded = zoo.load(tmp_path)
    assert_same(model, loaded)
    assert loaded.encoder.layer[0].output.dense.weight.is_contiguous()


def test_shards_and_their_index(tmp_path: Path) -> None:
    model = bert(task="masked-lm")
    manifest = zoo.save(model, tmp_path, max_shard_size="20KB")
    count = len(manifest.files)
    assert count > 2
    assert next(iter(manifest.files)) == f"model-00001-of-{count:05d}.safetensors"
    assert verify(tmp_path) == []
    assert_same(model, zoo.load(tmp_path))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(manifest.files)


@pytest.mark.parametrize("size", [0, -1, 1.5, "5 apples", "", True])
def test_a_size_that_is_none_is_refused(size: Any, tmp_path: Path) -> None:
    with pytest.raises(zoo.ZooError, match="max_shard_size"):
        zoo.save(bert("softmax"), tmp_path / "x", max_shard_size=size)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("whole", [True, False], ids=["model", "encoder"])
def test_a_compiled_model_has_plain_names(whole: bool, tmp_path: Path) -> None:
    model = bert()
    expected = output(model)
    if whole:
        zoo.save(torch.compile(model), tmp_path)
    else:
        model.encoder.layer[0].intermediate = torch.compile(model.encoder.layer[0].intermediate)
        zoo.save(model, tmp_path)
    assert "_orig_mod" not in "".join(zoo.load(tmp_path).state_dict())
    assert torch.equal(output(zoo.load(tmp_path)), expected)


def test_a_ddp_wrapped_model_has_plain_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = bert()
        zoo.save(nn.parallel.DistributedDataParallel(model), tmp_path)
    finally:
        torch.distributed.destroy_process_group()
    assert_same(model, zoo.load(tmp_path))


def test_frozen_projections_are_frozen_again(tmp_path: Path) -> None:
    model = bert("uniform")
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    zoo.save(model, tmp_path)
    loaded = zoo.load(tmp_path)
    assert frozen == {name for name, p in loaded.named_parameters() if not p.requires_grad}


def test_only_what_the_mechanism_added(tmp_path: Path) -> None:
    base = {"repo": "owner/name", "commit": "a" * 40, "sha256": "b" * 64}
    model = bert(options={"share": "layers"})
    manifest = zoo.save(model, tmp_path, holds="attention", base=base)
    assert manifest.holds == "attention"
    assert (tmp_path / "model.safetensors").stat().st_size < 5000
    with pytest.raises(zoo.ZooError, match=f"only what .* added to owner/name at {'a' * 40}.*pull"):
        zoo.load(tmp_path)

    stock = zoo.build("bert", **BERT)
    stock_state = {n: t for n, t in model.state_dict().items() if ".zoo." not in n}
    stack_of(stock).patches[0].restore()
    stock.load_state_dict(stock_state)
    assert_same(model, load_directory(tmp_path, base=stock))
