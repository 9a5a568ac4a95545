"""What zoo.save refuses, and what it does to a directory that is not empty."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from tiny_models import BERT, assert_same, bert, build, output
from torch import nn

import zoo_core as zoo
from zoo_core.checkpoint import read_manifest, verify
from zoo_core.errors import CheckpointError, PatchError


def refused(model: object, directory: Path, says: str, **kwargs: object) -> None:
    target = directory / "new" / "target"
    with pytest.raises(zoo.ZooError, match=says):
        zoo.save(model, target, **kwargs)
    assert not target.parent.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_values_that_are_not_finite(value: float, tmp_path: Path) -> None:
    model = bert("softmax")
    with torch.no_grad():
        model.encoder.layer[1].output.dense.bias[3] = value
    refused(model, tmp_path, "'encoder.layer.1.output.dense.bias' .* holds NaN or infinity")


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    refused(bert("softmax").to("meta"), tmp_path, "is on the meta device")


def test_a_dtype_that_no_checkpoint_holds(tmp_path: Path) -> None:
    model = bert("softmax")
    model.embeddings.register_buffer("extra", torch.ones(2, dtype=torch.complex64))
    refused(model, tmp_path, "'embeddings.extra' .* has dtype torch.complex64")


def test_a_sparse_tensor(tmp_path: Path) -> None:
    model = bert("softmax")
    model.embeddings.register_buffer("extra", torch.eye(2).to_sparse())
    refused(model, tmp_path, "'embeddings.extra' .* is stored as torch.sparse_coo")


def test_state_that_is_no_tensor(tmp_path: Path) -> None:
    model = bert("softmax")
    model.embeddings.__class__ = type(
        "Odd", (type(model.embeddings),), {"get_extra_state": lambda self: {"step": 3}}
    )
    refused(model, tmp_path, "'embeddings._extra_state' .* is a dict, not a tensor")


def test_views_of_the_same_memory(tmp_path: Path) -> None:
    model = bert("softmax")
    first, second = model.encoder.layer
    first.output.dense.weight = nn.Parameter(torch.randn(32, 32))
    second.output.dense.weight = nn.Parameter(first.output.dense.weight.detach().T)
    refused(model, tmp_path, "are different views of the same memory")


def test_a_part_that_the_config_does_not_build(tmp_path: Path) -> None:
    model = bert("softmax", task="sequence-classification")
    model.classifier = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))
    refused(model, tmp_path, "not what its config builds.*missing 'classifier.weight'")


def test_a_resized_part_that_the_config_does_not_know(tmp_path: Path) -> None:
    model = bert("softmax", task="sequence-classification")
    model.classifier = nn.Linear(32, 7)
    refused(model, tmp_path, r"'classifier.weight' has shape \(7, 32\)")


def test_adapters_name_merge_and_unload(tmp_path: Path) -> None:
    model = peft.get_peft_model(bert(), peft.LoraConfig(target_modules=["query"]))
    expected = output(model.eval())
    refused(model, tmp_path, "merge_and_unload")
    refused(nn.Sequential(model), tmp_path, "merge_and_unload")
    refused(model.base_model.model, tmp_path, "merge_and_unload")
    merged = model.merge_and_unload()
    zoo.save(merged, tmp_path)
    torch.testing.assert_close(output(zoo.load(tmp_path)), expected, rtol=1e-5, atol=1e-6)


def test_tensors_of_a_wrapper_are_not_lost_in_silence(tmp_path: Path) -> None:
    wrapper = nn.Sequential(bert("softmax"), nn.Linear(32, 4))
    refused(wrapper, tmp_path, "Sequential holds tensors outside its BertModel, such as '1.weight'")


def test_a_model_that_the_zoo_does_not_know(tmp_path: Path) -> None:
    refused(nn.Linear(2, 2), tmp_path, "Linear is not a model the zoo can patch")


def test_a_patch_that_was_switched_off(tmp_path: Path) -> None:
    model = bert("linformer")
    model.set_attn_implementation("eager")
    with pytest.raises(PatchError, match="patch"):
        zoo.save(model, tmp_path / "x")


@pytest.mark.parametrize("base", [None, {"repo": "owner/name"}], ids=["none", "incomplete"])
def test_only_attention_needs_a_base(base: dict[str, str] | None, tmp_path: Path) -> None:
    refused(bert(), tmp_path, "base", holds="attention", base=base)


@pytest.mark.parametrize("train", ["attention", "mechanism"])
def test_only_attention_needs_weights_that_were_not_trained(train: str, tmp_path: Path) -> None:
    base = {"repo": "owner/name", "commit": "a" * 40, "sha256": "b" * 64}
    model = bert()
    _calibrate(model, train=train)
    if train == "attention":
        refused(model, tmp_path, "train='attention'.*whole model", holds="attention", base=base)
    else:
        assert zoo.save(model, tmp_path, holds="attention", base=base).calibration is not None


def _calibrate(model: nn.Module, **how: object) -> None:
    data = [{"input_ids": torch.arange(n, n + 8)} for n in range(20)]
    zoo.calibrate(model, data, steps=2, batch_size=4, progress=False, **how)


def test_only_attention_needs_a_patch(tmp_path: Path) -> None:
    base = {"repo": "owner/name", "commit": "a" * 40, "sha256": "b" * 64}
    refused(
        zoo.load(_stock(tmp_path)), tmp_path, "needs a patched model", holds="attention", base=base
    )


def _stock(tmp_path: Path) -> Path:
    from transformers import BertConfig, BertModel

    zoo.save(BertModel(BertConfig(**BERT)), tmp_path / "stock")
    return tmp_path / "stock"


def test_other_files_and_the_readme_stay(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "log").write_text("x")
    zoo.save(bert(), tmp_path)
    zoo.save(bert("softmax"), tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "runs" / "log").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "runs", "tokenizer.json", "zoo.json",
    ]  # fmt: skip


def test_the_card_names_what_to_install(tmp_path: Path) -> None:
    zoo.save(bert(), tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: zoo-core\n")
    assert "- linformer\n" in card
    assert "pip install zoo-core" in card


def test_the_card_follows_the_model_until_somebody_writes_in_it(tmp_path: Path) -> None:
    model = bert()
    zoo.save(model, tmp_path)
    _calibrate(model)
    zoo.save(model, tmp_path)
    card = tmp_path / "README.md"
    assert "The attention was calibrated on 15 samples of a list of 20" in card.read_text()
    words = card.read_text() + "and my own words\n"
    card.write_text(words)
    zoo.save(bert("softmax"), tmp_path)
    assert card.read_text() == words


def test_the_card_of_a_damaged_checkpoint_stays(tmp_path: Path) -> None:
    zoo.save(bert(), tmp_path)
    before = (tmp_path / "README.md").read_bytes()
    (tmp_path / "zoo.json").write_text("{")
    zoo.save(bert("softmax"), tmp_path)
    assert (tmp_path / "README.md").read_bytes() == before


def test_shards_give_way_to_one_file_and_back(tmp_path: Path) -> None:
    model = bert()
    for size in ("20KB", "1GB", "30KB", "20KB"):
        manifest = zoo.save(model, tmp_path, max_shard_size=size)
        weights = {path.name for path in tmp_path.glob("*.safetensors")}
        assert weights == set(manifest.files)
        assert (tmp_path / "model.safetensors.index.json").exists() == (len(weights) > 1)
        assert verify(tmp_path) == []
        assert_same(model, zoo.load(tmp_path))


def test_a_tokenizer_is_written_beside_the_model(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, directory: str) -> None:
            (Path(directory) / "extra").mkdir()
            (Path(directory) / "extra" / "vocab.txt").write_text("a b")
            (Path(directory) / "config.json").write_text("not the model's")

    zoo.save(bert(), tmp_path, tokenizer=Tokenizer())
    assert (tmp_path / "extra" / "vocab.txt").read_text() == "a b"
    zoo.load(tmp_path)


class FullDisk:
    def save_pretrained(self, directory: str) -> None:
        raise OSError("no space left")


def test_a_failure_midway_leaves_no_new_directory(tmp_path: Path) -> None:
    refused(bert(), tmp_path, "could not be written: no space left", tokenizer=FullDisk())


def test_a_failure_midway_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    old = bert()
    zoo.save(old, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="could not be written: no space left"):
        zoo.save(bert("softmax"), tmp_path, tokenizer=FullDisk())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_same(old, zoo.load(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
    ],
)
def test_weights_of_others_are_not_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / name).write_text("the only copy")
    with pytest.raises(CheckpointError, match=f"{name}, .* would be lost; choose another dir"):
        zoo.save(bert(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", name}
    assert (tmp_path / name).read_text() == "the only copy"


def test_what_save_pretrained_wrote_of_a_patched_model_may_be_replaced(tmp_path: Path) -> None:
    model = bert()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    zoo.save(model, tmp_path)
    assert verify(tmp_path) == []
    assert not list(tmp_path.glob("model-*"))


@pytest.mark.parametrize("new", [True, False], ids=["first", "again"])
def test_a_folder_of_a_files_name_is_told_before_anything_changes(
    new: bool, tmp_path: Path
) -> None:
    old = bert()
    if not new:
        zoo.save(old, tmp_path)
        (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is a folder, .* needs a file"):
        zoo.save(bert("softmax"), tmp_path)
    assert not list(tmp_path.glob(".zoo-*"))
    (tmp_path / "config.json").rmdir()
    if not new:
        assert_same(old, zoo.load(tmp_path))
    zoo.save(old, tmp_path)
    assert verify(tmp_path) == []


def test_a_folder_of_a_shards_name_stays(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").mkdir()
    (tmp_path / "zoo.json").write_text("{")
    zoo.save(bert(), tmp_path)
    assert verify(tmp_path) == []


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="could not be written"):
        zoo.save(bert(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_the_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model = bert()
    zoo.save(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(model, zoo.load(tmp_path / "link"))


def test_timm_heads_and_data(tmp_path: Path) -> None:
    model = build("vit")
    model.reset_classifier(3)
    zoo.save(model, tmp_path)
    loaded = zoo.load(tmp_path)
    assert loaded.num_classes == 3
    assert loaded.pretrained_cfg["mean"] == model.pretrained_cfg["mean"]
    assert read_manifest(tmp_path).library == "timm"


def test_timm_with_one_number_for_both_sides(tmp_path: Path) -> None:
    model = build("vit", "linear", use_naflex=True)
    zoo.save(model, tmp_path)
    assert verify(tmp_path) == []
    assert zoo.load(tmp_path).state_dict().keys() == model.state_dict().keys()
