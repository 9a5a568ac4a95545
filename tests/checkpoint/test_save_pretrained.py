"""Directories that transformers itself wrote of a patched model are read by zoo.load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BERT, assert_same, bert, build
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

import zoo_core as zoo
from zoo_core.checkpoint import verify
from zoo_core.errors import CheckpointError, UnknownName

QUERY = "encoder.layer.0.attention.self.query.weight"
MODELS = {
    "bert": lambda: bert(),
    "no_pooler": lambda: bert(add_pooling_layer=False),
    "shared": lambda: bert(options={"share": "layers"}),
    "masked_lm": lambda: bert(task="masked-lm"),
    "pretraining": lambda: bert("softmax", task="pretraining"),
    "classifier": lambda: bert(task="sequence-classification", num_labels=5),
    "decoder": lambda: bert("softmax", task="causal-lm", is_decoder=True),
    "roberta": lambda: build("roberta", "linformer", vocab_size=60),
    "electra": lambda: build("electra", vocab_size=60),
    "distilbert": lambda: build("distilbert", vocab_size=60),
    "albert": lambda: build("albert", vocab_size=60),
    "modernbert": lambda: build("modernbert"),
    "hf_vit": lambda: build("hf_vit", "linformer"),
    "hf_deit": lambda: build("hf_deit", "linformer"),
    "dinov2": lambda: build("dinov2", "linformer"),
}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_last_bit(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    loaded = zoo.load(tmp_path)
    assert_same(model, loaded)
    assert zoo.inspect(loaded).sites == zoo.inspect(model).sites


def test_half_precision(tmp_path: Path) -> None:
    model = bert().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert_same(model, zoo.load(tmp_path))


def test_shards(tmp_path: Path) -> None:
    model = bert(task="masked-lm")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same(model, zoo.load(tmp_path))


def test_ties_are_tied_again(tmp_path: Path) -> None:
    model = bert(task="masked-lm", options={"share": "layers"})
    model.save_pretrained(tmp_path)
    loaded = zoo.load(tmp_path)
    predictions, embeddings = loaded.cls.predictions, loaded.bert.embeddings
    assert predictions.decoder.weight is embeddings.word_embeddings.weight
    first, second = (layer.attention.self.zoo for layer in loaded.bert.encoder.layer)
    assert first.project_keys is second.project_keys


def test_trainer_directories(tmp_path: Path) -> None:
    model = bert(task="sequence-classification")
    rows = [{"input_ids": [1, 2, 3, n], "labels": n % 2} for n in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    model.eval()
    assert_same(model, zoo.load(tmp_path / "final"))
    assert_same(model, zoo.load(tmp_path / "checkpoint-2"))


def test_zoo_json_goes_first_and_tells_that_weights_were_overwritten(tmp_path: Path) -> None:
    model = bert()
    zoo.save(model, tmp_path)
    nn.init.ones_(model.encoder.layer[0].output.dense.bias)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"SHA-256 of its manifest.*was overwritten"):
        zoo.load(tmp_path)
    (tmp_path / "zoo.json").unlink()
    assert_same(model, zoo.load(tmp_path))


def test_a_restored_model_is_a_stock_model(tmp_path: Path) -> None:
    model = BertModel(BertConfig(**BERT))
    zoo.patch(model, "linformer").restore()
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"not a zoo checkpoint.*pretrained="):
        zoo.load(tmp_path)
    assert_same(model.eval(), BertModel.from_pretrained(tmp_path))


def test_verify_says_that_there_are_no_hashes_and_how_to_get_some(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "here")
    (problem,) = verify(tmp_path / "here")
    assert "has no zoo.json; save_pretrained or Trainer wrote this patched model" in problem
    assert f"zoo.save(zoo.load(directory), another) makes it one (`zoo build {tmp_path}" in problem
    zoo.save(zoo.load(tmp_path / "here"), tmp_path / "there")
    assert verify(tmp_path / "there") == []


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    bert().save_pretrained(tmp_path)
    return tmp_path


def change_config(directory: Path, **entries: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def entry(**changes: Any) -> list[dict[str, Any]]:
    linformer = {"mechanism": "linformer", "options": {}, "layers": [0, 1]}
    return [{**linformer, "distribution": "zoo-core", "version": "1", **changes}]


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"zoo": "linformer"}, "zoo is 'linformer'"),
        ({"zoo": entry(code="x")}, "unknown key 'code'"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": ["BertModel", "ViTModel"]}, "must name one class"),
        ({"architectures": ["os.system"]}, "the name of a class"),
        ({"architectures": ["GPT2Model"]}, "GPT2Model, which no installed architecture has"),
        ({"transformers_version": "5\x1b[2J"}, "transformers_version is .*control characters"),
        ({"pretrained": "evil/model"}, "may not contain 'pretrained'"),
        ({"hidden_size": 64}, "does not fill BertModel"),
    ],
    ids=["zoo", "entry", "no-class", "two", "path", "unknown", "version", "source", "size"],
)
def test_a_config_that_builds_nothing(directory: Path, entries: Any, says: str) -> None:
    change_config(directory, **entries)
    with pytest.raises(CheckpointError, match=says):
        zoo.load(directory)


def test_a_plugin_that_is_not_installed(directory: Path) -> None:
    change_config(directory, zoo=entry(distribution="zoo-rocket", mechanism="rocket"))
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnknownName, match="pip install zoo-rocket"):
        zoo.load(directory)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop(QUERY), f"missing '{QUERY}'"),
        (lambda tensors: tensors.update(evil=torch.ones(1)), "unknown 'evil'"),
        (lambda tensors: tensors[QUERY].fill_(float("nan")), f"'{QUERY}' holds NaN"),
    ],
    ids=["missing", "unknown", "nan"],
)
def test_tensors_are_checked_as_strictly(directory: Path, change: Any, says: str) -> None:
    change_tensors(directory, change)
    with pytest.raises(CheckpointError, match=says):
        zoo.load(directory)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"x": "../evil.safetensors"}, "must be the name of a shard"),
        ({"x": "pytorch_model.bin"}, "must be the name of a shard"),
        ({"x": 3}, "must be of type str"),
        (None, "must be of type dict"),
        ({"x": "model-00001-of-00001.safetensors"}, "has no model-00001-of-00001.safetensors"),
    ],
    ids=["traversal", "pickle", "number", "none", "absent"],
)
def test_an_index_names_shards_only(directory: Path, weight_map: Any, says: str) -> None:
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=says):
        zoo.load(directory)


def test_a_pickle_is_never_read(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save(bert().state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="other formats can run code and are not read"):
        zoo.load(directory)
